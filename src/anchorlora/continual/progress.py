"""A task within its training, as named tensors: everything that its further course depends on, and nothing else.

    parameters/i      parameters that train, in the optimizer's order; frozen ones stay as the task began
    rows/kind/store   feature rows taken so far
    optimizer/i/name  the optimizer's state for each parameter
    dropout/kind      states of the generators that dropout draws from, by kind of device
    rank-n/kind       the same of the other processes of the run

The last two are kept while steps are left. All else follows from the seed, the data and the finished tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from anchorlora.devices import generator_states, set_generator_states
from anchorlora.errors import InvalidValue
from anchorlora.features.store import FeatureStore
from anchorlora.processes import ALONE, Processes

DROPOUT, OTHERS = "dropout/", "rank-"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter


@dataclass(frozen=True, eq=False)
class Progress:
    """A task within its training."""

    number: int  # the task's place in the order, from 1
    step: int  # optimizer steps so far
    seconds: float  # seconds of training so far
    tensors: dict[str, Tensor]  # everything that further steps depend on, by the names above
    stores: dict[str, str]  # layer path -> store of its feature rows

    def restore(self, optimizer: Optimizer, *, steps: int, rank: int = 0) -> None:
        """Load parameters, optimizer state and generators, while the constraints hold; rows go to `FeatureStore.collect` before."""
        parameters = _training_parameters(optimizer)
        self._refuse_misfit(parameters, steps)
        for i, parameter in parameters.items():
            with torch.no_grad():
                parameter.copy_(self.tensors[f"parameters/{i}"])
            prefix = f"optimizer/{i}/"
            state = {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}
            if state:  # a count of steps stays where torch keeps it, on the CPU
                optimizer.state[parameter] = {k: t.clone().to(parameter.device if t.ndim else "cpu") for k, t in state.items()}
        if self.step < steps and (states := self.generators(rank)):
            set_generator_states(_device(parameters), states)

    def _refuse_misfit(self, parameters: dict[int, torch.nn.Parameter], steps: int) -> None:
        wanted: dict[str, Tensor] = {f"parameters/{i}": p for i, p in parameters.items()}
        if self.step < steps:
            states = generator_states(_device(parameters))
            wanted |= {DROPOUT + kind: states[kind] for kind in states if kind == "cpu" or kind in self.generators()}
            started = {name.rpartition("/")[0] for name in self.tensors if name.startswith("optimizer/")}
            for i, p in parameters.items():
                if f"optimizer/{i}" in started:  # the first step moves no factor whose gradient is zero, and others have no state
                    wanted |= {f"optimizer/{i}/{name}": torch.tensor(0.0) if name == "step" else p for name in MOMENTS}
        unread = {DROPOUT + kind for kind in self.generators() if kind != "cpu"} - wanted.keys()  # begun on another device
        there = {name: t for name, t in self.tensors.items() if not name.startswith(("rows/", OTHERS)) and name not in unread}
        wrong = sorted(wanted.keys() ^ there.keys()) or sorted(name for name in wanted if not _alike(there[name], wanted[name]))
        if wrong:
            how = "is of another run" if wrong[0] in there else "is missing"
            raise InvalidValue(
                f"the progress saved after step {self.step} of task {self.number} cannot be resumed: {wrong[0]} {how}"
            )

    def generators(self, rank: int = 0) -> dict[str, Tensor]:
        """Return the states of a process's generators, by kind of device."""
        prefix = _place_of(rank)
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    @property
    def rows(self) -> dict[str, Tensor]:
        """Feature rows so far, by kind/store."""
        return {name.removeprefix("rows/"): t for name, t in self.tensors.items() if name.startswith("rows/")}


def tensors_of(optimizer: Optimizer, rows: FeatureStore, processes: Processes = ALONE, *, goes_on: bool) -> dict[str, Tensor]:
    """Return a copy of the state of a task while its rows are collected: what steps that are left, if any, depend on, too."""
    tensors, parameters = {f"rows/{name}": t for name, t in rows.begun().items()}, _training_parameters(optimizer)
    for i, parameter in parameters.items():
        tensors[f"parameters/{i}"] = parameter.detach()
        state = optimizer.state.get(parameter, {}) if goes_on else {}
        tensors |= {f"optimizer/{i}/{name}": value for name, value in state.items() if isinstance(value, Tensor)}
    for rank, states in enumerate(processes.gathered(generator_states(_device(parameters))) if goes_on else ()):
        tensors |= {_place_of(rank) + kind: state for kind, state in states.items()}
    return {name: t.cpu().clone() for name, t in tensors.items()}


def _place_of(rank: int) -> str:
    return f"{OTHERS}{rank}/" if rank else DROPOUT


def _training_parameters(optimizer: Optimizer) -> dict[int, torch.nn.Parameter]:
    """Parameters that train, by their place in the optimizer."""
    held = (p for group in optimizer.param_groups for p in group["params"])
    return {i: p for i, p in enumerate(held) if p.requires_grad}


def _device(parameters: dict[int, torch.nn.Parameter]) -> torch.device:
    return next((p.device for p in parameters.values()), torch.device("cpu"))


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)
