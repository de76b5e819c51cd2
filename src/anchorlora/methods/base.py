"""A method is a sentence: which blocks it trains, and which constraints hold them.  The difference of two methods is a part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from anchorlora.adapters import Blocks
    from anchorlora.constraints import Constraint
    from anchorlora.geometry import Factors


class BlockPlan(Protocol):
    """How blocks come and go over tasks."""

    family: str

    def begin(self, blocks: Blocks, generator: torch.Generator, *, first: bool) -> None: ...

    def finish(self, blocks: Blocks) -> None: ...

    def resume(self, blocks: Blocks, factors: Mapping[str, Factors]) -> None: ...


@dataclass(frozen=True)
class Shared:
    """One adapter for the whole sequence: a task starts where the last one ended, at a learned anchor."""

    family = "shared"

    def begin(self, blocks: Blocks, generator: torch.Generator, *, first: bool) -> None:
        if first:
            blocks.open(generator)

    def finish(self, blocks: Blocks) -> None:
        pass

    def resume(self, blocks: Blocks, factors: Mapping[str, Factors]) -> None:
        blocks.restore(factors, as_history=False)


@dataclass(frozen=True)
class PerTask:
    """A fresh zero-output block per task; earlier blocks are frozen and summed."""

    family = "cumulative"

    def begin(self, blocks: Blocks, generator: torch.Generator, *, first: bool) -> None:
        blocks.open(generator)

    def finish(self, blocks: Blocks) -> None:
        blocks.fold()

    def resume(self, blocks: Blocks, factors: Mapping[str, Factors]) -> None:
        blocks.restore(factors, as_history=True)


@dataclass(frozen=True)
class Method:
    """A name, a plan for blocks, and constraints in the order in which they act."""

    name: str
    blocks: BlockPlan
    constraints: tuple[Constraint, ...] = ()

    def plus(self, *constraints: Constraint, name: str) -> Method:
        """This method with further constraints, under a new name."""
        return replace(self, name=name, constraints=self.constraints + constraints)

    def at(self, task: int) -> tuple[Constraint, ...]:
        """The constraints that hold task number `task` (1-based)."""
        return tuple(c for c in self.constraints if task >= c.from_task)

    @property
    def definition(self) -> str:
        """The composition as one line, such as "Shared() + ProjectGradient('A')"."""
        return " + ".join(_phrase(part) for part in (self.blocks, *self.constraints))

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


def _phrase(part: Any) -> str:
    """A frozen dataclass as the call that makes it, values without names."""
    values = [repr(getattr(part, field.name)) for field in fields(part)] if is_dataclass(part) else []
    return f"{type(part).__name__}({', '.join(values)})"
