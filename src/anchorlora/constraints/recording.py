"""Record single examples of a task at every adapted layer: the rows that it read, and the gradients at its output.

The gradients are of a loss, or of the log-probability of an answer. Answers are drawn, not read from the data: the Fisher is an
expectation over the model's own answers. Which tokens are answers follows from the loss: those whose logits it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from anchorlora.devices import in_float64, torch
from anchorlora.errors import InvalidType, InvalidValue

if TYPE_CHECKING:
    from torch import Tensor

    from anchorlora.adapters import Anchor
    from anchorlora.geometry import GrowingRows

Rows = dict[str, tuple["Tensor", "Tensor"]]
ENTRIES = 1 << 22  # of logits that are in float64 at once
NO_LOGITS = "AnswerSensitivity draws answers from the model's logits"


def answers_drawn(anchor: Anchor, examples: int, *, seed: int) -> Iterator[tuple[int, Rows]]:
    """Yield every layer's input rows and the gradients of the log-probability of an answer that the model draws."""
    draw = torch.Generator().manual_seed(seed)
    with record_examples(anchor, "AnswerSensitivity") as seen, torch.enable_grad():
        for losses in losses_together(anchor, examples):
            batch = len(seen.logits) if seen.logits is not None and seen.logits.ndim == 3 else 1  # one loss may be of several texts
            yield max(len(losses), batch), _rows_of_drawn(seen, losses, draw)


def _rows_of_drawn(seen: ExampleRecord, losses: Tensor, draw: Any) -> Rows:
    logits = seen.logits
    if logits is None or not logits.requires_grad:
        raise InvalidType(f"{NO_LOGITS}: the model returned none with a gradient")
    (of_losses,) = torch.autograd.grad(losses.sum(), logits, allow_unused=True)
    if of_losses is None:
        raise InvalidType(f"{NO_LOGITS}: the loss does not depend on them")
    return seen.rows(_of_drawn_answers(logits.detach(), of_losses, draw))


def inputs_read(anchor: Anchor, examples: int, who: str, read: Callable[[str, Tensor], Tensor]) -> dict[str, GrowingRows]:
    """Return what `read` makes of every layer's input rows over examples, by layer; a layer that none reaches is left out."""
    from anchorlora.geometry import GrowingRows

    rows: dict[str, GrowingRows] = {}
    with record_examples(anchor, who) as seen, torch.no_grad():
        for _ in _losses(anchor, examples):
            for name, x in seen.inputs().items():
                rows.setdefault(name, GrowingRows(device=x.device)).add(read(name, x).float().cpu())
    refuse_none(who, rows)
    return rows


def refuse_none(who: str, examples: Any) -> None:
    """Refuse losses that gave no example."""
    if not examples:
        raise InvalidValue(f"{who} got no example of the task: losses of the anchor gave none")


def losses_together(anchor: Anchor, examples: int) -> Iterator[Tensor]:
    """Yield the losses of examples, (n,) of n that are run together; one by one unless `anchor.losses` has `together`."""
    if (several := getattr(anchor.losses, "together", None)) is None:
        return (loss.reshape(1) for loss in _losses(anchor, examples))
    return iter(several(examples))


def _losses(anchor: Anchor, examples: int) -> Iterator[Tensor]:
    losses: Any = anchor.losses(examples)  # type: ignore[misc]  # `record_examples` refuses None
    if not isinstance(losses, Iterator):  # a list: what its examples read is gone but for the last one
        raise InvalidType(f"losses of the anchor returned a {type(losses).__name__}; yield the loss of one example after the other")
    for loss in losses:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or (torch.is_grad_enabled() and not loss.requires_grad):
            raise InvalidType(f"losses of the anchor gave {loss!r:.60}; yield the loss of one example, a number with its graph")
        yield loss


def losses_summed(anchor: Anchor, examples: int) -> Iterator[Tensor]:
    """Yield sums of losses of examples, for callers that need only the gradient of all, so that rows may share a beginning."""
    summed = getattr(anchor.losses, "summed", None)
    return summed(examples) if summed is not None else (losses.sum() for losses in losses_together(anchor, examples))


def _of_drawn_answers(logits: Tensor, toward: Tensor, draw: Any) -> Tensor:
    """The gradient of sum log p(drawn answer) by the logits, at tokens whose logits the loss depends on, one draw each."""
    flat, gradient = logits.reshape(-1, logits.shape[-1]), toward.contiguous().view(-1, logits.shape[-1])  # in its place
    some = max(1, ENTRIES // flat.shape[1])  # tokens at a time
    sizes = torch.cat([part.float().abs().sum(1) for part in gradient.split(some)])
    places = sizes.nonzero().flatten()
    strongest = gradient[sizes.argmax()].float()
    if len(places) and (int((strongest < 0).sum()) != 1 or float(strongest.sum().abs()) > 0.02 * float(sizes.max())):
        raise InvalidType(f"{NO_LOGITS}: the loss is no cross-entropy of them")  # whose gradient is p - 1 for the right token
    shares = torch.rand(len(places), 1, generator=draw, dtype=torch.float64, device="cpu")
    for at, share in zip(places.split(some), shares.split(some), strict=True):
        p = flat[at].float().softmax(-1)
        total = in_float64(p).cumsum(1)
        chosen = share.to(total.device) * total[:, -1:]
        drawn = torch.searchsorted(total, chosen, right=True).clamp(max=p.shape[1] - 1).to(p.device)
        gradient[at] = (-p).scatter_add(1, drawn, torch.ones_like(drawn, dtype=p.dtype)).to(gradient.dtype)
    return gradient.reshape(logits.shape)


class ExampleRecord:
    """Input and output of each layer for the last example, and the model's logits, as forward hooks record them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Tensor, Any]] = []  # with the edge of the graph by which its output's gradient comes
        self.logits: Tensor | None = None
        self.without: str | None = None  # a layer that ran outside the graph

    def inputs(self) -> dict[str, Tensor]:
        """Return x of every layer that the example reached."""
        calls, self.calls, self.logits = self.calls, [], None
        out: dict[str, list[Tensor]] = {}
        for name, x, _ in calls:
            if x.numel():
                out.setdefault(name, []).append(in_float64(x).reshape(-1, x.shape[-1]))
        return {name: torch.cat(parts) for name, parts in out.items()}

    def rows(self, toward: Tensor | None, loss: Tensor | None = None) -> Rows:
        """Return x and g of every layer, as the model computes: the gradient of the loss, or of `toward` times the logits."""

        def joined(xs: tuple[Tensor, ...], gs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            return (xs[0], gs[0]) if len(xs) == 1 else (torch.cat(xs), torch.cat(gs))

        if self.without is not None:
            raise InvalidType(
                f"{self.without} runs outside the graph, as in reentrant activation checkpointing, so no gradient reaches its "
                "output; enable checkpointing with use_reentrant=False, or call model.eval() first"
            )
        calls, self.calls = self.calls, []  # activation checkpointing calls the layers again
        of: Any = self.logits if loss is None else loss
        gradients = torch.autograd.grad([of], [edge for *_, edge in calls], [toward] if loss is None else None, allow_unused=True)
        self.logits = None
        out: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for (name, x, _), g in zip(calls, gradients, strict=True):
            if g is not None and g.numel():
                out.setdefault(name, []).append((x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])))
        return {name: joined(*zip(*parts, strict=True)) for name, parts in out.items()}


@contextmanager
def record_examples(anchor: Anchor, who: str) -> Iterator[ExampleRecord]:
    """Record, in the block, what the anchor's layers read and write; hooks and the model's mode are as before after it."""
    from anchorlora.adapters.kinds import without_empty
    from anchorlora.adapters.layers import base_model_in, lora_layers

    if anchor.losses is None or anchor.model is None:
        raise InvalidValue(f"{who} needs losses of single examples of the task; pass losses= to Anchor.of")
    seen, layers = ExampleRecord(), lora_layers(anchor.model)

    def note(name: str, module: Any, args: tuple, output: Tensor) -> Tensor:
        """Add a call of the layer, with an output that gradients can be taken of."""
        seen.without = seen.without or (None if torch.is_grad_enabled() else name)
        if not torch.is_grad_enabled():
            seen.calls.append((name, args[0].detach(), None))
            return output
        y = output if output.requires_grad else output.detach().requires_grad_().clone()  # no leaf may be written to
        seen.calls.append((name, args[0].detach(), torch.autograd.graph.get_gradient_edge(y)))  # before the model writes to it
        return y

    def keep(module: Any, args: tuple, output: Any) -> None:
        """Keep the logits, which answers are drawn from."""
        seen.logits = getattr(output, "logits", seen.logits)  # a wrapper may return the loss alone

    def clear(module: Any, args: tuple) -> None:
        """Forget the calls of the pass before."""
        seen.calls.clear()
        seen.logits = None

    with ExitStack() as until_the_end:
        # what was compiled before runs no hooks that came later
        until_the_end.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in anchor.layers:
            until_the_end.enter_context(layers[layer.name].register_forward_hook(partial(note, layer.name)))
        # some versions of PEFT call the base's forward, past its hooks
        for whole in dict.fromkeys((base_model_in(anchor.model), anchor.model)):
            until_the_end.enter_context(whole.register_forward_pre_hook(clear))
            until_the_end.enter_context(whole.register_forward_hook(keep))
        for module in anchor.model.modules():
            until_the_end.callback(setattr, module, "training", module.training)
            module.training = module.training and not isinstance(module, torch.nn.Dropout)
        until_the_end.enter_context(without_empty(anchor.model))
        yield seen
