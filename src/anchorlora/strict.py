"""Values and files that are read without guessing: unknown fields refused, NaN refused.  Imports nothing of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

Read = TypeVar("Read", bound="Part")


class Part(BaseModel):
    """What every stored shape shares; a field whose name in the file is a word of Python has an alias."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


class NoNumber(ValueError):
    """The NaN or infinity that a JSON text holds, by its name."""


def loads(text: str) -> Any:
    """JSON, as the standard has it.  Raises NoNumber for NaN and infinities."""
    return json.loads(text, parse_constant=_refuse)


def read_json(text: str, kind: type[Read], *, where: str, remedy: str) -> Read:
    """One JSON object as a checked value.  Raises ValueError that names the place, the field and the remedy."""
    try:
        return kind.model_validate(loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except json.JSONDecodeError as error:
        reason = f"not complete JSON: {error}"
    except NoNumber as error:
        reason = f"holds {error}, which is no number"
    raise ValueError(f"{where}: {reason}; {remedy}")


def converting(pickled: Path, to: Path) -> str:
    """The command that turns a pickle of tensors into safetensors, for somebody who trusts the file."""
    load = f"torch.load({str(pickled)!r}, map_location='cpu', weights_only=True)"
    return (
        'python -c "import torch, safetensors.torch as s; '
        f's.save_file({{k: v.clone().contiguous() for k, v in {load}.items()}}, {str(to)!r})"'
    )


def _refuse(name: str) -> Any:
    raise NoNumber(name)
