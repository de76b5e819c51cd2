"""The directions that answers of finished tasks depend on, layer by layer, in a form of constant size.

    x_i  input row of a layer      y_i  its output row      g_i = d log p / d y_i  for an answer that the model draws itself
    G = sum_t mean_examples sum_i g_i g_i^T              (d_out, d_out)
    C = sum_t mean_examples sum_i |g_i|^2 x_i x_i^T      (d_in, d_in), divided by tr G where it is used

Moving the layer's effective weight by dW changes the old answers by about (1/2) tr(G dW C dW^T) nats of KL: the Fisher of the layer
with its two sides taken apart (Kronecker; Martens and Grosse 2015). Both are kept as low rank plus identity (`SpikedCovariance`):
64 d_in + 32 d_out numbers a layer however many tasks there are, and no row of any example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.constraints.checks import core_of
from anchorlora.constraints.recording import answers_drawn, refuse_none
from anchorlora.devices import float64_device, torch
from anchorlora.errors import InvalidValue, UnknownName

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import Anchor
    from anchorlora.geometry import LayerCore, SpikedCovariance

MEMORY = "sensitivity/"
INPUTS, OUTPUTS, TASKS = f"{MEMORY}inputs", f"{MEMORY}outputs", f"{MEMORY}tasks"


@dataclass(frozen=True)
class AnswerSensitivity(ProtectsPast):
    """Remember what the answers of finished tasks depend on: inputs C and outputs G of every layer. It constrains nothing.

    `SensitiveCore`, `KroneckerBrake` and `FoldedPerTask` read it.

    Args:
        examples: Examples of a finished task that are run forward and backward.
        inputs: Directions of C to keep a layer; the others are kept at their mean.
        outputs: Directions of G to keep a layer.
        seed: Seed of the drawn answers.
        alike: Keep the mean of the tasks, each with the same trace of its Fisher information, not their sum: long, unsure answers
            have more of it than short, sure ones.

    Example:
        >>> from anchorlora import Anchor
        >>> from anchorlora.constraints import AnswerSensitivity
        >>> model = tiny()
        >>> def losses(count):
        ...     for i in range(count):
        ...         ids = torch.arange(i, i + 8)[None]
        ...         yield model(input_ids=ids, labels=ids).loss
        >>> past = AnswerSensitivity(examples=2, inputs=8, outputs=4).end_task(Anchor.of(model, losses=losses))
        >>> past["sensitivity/inputs/model.layers.1.self_attn.v_proj"].shape
        torch.Size([32, 8])
    """

    examples: int = 64
    inputs: int = 64
    outputs: int = 32
    seed: int = 0
    alike: bool = field(default=False, kw_only=True)
    requires = ()

    @property
    def needs(self) -> str:
        """Examples, and answers that the model draws."""
        return f"one pass over {self.examples} examples of each finished task; the model samples the answers"

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Constrain nothing.

        Args:
            anchor: The task's anchor.
        """
        return ActiveConstraint()

    def end_task(self, anchor: Anchor) -> dict[str, Tensor]:
        """Return C and G of all tasks, the finished one included.

        Args:
            anchor: The finished task's anchor, with `losses`.

        Returns:
            "sensitivity/inputs/<layer>" (d_in, m) and "sensitivity/outputs/<layer>" (d_out, m), float32, and the tail of each under
            the same name with "/tail" at its end, float64, with `alike` the number of tasks; all on the CPU.

        Raises:
            InvalidValue: The anchor has no `losses`, or they give no example.
            InvalidType: The losses are no cross-entropy of the model's logits, so no answers can be drawn; or a layer runs outside
                the graph, as under reentrant activation checkpointing.
        """
        from anchorlora.geometry import SpikedCovariance, growing_rows

        grown = {}
        ranks = {INPUTS: self.inputs, OUTPUTS: self.outputs}
        for layer in anchor.layers:
            for kind, factor in ((INPUTS, layer.factor("A")), (OUTPUTS, layer.factor("B"))):
                width = factor.shape[1] if kind == INPUTS else factor.shape[0]
                grown[f"{kind}/{layer.name}"] = growing_rows(width, ranks[kind], device=float64_device(factor.device))
        count = 0
        for several, rows in answers_drawn(anchor, self.examples, seed=self.seed):
            while rows:  # one layer at a time in float32 or more
                name, (x, g) = rows.popitem()
                x, g = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (x, g))
                grown[f"{INPUTS}/{name}"].add(g.norm(dim=1, keepdim=True) * x)
                grown[f"{OUTPUTS}/{name}"].add(g)
            count += several
        refuse_none("AnswerSensitivity", count)
        earlier = {key: _read(anchor.past, key, gathered.width) for key, gathered in grown.items() if key in anchor.past}
        kept = {}
        former = whole = float(count)  # what the past counts beside the sum of examples, and what divides both
        if self.alike:
            tasks = float(anchor.past.get(TASKS, 1)) if earlier else 0.0
            kept[TASKS] = torch.tensor(tasks + 1, dtype=torch.float64, device="cpu")
            now = sum(rows.total for key, rows in grown.items() if key.startswith(INPUTS))  # the trace of the Fisher information
            before = sum(moment.trace for key, moment in earlier.items() if key.startswith(INPUTS))
            if now and before:
                former, whole = now * tasks / before, now * (tasks + 1) / before
        for key, gathered in grown.items():
            kind, _, name = key.rpartition("/")
            rank, floor = ranks[kind], 0.0
            if key in earlier:
                floor = former * earlier[key].tail
                gathered.add((former**0.5 * earlier[key].root).T)
            covariance = SpikedCovariance.of(gathered, rank, floor=floor)
            kept[key] = (covariance.root / whole**0.5).float().cpu().contiguous()  # as it will be read
            kept[f"{key}/tail"] = torch.tensor(covariance.tail / whole, dtype=torch.float64, device="cpu")
        return kept


def sensitivity(past: Mapping[str, Tensor], layer: str, *, d_in: int, d_out: int) -> tuple[SpikedCovariance, SpikedCovariance]:
    """Return what is remembered of a layer: C, divided by tr G, and G."""
    if not knows(past):
        raise InvalidValue(
            "nothing is known of what earlier answers depend on: add AnswerSensitivity() to the method, "
            "or pass what its end_task() returned as past= to Anchor.of"
        )
    C, G = _read(past, f"{INPUTS}/{layer}", d_in), _read(past, f"{OUTPUTS}/{layer}", d_out)
    trace = G.trace or 1.0
    return replace(C, values=C.values / trace, tail=C.tail / trace), G


def memory_in(past: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what is remembered of what earlier answers depend on, of all that is remembered."""
    return {name: tensor for name, tensor in past.items() if name.startswith(MEMORY)}


def knows(past: Mapping[str, Tensor]) -> bool:
    """Return whether anything is remembered of what earlier answers depend on."""
    return any(name.startswith(f"{INPUTS}/") for name in past)


@dataclass(frozen=True)
class SensitiveCore(ProtectsPast):
    """Protect the directions that earlier answers depend on most: the core is the leading eigenvectors of C, not of feature rows.

    It provides the core and does nothing to it: `ProjectDisplacement("A")` and the like keep it.

    Args:
        energy: Share of tr C to hold, in (0, 1].
        at_least: Smallest number of directions a layer.
        at_most: Largest number of directions a layer; it wins over `energy`.

    Example:
        >>> from anchorlora import Anchor
        >>> from anchorlora.constraints import AnswerSensitivity, SensitiveCore
        >>> model = tiny()
        >>> def losses(count):
        ...     for i in range(count):
        ...         ids = torch.arange(i, i + 8)[None]
        ...         yield model(input_ids=ids, labels=ids).loss
        >>> past = AnswerSensitivity(examples=2).end_task(Anchor.of(model, losses=losses))
        >>> cores = SensitiveCore(at_least=4, at_most=4).cores(past)
        >>> anchor = Anchor.of(model, cores={layer: made.core for layer, made in cores.items()})
        >>> anchor.layers[0].core.k
        4
    """

    energy: float = 0.93
    at_least: int = 4
    at_most: int = 20
    reads = MEMORY

    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        """Check that the anchor has cores; there is nothing else to do.

        Args:
            anchor: The task's anchor, with the cores that `cores` returned.

        Raises:
            InvalidValue: A layer has no core.
        """
        for layer in anchor.layers:
            core_of(layer)
        return ActiveConstraint()

    def cores(self, past: Mapping[str, Tensor]) -> dict[str, LayerCore]:
        """Return the core of every layer, as the next task must keep it.

        Args:
            past: What constraints remember, `AnswerSensitivity` among them.

        Returns:
            Layer path -> core, with all known directions as the wide basis and the share of tr C that the core holds.

        Raises:
            InvalidValue: Nothing is remembered, or fewer directions are known of a layer than `at_least`, as of an expert that
                hardly any token reached.
        """
        from anchorlora.geometry import LayerCore

        names = [n.removeprefix(f"{INPUTS}/") for n in past if n.startswith(f"{INPUTS}/") and not n.endswith("/tail")]
        chosen = {}
        for name in names:
            root, outputs = past[f"{INPUTS}/{name}"], past[f"{OUTPUTS}/{name}"]
            C, _ = sensitivity(past, name, d_in=len(root), d_out=len(outputs))
            known = len(C.values)
            if known < self.at_least:
                raise InvalidValue(
                    f"the answers depend on {known} directions at {name}, but a core needs {self.at_least}; "
                    "give more examples, lower at_least, or leave this layer out of the targets"
                )
            star = C.k_star(self.energy)
            k = min(max(star or self.at_most, self.at_least), self.at_most, known)
            chosen[name] = LayerCore(C.leading(k), C.leading(known), star, C.retained(k), known)
        if not chosen:
            sensitivity(past, "", d_in=0, d_out=0)
        return chosen


def _read(past: Mapping[str, Tensor], key: str, width: int) -> SpikedCovariance:
    from anchorlora.geometry import SpikedCovariance

    root, tail = past.get(key), past.get(f"{key}/tail")
    if root is None or tail is None or root.ndim != 2 or root.shape[0] != width or tail.ndim != 0:
        raise UnknownName(f"what is remembered knows no {key} of width {width}; it belongs to another adapter")
    return SpikedCovariance.read(root, tail)
