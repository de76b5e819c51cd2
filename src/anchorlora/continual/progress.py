"""A task that has begun and not ended, as named tensors: everything that its further course depends on, and nothing else.

    parameters/i      what the optimizer trains, in its order; what is frozen stays as the task began it
    optimizer/i/name  its state for each of them
    rows/kind/store   feature rows taken so far
    dropout/device    state of the generators that dropout draws from

What is not here follows from the seed, the data and the finished tasks: anchors and a retracted start (the task is begun again
before this is loaded), the order of examples and of rehearsed ones, cores, what constraints remembered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from anchorlora.features import RowStore

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter


@dataclass(frozen=True, eq=False)
class Progress:
    """Task `number` (1-based) after `step` optimizer steps and `seconds` of learning; stores: adapted layer -> its rows' store."""

    number: int
    step: int
    seconds: float
    tensors: dict[str, Tensor]
    stores: dict[str, str]

    @classmethod
    def of(cls, optimizer: Optimizer, rows: RowStore, *, number: int, step: int, seconds: float) -> Progress:
        """A copy of what stands now, between two optimizer steps, while `rows` is listening."""
        tensors = {f"rows/{name}": t for name, t in rows.begun().items()}
        for i, parameter in enumerate(_parameters(optimizer)):
            if not parameter.requires_grad:
                continue
            tensors[f"parameters/{i}"] = parameter.detach()
            state = {name: value for name, value in optimizer.state.get(parameter, {}).items() if isinstance(value, Tensor)}
            tensors |= {f"optimizer/{i}/{name}": value for name, value in state.items()}
        tensors["dropout/cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors |= {f"dropout/cuda{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
        return cls(number, step, seconds, {name: t.cpu().clone() for name, t in tensors.items()}, dict(rows.stores))

    def restore(self, optimizer: Optimizer) -> None:
        """Put parameters, optimizer state and generators back.  The rows went to `RowStore.listening` before.

        Call it while the constraints hold, so that what they freeze is frozen. Raises ValueError that names what is missing.
        """
        parameters = {i: p for i, p in enumerate(_parameters(optimizer)) if p.requires_grad}
        self._refuse_other_than(parameters)
        for i, parameter in parameters.items():
            with torch.no_grad():
                parameter.copy_(self.tensors[f"parameters/{i}"])
            prefix = f"optimizer/{i}/"
            state = {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}
            if state:  # a count of steps stays where torch keeps it, on the CPU
                optimizer.state[parameter] = {k: t.clone().to(parameter.device if t.ndim else "cpu") for k, t in state.items()}
        torch.set_rng_state(self.tensors["dropout/cpu"])
        states = [self.tensors[name] for name in sorted(self.tensors) if name.startswith("dropout/cuda")]
        if states and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(states)

    def _refuse_other_than(self, parameters: dict[int, torch.nn.Parameter]) -> None:
        wanted = {f"parameters/{i}" for i in parameters} | {"dropout/cpu"}
        started = {name.rpartition("/")[0] for name in self.tensors if name.startswith("optimizer/")}
        wanted |= {f"{place}/{name}" for place in started for name in MOMENTS}
        there = {name for name in self.tensors if not name.startswith(("rows/", "dropout/cuda"))}
        wrong = sorted(wanted ^ there) or sorted(
            f"parameters/{i}" for i, p in parameters.items() if self.tensors[f"parameters/{i}"].shape != p.shape
        )
        if wrong:
            how = "is missing" if wrong[0] in wanted - there else "is of another run"
            raise ValueError(
                f"the progress saved after step {self.step} of task {self.number} cannot be taken up: {wrong[0]} {how}"
            )

    @property
    def rows(self) -> dict[str, Tensor]:
        """Feature rows so far, by kind/store."""
        return {name.removeprefix("rows/"): t for name, t in self.tensors.items() if name.startswith("rows/")}


@dataclass(frozen=True, eq=False)
class Learned:
    """A task that is learned and not answered to the end.  texts: answers so far, by task and index of the example."""

    drift: dict | None
    train_seconds: float
    trained_parameters: int
    history_bytes: int
    evaluate_seconds: float
    texts: dict[str, dict[int, str]]


def _parameters(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
