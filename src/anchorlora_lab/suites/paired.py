"""A task before and after: its metrics, the change with its paired standard error, and the answers that flipped.

    d_q     value with the adapter minus value of the base model, on question q; both answer the same questions
    change  sum over tasks of w_t mean_q(d_q)                  one task: w = 1; a group: by size or equal, as lm_eval weights it
    error   sqrt(sum over tasks of w_t^2 var(d_q) / n_t)       sample variance; undefined where a task has one question

Two independent standard errors would add up instead, although most answers do not change; the paired one is what the change has.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from anchorlora.errors import InvalidValue
from anchorlora.scores import Paired
from anchorlora_lab.suites.evaluation import Change, Flips, MetricChange, Score, TaskChange, TaskScores

SAYS_FRACTION = {"acc", "accuracy", "em", "exact", "f1", "match"}  # words in the names of metrics that are fractions
ROUNDING = 1e-9


def task_change(name: str, base: TaskScores, after: TaskScores) -> TaskChange:
    """Return a task before and after. The primary metric is the first fraction whose name says so (acc, exact_match,
    prompt_level_strict_acc), else the first.
    """
    fractions = [metric for metric in after.metrics if metric in base.metrics and _is_fraction(metric, base, after)]
    if not fractions:
        raise InvalidValue(
            f"the task {name} cannot be scored in percent: no metric of it is a fraction of 1 ({', '.join(after.metrics)}); "
            "choose another task"
        )
    primary = next((metric for metric in fractions if SAYS_FRACTION & set(re.split(r"[^a-z0-9]+|_", metric.lower()))), fractions[0])
    metrics = {metric: _change(metric, base, after) for metric in fractions}
    parts = {
        part: Change(n=p.n, base=100 * base.parts[part].scores[primary], after=100 * p.scores[primary])
        for part, p in after.parts.items()
        if primary in p.scores and primary in base.parts[part].scores
    }
    asked: dict[str, Any] = {"task": name, "metric": primary, "n": after.n, "num_fewshot": after.num_fewshot}
    return TaskChange(**asked, **dict(metrics[primary]), flips=_flips(primary, base, after), metrics=metrics, parts=parts)


def _is_fraction(metric: str, *measured: TaskScores) -> bool:
    scores = [m.metrics[metric].score for m in measured]
    scores += [v for m in measured for values in m.values.values() for v in values.get(metric, ()) if v is not None]
    return all(-ROUNDING <= value <= 1 + ROUNDING for value in scores)


def _change(metric: str, base: TaskScores, after: TaskScores) -> MetricChange:
    before, now = _percent(base.metrics[metric]), _percent(after.metrics[metric])
    error = _paired_error(metric, base, after)
    return MetricChange(base=before, after=now, change=now.score - before.score, change_stderr=error)


def _percent(score: Score) -> Score:
    return Score(score=100 * score.score, stderr=None if score.stderr is None else 100 * score.stderr)


def _pairs(metric: str, base: TaskScores, after: TaskScores) -> Paired | None:
    """The values of each task's questions, before and after; None if a task has none or other questions."""
    before: list[float] = []
    now: list[float] = []
    tasks: list[str] = []
    for task in after.values:
        old, new = base.values.get(task, {}).get(metric), after.values[task].get(metric)
        if old is None and new is None:
            continue  # a group may have tasks without the metric
        if old is None or new is None or len(old) != len(new):
            return None
        both = [(a, b) for a, b in zip(old, new, strict=True) if a is not None and b is not None]
        if not both:
            return None
        before += [a for a, _ in both]
        now += [b for _, b in both]
        tasks += [task] * len(both)
    return Paired(before, now, tasks) if tasks else None


def _paired_error(metric: str, base: TaskScores, after: TaskScores) -> float | None:
    """In percentage points; None where the scores are no means of the values, or a task has one question."""
    pairs = _pairs(metric, base, after)
    sizes = Counter(pairs.tasks or ()) if pairs is not None else Counter()
    if pairs is None or min(sizes.values()) < 2:
        return None
    for weights in ({task: size / pairs.n for task, size in sizes.items()}, dict.fromkeys(sizes, 1 / len(sizes))):
        sides = ((base, pairs.before), (after, pairs.after))
        if all(_is_mean(measured.metrics[metric].score, pairs.by_task(values), weights) for measured, values in sides):
            return 100 * pairs.standard_error(weights)
    return None


def _is_mean(score: float, values: Mapping[Hashable, Sequence[float]], weights: Mapping[Hashable, float]) -> bool:
    mean = sum(weights[task] * statistics.fmean(part) for task, part in values.items())
    return math.isclose(mean, score, abs_tol=ROUNDING)


def _flips(metric: str, base: TaskScores, after: TaskScores) -> Flips | None:
    pairs = _pairs(metric, base, after)
    turned = pairs.flips if pairs is not None else None
    return None if turned is None else Flips(right_to_wrong=len(turned.lost), wrong_to_right=len(turned.gained))
