"""The loss over 150,000 words: flat rows of the answers' positions, against all positions with the words strided."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anchorlora.continual.batches import IGNORED, MicroBatch, Window, example_mean
from benchmarks.timing import ratio, report, side_by_side

WORDS, ANSWERS = 151_936, (1, 2, 2, 3, 1, 4, 2, 5)  # tokens of each example's answer


def words() -> None:
    draw = torch.Generator().manual_seed(0)
    longest = max(ANSWERS)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    targets = torch.randint(0, WORDS, (len(ANSWERS), longest), generator=draw)
    for row, length in zip(targets, ANSWERS, strict=True):
        row[: longest - length] = IGNORED
    batch = MicroBatch({}, longest + 1, targets.to(device))
    logits = torch.randn(len(ANSWERS), longest + 1, WORDS, generator=draw).to(device).requires_grad_()
    window = Window((batch,), len(ANSWERS), sum(ANSWERS), len(ANSWERS))
    variants = {"flat": lambda: example_mean(logits, batch, window), "strided": lambda: _strided(logits, batch)}
    assert torch.allclose(variants["flat"](), variants["strided"](), rtol=1e-5)

    def step(loss: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(), logits)

    times = side_by_side({name: step(loss) for name, loss in variants.items()}, rounds=9, warm=1)
    report(f"loss and gradient over {WORDS:,} words, flat / strided: time", ratio(times, "flat", "strided"), "<= 1/2")
    kept = {name: _kept(loss) for name, loss in variants.items()}
    report("the same: bytes kept for the backward pass", kept["flat"] / kept["strided"], "<= 1/2", f"({kept['flat'] >> 20} MiB)")


def _strided(logits: Tensor, batch: MicroBatch) -> Tensor:
    predicted = logits[:, -batch.keep : -1].float().transpose(1, 2)
    losses = torch.nn.functional.cross_entropy(predicted, batch.targets, ignore_index=IGNORED, reduction="none")
    return (losses.sum(1) / (batch.targets != IGNORED).sum(1)).mean()


def _kept(loss: Callable[[], Tensor]) -> int:
    """Bytes of all tensors that the graph of a loss holds on to."""
    held: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss()
    return sum(held.values())


if __name__ == "__main__":
    torch.set_num_threads(1)
    words()
