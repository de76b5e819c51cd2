"""A method is a sentence: which blocks it trains, and which constraints hold them.  The difference of two methods is a part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from anchorlora.tasks.rehearsal import Rehearsal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from anchorlora.adapters import Blocks
    from anchorlora.constraints import Constraint
    from anchorlora.geometry import Factors


class BlockPlan(Protocol):
    """How blocks come and go over tasks."""

    family: str

    def begin(self, blocks: Blocks, generator: torch.Generator, *, first: bool) -> None:
        """A task starts."""

    def finish(self, blocks: Blocks) -> None:
        """A task has been learned."""

    def groups(self, blocks: Blocks) -> list[dict[str, Any]]:
        """What the optimizer trains, as torch's parameter groups."""

    def state(self, blocks: Blocks) -> dict[str, Tensor]:
        """What `resume` needs besides the saved adapter."""

    def resume(self, blocks: Blocks, factors: Mapping[str, Factors], state: Mapping[str, Tensor]) -> None:
        """Go on after a finished task whose adapter is `factors`."""


class TrainsItsBlock:
    """What plans share: the current block trains, and the adapter says everything."""

    def groups(self, blocks: Blocks) -> list[dict[str, Any]]:
        return [{"params": blocks.trainable()}]

    def state(self, blocks: Blocks) -> dict[str, Tensor]:
        return {}


@dataclass(frozen=True)
class Shared(TrainsItsBlock):
    """One adapter for the whole sequence: a task starts where the last one ended, at a learned anchor."""

    family = "shared"

    def begin(self, blocks: Blocks, generator: torch.Generator, *, first: bool) -> None:
        if first:
            blocks.open(generator)

    def finish(self, blocks: Blocks) -> None:
        pass

    def resume(self, blocks: Blocks, factors: Mapping[str, Factors], state: Mapping[str, Tensor]) -> None:
        blocks.restore(factors, as_history=False)


@dataclass(frozen=True)
class PerTask(TrainsItsBlock):
    """A fresh zero-output block per task; earlier blocks are frozen and summed."""

    family = "cumulative"

    def begin(self, blocks: Blocks, generator: torch.Generator, *, first: bool) -> None:
        blocks.open(generator)

    def finish(self, blocks: Blocks) -> None:
        blocks.fold()

    def resume(self, blocks: Blocks, factors: Mapping[str, Factors], state: Mapping[str, Tensor]) -> None:
        blocks.restore(factors, as_history=True)


@dataclass(frozen=True)
class Method:
    """A name, a plan for blocks, rehearsal of earlier tasks if any, and constraints in the order in which they act."""

    name: str
    blocks: BlockPlan
    constraints: tuple[Constraint, ...] = ()
    rehearsal: Rehearsal | None = None

    def plus(self, *parts: Constraint | Rehearsal, name: str) -> Method:
        """This method with further parts, under a new name."""
        constraints = tuple(part for part in parts if not isinstance(part, Rehearsal))
        rehearsals = [part for part in parts if isinstance(part, Rehearsal)]
        return replace(self, name=name, constraints=self.constraints + constraints, rehearsal=[self.rehearsal, *rehearsals][-1])

    def changed(self, settings: Mapping[str, float]) -> Method:
        """This method with numbers of its parts set, by "Part.field", such as {"RoutingOverlap.strength": 0.05}."""
        method = self
        for path, value in settings.items():
            method = _changed(method, path, value)
        return method

    def at(self, task: int) -> tuple[Constraint, ...]:
        """The constraints that hold task number `task` (1-based)."""
        return tuple(c for c in self.constraints if task >= c.from_task)

    @property
    def definition(self) -> str:
        """The composition as one line, such as "Shared() + ProjectGradient('A')"."""
        return " + ".join(_phrase(part) for part in self.parts)

    @property
    def parts(self) -> tuple[Any, ...]:
        """Everything that it is composed of."""
        return (self.blocks, *([self.rehearsal] if self.rehearsal else []), *self.constraints)

    @property
    def reads(self) -> frozenset[str]:
        """What training needs of the feature rows, "core" and "wide"; otherwise they are kept for measuring only."""
        return frozenset(kind for c in self.constraints for kind in c.reads)


class MethodTable(dict[str, Method]):
    """Methods by name; an unknown name offers its neighbours."""

    @classmethod
    def of(cls, *modules: ModuleType) -> MethodTable:
        """Every method that the modules define, in the order in which they do."""
        return cls({value.name: value for module in modules for value in vars(module).values() if isinstance(value, Method)})

    def __missing__(self, name: str) -> Method:
        near = get_close_matches(name, self, n=3, cutoff=0.4) or list(self)
        raise LookupError(f"no method called {name!r}; nearest: {', '.join(near)}")


def _changed(method: Method, path: str, value: float) -> Method:
    kind, _, name = path.partition(".")
    numbers = {
        f"{type(part).__name__}.{field.name}": getattr(part, field.name)
        for part in method.parts
        for field in fields(part)
        if isinstance(getattr(part, field.name), (int, float))
    }
    if path not in numbers:
        raise LookupError(f"{method.name} has no number called {path!r}; it has: {', '.join(numbers) or 'none'}")
    if not value > 0:
        raise ValueError(f"{path} must be greater than 0, not {value:g}; leave the part out instead")
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
    values = [repr(getattr(part, field.name)) for field in fields(part)] if is_dataclass(part) else []
    return f"{type(part).__name__}({', '.join(values)})"
