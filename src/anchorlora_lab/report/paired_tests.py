"""Paired tests of two methods' runs by flipping signs, and intervals of means; both assume symmetry alone."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np

from anchorlora.errors import InvalidValue

EXACT = 12  # pairs whose signs are all tried; of more, PATTERNS are drawn
PATTERNS = 4096
LEVEL = 0.95  # of intervals


@dataclass(frozen=True)
class PairedTest:
    """Test of a mean of paired differences against zero, by flipping their signs."""

    n: int
    mean: float
    interval: tuple[float, float] | None
    p: float  # share of sign patterns whose mean is as far from zero
    adjusted: float


def paired_tests(comparisons: Sequence[Mapping[Any, float]]) -> list[PairedTest]:
    """Return a test of each comparison, corrected for their number (Westfall and Young's step-down).

    If two methods are alike, each difference of two runs that share everything else could as well have the other sign; nothing else
    is assumed. The signs of a pair are flipped in all comparisons together, so comparisons that nearly repeat others cost little.
    """
    if not all(comparisons):
        raise InvalidValue("a comparison has no pairs")
    names = list(dict.fromkeys(name for changes in comparisons for name in changes))
    values = np.array([[changes.get(name, 0.0) for name in names] for changes in comparisons])
    sizes = np.sqrt((values**2).sum(axis=1, keepdims=True))
    # |sum| over the root of the sum of squares grows with |mean| over its standard error; the first pattern flips nothing
    ratios = np.abs(values @ np.array(_patterns(len(names))).T) / np.where(sizes == 0, 1.0, sizes)
    p, adjusted = (ratios >= ratios[:, :1] - 1e-12).mean(axis=1), np.zeros(len(ratios))
    least = np.argsort(ratios[:, 0], kind="stable")
    for j, largest in zip(least, np.maximum.accumulate(ratios[least]), strict=True):
        adjusted[j] = (largest >= ratios[j, 0] - 1e-12).mean()
    adjusted[least] = np.maximum.accumulate(adjusted[least][::-1])[::-1]
    own = [list(changes.values()) for changes in comparisons]
    tested = zip(own, p.tolist(), adjusted.tolist(), strict=True)
    return [PairedTest(len(c), fmean(c), _typical(c), *shares) for c, *shares in tested]


@cache
def _patterns(n: int) -> list[tuple[int, ...]]:
    """Signs of n pairs, the first pattern all plus: all of them, or as many drawn."""
    if n <= EXACT:
        return list(product((1, -1), repeat=n))
    draw = random.Random(0)
    return [(1,) * n, *(tuple(draw.choices((1, -1), k=n)) for _ in range(PATTERNS - 1))]


def _typical(changes: Sequence[float]) -> tuple[float, float] | None:
    """Hartigan's typical values: means of all parts of the sample, between which the true mean lies with equal probability."""
    parts = _patterns(len(changes))
    chosen = ([c for c, s in zip(changes, signs, strict=True) if s < 0] for signs in parts[1:])
    means = sorted(round(fmean(part), 12) + 0.0 for part in chosen if part)  # zero where it is zero but for rounding, and never -0
    outside = math.floor((1 - LEVEL) / 2 * len(parts) + 1e-9)
    return (means[outside - 1], means[-outside]) if outside else None


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval of the mean of a few independent values, such as the scores of runs; it assumes symmetry alone."""
    return _typical(values) if values else None
