"""The best approximation of lower rank of a block's update   (Eckart and Young), from thin factors.

    B = Q_B R_B,  A^T = Q_A R_A        R_B R_A^T = U S W^T      (m, m), the only matrix that is decomposed
    B' = Q_B U (S/s)^1/2               A' = (S/s)^1/2 W^T Q_A^T        the first R columns and rows, so |B'| = |A'|
    |s B A - s B' A'|^2 = sum_{i > R} S_i^2

S holds the singular values of s B A, strongest first; no other matrix of rank R is nearer in Frobenius norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anchorlora.devices import in_float64
from anchorlora.geometry.factors import Factors
from anchorlora.geometry.product import Product


def singular(product: Product) -> tuple[Tensor, Tensor, Tensor]:
    """The thin decomposition left (d_out, n), values (n,), right (n, d_in), in float64; n at most the inner size m."""
    left, right = (torch.linalg.qr(in_float64(x.detach())) for x in (product.left, product.right.mT))
    U, S, W = torch.linalg.svd(left.R @ right.R.mT, full_matrices=False)
    return left.Q @ U, S, W @ right.Q.mT


def truncated(factors: Factors, rank: int) -> Factors:
    """The nearest block of `rank` rows and of the same scale, in float64; rows beyond what there is to hold are zero."""
    if rank < 1:
        raise ValueError(f"a block has a rank of 1 or more, not {rank}")
    if factors.scale == 0:  # an update of nothing
        return Factors(factors.A.new_zeros(rank, factors.A.shape[1]), factors.B.new_zeros(factors.B.shape[0], rank), 0.0)
    left, values, right = singular(factors.product())
    root = (values[:rank] / abs(factors.scale)).sqrt()
    A, B = root[:, None] * right[:rank], left[:, :rank] * (root if factors.scale > 0 else -root)
    missing = rank - len(root)
    A = torch.cat([A, A.new_zeros(missing, A.shape[1])])
    B = torch.cat([B, B.new_zeros(B.shape[0], missing)], dim=1)
    return Factors(A, B, factors.scale)
