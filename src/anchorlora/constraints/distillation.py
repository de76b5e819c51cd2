"""Learning without forgetting: lambda T^2 mean KL(softmax(z_teacher / T) || softmax(z_student / T))   (Li and Hoiem 2017).

    z_student  logits of the model that trains      z_teacher  logits of the model as it was at the task's start, without dropout
    mean       over the positions that predict an example's answer tokens, then over examples, as in the task loss

Inputs are the new task's own examples, or those that rehearsal mixes in: on text of the model's own that is the divergence between
the two models' distributions, since the text is drawn from the teacher. Nothing is cached: the teacher is a second forward pass
without gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.devices import evaluating, torch
from anchorlora.errors import InvalidType, InvalidValue

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import Anchor


@dataclass(frozen=True)
class Distillation(ProtectsPast):
    """Keep the distribution of answers near that at the task's start   (Li and Hoiem 2017, learning without forgetting).

        lambda T^2 mean KL(softmax(z_teacher / T) || softmax(z_student / T))

    It needs the model's outputs, so the loop must add its `loss`, and trainers' callbacks cannot use it.

    Args:
        strength: Weight lambda of the divergence.
        temperature: Temperature T that both distributions are softened with.
        on: The examples: "new" ones, or those "remembered", which a method with `Rehearsal` mixes in.

    Raises:
        InvalidValue: `on` is something else.

    Example:
        >>> from anchorlora import Anchor, Distillation
        >>> from anchorlora.continual.batches import MicroBatch
        >>> model, ids = tiny(), torch.arange(8)[None]
        >>> active = Distillation().begin_task(Anchor.of(model))
        >>> batch = MicroBatch({"input_ids": ids}, keep=3, targets=torch.tensor([[6, 7]]))  # the last two tokens are the answer
        >>> outputs = model.eval()(input_ids=ids)
        >>> float(active.loss(batch, outputs).detach().abs()) < 1e-6  # nothing has moved yet
        True
    """

    strength: float = 1.0
    temperature: float = 2.0
    on: str = "new"
    requires = ("start",)
    needs = "a second forward pass, with the model as it was before the task"

    def __post_init__(self) -> None:
        if self.on not in ("new", "remembered"):
            raise InvalidValue(f'Distillation is on "new" or "remembered" examples, not {self.on!r}')

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Keep the task's start as the teacher.

        Args:
            anchor: The task's anchor, with its model.

        Returns:
            Working memory whose `loss` takes batches such as `continual.batches.MicroBatch`.

        Raises:
            InvalidValue: The anchor has no model.
        """
        if anchor.model is None:
            raise InvalidValue("Distillation needs the model, which it compares with the task's start; use Anchor.of(model)")
        return _Distilling(self, anchor)


class _Distilling(ActiveConstraint):
    def __init__(self, distillation: Distillation, anchor: Anchor) -> None:
        self.strength, self.temperature, self.model = distillation.strength, distillation.temperature, anchor.model
        self.on = distillation.on
        start = {id(layer.factor(name)): layer.start_factor(name) for layer in anchor.layers for name in ("A", "B")}
        self.teacher = {name: start[id(p)] for name, p in anchor.model.named_parameters() if id(p) in start}  # type: ignore[union-attr]
        self.total, self.examples, self.value = 0.0, 0, 0.0

    def loss(self, batch: Any, outputs: Any) -> Tensor:
        if not hasattr(batch, "answer_logits"):
            raise InvalidType(f"Distillation takes a MicroBatch of anchorlora.continual.batches, not a {type(batch).__name__}")
        answers = batch.targets >= 0
        if self.on == "remembered" and batch.remembered is None:
            return outputs.logits.new_zeros(())
        student, teacher = (batch.answer_logits(logits) for logits in (outputs.logits, self.teacher_logits(batch)))
        divergence = self.divergence(student, teacher)
        per_example = divergence.new_zeros(answers.shape).masked_scatter(answers, divergence).sum(1) / answers.sum(1)
        if self.on == "remembered":
            per_example = per_example[batch.remembered]
        self.total, self.examples = self.total + float(per_example.detach().sum()), self.examples + len(per_example)
        return self.strength * self.temperature**2 * per_example.sum() / len(answers)

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """KL(teacher || student) at temperature T, in nats.  logits (positions, vocabulary) -> (positions)."""
        p, q = ((logits.float() / self.temperature).log_softmax(-1) for logits in (teacher, student))
        return (p.exp() * (p - q)).sum(-1)

    def teacher_logits(self, batch: Any) -> Tensor:
        """The teacher's logits: this model with the start's factors in place of its own."""
        with evaluating(self.model):
            inputs = {**batch.inputs, "logits_to_keep": batch.keep, "use_cache": False}
            return torch.func.functional_call(self.model, self.teacher, (), inputs).logits  # type: ignore[arg-type]

    def after_backward(self) -> None:
        self.value = self.total / self.examples if self.examples else 0.0
        self.total, self.examples = 0.0, 0

    def readings(self) -> dict[str, float]:
        """The unweighted mean divergence over the examples of the last step."""
        return {"distillation": self.value}
