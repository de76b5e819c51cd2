"""Leading singular directions of a weight:  W = U S V^T, the first k columns of U and V   (as OSF protects them).

    W  (d_out, d_in)      U  (d_out, k)  left, what the layer writes      V  (d_in, k)  right, what it reads

From the Gram matrix of the smaller side in float64, with one QR polish a side: a cost of min(d_out, d_in)^3, where the full SVD
takes ten times as long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anchorlora.devices import in_float64
from anchorlora.geometry.subspace import Subspace


def singular_directions(weight: Tensor, k: int) -> tuple[Subspace, Subspace]:
    """(U, V) of the k largest singular values of weight (d_out, d_in), in float64.

    Raises ValueError when the weight is not finite, or has fewer than k singular values above rounding: where a singular value
    is nothing but rounding, its directions are chance.
    """
    if weight.ndim != 2:
        raise ValueError(f"singular directions need a matrix (d_out, d_in), not {tuple(weight.shape)}")
    W = in_float64(weight.detach())
    if not bool(torch.isfinite(W).all()):
        raise ValueError("the weight holds NaN or infinite values; it has no singular directions")
    tall = W.shape[0] >= W.shape[1]
    X = W if tall else W.T  # (n, m) with n >= m
    values, vectors = torch.linalg.eigh(X.T @ X)
    rank = int((values > values[-1].clamp(min=0) * X.shape[0] * torch.finfo(torch.float64).eps).sum())
    if not 1 <= k <= rank:
        raise ValueError(f"a weight of shape {tuple(weight.shape)} and rank {rank} has no {k} leading singular directions")
    near = vectors[:, -k:].flip(1)
    narrow, wide = torch.linalg.qr(near).Q, torch.linalg.qr(X @ near).Q
    return (Subspace(wide), Subspace(narrow)) if tall else (Subspace(narrow), Subspace(wide))
