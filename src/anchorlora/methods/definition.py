"""The definition of a method as text, and numbers in it: Shared() + ProjectGradient('A') + Freeze('B')."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from anchorlora.errors import InvalidValue, UnknownName

if TYPE_CHECKING:
    from anchorlora.methods.base import Method


def changed(method: Method, path: str, value: float) -> Method:
    """Return a method with one number of its parts set."""
    kind, _, name = path.partition(".")
    numbers = {
        f"{type(part).__name__}.{each.name}": getattr(part, each.name)
        for part in method.parts
        for each in (fields(part) if is_dataclass(part) else ())
        if isinstance(getattr(part, each.name), (int, float)) and not isinstance(getattr(part, each.name), bool)
    }
    if path not in numbers:
        raise UnknownName(f"{method.name} has no number called {path!r}; it has: {', '.join(numbers) or 'none'}")
    if not value > 0:
        raise InvalidValue(f"{path} must be greater than 0, not {value:g}; leave the part out instead")
    value = type(numbers[path])(value)

    def new(part: Any) -> Any:
        return replace(part, **{name: value}) if type(part).__name__ == kind else part

    return replace(
        method,
        plan=new(method.plan),
        rehearsal=new(method.rehearsal),
        constraints=tuple(new(constraint) for constraint in method.constraints),
    )


def phrase(part: Any) -> str:
    """Return a frozen dataclass as the call that makes it: values without names, then keywords that are not at their default."""
    every = fields(part) if is_dataclass(part) else ()
    values = [repr(getattr(part, each.name)) for each in every if not each.kw_only]
    values += [f"{e.name}={getattr(part, e.name)!r}" for e in every if e.kw_only and getattr(part, e.name) != e.default]
    return f"{type(part).__name__}({', '.join(values)})"


def shown(value: Any) -> str:
    """Return a value as an error shows it: a part as it is typed, anything else as Python shows it, cut."""
    return phrase(value) if is_dataclass(value) and not isinstance(value, type) else f"{value!r:.80}"
