"""Tables of the four scores: means over orders and seeds, by order, by seed, and deviations over the seeds of one order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from anchorlora.methods import METHODS
from anchorlora.methods.entry import GROUPS, OUTSIDE
from anchorlora.pages.labels import order_label, paper_order
from anchorlora.pages.table import Better, Column, Table
from anchorlora.scores import Paired
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.paired_tests import mean_interval
from anchorlora_lab.report.published import MISTRAL, printed_by_order, printed_of_seed, printed_score, printed_seed_sd
from anchorlora_lab.report.records import Run, by_method, mean_of
from anchorlora_lab.report.tables.paper import beside
from anchorlora_lab.report.tables.pivot import METHOD, ORDER, Measure, N, average, by_run, pivot, spread
from anchorlora_lab.report.tables.references import LEVELS, References

BETTER: dict[str, Better] = {"AA": "higher", "LA": "higher", "BWT": "higher", "FM": "lower"}
UNITS_NOTE = "AA and LA in percent, BWT and FM in percentage points."
Printed = Callable[[str, str], float | None]  # of a method and a score


def score(run: Run, name: str) -> float | None:
    """Return AA, LA, BWT, or FM of a run."""
    return getattr(run.record.scores, name)


def main_table(runs: Sequence[Run], others: Sequence[Run] = ()) -> Table:
    """AA, BWT, and FM of each method: means over all its runs.

    Args:
        runs: Runs of one study.
        others: Runs beside it, for the rows of references.

    Example:
        >>> from anchorlora_lab.report.tables import Column, Table
        >>> from anchorlora_lab.report.writers import markdown
        >>> columns = (Column("method"), Column("AA", better="higher"))
        >>> print(markdown(Table("main", "Scores", columns, (("sfor", 80.45), ("o-lora-hard", 81.3)))))
        ### Scores
        <BLANKLINE>
        | method      |        AA |
        |-------------|-----------|
        | sfor        |   *80.45* |
        | o-lora-hard | **81.30** |
        <BLANKLINE>
    """
    scores, compared = ("AA", "BWT", "FM"), Grid.of(runs).is_paper
    return score_table("main", "Scores", runs, scores, printed=_of_all_orders, compared=compared, others=others)


def complete_table(runs: Sequence[Run], others: Sequence[Run] = ()) -> Table:
    """The main table with learning accuracy (LA) added.

    Args:
        runs: Runs of one study.
        others: Runs beside it, for the rows of references.
    """
    title, compared = "Scores with learning accuracy", Grid.of(runs).is_paper
    return score_table("complete", title, runs, tuple(BETTER), printed=_of_all_orders, compared=compared, others=others)


def score_table(
    name: str,
    title: str,
    runs: Sequence[Run],
    scores: Sequence[str],
    *,
    printed: Printed,
    compared: bool,
    others: Sequence[Run] = (),
) -> Table:
    """Means of scores over each method's runs; over a single order also standard deviations over its seeds."""
    grid, references = Grid.of(runs), References.of(runs, others)
    sd = grid.one_order and len(grid.seeds) > 1
    intervals = {
        (each, kind): [of(grid.of_method(method), name=each) for method in grid.methods]
        for each in (scores if name != "main" else ("AA",))  # the main table is printed in terminals, too
        for kind, of in INTERVALS.items()
    }
    intervals = {key: found for key, found in intervals.items() if any(found)}
    measures: list[Measure[Run]] = []
    for score_name in scores:
        measures += [(Column(score_name, better=BETTER[score_name]), average(partial(score, name=score_name)))]
        measures += [(Column(f"{score_name} sd"), spread(partial(score, name=score_name)))] if sd else []
        measures += [
            (Column(f"{each} 95 % {kind}"), partial(_ends, at=dict(zip(grid.methods, found, strict=True)), signed=each == "BWT"))
            for (each, kind), found in intervals.items()
            if each == score_name
        ]
    title = f"{title}: means over {_amount(len(grid.orders), 'order')} and {_amount(len(grid.seeds), 'seed')}"
    groups, runs_column = map(grid.of_method, grid.methods), (Column("runs"), lambda mine: grid.count(mine[0].method))
    table = pivot(name, title, groups, [METHOD, runs_column, *measures], UNITS_NOTE, grid.partial)
    table = table.noting("sd: sample standard deviation (ddof 1) over the seeds." if sd else "", grid.note, tuned_note(runs))
    table = table.noting(*(INTERVAL_NOTES[kind] for kind in INTERVALS if any(each == kind for _, each in intervals)))
    table = references.mark(table, [unlearned(references, grid.of_method(method)) for method in grid.methods])
    table = grouped(references.below(table))
    if not compared:
        return table
    theirs = {score_name: [printed(method, score_name) for method in grid.methods] for score_name in scores}
    return beside(table, theirs, runs)


def interval_over_runs(runs: Sequence[Run], *, name: str = "AA") -> tuple[float, float] | None:
    """Return the 95 % interval of a mean score over orders and seeds; None for fewer than six runs, or where it is undefined."""
    found = [score(run, name) for run in runs]
    known = [value for value in found if value is not None]
    return mean_interval(known) if len(known) == len(found) else None


def interval_over_examples(
    runs: Sequence[Run], others: Sequence[Run] = (), *, name: str = "AA", level: float = 0.95
) -> tuple[float, float] | None:
    """Return the interval of a mean score, or of its difference from another method's, over test examples."""
    ours, theirs = by_example(runs, name), by_example(others, name) if others else {}
    if not ours or theirs is None or (theirs and theirs.keys() != ours.keys()):
        return None
    before = [theirs.get(place, 0.0) for place in ours]
    return Paired(before, list(ours.values()), tasks=[task for task, _ in ours]).interval(level=level)


def by_example(runs: Sequence[Run], name: str) -> dict[tuple[str, int], float] | None:
    """Return what each test example (task, index) gives to a score: the score is the mean over tasks of their examples' means.

    BWT is that of AA - LA, times N / (N - 1) for N tasks. FM asks for the answers after every task, which `Run.answers` lacks.
    """
    if name == "BWT":
        last, first = by_example(runs, "AA"), by_example(runs, "LA")
        tasks = len({task for task, _ in last or ()})
        if not last or not first or tasks < 2:
            return None
        return {place: (last[place] - first[place]) * tasks / (tasks - 1) for place in last}
    answered = [run.answers.get(name) for run in runs]
    known = [answers for answers in answered if answers]
    if not known or len(known) < len(answered) or any(answers.keys() != known[0].keys() for answers in known):
        return None
    return {place: 100 * sum(answers[place] for answers in known) / len(known) for place in known[0]}


def ends(interval: tuple[float, float] | None, *, signed: bool = False) -> str | None:
    """Return an interval as text."""
    form = "+.2f" if signed else ".2f"
    return None if interval is None else f"{interval[0]:{form}} to {interval[1]:{form}}"


def _ends(runs: Sequence[Run], *, at: Mapping[str, tuple[float, float] | None], signed: bool) -> str | None:
    return ends(at[runs[0].method], signed=signed)


INTERVALS: dict[str, Callable[..., tuple[float, float] | None]] = {
    "runs": interval_over_runs,
    "examples": interval_over_examples,
}
INTERVAL_NOTES = {
    "runs": "95 % runs: interval of the mean over orders and seeds, which assumes only symmetry (six runs at least).",
    "examples": "95 % examples: interval of the same mean over test examples (bootstrap within each task).",
}


def grouped(table: Table) -> Table:
    """Return a table of methods with the groups of the paper's main table; references and methods of one's own come last."""
    named = [str(row[0]) for row in table.rows]
    groups: dict[str, list[int]] = {name: [] for name in (*GROUPS, ALONE)}
    for i, name in enumerate(named):
        groups[ALONE if name in LEVELS else METHODS[name].entry.group if name in METHODS else OUTSIDE].append(i)
    return replace(table, groups=tuple((name, tuple(rows)) for name, rows in groups.items() if rows))


ALONE = "No continual learning"


def tuned_note(runs: Sequence[Run]) -> str:
    """Return a sentence on the strengths that were selected for these runs, beside those that the paper printed its values for."""
    told = []
    for method, mine in by_method(runs).items():
        tuned: Any = mine[0].record.protocol.get("tuned")
        tunable = METHODS[method].entry.tunable if method in METHODS else None
        printed_at = {tunable.parameter: tunable.printed_at} if tunable and tunable.printed_at is not None else {}
        for name, value in tuned.items() if isinstance(tuned, dict) else ():
            at = f" (the paper prints its values for {printed_at[name]:g})" if printed_at.get(name, value) != value else ""
            told.append(f"{method} at {name} {value:g}{at}" if isinstance(value, (int, float)) else f"{method} at {name} {value}")
    return f"Selected on a holdout: {'; '.join(told)}." if told else ""


def unlearned(references: References, runs: Sequence[Run]) -> frozenset[str]:
    """Return the scores whose means over some runs show no learning."""
    return references.unlearned(*(mean_of(score(run, name) for run in runs) for name in ("AA", "LA")))


def order_table(runs: Sequence[Run], others: Sequence[Run] = ()) -> Table:
    """AA of each method by order: means over the order's seeds; "all": mean over all runs.

    Args:
        runs: Runs of one study.
        others: Runs beside it, for the rows of references.
    """
    grid, references = Grid.of(runs), References.of(runs, others)
    names = [order_label(order) for order in grid.orders]
    printed = {name: [printed_by_order(m, name) for m in grid.methods] for name in names}
    orders: list[tuple[str, tuple[str, ...] | None]] = [*zip(names, grid.orders, strict=True), ("all", None)]
    measures: list[Measure[Run]] = [
        METHOD,
        (Column("seeds"), lambda mine: "+".join(str(sum(run.order == order for run in mine)) for order in grid.orders)),
        *((Column(name, better="higher"), partial(_mean_aa, order=order)) for name, order in orders),
    ]
    if grid.is_paper:
        printed["all"] = [printed_by_order(method, "avg") for method in grid.methods]
    note = "Percent. seeds: number of seeds behind each order's mean" + ("." if grid.one_order else "; all: mean over all runs.")
    groups = [grid.of_method(method) for method in grid.methods]
    table = pivot("by-order", "AA by order", groups, measures, note, grid.partial).noting(grid.note, tuned_note(runs))
    for name, order in orders:
        found = [[run for run in grid.of_method(method) if order in (None, run.order)] for method in grid.methods]
        table = references.mark(table, [unlearned(references, mine) for mine in found], {"AA": name})
    table = grouped(references.below(table))
    return beside(table.without("all") if grid.one_order else table, printed, runs)


def seed_table(runs: Sequence[Run]) -> Table:
    """The scores of every run.

    Args:
        runs: Runs of one study.
    """
    grid = Grid.of(runs)
    measures: list[Measure[Run]] = [(Column(name), lambda mine, name=name: score(mine[0], name)) for name in BETTER]  # type: ignore[misc]
    listed = [run for method in grid.methods for run in grid.of_method(method)]
    printed = {name: [_of_seed(run, name) for run in listed] for name in BETTER}
    references = References.of(runs)
    table = by_run("by-seed", "Scores of every run", grid, measures, UNITS_NOTE).noting(grid.note)
    table = references.mark(table, [unlearned(references, [run]) for run in listed])
    return beside(table, printed, runs, printed_on=MISTRAL)


def deviation_table(runs: Sequence[Run]) -> Table:
    """Sample standard deviations of the scores over the seeds of one order.

    Args:
        runs: Runs of one study.
    """
    grid = Grid.of(runs)
    groups = [[r for r in grid.of_method(m) if r.order == order] for m in grid.methods for order in grid.orders]
    groups = [mine for mine in groups if mine]
    measures = [METHOD, ORDER, N, *((Column(f"{name} sd"), spread(partial(score, name=name))) for name in BETTER)]
    printed = {f"{name} sd": [_seed_sd(mine[0], name) for mine in groups] for name in BETTER}
    short = frozenset(i for i, mine in enumerate(groups) if len(mine) < len(grid.seeds))
    note = "Percentage points; sample standard deviation (ddof 1) over the n seeds of one order."
    references = References.of(runs)
    table = pivot("seed-sd", "Standard deviations over seeds", groups, measures, note, short).noting(grid.note)
    table = references.mark(table, [unlearned(references, mine) for mine in groups], {name: f"{name} sd" for name in BETTER})
    return beside(table, printed, runs)


def _mean_aa(runs: Sequence[Run], *, order: tuple[str, ...] | None) -> float | None:
    return mean_of(score(run, "AA") for run in runs if order in (None, run.order))


def _of_all_orders(method: str, name: str) -> float | None:
    return printed_score("standard_cl_qwen3_8b", method, name)


def _of_seed(run: Run, name: str) -> float | None:
    return printed_of_seed(run.method, run.seed, name) if paper_order(run.order) == "order1" else None


def _seed_sd(run: Run, name: str) -> float | None:
    order = paper_order(run.order)
    return printed_seed_sd(run.method, order, name) if order else None


def _amount(n: int, what: str) -> str:
    return f"{n} {what}{'s' if n > 1 else ''}"
