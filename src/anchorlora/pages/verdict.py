"""Render the verdict on a skill as one HTML page, from its JSON alone: what became of it first, then the evidence."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anchorlora.pages.audit import percent
from anchorlora.pages.html import escaping


def write_verdict(found: Mapping[str, Any], path: Path) -> None:
    """Write the page of a verdict; an older one is replaced."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(render(found))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:  # a full disk names no file
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        if temporary.exists():
            temporary.unlink()


def render(found: Mapping[str, Any]) -> str:
    """Return the page as HTML. Text from files is escaped, and the page loads nothing."""
    environment = escaping()
    environment.filters |= {"percent": percent, "signed": signed}
    return environment.get_template("verdict.html.j2").render(found=found, rows=_rows(found))


def signed(value: float, digits: int = 3) -> str:
    """Return a change with its sign."""
    return f"{value:+.{digits}f}"


def _rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for the skill and for each thing that is kept, with the unprotected twin's numbers where there is one."""
    twin = found["unprotected"]
    rows = [
        {
            "name": found.get("title", found["name"]),
            "role": "new skill",
            "now": found["skill"],
            "twin": twin["skill"] if twin else None,
        }
    ]
    for kept in found["kept"]:
        other = twin["kept"][kept["name"]] if twin else None
        rows.append({"name": kept.get("title", kept["name"]), "role": "to be kept", "now": kept, "twin": other})
    return rows
