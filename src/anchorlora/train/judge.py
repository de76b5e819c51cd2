"""Judge a skill and what was to be kept by the same examples before and after, with 95 % intervals over them.

    worse        the interval of the loss lies above what rounding explains, or that of the answers below zero
    kept         both intervals, and what so few rows can miss, exclude a harm larger than the margin
    cannot tell  neither; the reason has the largest harm still possible, and how many rows would tell

An event that none of n rows shows may still happen in 1 - 0.025^(1/n) of all, about 3.7/n: an interval of equal rows has no width,
and three rows prove nothing. Answers that are right or wrong have Clopper and Pearson's bound of the share that turned; other
scores that of as many answers as would have to turn for such a spread. Intervals are Student's over rows: chats, prompts, or texts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from anchorlora.data import LOSS
from anchorlora.data.metrics import TOKEN_ACCURACY
from anchorlora.errors import InvalidValue
from anchorlora.scores import LEAST_PAIRS, Paired, most_share, student_quantile
from anchorlora.text import amount

ROUNDING = 1e-3  # nats; a loss that changes by less has not changed
FEWEST = 20  # rows without which nothing is called kept
LITTLE = 50.0  # percent of answers right, below which a skill is learned a little
LITTLE_TOKENS = 0.1  # share of the tokens that were wrong, the same where no answers are generated


@dataclass(frozen=True)
class Harm:
    """A drop of answers, in points, and a rise of the loss per token, in nats."""

    points: float
    nats: float


@dataclass(frozen=True)
class Margin(Harm):
    """The largest harm with which something counts as kept."""

    points: float = 5.0
    nats: float = 0.05

    def __post_init__(self) -> None:
        if not (0 < self.points <= 100 and 0 < self.nats < math.inf):
            raise InvalidValue(f"a margin is 0 to 100 points and some loss, both above 0, not {self.points:g} and {self.nats:g}")

    def __str__(self) -> str:
        return f"{amount(self.points, 'point')} of answers and {self.nats:g} of loss per token"


DEFAULT_MARGIN = Margin()


@dataclass(frozen=True)
class Change:
    """The mean of a number before and after, with the 95 % interval of its change over the same examples."""

    name: str
    before: float
    after: float
    change: float
    interval: tuple[float, float]

    @classmethod
    def of(cls, name: str, pairs: Paired) -> Change:
        """Return the change of paired values."""
        before, after = pairs.means
        return cls(name, before, after, after - before, pairs.t_interval())


@dataclass(frozen=True)
class Turned:
    """How many answers are right only now, and how many were right only before."""

    gained: int
    lost: int


@dataclass(frozen=True)
class Comparison:
    """A model before and after, over the same examples."""

    n: int  # examples; a chat is one, however many turns of it are answered, and so are all answers to one prompt
    metric: Change  # the primary one, in percent
    loss: Change  # of the right answers, in nats per token
    flips: Turned | None  # None where answers are more than right and wrong

    @classmethod
    def of(cls, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Comparison:
        """Return the comparison of the scores of all examples, as `scores.json` has them."""
        rows = rows_of(before)

        def pairs(name: str, unit: float) -> Paired:
            return Paired(*(by_row([unit * scores["metrics"][name] for scores in side], rows) for side in (before, after)))

        name = next(iter(before[0]["metrics"]))
        flips = pairs(name, 1.0).flips
        turned = None if flips is None else Turned(len(flips.gained), len(flips.lost))
        return cls(len({*rows}), Change.of(name, pairs(name, 100.0)), Change.of(LOSS, pairs(LOSS, 1.0)), turned)

    def largest(self, *, worse: bool) -> float:
        """Return the largest drop, or rise, of the metric in points that the interval, and what few rows miss, do not exclude."""
        low, high = self.metric.interval
        bound = -low if worse else high
        if self.flips is not None or self.metric.name != TOKEN_ACCURACY or self.n < LEAST_PAIRS:
            turned, back = self._turned if worse else self._turned[::-1]
            bound = max(bound, 100 * (most_share(turned, self.n) - back / self.n))
            if self.flips is None:
                bound = max(bound, 100 * most_share(0, self.n))
        return float(min(100.0, max(0.0, bound)))

    @property
    def _turned(self) -> tuple[int, int]:
        """How many answers were lost and gained or, of scores in between, would have to be for this change and spread."""
        if self.flips is not None:
            return self.flips.lost, self.flips.gained
        if self.n < LEAST_PAIRS:
            return 0, 0
        low, high = self.metric.interval
        error = (high - low) / 2 / student_quantile(0.975, self.n - 1)
        net = self.n * self.metric.change / 100
        both = (self.n * (self.n - 1) * error**2 + self.n * self.metric.change**2) / 100**2
        lost, gained = (min(self.n, max(0, math.floor((both + sign * net) / 2 + 1e-6))) for sign in (-1, 1))
        return lost, gained


def rows_of(scores: Sequence[Mapping[str, Any]]) -> list[Hashable]:
    """Return what each example shares with those that say the same again: its chat, the prompt that it answers, or its text.
    Chats go together where more than half of what each is asked is the same; one beginning, such as a greeting, is not enough.
    """
    chats: dict[Hashable, list[Hashable]] = {}
    numbers: list[Hashable] = [row.get("row", i) for i, row in enumerate(scores)]
    for i, row in enumerate(scores):
        prompt = row.get("prompt_sha256", i), "" if row.get("text") else row.get("gold")
        chats.setdefault(numbers[i], []).append(prompt)
    first: dict[Hashable, Hashable] = {}  # prompt -> the first of the chats that go together
    group = {chat: chat for chat in chats}
    for chat, prompts in chats.items():
        for later in prompts[len(prompts) // 2 :]:  # which has all earlier ones in it
            group[_root(chat, group)] = _root(first.setdefault(later, chat), group)
    if sum(chat == root for chat, root in group.items()) < LEAST_PAIRS:  # a few fixed prompts are all that is asked
        return numbers
    return [_root(chat, group) for chat in numbers]


def _root(chat: Hashable, group: Mapping[Hashable, Hashable]) -> Hashable:
    while group[chat] != chat:
        chat = group[chat]
    return chat


def by_row(values: Sequence[float], rows: Sequence[Hashable]) -> list[float]:
    """Return a value a row, whose mean is that of all values: what is of one row is alike, so it is drawn together."""
    sums: dict[Hashable, float] = {}
    for value, row in zip(values, rows, strict=True):
        sums[row] = sums.get(row, 0.0) + value
    return [total * (len(sums) / len(values)) for total in sums.values()]


@dataclass(frozen=True)
class Judged(Comparison):
    """A comparison with its verdict."""

    verdict: str  # kept, worse, learned, a little, not, or that nothing can be told
    state: str  # "good", "even" or "bad"
    reason: str = ""
    rows_needed: int | None = None  # held-out rows that would tell


@dataclass(frozen=True, kw_only=True)
class JudgedKept(Judged):
    """A comparison of something that was to be kept with its verdict."""

    margin: Margin  # the harm that is allowed
    possible: Harm  # the largest harm that the rows do not exclude


def judge_kept(comparison: Comparison, margin: Margin = DEFAULT_MARGIN) -> JudgedKept:
    """Judge something that was to be kept: kept, worse, or that nothing can be told."""
    n, metric, loss = comparison.n, comparison.metric, comparison.loss
    possible = Harm(comparison.largest(worse=True), loss.interval[1])
    judged = partial(JudgedKept, n, metric, loss, comparison.flips, margin=margin, possible=possible)
    allowed = amount(margin.points, "point")
    unsound = not math.isfinite(loss.after)
    harmed = n >= LEAST_PAIRS and (loss.interval[0] > ROUNDING or metric.interval[1] < 0)
    within = n >= FEWEST and possible.points <= margin.points < metric.before and possible.nats <= margin.nats
    if unsound or (harmed and not within):
        return judged("worse", "bad")
    if metric.before <= margin.points:
        reason = f"only {metric.before:.1f} % was right before, and no drop by more than {allowed} could be seen"
        return judged(f"cannot tell (n = {n})", "even", reason)
    if within:
        better = "and better" if loss.interval[1] < -ROUNDING else ""
        return judged(f"kept within {allowed}", "good", "but a little worse" if harmed else better)
    reasons = []
    if possible.points > margin.points:
        are = "is" if margin.points == 1 else "are"
        reasons.append(f"a drop of up to {_in_points(possible.points)} is possible, and {margin.points:g} {are} allowed")
    if possible.nats > margin.nats:
        reasons.append(f"the loss may have risen by up to {possible.nats:.3f}, and {margin.nats:g} is allowed")
    if n < FEWEST and not reasons:
        reasons.append(f"fewer than {FEWEST} held-out rows cannot exclude a harm")
    needed = _rows_needed(comparison, possible, margin)
    reasons.append(f"about {needed:,} held-out rows would tell")
    return judged(f"cannot tell (n = {n})", "even", "; ".join(reasons), needed)


def judge_learned(comparison: Comparison, margin: Margin = DEFAULT_MARGIN) -> Judged:
    """Judge a new skill: learned, learned a little, not learned, or that nothing can be told.

    Learned: the loss fell and the answers are better, both by their intervals. A little: fewer than half of the answers are then
    right (without answers: less than a tenth of the wrong tokens), or the loss did not fall.
    """
    n, metric, loss = comparison.n, comparison.metric, comparison.loss
    low, high = loss.interval
    judged = partial(Judged, n, metric, loss, comparison.flips)
    enough = n >= LEAST_PAIRS
    fell, better = enough and high < -ROUNDING, enough and metric.interval[0] > 0
    if not math.isfinite(loss.after) or (enough and not better and (low > ROUNDING or metric.interval[1] < 0)):
        return judged("not learned", "bad", "loss or answers are worse")
    if fell and better:
        tokens = metric.name == TOKEN_ACCURACY
        little = metric.change < LITTLE_TOKENS * (100 - metric.before) if tokens else metric.after < LITTLE
        if not little:
            return judged("learned", "good")
        share = f"{metric.after:.{_digits(metric.after)}f} % of {'tokens' if tokens else 'answers'} right"
        return judged("learned a little", "even", share)
    if better:
        return judged("learned a little", "even", "answers are better, but no lower loss is shown")
    gain = min(comparison.largest(worse=False), 100 - metric.before)
    if metric.before >= 100 and metric.after >= 100 and enough:
        return judged("not learned", "even", "the answers were right before")
    if enough and (gain <= margin.points or -low <= ROUNDING):
        return judged("not learned", "even", "the loss fell, but answers are not better" if fell else "no difference is shown")
    width = metric.interval[1] - metric.change
    room = max(abs(metric.change), margin.points)
    needed = max(n + 1, FEWEST, math.ceil(n * (width / room) ** 2), 0 if metric.change else _fewest(margin.points))
    loss_too = "the loss fell, and " if fell else ""
    reason = f"{loss_too}answers may be up to {_in_points(gain)} better; about {needed:,} held-out rows would tell"
    return judged(f"cannot tell (n = {n})", "even", reason, needed)


def _rows_needed(comparison: Comparison, possible: Harm, margin: Margin) -> int:
    """Held-out rows that would tell, if further rows are as these: where the interval's half excludes the margin, or no harm."""
    n = comparison.n
    tokens = comparison.metric.name == TOKEN_ACCURACY
    needed = max(n + 1, FEWEST if tokens else _fewest(margin.points))
    # where no answer turned, the bound shrinks with n, as `_fewest` has it; an interval with a width shrinks with its root
    points = possible.points if possible.points > 100 * most_share(0, n) else -comparison.metric.interval[0]
    harms = ((-comparison.metric.change, points, margin.points), (comparison.loss.change, possible.nats, margin.nats))
    for harm, most, allowed in harms:
        if most > allowed and math.isfinite(most):
            room = max(allowed - harm, harm, allowed / 100)  # to the margin, or to none: the nearer end needs more rows
            needed = max(needed, math.ceil(n * ((most - harm) / room) ** 2))
    return needed


def _fewest(points: float) -> int:
    """Number of rows that exclude a drop of so many points if none of them turns wrong."""
    return max(FEWEST, math.ceil(math.log(0.025) / math.log1p(-min(points, 99.9) / 100) - 1e-9))


def _in_points(points: float) -> str:
    return amount(round(points, _digits(points)), "point")


def _digits(points: float) -> int:
    return 0 if points >= 1 else 1
