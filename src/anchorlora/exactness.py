"""What counts as zero: a ratio rho that float32 storage of the factors explains."""

from __future__ import annotations

SMALLEST = 1e-7  # below this nothing is told apart, however small the floor


def largest_zero(rho_floor: float | None) -> float:
    """The largest rho that counts as zero: max(1e-7, 3 rho_floor)."""
    return max(SMALLEST, 3 * (rho_floor or 0.0))


def is_zero(rho: float | None, rho_floor: float | None) -> bool:
    """Whether the core saw no more than rounding; an undefined rho (nothing moved) touched nothing."""
    return rho is None or rho <= largest_zero(rho_floor)
