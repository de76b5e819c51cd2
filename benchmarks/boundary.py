"""What a task's end costs after many tasks: cores of all rows, the union of past cores, drift on all of them and on held-out rows.

One store of width 4096 with q_proj and v_proj of rank 8 on it; 128 rows, 32 held-out rows and a core of up to 20 directions a task.
Seconds are of this process alone, so that other work on the machine counts less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from anchorlora import AdaptedLayer, Anchor
from anchorlora.continual.past import Past
from anchorlora.geometry import Factors, Spectrum
from anchorlora.recipes import qwen3_8b
from anchorlora.runs.run import boundary_drift
from benchmarks.timing import report

D, R, TASKS = 4096, 8, 200
SEEN = (8, 16, 17, 50, 100, 200)  # tasks whose end is printed, beside that of task 2
EACH = 5  # ends that a number is the median of, where neighbors cost alike


class Boundaries:
    """Tasks one after another whose rows share their strongest directions."""

    def __init__(self, width: int) -> None:
        self.draw, self.width = torch.Generator().manual_seed(0), width
        self.past = Past.empty(qwen3_8b().features)
        self.past.rows.stores = {"q": "q", "v": "q"}
        self.sizes = torch.arange(1, width + 1) ** -0.7
        self.blocks = {layer: self._moved(width if layer == "q" else width // 4) for layer in ("q", "v")}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw)

    def _moved(self, outputs: int) -> tuple[Factors, Factors]:
        anchor = Factors(self.normal(R, self.width) / 64, self.normal(outputs, R) / 64, 4.0)
        return Factors(anchor.A + 1e-3 * self.normal(R, self.width), anchor.B + 1e-3 * self.normal(outputs, R), 4.0), anchor

    def end(self) -> tuple[float, float]:
        """Seconds of the next task's cores, and of its whole end."""
        features, width = self.past.settings, self.width
        mixed = torch.linalg.qr(self.normal(64, 64)).Q  # a task turns the strongest directions, and keeps the rest
        rows = {f"{kind}/q": self.normal(n, width) * self.sizes for kind, n in (("core", features.rows), ("held_out", 32))}
        for x in rows.values():
            x[:, :64] = x[:, :64] @ mixed
        self.past.rows.restore_task(rows)
        anchor = Anchor(tuple(AdaptedLayer(n, now, start, core=self.past.cores.get(n)) for n, (now, start) in self.blocks.items()))
        drift = _seconds(lambda: boundary_drift(anchor, self.past)) if self.past.tasks else 0.0
        cores = _seconds(lambda: self.past.append(*self.past.made({})))
        return cores, cores + drift


def growth() -> None:
    tasks = Boundaries(D)
    times = [tasks.end() for _ in range(TASKS + EACH // 2)]
    twice = [[begun.end(), begun.end()][1] for begun in (Boundaries(D) for _ in range(EACH))]
    for i, what in enumerate(("cores of a store", "a store's whole end")):
        second = statistics.median(t[i] for t in twice)
        for n in SEEN:
            found = statistics.median(t[i] for t in (times[n - 1 : n] if n < 50 else times[n - 1 - EACH // 2 : n + EACH // 2]))
            aim = "<= 3" if n == 50 else "-"
            report(f"{what}, d = {D}, at task {n} / at task 2", found / second, aim, f"({found:.3f} s)")
    report("energy that merges may have taken from one direction, at task 200", tasks.past.rows.grown["q"].spectrum(1).dropped, "-")


def narrow() -> None:
    """Many rows of a narrow layer, against the rows' own Gram matrix."""
    rows = torch.randn(2048, 192, generator=torch.Generator().manual_seed(0))

    def of_rows() -> None:
        X = rows.double()
        values, left = torch.linalg.eigh(X @ X.T)
        torch.linalg.qr(X.T @ (left[:, -64:] / values[-64:].sqrt()))

    Spectrum.of(rows, at_most=64)
    smaller, larger = (_seconds(call) for call in (lambda: Spectrum.of(rows, at_most=64), of_rows))
    report("spectrum of 2048 rows, d = 192 / from the rows' Gram matrix", smaller / larger, "<= 1/50", f"({smaller:.4f} s)")


def _seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    torch.set_num_threads(1)
    growth()
    narrow()
