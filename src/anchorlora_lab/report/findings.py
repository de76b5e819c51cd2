"""Findings of a study's runs, in plain words, and what to do: computed from their records, with claims only where an interval
supports them.

A difference of two methods counts where paired runs show it (`paired_tests`), or, for fewer than six pairs, where the interval over
test examples excludes zero; both are corrected for all pairs of methods, since each could have come out highest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from anchorlora.pages.record import paper_order
from anchorlora.text import amount
from anchorlora_lab.report.comparability import Study
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.layout import value_of
from anchorlora_lab.report.paired_tests import LEVEL, paired_tests
from anchorlora_lab.report.records import Run, by_method, mean, mean_of
from anchorlora_lab.report.tables.references import References, exact_methods, unprotected_method
from anchorlora_lab.report.tables.scores import interval_over_examples, interval_over_runs

State = Literal["good", "bad", "even", ""]
Over = Literal["runs", "examples"]


@dataclass(frozen=True)
class Level:
    """The mean of a score over a method's runs; percent, forgetting in percentage points."""

    method: str
    score: str
    mean: float
    interval: tuple[float, float] | None  # at 95 %
    over: Over | None  # what the interval is over
    seeds: tuple[int, ...]  # of all runs


@dataclass(frozen=True)
class Difference:
    """The mean of a method's score less another's, paired by order and seed, in percentage points."""

    method: str
    other: str
    score: str
    mean: float
    interval: tuple[float, float] | None
    over: Over | None
    p: float | None  # corrected for all pairs of methods, of an interval over runs
    seeds: tuple[int, ...]  # of all pairs

    @property
    def shown(self) -> bool | None:
        """True if the method is higher; None where nothing could show it."""
        return None if self.interval is None else self.interval[0] > 0 and (self.p is None or self.p < 1 - LEVEL)


@dataclass(frozen=True)
class BoundaryCounts:
    """At how many task boundaries of a method's runs rho counts as zero."""

    method: str
    promised: bool
    exact: int
    boundaries: int
    rho: float | None  # mean


@dataclass(frozen=True)
class Finding:
    """One finding."""

    about: str  # what it is about, in a few words
    words: str
    more: str = ""  # what it rests on
    state: State = ""  # "good", "bad", "even" (not decided), or "" for a plain fact
    facts: tuple[Level | Difference | BoundaryCounts, ...] = ()  # what the words say, as data


@dataclass(frozen=True)
class Findings:
    """The verdict, findings and advice that a chapter begins with."""

    verdict: str  # one or two sentences
    cards: tuple[Finding, ...]  # what the verdict rests on
    advice: tuple[str, ...]  # what to take, and what is missing


def findings_of(study: Study) -> Findings:
    """Return what a study shows."""
    return _of_trace(study.runs) if study.kind == "trace" else _of_sequences(study)


def _of_sequences(study: Study) -> Findings:
    runs, grid = study.runs, Grid(study.runs)
    learned = dict(sorted(_comparable(study, "AA").items(), key=lambda item: -_aa(item[1])))  # from the highest mean
    asked = study.layout.reference if study.layout.reference in grid.methods else None
    plain = asked or unprotected_method(runs)
    protection, forgetting = _protection(runs), _forgetting(study, plain)
    if not learned:
        what = "No method can be ranked: each lacks runs, or learned no more than the majority label."
        return Findings(what, tuple(filter(None, (protection, forgetting))), tuple(_missing(study, {})))
    top = next(iter(learned))
    differences = _differences(top, learned)
    higher = {difference.other: difference.shown for difference in differences}
    apart, close, unknown = ([method for method, known in higher.items() if known is which] for which in (True, False, None))
    cards = [_highest(learned[top], differences, apart, close, unknown), protection, forgetting]
    verdict = [f"{top} ends {'highest with' if higher else 'at'} {_aa(learned[top]):.1f} % mean accuracy over all tasks"]
    if apart:
        verdict.append(
            f", higher than {'all ' + str(len(apart)) + ' others' if len(apart) == len(higher) > 1 else _names(apart, 3)}"
        )
    if close:
        verdict.append(f"{'; ' if apart else ', but '}{_names(close, 3)} may be as good")
    verdict.append(". ")
    forgotten, lost = _fm(learned[top]), _fm(grid.of_method(plain)) if plain and plain != top else None
    if forgotten is not None and lost is not None:
        without = f"With {asked}" if asked else f"Without protection ({plain})"
        verdict.append(f"{without}, earlier tasks {_lose(lost)}; with {top}, {_lose(forgotten, after=lost)}.")
    elif forgotten is not None:
        verdict.append(f"Earlier tasks {_lose(forgotten)}.")
    advice = (*_choices(learned, higher), *_missing(study, higher))
    return Findings("".join(verdict).strip(), tuple(filter(None, cards)), advice)


def _comparable(study: Study, score: str) -> dict[str, list[Run]]:
    """The methods that lack no runs and whose score shows that they have learned."""
    grid, references = Grid(study.runs), References.of(study.runs, study.others)
    whole = {method: grid.of_method(method) for i, method in enumerate(grid.methods) if i not in grid.partial}
    return {method: group for method, group in whole.items() if score not in references.unlearned(group)}


def _differences(top: str, ranked: dict[str, list[Run]]) -> list[Difference]:
    """Of every other method, how much higher the highest is."""
    others = [method for method in ranked if method != top]
    at = {method: {(run.order, run.seed): run.record.scores.AA for run in group} for method, group in ranked.items()}
    pairs = [*((top, method) for method in others), *combinations(others, 2)]
    changes = [{where: at[one][where] - at[other][where] for where in at[one]} for one, other in pairs]
    tests = paired_tests(changes)[: len(others)] if changes else []
    seeds, differences = tuple(seed for _, seed in at[top]), []
    for method, test in zip(others, tests, strict=True):
        shown: tuple[tuple[float, float] | None, Over | None, float | None] = test.interval, "runs", test.adjusted
        if test.interval is None:
            interval = interval_over_examples(ranked[top], ranked[method], level=1 - (1 - LEVEL) / len(pairs))
            shown = interval, "examples" if interval else None, None
        differences.append(Difference(top, method, "AA", test.mean, *shown, seeds))
    return differences


def _level(runs: Sequence[Run], name: str = "AA") -> Level | None:
    """A score of a method, with its interval over runs or, of too few, over examples; None where it is undefined."""
    known = [(run.seed, value) for run in runs if (value := value_of(run, name)) is not None]
    if not known:
        return None
    over_runs, over_examples = interval_over_runs(runs, name=name), interval_over_examples(runs) if name == "AA" else None
    over: Over | None = "runs" if over_runs else "examples" if over_examples else None
    middle, seeds = mean([value for _, value in known]), tuple(seed for seed, _ in known)
    return Level(runs[0].method, name, middle, over_runs or over_examples, over, seeds)


def _highest(
    top: Sequence[Run], differences: Sequence[Difference], apart: Sequence[str], close: Sequence[str], unknown: Sequence[str]
) -> Finding:
    level = _level(top)
    assert level is not None  # every run has AA
    interval, over = level.interval, amount(len(top), "run") if level.over == "runs" else "test examples"
    more = [f"95 % interval {interval[0]:.1f} to {interval[1]:.1f} over {over}." if interval else "No interval: too few runs."]
    more += [f"Higher than {_names(apart, 6)}."] if apart else []
    more += [f"Not told apart: {_names(close, 6)}."] if close else []
    more += [f"It cannot be compared with {_names(unknown, 6)}: too few runs, and no predictions next to them."] if unknown else []
    if level.over != "runs" and (apart or close):
        more.append("This is tested over examples; other seeds and orders may differ.")
    alone = not (apart or close or unknown)
    state: State = "" if alone else "even" if close or unknown else "good"
    about = "Accuracy at the end" if alone else "Highest at the end"
    return Finding(about, f"{level.method}: {level.mean:.1f} %", " ".join(more), state, (level, *differences))


def promises_response(run: Run) -> bool:
    """Return whether the run's method promises ΔW V = 0."""
    return "response" in run.record.method.preserves


def _protection(runs: Sequence[Run]) -> Finding | None:
    """Finding on whether rho counts as zero at every task boundary, of methods that promise it and of the others."""
    methods = {method: group for method, group in by_method(runs).items() if any(run.record.drift for run in group)}
    if not methods:
        return None
    facts = {method: _boundaries(group) for method, group in methods.items()}
    exact = [m for m, fact in facts.items() if fact.exact == fact.boundaries]
    broken = [m for m, fact in facts.items() if fact.promised and m not in exact]
    known = {m: fact.rho for m, fact in facts.items() if m not in exact and m not in broken and fact.rho is not None}
    more = []
    if broken:
        counts = "; ".join(f"{m}: {facts[m].exact} of {facts[m].boundaries} boundaries, rho {facts[m].rho:.1e}" for m in broken)
        words, state = f"Broken by {_names(broken, 3)}", "bad"
        more.append(f"They promise that a new task does not touch protected directions, but: {counts}.")
    elif exact:
        who = _names(exact, 3) if len(exact) <= 3 else f"{len(exact)} methods"
        words, state = f"{who} {'leave' if len(exact) > 1 else 'leaves'} protected directions alone", "good"
    else:
        words, state = "No method leaves protected directions alone", ""
    if exact:
        boundaries = sum(facts[m].boundaries for m in exact)
        more.append(f"The share rho counts as zero at all {boundaries} task boundaries of {_names(exact, 8)}.")
    if known:
        least, most = min(known, key=lambda m: known[m]), max(known, key=lambda m: known[m])
        spread = f"{known[least]:.0%} ({least}) to {known[most]:.0%} ({most})" if least != most else f"{known[most]:.0%} ({most})"
        more.append(f"For the other methods, which make no such promise, {spread} of each change lies on them.")
    return Finding("Protection", words, " ".join(more).replace("%", " %"), state, tuple(facts.values()))  # type: ignore[arg-type]


def _boundaries(runs: Sequence[Run]) -> BoundaryCounts:
    kept = [drift.exact for run in runs for drift in run.record.drift]
    rho = mean_of(drift.rho for run in runs for drift in run.record.drift)
    return BoundaryCounts(runs[0].method, promises_response(runs[0]), sum(kept), len(kept), rho)


def _forgetting(study: Study, plain: str | None) -> Finding | None:
    """Finding on how much of earlier tasks methods forget, beside the unprotected one or the reference."""
    runs = study.runs
    facts = {method: fact for method, group in by_method(runs).items() if (fact := _level(group, "FM"))}
    lost = {method: fact.mean for method, fact in facts.items()}
    if not lost:
        return None
    ranked = [method for method in _comparable(study, "FM") if method in lost]
    least = min(ranked, key=lambda m: lost[m], default=None)

    def level(method: str) -> str:
        interval = facts[method].interval
        return f"{method} {lost[method]:.1f}" + (f" ({interval[0]:.1f} to {interval[1]:.1f})" if interval else "")

    words = "No method can be ranked"
    if least is not None:
        forgets = f"{least} forgets {lost[least]:.1f} points"
        words = f"{least} forgets nothing: earlier tasks {_lose(lost[least])}" if _gains(lost[least]) else forgets
    words += ", the least" if len(ranked) > 1 and least is not None and not _gains(lost[least]) else ""
    shown = [method for method in dict.fromkeys([plain, *exact_methods(runs)[:3], least]) if method in lost and method is not None]
    more = f"Drop of earlier tasks from their best accuracy, in points: {'; '.join(map(level, shown))}."
    if len(lost) > len(shown):
        more += " All methods stand in the tables."
    return Finding("Forgetting", words, more, facts=tuple(facts.values()))


def _choices(ranked: dict[str, list[Run]], higher: dict[str, bool | None]) -> list[str]:
    """Which method to take when: for each kind of adapter, and where protection must be exact; none where intervals overlap."""
    if not higher:
        return []
    advice, top = [], next(iter(ranked))
    every = [run for group in ranked.values() for run in group]
    for grows, kind in enumerate(KINDS):  # blocks that are folded into one adapter keep its size
        names = [method for method in ranked if ranked[method][0].record.method.grows == grows]
        if len(names) > 1:
            first = next((m for m in names if not ranked[m][0].record.method.rehearses), names[0])
            close = _as_good(first, [name for name in names if _aa(ranked[name]) <= _aa(ranked[first])], ranked)
            lost = _fm(ranked[first])
            forgets = (
                "nothing to forget" if lost is None else "nothing forgotten" if _gains(lost) else f"{lost:.1f} points forgotten"
            )
            take = f"take {first} ({_aa(ranked[first]):.1f} %, {forgets})"
            advice.append(f"{kind}: {UNDECIDED.format(_names([first, *close], 4)) if close else take}.")
    exact = [method for method in exact_methods(every) if method in ranked]
    if exact and exact[0] != top:
        close, level = _as_good(exact[0], exact, ranked), _aa(ranked[exact[0]])
        costs = f", which costs {_aa(ranked[top]) - level:.1f} points" if higher[exact[0]] else ""
        use = UNDECIDED.format(_names([exact[0], *close], 4)) if close else f"use {exact[0]} ({level:.1f} %){costs}"
        advice.append(f"If protected directions must not move at all: {use}.")
    return advice


UNDECIDED = "these runs do not decide between {}"


def _as_good(first: str, names: Sequence[str], ranked: Mapping[str, list[Run]]) -> list[str]:
    """The methods that these runs do not show to be lower than the first."""
    others = _differences(first, {name: ranked[name] for name in (first, *names)})
    return [difference.other for difference in others if difference.shown is not True]


KINDS = ("One adapter that keeps its size, without old examples", "A new block for each task")


def _missing(study: Study, higher: dict[str, bool | None]) -> list[str]:
    """Sentences about what these runs cannot say, and what would."""
    runs, grid, notes = study.runs, Grid(study.runs), []
    if grid.size < 6:
        over = "one run" if grid.size == 1 else f"{grid.size} runs"
        seeds = "Other seeds and orders are not covered" if grid.size == 1 else "Six are needed for an interval over runs"
        more = " --orders order1,order2" if grid.orders and paper_order(grid.orders[0]) else ""  # others have names of their own
        notes.append(f"Each mean is over {over}. {seeds}: add them with anchorlora grid --seeds 38,42,2026{more}.")
    if grid.partial:
        short = [grid.methods[i] for i in sorted(grid.partial)]
        notes.append(f"Not compared, because runs are missing: {_names(short, 8)}. Repeat the anchorlora grid command to run them.")
    if any(known is None for known in higher.values()) and grid.size < 6:
        notes.append("Keep predictions.jsonl next to the records: without them there is no interval over test examples.")
    references = References.of(runs, study.others)
    poor = [method for method in grid.methods if "LA" in references.unlearned(grid.of_method(method))]
    if poor:
        notes.append(f"{_names(poor, 8)}: learned no more than the majority label; raise the learning rate or train longer first.")
    if references.line is None and any(rate is not None for run in runs for row in run.record.invalid for rate in row):
        notes.append("The records do not count labels, so nothing shows whether a score is above guessing.")
    if len(runs[0].order) > 1 and unprotected_method(runs) is None:
        notes.append("There is no unprotected method to compare with; run seq-lora to see how much there is to protect.")
    if len(grid.methods) == 1 and unprotected_method(runs) is not None:
        notes.append("Only the unprotected method was run; run sfor or o-lora-hard as well.")
    return notes


def _of_trace(runs: Sequence[Run]) -> Findings:
    """Of a mechanism trace: where rho ends."""
    ends = {method: [run.trace[-1] for run in group] for method, group in by_method(runs).items()}
    exact = [method for method, points in ends.items() if all(point.exact for point in points)]
    rho = {m: mean_of(point.rho for point in points) for m, points in ends.items() if m not in exact}
    known = {m: value for m, value in rho.items() if value is not None}
    broken = [m for m, group in by_method(runs).items() if m not in exact and promises_response(group[0])]
    sentence = f"{_names(exact, 4)} {'leave' if len(exact) > 1 else 'leaves'} the first task's directions alone" if exact else ""
    if known:
        low, high = min(known.values()), max(known.values())
        share = f"{100 * low:.0f} to {100 * high:.0f} %" if len(known) > 1 else f"{100 * high:.0f} %"
        who = "the others" if exact else _names(list(known), 4)
        others = f"of {who}, {share} of the change lies on the first task's directions"
        sentence = f"{sentence}; {others}" if sentence else others[0].upper() + others[1:]
    steps = max(point.step for points in ends.values() for point in points)
    chance = mean_of(point.chance for points in ends.values() for point in points)
    beside = "" if chance is None else f"; chance is {100 * chance:.0f} %"
    more = f"After {steps} optimizer steps on the second task{beside}."
    words = f"Broken by {_names(broken, 3)}" if broken else "Every promise holds" if exact else "Nothing is protected"
    state: State = "bad" if broken else "good" if exact else ""
    seeds = len({run.seed for run in runs})
    advice = () if seeds >= 6 else (f"{amount(seeds, 'seed')}: too few for an interval over runs, which needs six.",)
    return Findings(f"{sentence}.", (Finding("Protection step by step", words, more, state),), advice)


def _gains(lost: float) -> bool:
    """True if forgetting is negative, to the digit that is printed."""
    return lost <= -0.05


def _lose(lost: float, *, after: float | None = None) -> str:
    """Return what earlier tasks lose or gain; `after` is of a method just named, whose verb is not repeated."""
    if after is not None and _gains(lost) == _gains(after):
        return f"{abs(lost):.1f}"
    return f"{'they ' if after is not None else ''}{'gain' if _gains(lost) else 'lose'} {abs(lost):.1f} points"


def _aa(runs: Sequence[Run]) -> float:
    return mean([run.record.scores.AA for run in runs])


def _fm(runs: Sequence[Run]) -> float | None:
    return mean_of(run.record.scores.FM for run in runs)


def _names(methods: Sequence[str], most: int) -> str:
    """Names as words: a, b and c; of more, how many."""
    if len(methods) > most:
        return f"{', '.join(methods[: most - 1])} and {len(methods) - most + 1} more"
    return " and ".join(part for part in (", ".join(methods[:-1]), methods[-1]) if part)
