"""Continual-learning scores of an accuracy triangle   (paper, eq. 35 to 37).

    a[t][i]  accuracy on task i after training task t, percent, i <= t

    AA  = mean_i a[N][i]                     final average accuracy, percent
    LA  = mean_i a[i][i]                     accuracy right after learning, percent
    BWT = mean_{i<N} (a[N][i] - a[i][i])     backward transfer, percentage points; negative means forgetting
    FM  = mean_{i<N} (max_{i<=t<N} a[t][i] - a[N][i])    forgetting, percentage points; may be negative

AA = LA + (N-1)/N BWT and FM >= -BWT hold for every triangle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from anchorlora.errors import InvalidValue


@dataclass(frozen=True)
class Scores:
    """A lower triangle of accuracies in percent: row t holds tasks 1..t."""

    a: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> Scores:
        for number, row in enumerate(rows, 1):
            if len(row) != number:
                raise InvalidValue(f"row {number} of an accuracy triangle has {number} entries, not {len(row)}")
            if not all(0 <= value <= 100 for value in row):
                raise InvalidValue(f"row {number} of an accuracy triangle holds a value outside 0..100 percent: {list(row)}")
        if not rows:
            raise InvalidValue("an accuracy triangle needs at least one row")
        return cls(tuple(tuple(float(value) for value in row) for row in rows))

    @property
    def average(self) -> float:
        """AA: reads the last row."""
        return _mean(self.a[-1])

    @property
    def learning(self) -> float:
        """LA: reads the diagonal."""
        return _mean([row[-1] for row in self.a])

    @property
    def backward_transfer(self) -> float | None:
        """BWT: reads the last row and the diagonal; None for one task."""
        last = self.a[-1]
        return _mean([last[i] - self.a[i][i] for i in range(len(last) - 1)]) if len(last) > 1 else None

    @property
    def forgetting(self) -> float | None:
        """FM: best score before the last task minus the final one, mean over old tasks; None for one task."""
        last = self.a[-1]
        best = [max(row[i] for row in self.a[i:-1]) for i in range(len(last) - 1)]
        return _mean([b - final for b, final in zip(best, last, strict=False)]) if best else None

    def as_dict(self) -> dict[str, float | None]:
        return {"AA": self.average, "LA": self.learning, "BWT": self.backward_transfer, "FM": self.forgetting}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)  # exact: sum() rounds differently from one version of Python to the next
