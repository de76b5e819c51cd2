"""The paper in dense float64: every matrix formed, every sum written out.  Imports nothing of the project.

Slow and obvious on purpose: what the package computes with thin factors must agree with this.
"""

from __future__ import annotations

import torch


def projector(V):
    """P = I - V V^T as a matrix (d, d)."""
    V = V.double()
    return torch.eye(V.shape[0], dtype=torch.float64) - V @ V.T


def core(rows, *, energy, at_least, at_most):
    """(V, k_star, retained): right singular vectors of rows (n, d) by SVD, with the paper's rank rule."""
    _, sigma, right = torch.linalg.svd(rows.double(), full_matrices=False)
    shares = sigma**2 / (sigma**2).sum()
    k_star, total = 0, 0.0
    while k_star < len(shares) and total < energy * (1 - 1e-12):
        total += float(shares[k_star])
        k_star += 1
    k = min(max(k_star, at_least), at_most)
    return right[:k].T, k_star, float(shares[:k].sum())


def change(A, B, A0, B0, s):
    """dW = s (B A - B_0 A_0) as a matrix (d_out, d_in)."""
    A, B, A0, B0 = (x.detach().double() for x in (A, B, A0, B0))
    return s * (B @ A) - s * (B0 @ A0)


def drift(layers):
    """layers: list of (dW, V).  D_eff, D_old, D_new, rho, chance as the paper and docs/rule.md define them."""
    eff = sum((dW**2).sum() for dW, _ in layers).sqrt()
    old = sum(((dW @ V.double()) ** 2).sum() for dW, V in layers).sqrt()
    new = sum(((dW @ projector(V)) ** 2).sum() for dW, V in layers).sqrt()
    chance = (sum(V.shape[1] / V.shape[0] * (dW**2).sum() for dW, V in layers) / eff**2).sqrt()
    return {"d_eff": eff, "d_old": old, "d_new": new, "rho": old / (eff + 1e-12), "chance": chance}


def floor(layers, d_eff):
    """layers: list of (A, B, s, k).  What float32 storage of the factors alone explains."""
    total = 0.0
    for A, B, s, k in layers:
        r, d = A.shape
        total += float(s * B.double().norm() * A.double().norm() * (k / (d * r)) ** 0.5) ** 2
    return 2.0**-24 / 3**0.5 * total**0.5 / float(d_eff)


def overlap(A_old, A):
    """|A_old A^T|_1, by a double loop over rows."""
    total = torch.zeros((), dtype=A.dtype)
    for old in A_old:
        for new in A:
            total = total + (old * new).sum().abs()
    return total


def response(layers):
    """BSR: mean over layers of the mean square of dW V_wide.  sites: list of (A, B, A0, B0, s, V)."""
    total = 0.0
    for A, B, A0, B0, s, V in layers:
        E = s * (B @ A - B0 @ A0) @ V
        total = total + (E**2).sum() / E.numel()
    return total / len(layers)


def scores(a):
    """AA, LA, BWT, FM of a triangle (list of rows), by their sums with 1-based indices."""
    N = len(a)

    def at(t, i):
        return a[t - 1][i - 1]

    AA = sum(at(N, i) for i in range(1, N + 1)) / N
    LA = sum(at(i, i) for i in range(1, N + 1)) / N
    BWT = sum(at(N, i) - at(i, i) for i in range(1, N)) / (N - 1)
    FM = sum(max(at(t, i) for t in range(i, N)) - at(N, i) for i in range(1, N)) / (N - 1)
    return {"AA": AA, "LA": LA, "BWT": BWT, "FM": FM}
