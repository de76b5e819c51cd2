"""A method is a sentence: which blocks it trains, and which constraints hold them.  The difference of two methods is a part.

Shared() + ProjectGradient("A") + Freeze("B")     is how one is printed, and how one is typed

What each method promises for every optimizer, as data: the table that `check`, the tests and the documents share.

displacement  dA V = 0    the block's move does not touch the core
state         A V = 0     the block itself does not touch the core
companion     dB = 0      B does not move
response      dW V = 0    the layer's effective change does not touch the core: rho is zero to rounding
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from anchorlora.constraints.base import Constraint
from anchorlora.errors import InvalidType, InvalidValue, UnknownName
from anchorlora.tasks.rehearsal import Rehearsal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from anchorlora.adapters import AdapterStack
    from anchorlora.geometry import Factors


NEEDED = ("first_task", "requires", "begin_task", "end_task")  # of a constraint


@runtime_checkable
class AdapterPlan(Protocol):
    """How blocks come and go over tasks."""

    family: str

    def begin(self, blocks: AdapterStack, generator: torch.Generator, *, first: bool) -> None:
        """A task starts."""

    def finish(self, blocks: AdapterStack) -> None:
        """A task has been learned."""

    def groups(self, blocks: AdapterStack) -> list[dict[str, Any]]:
        """What the optimizer trains, as torch's parameter groups."""

    def state(self, blocks: AdapterStack) -> dict[str, Tensor]:
        """What `resume` needs besides the saved adapter."""

    def resume(self, blocks: AdapterStack, factors: Mapping[str, Factors], state: Mapping[str, Tensor]) -> None:
        """Go on after a finished task whose adapter is `factors`."""


class BeginsSum:
    """A plan begins a method: `plan + constraint` is one, without a name."""

    def __add__(self, part: Constraint | Rehearsal) -> Method:
        return Method.of(self) + part


class TrainsItsBlock(BeginsSum):
    """What plans share: the current block trains, and the adapter says everything."""

    def groups(self, blocks: AdapterStack) -> list[dict[str, Any]]:
        return [{"params": blocks.trainable()}]

    def state(self, blocks: AdapterStack) -> dict[str, Tensor]:
        return {}


@dataclass(frozen=True)
class Shared(TrainsItsBlock):
    """One adapter for the whole sequence: a task starts where the last one ended, at a learned anchor."""

    family = "shared"

    def begin(self, blocks: AdapterStack, generator: torch.Generator, *, first: bool) -> None:
        if first:
            blocks.open(generator)

    def finish(self, blocks: AdapterStack) -> None:
        pass

    def resume(self, blocks: AdapterStack, factors: Mapping[str, Factors], state: Mapping[str, Tensor]) -> None:
        blocks.restore(factors, as_history=False)


@dataclass(frozen=True)
class PerTask(TrainsItsBlock):
    """A fresh zero-output block per task; earlier blocks are frozen and summed."""

    family = "cumulative"

    def begin(self, blocks: AdapterStack, generator: torch.Generator, *, first: bool) -> None:
        blocks.open(generator)

    def finish(self, blocks: AdapterStack) -> None:
        blocks.fold()

    def resume(self, blocks: AdapterStack, factors: Mapping[str, Factors], state: Mapping[str, Tensor]) -> None:
        blocks.restore(factors, as_history=True)


@dataclass(frozen=True)
class Method:
    """A name, a plan for blocks, rehearsal of earlier tasks if any, and constraints in the order in which they act.

    A sum such as `Shared() + Freeze("B")` has no name (""): `named` gives it one, and so does the variable of a file. Methods are
    equal when their parts are, whatever they are called.
    """

    name: str = field(compare=False)
    blocks: AdapterPlan
    constraints: tuple[Constraint, ...] = ()
    rehearsal: Rehearsal | None = None

    @classmethod
    def of(cls, made: Any) -> Method:
        """A method as it is; a plan as the method of that plan alone, without a name.  Raises TypeError for anything else."""
        if isinstance(made, Method):
            return made
        if isinstance(made, AdapterPlan) and not isinstance(made, type):
            return cls("", made)
        example = _phrase(made) if isinstance(made, Constraint) and not isinstance(made, type) else "Freeze('B')"
        raise InvalidType(f"{_shown(made)} is no method: one begins with a plan, as in Shared() + {example}")

    def __add__(self, part: Constraint | Rehearsal) -> Method:
        """This method with one more part, without a name."""
        if not isinstance(part, Rehearsal):
            _refuse_foreign(part)
            return replace(self, name="", constraints=(*self.constraints, part))
        if self.rehearsal is not None:
            raise InvalidValue(f"{_phrase(part)} cannot be added: {_phrase(self.rehearsal)} is there already")
        return replace(self, name="", rehearsal=part)

    def plus(self, *parts: Constraint | Rehearsal, name: str) -> Method:
        """This method with further parts, under a new name."""
        method = self
        for part in parts:
            method += part
        return method.named(name)

    def named(self, name: str) -> Method:
        """The same method by another name."""
        return replace(self, name=name)

    def changed(self, settings: Mapping[str, float]) -> Method:
        """This method with numbers of its parts set, by "Part.field", such as {"RoutingOverlap.strength": 0.05}."""
        method = self
        for path, value in settings.items():
            method = _changed(method, path, value)
        return method

    def at(self, task: int) -> tuple[Constraint, ...]:
        """The constraints that hold task number `task` (1-based)."""
        return tuple(c for c in self.constraints if task >= c.first_task)

    @property
    def definition(self) -> str:
        """The composition as one line, such as "Shared() + ProjectGradient('A')"."""
        return " + ".join(_phrase(part) for part in self.parts)

    @property
    def parts(self) -> tuple[Any, ...]:
        """Everything that it is composed of."""
        return (self.blocks, *([self.rehearsal] if self.rehearsal else []), *self.constraints)

    @property
    def requires(self) -> frozenset[str]:
        """What training needs of the feature rows, "core" and "wide"; otherwise they are kept for measuring only."""
        return frozenset(kind for c in self.constraints for kind in c.requires)


class MethodTable(dict[str, Method]):
    """Methods by name; an unknown name offers its neighbors."""

    @classmethod
    def of(cls, *modules: ModuleType) -> MethodTable:
        """Every method that the modules define, in the order in which they do."""
        return cls({value.name: value for module in modules for value in vars(module).values() if isinstance(value, Method)})

    def __missing__(self, name: str) -> Method:
        near = get_close_matches(name, self, n=3, cutoff=0.4) or list(self)
        raise UnknownName(f"no method called {name!r}; nearest: {', '.join(near)}")


def _changed(method: Method, path: str, value: float) -> Method:
    kind, _, name = path.partition(".")
    numbers = {
        f"{type(part).__name__}.{each.name}": getattr(part, each.name)
        for part in method.parts
        for each in (fields(part) if is_dataclass(part) else ())
        if isinstance(getattr(part, each.name), (int, float))
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
        blocks=new(method.blocks),
        rehearsal=new(method.rehearsal),
        constraints=tuple(new(constraint) for constraint in method.constraints),
    )


def _phrase(part: Any) -> str:
    """A frozen dataclass as the call that makes it, values without names."""
    values = [repr(getattr(part, each.name)) for each in fields(part)] if is_dataclass(part) else []
    return f"{type(part).__name__}({', '.join(values)})"


def _shown(value: Any) -> str:
    """A value in an error: a part as it is typed, anything else as Python shows it, cut."""
    return _phrase(value) if is_dataclass(value) and not isinstance(value, type) else f"{value!r:.80}"


def _refuse_foreign(part: Any) -> None:
    """Raises TypeError for what is no constraint."""
    if isinstance(part, type):
        raise InvalidType(f"{part.__name__} is a class; write {part.__name__}(..)")
    if isinstance(part, Method):
        raise InvalidType(f"{part.name or part.definition} is a method; add its parts one by one")
    if isinstance(part, AdapterPlan):
        raise InvalidType(f"{_phrase(part)} is a plan, and a method has one, which comes first")
    missing = [name for name in NEEDED if not hasattr(part, name)]
    if len(missing) == len(NEEDED):
        raise InvalidType(f"{_shown(part)} is no part of a method; a plan takes constraints and a Rehearsal")
    if missing:
        raise InvalidType(f"{_shown(part)} is no constraint: it has no {', '.join(missing)}")


@dataclass(frozen=True)
class Claims:
    """Which of the four conditions a method keeps from its second task on."""

    displacement: bool = False
    state: bool = False
    companion: bool = False
    response: bool = False

    def condition(self) -> str:
        """The condition in words, as tables print it."""
        kept = [field.name for field in fields(self) if getattr(self, field.name)]
        return ", ".join(kept) if kept else "none"


NONE = Claims()
CLAIMS: dict[str, Claims] = {
    "seq-lora": NONE,
    "replay": NONE,
    "ewc": NONE,
    "lwf": NONE,
    "projected-lora": NONE,
    "projected-lora-wrp": Claims(displacement=True),
    "projected-lora-freeze-b": Claims(companion=True),
    "sfor": Claims(displacement=True, companion=True, response=True),
    "inc-lora": NONE,
    "n-lora": NONE,
    "sd-lora": NONE,
    "o-lora": NONE,
    "o-lora-retract": NONE,
    "o-lora-retract-gradient": NONE,
    "o-lora-hard": Claims(displacement=True, state=True, response=True),
    "o-lora-effective": NONE,
    "o-lora-bsr": Claims(displacement=True, state=True, response=True),
    "o-lora-bsr-strong": Claims(displacement=True, state=True, response=True),
}
