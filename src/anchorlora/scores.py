"""Continual-learning scores of an accuracy triangle   (paper, eqs. 35-37).

    a[t][i]  accuracy on task i after training task t, percent, i <= t

    AA  = mean_i a[N][i]                     final average accuracy, percent
    LA  = mean_i a[i][i]                     accuracy right after training on the task, percent
    BWT = mean_{i<N} (a[N][i] - a[i][i])     backward transfer, percentage points; negative means forgetting
    FM  = mean_{i<N} (max_{i<=t<N} a[t][i] - a[N][i])    forgetting, percentage points; may be negative

AA = LA + (N-1)/N BWT and FM >= -BWT hold for every triangle.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, mean, pvariance, variance

from anchorlora.errors import InvalidValue

IN_WORDS = {  # what a metric of answers counts
    "exact_match": "right answers",
    "verbatim_match": "right answers, to the letter",
    "token_f1": "words shared with the right answer",
    "token_accuracy": "right tokens",
    "rouge_l": "longest shared text (ROUGE-L)",
    "edit_similarity": "similarity to the right answer",
}


def metric_in_words(name: str) -> str:
    """Return what a metric counts, in words."""
    return IN_WORDS.get(name, name.replace("_", " "))


@dataclass(frozen=True)
class Scores:
    """Continual-learning scores of an accuracy triangle (paper, eqs. 35-37).

    Args:
        a: Accuracies in percent. Row t holds tasks 1..t, as tested after training task t. Use `Scores.of` to check them.

    Example:
        >>> from anchorlora import Scores
        >>> scores = Scores.of([[90.0], [84.0, 80.0]])  # after task 1; after task 2
        >>> scores.average, scores.learning
        (82.0, 85.0)
        >>> scores.backward_transfer, scores.forgetting  # percentage points
        (-6.0, 6.0)
    """

    a: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> Scores:
        """Build the scores from a checked accuracy triangle.

        Args:
            rows: One row per training task: row t has the accuracies on tasks 1..t, in percent.

        Returns:
            The scores.

        Raises:
            InvalidValue: There is no row, row t does not have t entries, or a value lies outside 0..100.

        Example:
            >>> from anchorlora import Scores
            >>> Scores.of([[90.0], [84.0]])
            Traceback (most recent call last):
                ...
            anchorlora.errors.InvalidValue: row 2 of an accuracy triangle has 2 entries, not 1
        """
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
        """AA, final average accuracy in percent: the mean of the last row."""
        return fmean(self.a[-1])

    @property
    def learning(self) -> float:
        """LA, accuracy right after training in percent: the mean of the diagonal."""
        return fmean([row[-1] for row in self.a])

    @property
    def backward_transfer(self) -> float | None:
        """BWT in percentage points, from the last row and the diagonal; negative means forgetting.  None for a single task."""
        last = self.a[-1]
        return fmean([last[i] - self.a[i][i] for i in range(len(last) - 1)]) if len(last) > 1 else None

    def forward_transfer(self, alone: Sequence[float]) -> float:
        """Return FWT in percentage points: accuracy right after training on a task, less that of a model trained on it alone.

        The mean over all tasks, as SAPT has it (arXiv 2401.08295).

        Args:
            alone: Percent, of each task in order.

        Raises:
            InvalidValue: There are not as many as tasks.

        Example:
            >>> from anchorlora import Scores
            >>> Scores.of([[90.0], [84.0, 80.0]]).forward_transfer([90.0, 83.0])
            -1.5
        """
        if len(alone) != len(self.a):
            raise InvalidValue(f"{len(self.a)} tasks need as many accuracies of single-task runs, not {len(alone)}")
        return fmean([row[-1] - value for row, value in zip(self.a, alone, strict=True)])

    @property
    def forgetting(self) -> float | None:
        """FM in percentage points: best accuracy before the last task less the final one, mean over earlier tasks; None for one."""
        last = self.a[-1]
        best = [max(row[i] for row in self.a[i:-1]) for i in range(len(last) - 1)]
        return fmean([b - final for b, final in zip(best, last, strict=False)]) if best else None

    def as_dict(self) -> dict[str, float | None]:
        """Return all scores under the paper's abbreviations.

        Example:
            >>> from anchorlora import Scores
            >>> Scores.of([[90.0], [84.0, 80.0]]).as_dict()
            {'AA': 82.0, 'LA': 85.0, 'BWT': -6.0, 'FM': 6.0}
        """
        return {"AA": self.average, "LA": self.learning, "BWT": self.backward_transfer, "FM": self.forgetting}


DRAWS = 2000
LEAST_PAIRS = 6  # fewer have no 95 % interval, since all their signs are equal by chance in more than 5 %
MOST_PROBES = 200  # held-out rows that something kept is measured on
LIMIT = 5000


@dataclass(frozen=True)
class Flips:
    """Positions of the answers that turned right, and of those that turned wrong."""

    gained: tuple[int, ...]
    lost: tuple[int, ...]


@dataclass(frozen=True)
class Paired:
    """Values of the same examples before and after, or of one method and of another, with what can be said of their difference."""

    before: Sequence[float]
    after: Sequence[float]
    tasks: Sequence[Hashable] | None = None  # of each example; means are then those over tasks of each task's mean, as in AA

    def __post_init__(self) -> None:
        before, after = len(self.before), len(self.after)
        if before != after or not before or (self.tasks is not None and len(self.tasks) != after):
            raise InvalidValue(f"{before} scores before and {after} after are not of the same examples")

    @property
    def n(self) -> int:
        """Number of examples."""
        return len(self.after)

    @property
    def means(self) -> tuple[float, float]:
        """The mean before and after."""
        before, after = ([mean(part) for part in self.by_task(values).values()] for values in (self.before, self.after))
        return (before[0], after[0]) if self.tasks is None else (mean(before), mean(after))

    @property
    def changes(self) -> list[float]:
        """The gain of each example."""
        return [now - was for was, now in zip(self.before, self.after, strict=True)]

    def by_task(self, values: Sequence[float]) -> dict[Hashable, list[float]]:
        """Return values of the examples by task; all together where there are no tasks."""
        groups: dict[Hashable, list[float]] = {}
        for value, task in zip(values, self.tasks or [None] * self.n, strict=True):
            groups.setdefault(task, []).append(value)
        return groups

    def interval(self, *, level: float = 0.95) -> tuple[float, float]:
        """Return a percentile bootstrap interval of the mean change over examples, drawn within each task; for more than 5,000
        examples, or a level beyond 2,000 draws, the bootstrap's normal limit.
        """
        changes = self.by_task(self.changes)
        if self.n > LIMIT or (1 - level) * DRAWS < 2:
            middle = fmean([fmean(part) for part in changes.values()])
            spread = math.sqrt(math.fsum(pvariance(part) / len(part) for part in changes.values())) / len(changes)
            reach = NormalDist().inv_cdf((1 + level) / 2) * spread
            return middle - reach, middle + reach
        means = _drawn_means([*changes.values()])
        outside = round((1 - level) / 2 * DRAWS)
        return means[outside], means[DRAWS - 1 - outside]

    def t_interval(self, *, level: float = 0.95) -> tuple[float, float]:
        """Return Student's interval of the mean change over examples: of a few, a bootstrap's is too short."""
        middle = mean(self.changes)
        reach = student_quantile((1 + level) / 2, self.n - 1) * self.standard_error({None: 1.0}) if self.n > 1 else 0.0
        return middle - reach, middle + reach

    def standard_error(self, weights: Mapping[Hashable, float]) -> float:
        """Return the standard error of the mean change with a weight for each task: sqrt(sum of w^2 var / n), two examples each."""
        changes = self.by_task(self.changes)
        return math.sqrt(sum(weights[task] ** 2 * (variance(part) / len(part)) for task, part in changes.items()))

    @property
    def flips(self) -> Flips | None:
        """The answers that turned; None where values say more than right (1) and wrong (0)."""
        pairs = list(zip(self.before, self.after, strict=True))
        if not {value for pair in pairs for value in pair} <= {0.0, 1.0}:
            return None
        gained, lost = (tuple(i for i, pair in enumerate(pairs) if pair == turned) for turned in ((0.0, 1.0), (1.0, 0.0)))
        return Flips(gained, lost)


def student_quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's distribution by Fisher's expansion, within 0.1 % from five degrees of freedom on."""
    z = NormalDist().inv_cdf(share)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def _drawn_means(groups: Sequence[Sequence[float]]) -> list[float]:
    """Sorted bootstrap means (DRAWS of them) of each group's mean, of the draws of random.Random(0).choices, group by group."""
    import numpy as np  # takes a tenth of a second, which those who only read scores need not wait

    _, state, _ = random.Random(0).getstate()
    stream = np.random.RandomState()
    stream.set_state(("MT19937", np.array(state[:-1], dtype=np.uint32), int(state[-1]), 0, 0.0))
    values, means = [np.asarray(group, dtype=float) for group in groups], np.zeros(DRAWS)
    ends = np.cumsum([len(of) for of in values])
    for draws in np.split(np.arange(DRAWS), range(100, DRAWS, 100)):  # which bounds the memory that it takes
        parts = np.split(stream.random_sample((len(draws), ends[-1])), ends[:-1], axis=1)
        for of, part in zip(values, parts, strict=True):
            means[draws] += of[(part * len(of)).astype(int)].mean(axis=1) / len(values)
    return sorted((means.round(12) + 0.0).tolist())  # a sum that is zero but for rounding is zero, and never -0


def most_share(events: int, n: int, *, level: float = 0.95) -> float:
    """Return the largest share of all examples that an event can have, if some of n show it: Clopper and Pearson's upper limit."""
    if not 0 <= events <= n or n < 1:
        raise InvalidValue(f"{events} of {n} examples cannot show an event")
    if events == n:
        return 1.0
    outside, low, high = (1 - level) / 2, events / n, 1.0
    for _ in range(60):  # bisection of P(at most so many events) = outside
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(events, n, middle) > outside else (low, middle)
    return high


def _at_most(events: int, n: int, share: float) -> float:
    """P(X <= events) of a binomial distribution, for a share above 0 and below 1."""
    log, other, whole = math.log(share), math.log1p(-share), math.lgamma(n + 1)
    return math.fsum(
        math.exp(whole - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * log + (n - k) * other) for k in range(events + 1)
    )
