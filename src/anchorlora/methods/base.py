"""A method is a sum: a plan that says how adapters come and go, and the constraints that act on them.

    Shared() + ProjectGradient("A") + Freeze("B")     is how a method is printed, and how it is typed

Two methods differ by a part that is there or not. What a method preserves stands on it: see `preserves`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

from anchorlora.constraints.base import Constraint, ProvidesCores
from anchorlora.data.rehearsal import Rehearsal
from anchorlora.errors import InvalidType, InvalidValue, UnknownName, nearest_names
from anchorlora.methods.adapter_plan import AdapterPlan
from anchorlora.methods.entry import CatalogEntry
from anchorlora.methods.preserves import Preserves

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.geometry import LayerCore
    from anchorlora.store.record import MethodFacts


FAMILIES = ("shared", "cumulative")
UNDESCRIBED = CatalogEntry()
REQUIRED = {"core", "wide", "start"}  # what a constraint may require
NEEDED = ("first_task", "requires", "begin_task", "end_task")  # of a constraint


@dataclass(frozen=True)
class Method:
    """A named sum of parts: a plan for adapters, rehearsal if any, and constraints in the order in which they act.

    A sum such as `Shared() + Freeze("B")` has no name (""): `named` gives it one, and in a file its variable does. Two methods are
    equal when their parts are, whatever their names.

    Args:
        name: The name in tables and records.
        plan: How adapters come and go.
        constraints: Constraints, in the order in which they act.
        rehearsal: Examples of earlier tasks to mix in; None trains on the new task alone.
        entry: What tables and pages say of it.
        extends: Name of the method that `plus` made it of, or "".

    Example:
        >>> from anchorlora import Freeze, Method, ProjectGradient, Shared
        >>> mine = Method("mine", Shared(), (ProjectGradient("A"), Freeze("B")))
        >>> mine.definition
        "Shared() + ProjectGradient('A') + Freeze('B')"
        >>> mine == Shared() + ProjectGradient("A") + Freeze("B")
        True
    """

    name: str = field(compare=False)
    plan: AdapterPlan
    constraints: tuple[Constraint, ...] = ()
    rehearsal: Rehearsal | None = None
    entry: CatalogEntry = field(default=UNDESCRIBED, compare=False, repr=False)
    extends: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.plan.family not in FAMILIES:
            raise InvalidValue(f"the family of {phrase(self.plan)} is {self.plan.family!r:.40}; it is one of {', '.join(FAMILIES)}")
        if refuse := getattr(self.plan, "refuse_beside", None):
            refuse(self.constraints)

    @cached_property
    def preserves(self) -> Preserves:
        """The conditions that follow from the parts, see `Preserves.derived`."""
        return Preserves.derived(self.plan, self.constraints)

    @classmethod
    def of(cls, made: Any) -> Method:
        """Return a method as it is, and a plan as the method of that plan alone, without a name.

        Args:
            made: A method or a plan.

        Returns:
            The method.

        Raises:
            InvalidType: `made` is neither.

        Example:
            >>> from anchorlora import Method, PerTask
            >>> Method.of(PerTask()).definition
            'PerTask()'
        """
        if isinstance(made, Method):
            return made
        if isinstance(made, AdapterPlan) and not isinstance(made, type):
            return cls("", made)
        example = phrase(made) if isinstance(made, Constraint) and not isinstance(made, type) else "Freeze('B')"
        raise InvalidType(f"{shown(made)} is not a method: a method begins with a plan, as in Shared() + {example}")

    def __add__(self, part: Constraint | Rehearsal) -> Method:
        """Return this method with one more part, without a name."""
        if not isinstance(part, Rehearsal):
            _refuse_foreign(part)
            return Method("", self.plan, (*self.constraints, part), self.rehearsal)
        if self.rehearsal is not None:
            raise InvalidValue(f"{phrase(part)} cannot be added: {phrase(self.rehearsal)} is there already")
        return Method("", self.plan, self.constraints, part)

    def plus(self, *parts: Constraint | Rehearsal, name: str, entry: CatalogEntry = UNDESCRIBED) -> Method:
        """Return this method with further parts, under a new name.

        Args:
            parts: Constraints, in the order in which they act, and at most one `Rehearsal`.
            name: The new method's name.
            entry: What tables and pages say of it.

        Returns:
            The new method; this one does not change.

        Raises:
            InvalidType: A part is no constraint and no `Rehearsal`.
            InvalidValue: The method has a `Rehearsal` already.

        Example:
            >>> from anchorlora import METHODS, ProjectDisplacement
            >>> METHODS["seq-lora"].plus(ProjectDisplacement("A"), name="mine").preserves.words
            'displacement'
        """
        method = self
        for part in parts:
            method += part
        return replace(method, name=name, entry=entry, extends=self.name)

    def named(self, name: str) -> Method:
        """Return the same method under another name.

        Args:
            name: The new name.

        Example:
            >>> from anchorlora import Freeze, Shared
            >>> (Shared() + Freeze("B")).named("frozen-b").name
            'frozen-b'
        """
        return replace(self, name=name)

    def changed(self, settings: Mapping[str, float]) -> Method:
        """Return this method with numbers of its parts set.

        Args:
            settings: "Part.field" -> value greater than 0.

        Returns:
            The new method, under the same name.

        Raises:
            UnknownName: No part has such a number.
            InvalidValue: A value is 0 or less.

        Example:
            >>> from anchorlora import METHODS
            >>> METHODS["o-lora"].changed({"RoutingOverlap.strength": 0.05}).definition
            'PerTask() + RoutingOverlap(0.05)'
        """
        values = {path: _number(self, path, value) for path, value in settings.items()}

        def adjust(part: Any) -> Any:
            """Return the part with its numbers."""
            own = {path.partition(".")[2]: value for path, value in values.items() if path.partition(".")[0] == type(part).__name__}
            return replace(part, **own) if own else part

        constraints = tuple(adjust(constraint) for constraint in self.constraints)
        return replace(self, plan=adjust(self.plan), rehearsal=adjust(self.rehearsal), constraints=constraints)

    def at(self, task: int) -> tuple[Constraint, ...]:
        """Return the constraints that act during one task.

        Args:
            task: Number of the task, from 1.

        Example:
            >>> from anchorlora import METHODS
            >>> METHODS["sfor"].at(1)
            ()
        """
        return tuple(c for c in self.constraints if task >= c.first_task)

    @property
    def definition(self) -> str:
        """The sum as one line of Python, such as "Shared() + ProjectGradient('A')"."""
        return " + ".join(self.phrases)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The plan, the rehearsal if there is one, and the constraints."""
        return (self.plan, *([self.rehearsal] if self.rehearsal else []), *self.constraints)

    @property
    def phrases(self) -> tuple[str, ...]:
        """Each part as it is typed, such as ("Shared()", "ProjectGradient('A')")."""
        return tuple(phrase(part) for part in self.parts)

    @property
    def facts(self) -> MethodFacts:
        """The facts of the method that a record holds."""
        from anchorlora.store.record import MethodFacts

        content = {
            "name": self.name,
            "parts": list(self.phrases),
            "family": self.plan.family,
            "preserves": list(self.preserves.names),
            "rehearses": self.rehearsal is not None,
            "grows": bool(getattr(self.plan, "grows", False)),
        }
        return MethodFacts.model_validate(content)

    @property
    def compared_with(self) -> tuple[str, ...]:
        """Names of the methods whose scores are subtracted from its own: those of its entry, else the one that it extends."""
        named = self.entry.compared_with
        return named if named is not None else (self.extends,) if self.extends else ()

    @property
    def needs(self) -> str:
        """Needs of earlier tasks besides its own adapters, in words."""
        rehearsal = self.rehearsal
        phrases = [f"{rehearsal.memory} examples of earlier tasks, stored and trained on again"] if rehearsal else []
        phrases += [words for c in self.constraints if (words := getattr(c, "needs", ""))]
        if {"core", "wide"} & self.requires and not self.provided_cores:
            phrases.append("feature rows of finished tasks: text is enough")
        return "; ".join(phrases) or "nothing"

    @property
    def provided_cores(self) -> Callable[[Mapping[str, Tensor]], dict[str, LayerCore]] | None:
        """The `cores` of the constraint that chooses the core itself, or None where it is made of feature rows."""
        return next((c.cores for c in self.constraints if isinstance(c, ProvidesCores)), None)

    @property
    def reads_past(self) -> bool:
        """True if a constraint needs the memory that constraints leave of earlier tasks."""
        return any(getattr(c, "reads", "") for c in self.constraints)

    def refuse_without_memory(self, where: str, memory: Iterable[str] = ()) -> None:
        """Refuse a method that reads what constraints remember of earlier tasks, where that is not remembered.

        Args:
            where: What leaves no such memory, for the message.
            memory: Names of what is remembered.

        Raises:
            InvalidValue: A constraint reads something else.

        Example:
            >>> from anchorlora import METHODS
            >>> METHODS["ewc"].refuse_without_memory("text")
            Traceback (most recent call last):
            ...
            anchorlora.errors.InvalidValue: ewc: FisherAnchor needs what earlier tasks left, and text leaves none: try inc-lora-hard
        """
        known, wanted = tuple(memory), ((type(c).__name__, getattr(c, "reads", "")) for c in self.constraints)
        reader = next((part for part, prefix in wanted if prefix and not any(name.startswith(prefix) for name in known)), None)
        if reader is not None:
            name = self.name or self.definition
            raise InvalidValue(f"{name}: {reader} needs what earlier tasks left, and {where} leaves none: try inc-lora-hard")

    @property
    def requires(self) -> frozenset[str]:
        """Kinds of past feature rows that training needs, such as "core" and "wide"; other rows serve measuring alone."""
        return frozenset(kind for c in self.constraints for kind in c.requires)


class MethodTable(dict[str, Method]):
    """Methods by name; an unknown name offers its neighbors."""

    @classmethod
    def of(cls, *modules: ModuleType) -> MethodTable:
        """Return every method that the modules define, in the order of their definitions."""
        return cls({value.name: value for module in modules for value in vars(module).values() if isinstance(value, Method)})

    def baseline(self, family: str) -> Method:
        """Return the method that is a family's plan and nothing else."""
        return next(m for m in self.values() if m.plan.family == family and len(m.parts) == 1)

    def default(self, where: str) -> Method:
        """Return the method that `train` takes where none is named (see `CatalogEntry.default`)."""
        return next(m for m in self.values() if m.entry.default == where)

    def __missing__(self, name: str) -> Method:
        raise UnknownName(f"no method called {name!r}; {nearest_names(name, self)}")


def _number(method: Method, path: str, value: float) -> float:
    """Return a number of a method's parts, of the type that it has there; 1 also sets a switch."""
    numbers = {
        f"{type(part).__name__}.{setting.name}": getattr(part, setting.name)
        for part in method.parts
        for setting in (fields(part) if is_dataclass(part) else ())
        if isinstance(getattr(part, setting.name), (int, float))
        if value == 1 or not isinstance(getattr(part, setting.name), bool)
    }
    if path not in numbers:
        raise UnknownName(f"{method.name} has no number called {path!r}; it has: {', '.join(numbers) or 'none'}")
    if not value > 0:
        raise InvalidValue(f"{path} must be greater than 0, not {value:g}; leave the part out instead")
    return type(numbers[path])(value)


def _refuse_foreign(part: Any) -> None:
    """Raise for what is no constraint."""
    missing = [name for name in NEEDED if not hasattr(part, name)]
    if missing or isinstance(part, (type, Method, AdapterPlan)):
        lacks = f"; it has no {', '.join(missing)}" if missing else ""
        raise InvalidType(f"{shown(part):.80} is not a part of a method: a plan takes constraints and a Rehearsal{lacks}")
    if isinstance(part.requires, str) or not set(part.requires) <= REQUIRED:
        raise InvalidValue(f"{shown(part)} requires {part.requires!r}, which is not a tuple of: {', '.join(sorted(REQUIRED))}")


def phrase(part: Any) -> str:
    """Return a frozen dataclass as the call that makes it: values without names, then keywords that are not at their default."""
    settings = fields(part) if is_dataclass(part) else ()
    values = [repr(getattr(part, field.name)) for field in settings if not field.kw_only]
    values += [f"{f.name}={getattr(part, f.name)!r}" for f in settings if f.kw_only and getattr(part, f.name) != f.default]
    return f"{type(part).__name__}({', '.join(values)})"


def shown(value: Any) -> str:
    """Return a value as an error shows it: a part as it is typed, anything else as Python shows it, cut."""
    return phrase(value) if is_dataclass(value) and not isinstance(value, type) else f"{value!r:.80}"
