"""JSON that says what it is: files beside a record, read without guessing."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

Read = TypeVar("Read", bound="Part")


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def read_json(text: str, kind: type[Read], *, where: str, remedy: str) -> Read:
    """One JSON object as a checked value.  Raises ValueError that names the place, the field and the remedy."""
    try:
        return kind.model_validate(json.loads(text, parse_constant=_refuse))
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except json.JSONDecodeError as error:
        reason = f"not complete JSON: {error}"
    except _Constant as error:
        reason = f"holds {error}, which is no number"
    raise ValueError(f"{where}: {reason}; {remedy}")


class _Constant(Exception):
    pass


def _refuse(name: str) -> Any:
    raise _Constant(name)
