"""Elastic weight consolidation on factors: (lambda / 2) sum_t sum_i F_t,i (theta_i - theta*_t,i)^2   (Kirkpatrick et al. 2017).

    F_t = (1/N) sum_n (d l_n / d theta)^2    empirical Fisher of task t: per-example gradients, gold labels, dropout off
    S0 = sum_t F_t      S1 = sum_t F_t theta*_t      all that is stored of earlier tasks, however many there are

Gradient: lambda (S0 theta - S1). Published values of lambda belong to other definitions of F (batch means, token sums) and do
not transfer. A diagonal Fisher of factors changes under B -> cB, A -> A/c, which the function does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, Penalty, ProtectsPast
from anchorlora.devices import float64_device, in_float64, torch
from anchorlora.errors import InvalidType, InvalidValue, UnknownName

if TYPE_CHECKING:
    from torch import Tensor, nn

    from anchorlora.adapters import Anchor

FISHER, WEIGHTED, CONSTANT = "fisher", "fisher_start", "fisher_constant"


@dataclass(frozen=True)
class FisherAnchor(ProtectsPast):
    """Pull every factor entry toward its values after earlier tasks, weighted by their Fisher information   (EWC).

        (lambda / 2) sum_t sum_i F_t,i (theta_i - theta*_t,i)^2        (Kirkpatrick et al. 2017)

    Args:
        strength: Weight lambda of the penalty.
        examples: Number N of examples of a finished task that its Fisher is estimated from.

    Example:
        >>> from anchorlora import Anchor, FisherAnchor
        >>> model = tiny()
        >>> def losses(count):
        ...     for i in range(count):
        ...         ids = torch.arange(i, i + 8)[None]
        ...         yield model(input_ids=ids, labels=ids).loss
        >>> ewc = FisherAnchor(examples=2)
        >>> past = ewc.end_task(Anchor.of(model, losses=losses))
        >>> active = ewc.begin_task(Anchor.of(model, past=past))
        >>> with torch.no_grad():
        ...     active.add_penalty_grads()
        >>> abs(active.readings()["fisher"]) < 1e-6  # nothing has moved yet
        True
    """

    strength: float = 1e4
    examples: int = 500
    requires = ()
    reads = f"{FISHER}/"
    needs = "one pass over examples of each finished task, with their right answers"

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Start to pull toward the values after earlier tasks.

        Args:
            anchor: The task's anchor; its `past` holds what `end_task` returned after the last task.

        Raises:
            InvalidValue: `anchor.past` holds no Fisher.
            UnknownName: The Fisher belongs to another adapter.
        """
        if CONSTANT not in anchor.past:
            raise InvalidValue("FisherAnchor finds no Fisher of earlier tasks; pass what end_task() returned as past= to Anchor.of")
        return _Anchored("fisher", self.strength, anchor)

    def end_task(self, anchor: Anchor) -> dict[str, Tensor]:
        """Return S0 and S1 including the finished task.

        Args:
            anchor: The finished task's anchor, with `losses`.

        Returns:
            S0 and S1 by factor, float32 on the CPU, and the constant that completes the square, float64.

        Raises:
            InvalidValue: The anchor has no `losses`.
        """
        kept = {CONSTANT: anchor.past.get(CONSTANT, torch.zeros((), dtype=torch.float64, device="cpu")).clone()}
        for (key, parameter), fisher in zip(_factors(anchor), self.fisher(anchor), strict=True):
            theta = parameter.detach().cpu()
            for name, new in ((FISHER, fisher), (WEIGHTED, fisher * theta)):
                kept[f"{name}/{key}"] = new + anchor.past.get(f"{name}/{key}", 0.0)
            kept[CONSTANT] += (in_float64(fisher) * in_float64(theta) ** 2).sum()
        return kept

    def fisher(self, anchor: Anchor) -> list[Tensor]:
        """Return the empirical diagonal Fisher: the mean over examples of the squared gradient of an example's loss.

        Args:
            anchor: The finished task's anchor, with `losses`.

        Returns:
            One tensor per factor on the CPU; layer by layer, A before B.

        Raises:
            InvalidValue: The anchor has no `losses`.
            InvalidType: Factors are split over processes (FSDP2).
        """
        if anchor.losses is None:
            raise InvalidValue("FisherAnchor needs losses of single examples of the finished task; pass losses= to Anchor.of")
        if any(layer.is_split(name) for layer in anchor.layers for name in ("A", "B")):
            raise InvalidType(
                "the Fisher needs the gradient of one example at a time, which FSDP2 adds up for factors that it has split; "
                "leave the LoRA modules out of fully_shard (ignored_params), as `anchorlora run` does, or use DDP"
            )
        parameters = [parameter for _, parameter in _factors(anchor)]
        total, count = [torch.zeros_like(p) for p in parameters], 0
        with torch.enable_grad():
            for loss in anchor.losses(self.examples):
                for sum_, gradient in zip(total, torch.autograd.grad(loss, parameters), strict=True):
                    sum_ += gradient.square()
                count += 1
        return [(sum_ / count).cpu() for sum_ in total]


class _Anchored(Penalty):
    def __init__(self, name, strength, anchor):
        super().__init__(name, strength, anchor)
        self.past = {key: _both(anchor.past, key, parameter) for key, parameter in _factors(anchor)}
        self.constant = _fitting(anchor.past, CONSTANT, like=())

    def pieces(self, layer) -> tuple[Tensor, dict[str, Tensor]]:
        value, gradients = 0.5 * self.constant.to(float64_device(layer.factor("A").device)) / len(self.layers), {}
        for name in ("A", "B"):
            theta = layer.factor(name)
            fisher, weighted = self.past[f"{layer.name}.{name}"]
            gradients[name] = fisher * theta - weighted
            S0, S1, x = in_float64(fisher), in_float64(weighted), in_float64(theta)
            value = value + ((0.5 * S0 * x - S1) * x).sum()
        return value, gradients


def _factors(anchor: Anchor) -> Iterator[tuple[str, nn.Parameter]]:
    for layer in anchor.layers:
        for name in ("A", "B"):
            yield f"{layer.name}.{name}", layer.factor(name)


def _both(past, key: str, parameter) -> tuple[Tensor, Tensor]:
    fisher, weighted = (_fitting(past, f"{name}/{key}", like=parameter.shape) for name in (FISHER, WEIGHTED))
    from anchorlora.adapters.sharding import local

    rows = local(parameter)
    return fisher.to(rows), weighted.to(rows)


def _fitting(past, name: str, *, like: tuple[int, ...]) -> Tensor:
    if name not in past or past[name].shape != like or not past[name].is_floating_point():
        raise UnknownName(f"the remembered Fisher knows no {name} of shape {tuple(like)}; it belongs to another adapter")
    return past[name]
