"""The parts of a method as text: Shared() + ProjectGradient('A') + Freeze('B')."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any


def phrase(part: Any) -> str:
    """Return a frozen dataclass as the call that makes it: values without names, then keywords that are not at their default."""
    settings = fields(part) if is_dataclass(part) else ()
    values = [repr(getattr(part, field.name)) for field in settings if not field.kw_only]
    values += [f"{f.name}={getattr(part, f.name)!r}" for f in settings if f.kw_only and getattr(part, f.name) != f.default]
    return f"{type(part).__name__}({', '.join(values)})"


def shown(value: Any) -> str:
    """Return a value as an error shows it: a part as it is typed, anything else as Python shows it, cut."""
    return phrase(value) if is_dataclass(value) and not isinstance(value, type) else f"{value!r:.80}"
