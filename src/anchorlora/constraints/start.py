"""A fresh block that starts where the new task wants to go: A_0 from the task's first gradient, in the complement of the core.

    D = sum_examples d loss / d W  (d_out, d_in), the gradient by the layer's effective weight      P = I - V V^T
    A_0 = the leading right singular directions of D P, as rows, with the norm that A had

B stays 0, so no output changes, and A_0 V = 0. PEFT's uniform start spends most of A on directions that the task never reads.
(LoRA-GA, Wang et al. 2024, takes both factors from the gradient; here B must be 0 and A must not read the core.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.constraints.checks import exact_factor
from anchorlora.constraints.sensitivity import recorded
from anchorlora.devices import forked_generators, in_float64, placed
from anchorlora.errors import InvalidType, InvalidValue

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import AdaptedLayer, Anchor

OVERSAMPLED, ITERATIONS = 8, 6  # of the randomized SVD (Halko, Martinsson and Tropp 2011)


@dataclass(frozen=True)
class GradientStart(ProtectsPast):
    """Start a new block's A at the leading directions of the task's first gradient, outside the core where there is one.

    List it before `Retract("A")`, whose rounding is then the last. For a moment it holds one gradient of the size of each adapted
    weight, in float32 on the CPU.

    Args:
        examples: Examples of the new task whose gradients are added up.

    Example:
        >>> from anchorlora import Anchor
        >>> from anchorlora.constraints import GradientStart
        >>> model = tiny()
        >>> def losses(count):
        ...     for i in range(count):
        ...         ids = torch.arange(i, i + 8)[None]
        ...         yield model(input_ids=ids, labels=ids).loss
        >>> anchor = Anchor.of(model, cores=cores_of(model), losses=losses)
        >>> before = anchor.layers[0].factor("A").detach().clone()
        >>> with torch.no_grad():
        ...     _ = GradientStart(examples=2).begin_task(anchor)
        >>> A = anchor.layers[0].factor("A")
        >>> bool((A @ anchor.layers[0].core.basis).norm() < 1e-6), bool((A.norm() - before.norm()).abs() < 1e-5)
        (True, True)
    """

    examples: int = 64
    requires = ()

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Move A of every layer, and its start with it.

        Args:
            anchor: The task's anchor, with `losses` of the new task.

        Returns:
            A constraint without hooks: there is nothing more to do.

        Raises:
            InvalidValue: B of a layer is not 0, so the function would change; or the anchor has no `losses`, or they give none.
            InvalidType: A factor is not stored in float32 or float64, or is split over processes (FSDP2).
        """
        import torch

        for layer in anchor.layers:
            exact_factor(layer, "A")
            if layer.is_split("A"):
                raise InvalidType(
                    f"A at {layer.name} is split over processes, and its rows cannot be started one process at a time; "
                    "keep LoRA factors whole (ignored_params of fully_shard)"
                )
            if bool(layer.factor("B").any()):
                raise InvalidValue(
                    f"GradientStart would change the function at {layer.name}: B is not zero there; start a new block with it"
                )
        toward: dict[str, Tensor] = {}
        with recorded(anchor, "GradientStart") as seen, torch.enable_grad():
            for loss in anchor.losses(self.examples):  # type: ignore[misc]  # `recorded` refuses None
                for name, (x, g) in seen.rows(None, loss).items():
                    added = (g.T @ x).float().cpu()
                    toward[name] = toward[name].add_(added) if name in toward else added
        if not toward:
            raise InvalidValue("GradientStart got no example of the new task: losses of the anchor gave none")
        for layer in anchor.layers:
            if layer.name in toward:
                _start(layer, toward.pop(layer.name))
        return ActiveConstraint()


def _start(layer: AdaptedLayer, gradient: Tensor) -> None:
    import torch

    A = layer.rows("A")
    gradient = in_float64(gradient)
    if layer.core is not None:
        gradient = layer.core.to(dtype=torch.float64, device="cpu").outside(gradient)
    rank = len(A)
    q = min(2 * rank + OVERSAMPLED, *gradient.shape)
    if q < rank or not bool(gradient.any()):
        return  # fewer directions than rows, or a layer that this task does not use
    with forked_generators():
        torch.manual_seed(0)
        directions = torch.svd_lowrank(gradient, q=q, niter=ITERATIONS)[2][:, :rank].T
    if layer.core is not None:
        directions = layer.core.to(dtype=torch.float64, device="cpu").outside(directions)  # again: this is where digits are lost
    size = placed(A, torch.float64, torch.device("cpu")).norm()
    A.copy_(placed(directions / directions.norm() * size, A.dtype, A.device))
    layer.start_rows("A").copy_(A)
