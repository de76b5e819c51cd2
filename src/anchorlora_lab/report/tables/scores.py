"""Tables of the four scores: means over orders and seeds, by order, by seed, and deviations over the seeds of one order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from anchorlora.methods import METHODS
from anchorlora.methods.entry import GROUPS, OUTSIDE
from anchorlora.pages.record import order_label, paper_order
from anchorlora.pages.table import GROUP, Better, Column, Table
from anchorlora.scores import Paired
from anchorlora.text import amount
from anchorlora_lab.report import published
from anchorlora_lab.report.grid import METHOD, ORDER, SEED, Grid, Measure, N, average, by_methods, pivot, spread
from anchorlora_lab.report.layout import AS_IS, COLUMNS, NOTES, Layout, value_of
from anchorlora_lab.report.paired_tests import mean_interval
from anchorlora_lab.report.published import MISTRAL, QWEN, beside
from anchorlora_lab.report.records import Run, by_method, mean_of
from anchorlora_lab.report.tables.references import LEVELS, References

BETTER: dict[str, Better | None] = {name: COLUMNS[name].better for name in ("AA", "LA", "BWT", "FM")}
UNITS_NOTE = "AA and LA in percent, BWT and FM in percentage points."
OF_ORDER1 = "olora_components_qwen3_8b_order1"  # the paper's table of means over one order


def main_table(runs: Sequence[Run], others: Sequence[Run] = (), layout: Layout = AS_IS) -> Table:
    """AA, BWT, and FM of each method, or the columns that are asked for: means over all its runs."""
    return score_table("main", "Scores", runs, layout.columns or ("AA", "BWT", "FM"), others=others, layout=layout)


def complete_table(runs: Sequence[Run], others: Sequence[Run] = (), layout: Layout = AS_IS) -> Table:
    """The main table with learning accuracy (LA) added."""
    return score_table("complete", "Scores with learning accuracy", runs, tuple(BETTER), others=others, layout=layout)


def score_table(
    name: str,
    title: str,
    runs: Sequence[Run],
    scores: Sequence[str],
    *,
    others: Sequence[Run] = (),
    layout: Layout = AS_IS,
    printed_in: str = "standard_cl_qwen3_8b",
) -> Table:
    """Means of scores over each method's runs, with the spread that the layout names beside them; by default, standard deviations
    over the seeds of a single order, and intervals where there are any.
    """
    grid, references = Grid(runs), References.of(runs, others)
    over_seeds = layout.spread is None and grid.one_order and len(grid.seeds) > 1
    sd, reference = over_seeds or layout.spread == "sd", layout.reference if layout.reference in grid.methods else None
    intervals = {"none": (), "sd": (), "interval": scores}.get(layout.spread or "", ("AA",) if name == "main" else scores)
    measures: list[Measure] = []
    notes: list[str] = [NOTES[score] for score in scores if score in NOTES]
    for score in scores:
        value, column = partial(value_of, name=score), COLUMNS.get(score) or Column(score, better="higher")
        measures.append((column, average(value)))
        if sd:
            measures.append((replace(column, heading=f"{score} sd", better=None), spread(value)))
        for kind, of in INTERVALS.items() if score in intervals else ():
            spans = {method: ends(of(grid.of_method(method), name=score), signed=score == "BWT") for method in grid.methods}
            if any(spans.values()):
                measures.append((Column(f"{score} 95 % {kind}"), lambda group, spans=spans: spans[group[0].method]))  # type: ignore[misc]
                notes.append(NOTES[f"95 % {kind}"])
        if reference:
            column = replace(column, heading=f"{score} - {reference}", better=None, signed=True)
            measures.append((column, partial(_change, grid, reference, name=score)))
    if layout.spread == "interval" and not any("95 %" in column.heading for column, _ in measures):
        notes.append("95 % intervals take six runs of a method, or predictions next to the records.")
    if reference:
        notes.append(f"- {reference}: mean of the differences from it at the same order and seed.")
    title = f"{title}: means over {amount(len(grid.orders), 'order')} and {amount(len(grid.seeds), 'seed')}"
    note = UNITS_NOTE + (f" sd: sample standard deviation (ddof 1) over {'the seeds' if over_seeds else 'runs'}." if sd else "")
    table = by_methods(name, title, grid, measures, note).noting(tuned_note(runs), *dict.fromkeys(notes))
    table = references.below(references.mark(table, map(references.unlearned, grid.groups)))
    compared = grid.is_paper if printed_in != OF_ORDER1 else paper_order(grid.orders[0]) == "order1"
    paper = {score: [published.printed(printed_in, method, score) for method in grid.methods] for score in scores}
    return group_rows(beside(table, paper, runs) if compared else table, layout)


def _change(grid: Grid, reference: str, runs: Sequence[Run], *, name: str) -> float | None:
    """The mean of how much more a method has than the reference, over the orders and seeds at which both ran."""
    method = runs[0].method
    return mean_of(pair.change(name) for pair in grid.pairs(method, reference)) if method != reference else None


def interval_over_runs(runs: Sequence[Run], *, name: str = "AA") -> tuple[float, float] | None:
    """Return the 95 % interval of a mean score over orders and seeds; None for fewer than six runs, or where it is undefined."""
    known = [value for run in runs if (value := value_of(run, name)) is not None]
    return mean_interval(known) if len(known) == len(runs) else None


def interval_over_examples(
    runs: Sequence[Run], others: Sequence[Run] = (), *, name: str = "AA", level: float = 0.95
) -> tuple[float, float] | None:
    """Return the interval of a mean score, or of its difference from another method's, over test examples."""
    ours, baseline = by_example(runs, name), by_example(others, name) if others else {}
    if not ours or baseline is None or (baseline and baseline.keys() != ours.keys()):
        return None
    before = [baseline.get(example, 0.0) for example in ours]
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
        return {example: (last[example] - first[example]) * tasks / (tasks - 1) for example in last}
    known = [answers for run in runs if (answers := run.answers.get(name))]
    if not known or len(known) < len(runs) or any(answers.keys() != known[0].keys() for answers in known):
        return None
    return {example: 100 * sum(answers[example] for answers in known) / len(known) for example in known[0]}


def ends(interval: tuple[float, float] | None, *, signed: bool = False) -> str | None:
    """Return an interval as text."""
    form = "+.2f" if signed else ".2f"
    return None if interval is None else f"{interval[0]:{form}} to {interval[1]:{form}}"


INTERVALS = {"runs": interval_over_runs, "examples": interval_over_examples}


def group_rows(table: Table, layout: Layout = AS_IS) -> Table:
    """Return a table of methods in the groups that are asked for or, for LaTeX, in those of the paper's main table. References and
    methods that have no group come last. Groups that are asked for put the rows in their order and are a column.
    """
    asked = {method: name for name, methods in layout.groups.items() for method in methods}
    catalog = {} if asked else {name: method.entry.group for name, method in METHODS.items()}
    groups: dict[str, list[int]] = {name: [] for name in (*(layout.groups or GROUPS), OUTSIDE, ALONE)}
    for i, name in enumerate(str(row[0]) for row in table.rows):
        groups[ALONE if name in LEVELS else (asked or catalog).get(name, OUTSIDE)].append(i)
    if asked:
        table = table.arranged([i for rows in groups.values() for i in rows])
        group = [name for name, rows in groups.items() for _ in rows]
        groups = {name: [i for i, group_name in enumerate(group) if group_name == name] for name in groups}
        rows = tuple((name, *row) for name, row in zip(group, table.rows, strict=True))
        table = replace(table, columns=(Column(GROUP), *table.columns), rows=rows)
    return replace(table, groups=tuple((name, tuple(rows)) for name, rows in groups.items() if rows))


ALONE = "No continual learning"


def tuned_note(runs: Sequence[Run]) -> str:
    """Return what says which strengths were selected or set for these runs, beside those that the paper printed its values for."""
    by_origin: dict[str, list[str]] = {}
    for method, (first, *_) in by_method(runs).items():
        tuned, how = first.setting("tuned"), "Selected on a holdout" if first.setting("selection") else "Not as in the catalog"
        tunable = METHODS[method].entry.tunable if method in METHODS else None
        printed_at = {tunable.parameter: tunable.printed_at} if tunable and tunable.printed_at is not None else {}
        for name, value in tuned.items() if isinstance(tuned, dict) else ():
            at = f" (the paper prints its values for {printed_at[name]:g})" if printed_at.get(name, value) != value else ""
            number = f"{value:g}{at}" if isinstance(value, (int, float)) else value
            by_origin.setdefault(how, []).append(f"{method} at {name} {number}")
    return " ".join(f"{how}: {'; '.join(strengths)}." for how, strengths in by_origin.items())


def order_table(runs: Sequence[Run], others: Sequence[Run] = (), layout: Layout = AS_IS) -> Table:
    """AA of each method by order: means over the order's seeds; "all": mean over all runs."""
    grid, references = Grid(runs), References.of(runs, others)
    within = {order_label(order): {order} for order in grid.orders} | ({} if grid.one_order else {"all": set(grid.orders)})
    measures: list[Measure] = [
        METHOD,
        (Column("seeds"), lambda group: "+".join(str(sum(run.order == order for run in group)) for order in grid.orders)),
        *((Column(name, better="higher"), average(partial(_aa_within, orders=orders))) for name, orders in within.items()),
    ]
    note = "Percent. seeds: number of seeds behind each order's mean" + ("." if grid.one_order else "; all: mean over all runs.")
    table = pivot("by-order", "AA by order", grid.groups, measures, note, grid.partial).noting(grid.note, tuned_note(runs))
    for name, orders in within.items():
        within_orders = ([run for run in group if run.order in orders] for group in grid.groups)
        table = references.mark(table, map(references.unlearned, within_orders), {"AA": name})
    printed = {name: [published.printed_by_order(m, "avg" if name == "all" else name) for m in grid.methods] for name in within}
    table = beside(references.below(table), printed if grid.is_paper else {**printed, "all": []}, runs)
    return group_rows(table, layout)


def seed_table(runs: Sequence[Run]) -> Table:
    """The scores of every run."""
    grid = Grid(runs)
    measures = [METHOD, ORDER, SEED, *((Column(name), average(partial(value_of, name=name))) for name in BETTER)]
    groups = [[run] for group in grid.groups for run in group]
    table = pivot("by-seed", "Scores of every run", groups, measures, UNITS_NOTE).noting(grid.note)
    return _of_groups(table, groups, runs, _of_seed, {name: name for name in BETTER}, printed_on=MISTRAL)


def deviation_table(runs: Sequence[Run]) -> Table:
    """Sample standard deviations of the scores over the seeds of one order."""
    grid = Grid(runs)
    groups = [same for group in grid.groups for order in grid.orders if (same := [run for run in group if run.order == order])]
    measures = [METHOD, ORDER, N, *((Column(f"{name} sd"), spread(partial(value_of, name=name))) for name in BETTER)]
    short = frozenset(i for i, group in enumerate(groups) if len(group) < len(grid.seeds))
    table = pivot("seed-sd", "Standard deviations over seeds", groups, measures, partial=short).noting(grid.note)
    return _of_groups(table, groups, runs, _seed_sd, {name: f"{name} sd" for name in BETTER})


def _of_groups(
    table: Table,
    groups: Sequence[Sequence[Run]],
    runs: Sequence[Run],
    printed: Callable[[Run, str], float | None],
    headings: Mapping[str, str],
    printed_on: str = QWEN,
) -> Table:
    """A table of scores, marked, with the paper's values of each group beside them."""
    paper = {heading: [printed(group[0], name) for group in groups] for name, heading in headings.items()}
    references = References.of(runs)
    return beside(references.mark(table, map(references.unlearned, groups), headings), paper, runs, printed_on=printed_on)


def _aa_within(run: Run, *, orders: set[tuple[str, ...]]) -> float | None:
    return value_of(run, "AA") if run.order in orders else None


def _of_seed(run: Run, name: str) -> float | None:
    return published.printed_of_seed("per_seed", run.method, run.seed, name) if paper_order(run.order) == "order1" else None


def _seed_sd(run: Run, name: str) -> float | None:
    return published.printed_seed_sd(run.method, paper_order(run.order), name)
