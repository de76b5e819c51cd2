"""Measuring a 4096 x 4096 layer from its factors, against forming the matrix."""

from __future__ import annotations

import torch

from anchorlora import AdaptedLayer, Anchor, Subspace, measure
from anchorlora.geometry import Factors
from benchmarks.timing import ratio, report, side_by_side


def drift() -> None:
    d, r, k = 4096, 8, 20
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    start = Factors(normal(r, d) / 64, normal(d, r) / 64, 4.0)
    now = Factors(start.A + 1e-3 * normal(r, d), start.B + 1e-3 * normal(d, r), 4.0)
    core = Subspace(torch.linalg.qr(normal(d, k)).Q)
    anchor = Anchor((AdaptedLayer("layer", now, start, core=core),))

    def dense() -> tuple[float, float, float]:
        """The formulas as written, in float64: dW, dW V and dW - dW V V^T as matrices."""
        A, B, A0, B0, V = (x.double() for x in (now.A, now.B, start.A, start.B, core.basis))
        dW = 4.0 * (B @ A - B0 @ A0)
        response = dW @ V
        return float(dW.norm()), float(response.norm()), float((dW - response @ V.T).norm())

    found = measure(anchor)
    for mine, theirs in zip((found.d_eff, found.d_old, found.d_new), dense(), strict=True):
        assert abs(mine - theirs) < 1e-9 * theirs
    times = side_by_side({"thin": lambda: measure(anchor), "dense": dense}, rounds=9, warm=1)
    milliseconds = 1e3 * sorted(times["thin"])[len(times["thin"]) // 2]
    report("measure / dense formulas, one 4096 x 4096 layer", ratio(times, "thin", "dense"), "<= 1/30", f"({milliseconds:.1f} ms)")
