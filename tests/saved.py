"""What saved task folders say, read in float64 by dense arithmetic: every matrix formed."""

from __future__ import annotations

from pathlib import Path

import torch

import oracle
from anchorlora.adapters import read_adapter
from anchorlora.features.files import read_cores


def folders(run: Path, order) -> list[Path]:
    return [run / f"tasks/{number}-{task}" for number, task in enumerate(order, 1)]


def changes(before: Path, after: Path) -> dict[str, torch.Tensor]:
    """Layer -> the difference of the two adapters' products, a (d_out, d_in) matrix."""
    then, now = read_adapter(before / "adapter"), read_adapter(after / "adapter")
    return {
        n: f.scale * f.B.double() @ f.A.double() - then[n].scale * then[n].B.double() @ then[n].A.double() for n, f in now.items()
    }


def drift(before: Path, after: Path, cores: Path | None = None) -> tuple[dict, float]:
    """The paper's quantities on the cores of a folder (by default `before`), and the largest rho that counts as zero."""
    bases = {layer: core.basis for layer, core in read_cores((cores or before) / "cores.safetensors").items()}
    found = oracle.drift([(dW, bases[layer]) for layer, dW in changes(before, after).items()])
    then, now = read_adapter(before / "adapter"), read_adapter(after / "adapter")
    trained = {layer: f.grown_from(then[layer]) or f for layer, f in now.items()}
    floor = oracle.floor([(f.A, f.B, f.scale, bases[layer].shape[1]) for layer, f in trained.items()], found["d_eff"])
    return {name: float(value) for name, value in found.items()}, max(1e-7, 3 * floor)
