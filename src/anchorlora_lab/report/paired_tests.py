"""Whether two methods differ: paired tests of runs by flipping signs, and intervals of means; both assume symmetry alone."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

from anchorlora.errors import InvalidValue

EXACT = 12  # pairs whose signs are all tried; of more, PATTERNS are drawn
PATTERNS = 4096


@dataclass(frozen=True)
class PairedTest:
    """Whether a mean of paired differences differs from zero, by flipping their signs."""

    n: int
    mean: float
    interval: tuple[float, float] | None
    p: float  # share of sign patterns whose mean is as far from zero
    adjusted: float


def paired_tests(comparisons: Sequence[Mapping[Any, float]], *, level: float = 0.95) -> list[PairedTest]:
    """Return a test of each comparison, corrected for their number.

    If two methods are alike, each difference of two runs that share everything else could as well have had the other sign. No other
    distribution is assumed. The signs of a pair are flipped in all comparisons together, so that those which nearly repeat each
    other cost little; as in Holm's correction, the comparison with the largest ratio of mean to standard error is corrected for
    all, the next for all but it, and so on.
    """
    if not all(comparisons):
        raise InvalidValue("a comparison has no pairs")
    names = list(dict.fromkeys(name for changes in comparisons for name in changes))
    patterns = [dict(zip(names, signs, strict=True)) for signs in _patterns(len(names))]
    ratios = [_ratios(changes, patterns) for changes in comparisons]  # the first pattern flips nothing
    adjusted, largest, least = [0.0] * len(ratios), [0.0] * len(patterns), sorted(range(len(ratios)), key=lambda j: ratios[j][0])
    for j in least:
        largest = [max(pair) for pair in zip(largest, ratios[j], strict=True)]
        adjusted[j] = _share(largest, ratios[j][0])
    for j, larger in zip(least[-2::-1], least[:0:-1], strict=True):
        adjusted[j] = max(adjusted[j], adjusted[larger])
    return [
        PairedTest(len(c), fmean(list(c.values())), _typical(list(c.values()), level), _share(found, found[0]), adjusted[j])
        for j, (c, found) in enumerate(zip(comparisons, ratios, strict=True))
    ]


def _patterns(n: int) -> list[tuple[int, ...]]:
    """Signs of n pairs, the first pattern all plus: all of them, or as many drawn."""
    if n <= EXACT:
        return list(product((1, -1), repeat=n))
    draw = random.Random(0)
    return [(1,) * n, *(tuple(draw.choices((1, -1), k=n)) for _ in range(PATTERNS - 1))]


def _ratios(changes: Mapping[Any, float], patterns: Sequence[Mapping[Any, int]]) -> list[float]:
    """|sum| over the root of the sum of squares, for each pattern: it grows with |mean| over its standard error."""
    size = math.sqrt(math.fsum(value**2 for value in changes.values())) or 1.0
    return [abs(math.fsum(signs[name] * value for name, value in changes.items())) / size for signs in patterns]


def _share(found: Sequence[float], least: float) -> float:
    return sum(value >= least - 1e-12 for value in found) / len(found)


def _typical(changes: Sequence[float], level: float) -> tuple[float, float] | None:
    """Hartigan's typical values: means of all parts of the sample, between which the true mean lies with equal probability."""
    parts = _patterns(len(changes))
    means = sorted(fmean(part) for signs in parts[1:] if (part := [c for c, s in zip(changes, signs, strict=True) if s < 0]))
    outside = math.floor((1 - level) / 2 * len(parts) + 1e-9)
    return (means[outside - 1], means[-outside]) if outside else None


def mean_interval(values: Sequence[float], *, level: float = 0.95) -> tuple[float, float] | None:
    """Return an interval of the mean of a few independent values, such as the scores of runs; it assumes symmetry alone."""
    return _typical(values, level) if values else None
