"""A protected subspace: inside = x V V^T, outside = x P with P = I - V V^T.

V  (d, k)  orthonormal directions as columns      P  (d, d)  never formed

Leading singular directions of a weight:  W = U S V^T, the first k columns of U and V   (as OSF protects them).

    W  (d_out, d_in)      U  (d_out, k)  left, what the layer writes      V  (d_in, k)  right, what it reads

Both come from the Gram matrix of the smaller side in float64, with one QR polish per side. This costs min(d_out, d_in)^3; the
full SVD takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass

import torch
from torch import Tensor

from anchorlora.devices import in_float64, placed
from anchorlora.errors import InvalidType, InvalidValue, NotFinite

# How far V^T V may be from I (Frobenius norm): float32 storage of an orthonormal basis leaves about 1e-7,
# bfloat16 storage 1e-3, which would void every promise made with it.
ORTHONORMAL = 1e-5


@dataclass(frozen=True, eq=False)
class Subspace:
    """Protected subspace: the span of `basis`, whose columns are orthonormal directions.

        inside(x) = x V V^T      outside(x) = x P = x - x V V^T      V = basis

    The d x d projector P is never formed.

    Args:
        basis: Orthonormal directions as columns, (d, k) with k >= 1, float32 or float64.
        sound: Number of leading columns already known to be orthonormal; only the others are checked.

    Raises:
        InvalidValue: The basis is not a matrix, has no column, or its columns are not orthonormal:
            |V^T V - I| may be at most 1e-5.
        InvalidType: The basis is neither float32 nor float64. Half-precision storage is too coarse to protect with.
        NotFinite: The basis holds NaN or infinite values.

    Example:
        >>> from anchorlora.geometry import Subspace
        >>> core = Subspace(torch.eye(4)[:, :2])
        >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> core.inside(x)
        tensor([[1., 2., 0., 0.]])
        >>> core.outside(x)
        tensor([[0., 0., 3., 4.]])

        QR turns any independent columns into a basis; `Spectrum.of` finds the strongest directions of feature rows.

        >>> Subspace(torch.linalg.qr(torch.randn(32, 5)).Q).k
        5
    """

    basis: Tensor
    _: KW_ONLY
    sound: InitVar[int] = 0

    def __post_init__(self, sound: int) -> None:
        V = self.basis
        if V.ndim != 2:
            raise InvalidValue(f"a basis has shape (d, k), not {tuple(V.shape)}")
        if V.shape[1] == 0:
            raise InvalidValue(f"this basis {tuple(V.shape)} has no directions, so it would protect nothing")
        if V.dtype not in (torch.float32, torch.float64):
            raise InvalidType(f"a protected basis must be float32 or float64, not {V.dtype}; give the decomposed basis itself")
        self.check(sound=sound)

    def check(self, *, sound: int = 0) -> None:
        """Check the basis as it is now: other code can write to the tensor after construction.

        Args:
            sound: Number of leading columns that need no check.

        Raises:
            InvalidValue: The columns are not orthonormal.
            NotFinite: The basis holds NaN or infinite values.
        """
        V = in_float64(self.basis)
        if not bool(torch.isfinite(V[:, sound:]).all()):
            raise NotFinite("this basis holds NaN or infinite values and cannot protect anything")
        gram = V[:, sound:].T @ V
        gram[:, sound:].diagonal().sub_(1)
        error = float(torch.linalg.norm(gram))
        if not error <= ORTHONORMAL:
            raise InvalidValue(
                f"the columns of this basis are not orthonormal: |V^T V - I| = {error:.1e}, allowed {ORTHONORMAL:.0e}; "
                "orthonormalize it first (torch.linalg.qr)"
            )

    @property
    def d(self) -> int:
        """Width of the space that contains the directions."""
        return self.basis.shape[0]

    @property
    def k(self) -> int:
        """Number of protected directions."""
        return self.basis.shape[1]

    @property
    def tokens(self) -> Tensor | None:
        """Numbers (k,) of the protected rows of an embedding; None for directions that are held as a basis."""
        return None

    def coordinates(self, rows: Tensor) -> Tensor:
        """Return the components along the directions, x V.

        Args:
            rows: Rows (..., d).

        Returns:
            Components (..., k), in the dtype and on the device of `rows`.

        Example:
            >>> from anchorlora.geometry import Subspace
            >>> Subspace(torch.eye(3)[:, 1:]).coordinates(torch.tensor([5.0, 6.0, 7.0]))
            tensor([6., 7.])
        """
        return rows @ placed(self.basis, rows.dtype, rows.device)

    def inside(self, rows: Tensor) -> Tensor:
        """Project rows onto the subspace, x V V^T.

        Args:
            rows: Rows (..., d).

        Returns:
            The part of each row inside the subspace, (..., d).
        """
        basis = placed(self.basis, rows.dtype, rows.device)
        return (rows @ basis) @ basis.T

    def outside(self, rows: Tensor) -> Tensor:
        """Project rows onto the orthogonal complement, x P = x - x V V^T.

        Args:
            rows: Rows (..., d).

        Returns:
            The part of each row outside the subspace, (..., d).

        Example:
            >>> from anchorlora.geometry import Subspace
            >>> core = Subspace(torch.linalg.qr(torch.randn(32, 3, dtype=torch.float64)).Q)
            >>> A = core.outside(torch.randn(4, 32, dtype=torch.float64))  # a LoRA factor blind to the core
            >>> bool((A @ core.basis).norm() < 1e-12)
            True
        """
        return rows - self.inside(rows)

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Subspace:
        """Return the same directions in another dtype or on another device.

        Args:
            dtype: float32 or float64; by default unchanged.
            device: Target device; by default unchanged.

        Returns:
            A new `Subspace`, or this one if nothing changes.
        """
        basis = placed(self.basis, dtype or self.basis.dtype, torch.device(device or self.basis.device))
        return self if basis is self.basis else Subspace(basis)

    def joined(self, other: Subspace) -> Subspace:
        """Return the sum of both subspaces: this basis unchanged, followed by the directions that only `other` has.

        A direction is new if more than 1e-6 of it lies outside this subspace, the same threshold as in `joining`. Adding subspaces
        one at a time with this method costs far less than joining all of them again.

        Args:
            other: A subspace of the same space.

        Returns:
            The sum, (d, k + number of new directions), in float64.

        Example:
            >>> from anchorlora.geometry import Subspace
            >>> first, second = Subspace(torch.eye(4)[:, :2]), Subspace(torch.eye(4)[:, 1:3])
            >>> first.joined(second).k
            3
        """
        held = self.to(dtype=torch.float64)
        directions, values, _ = torch.linalg.svd(held.outside(other.basis.to(held.basis).T).T, full_matrices=False)
        directions = held.outside(directions[:, values > 1e-6].T).T  # again: what was nearly inside has lost its digits
        return Subspace(torch.cat([held.basis, torch.linalg.qr(directions).Q.contiguous()], dim=1), sound=held.k)

    @classmethod
    def joining(cls, parts: Sequence[Subspace]) -> Subspace:
        """Return the sum of several subspaces of one space; directions that they share count once.

        All unit columns are decomposed together in float64. A direction counts if its singular value exceeds 1e-6, which is above
        what float32 storage leaves (1e-7) and far below any principal angle that matters.

        Args:
            parts: At least one subspace; all have the same width d.

        Returns:
            The sum, float64, on the CPU.

        Raises:
            InvalidValue: `parts` is empty.

        Example:
            >>> from anchorlora.geometry import Subspace
            >>> axes = torch.eye(4)
            >>> Subspace.joining([Subspace(axes[:, :2]), Subspace(axes[:, 1:3]), Subspace(axes[:, :1])]).k
            3
        """
        if not parts:
            raise InvalidValue("joining needs at least one subspace")
        columns = torch.cat([placed(part.basis, torch.float64, torch.device("cpu")) for part in parts], dim=1)
        values, vectors = torch.linalg.eigh(columns.T @ columns)
        keep = values > 1e-12
        directions = columns @ (vectors[:, keep] / values[keep].sqrt())
        return cls(torch.linalg.qr(directions).Q.contiguous())


class TokenRows(Subspace):
    """Protected rows of an embedding: the one-hot directions of tokens, of which only the numbers are stored: `tokens` (k,)."""

    def __init__(self, tokens: Tensor, *, d: int) -> None:
        known = torch.unique(tokens.detach().cpu())
        if not known.numel() or known.is_floating_point() or int(known[0]) < 0 or int(known[-1]) >= d:
            raise InvalidValue(f"tokens are given by their numbers, at least one and each below {d}")
        vars(self).update(_tokens=known, _width=d)

    @property
    def d(self) -> int:
        """Number of tokens of the vocabulary."""
        return int(vars(self)["_width"])

    @property
    def k(self) -> int:
        """Number of protected tokens."""
        return self.tokens.numel()

    @property
    def tokens(self) -> Tensor:
        """Numbers (k,) of the protected tokens, ascending."""
        numbers: Tensor = vars(self)["_tokens"]
        return numbers

    def check(self, *, sound: int = 0) -> None:
        """Check nothing: one-hot directions are orthonormal."""

    def coordinates(self, rows: Tensor) -> Tensor:
        """Return the columns of the protected tokens: rows (..., d) -> (..., k)."""
        return rows[..., self.tokens.to(rows.device)]

    def outside(self, rows: Tensor) -> Tensor:
        """Return the rows (..., d) with those columns set to zero."""
        return rows.index_fill(-1, self.tokens.to(rows.device), 0.0)

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> TokenRows:
        """Return itself: there is no basis to move."""
        return self


@dataclass(frozen=True, eq=False)
class LayerCore:
    """Protected subspace of one layer, and how it was chosen: `core` (d_in, k), `shares` (k,)."""

    core: Subspace  # protected subspace (d_in, k)
    wide: Subspace  # wider basis (d_in, `wide`) of the strongest directions, for methods that need more than the core
    k_star: int | None
    retained_energy: float  # fraction of the energy inside the core: of feature rows, or of what a constraint makes the core from
    rows: int  # number of feature rows that the core was made from, or of directions
    shares: Tensor | None = None  # fraction of the energy on each direction of the core, (k,); None if it is not known


def singular_directions(weight: Tensor, k: int) -> tuple[Subspace, Subspace]:
    """Return the leading singular directions of a weight, as OSF protects them: `weight` (d_out, d_in); returns (d_out, k)."""
    if weight.ndim != 2:
        raise InvalidValue(f"singular directions need a matrix (d_out, d_in), not {tuple(weight.shape)}")
    W = in_float64(weight.detach())
    if not bool(torch.isfinite(W).all()):
        raise InvalidValue("the weight holds NaN or infinite values; it has no singular directions")
    tall = W.shape[0] >= W.shape[1]
    X = W if tall else W.T  # (n, m) with n >= m
    values, vectors = torch.linalg.eigh(X.T @ X)
    rank = int((values > values[-1].clamp(min=0) * X.shape[0] * torch.finfo(torch.float64).eps).sum())
    if not 1 <= k <= rank:
        raise InvalidValue(f"a weight of shape {tuple(weight.shape)} and rank {rank} has no {k} leading singular directions")
    near = vectors[:, -k:].flip(1)
    narrow, wide = torch.linalg.qr(near).Q, torch.linalg.qr(X @ near).Q
    return (Subspace(wide), Subspace(narrow)) if tall else (Subspace(narrow), Subspace(wide))


def in_float32(cores: Mapping[str, Subspace]) -> dict[str, Subspace]:
    """Return cores in float32, as constraints hold them; layers that share a core still do."""
    made = {id(core): core.to(dtype=torch.float32) for core in cores.values()}
    return {layer: made[id(core)] for layer, core in cores.items()}


def joined_by_layer(union: Mapping[str, Subspace], cores: Mapping[str, Subspace]) -> dict[str, Subspace]:
    """Return each layer's union with its new core; layers that share a core share the union."""
    made: dict[tuple[int, int], Subspace] = {}
    for layer, core in cores.items():
        before = union.get(layer)
        key = (id(before), id(core))
        if key not in made:
            made[key] = before.joined(core) if before else Subspace.joining([core])
    return {layer: made[id(union.get(layer)), id(core)] for layer, core in cores.items()}
