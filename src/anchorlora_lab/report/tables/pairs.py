"""Tables that isolate one change: paired differences of two methods at the same order and seed, and each family's components."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anchorlora.methods import METHODS
from anchorlora.pages.labels import order_label, paper_order
from anchorlora.pages.table import DAGGER, Column, Table, Value
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.paired_tests import PairedTest, paired_tests
from anchorlora_lab.report.published import MISTRAL, printed_learning_change, printed_pair, printed_score
from anchorlora_lab.report.records import Run, mean_of
from anchorlora_lab.report.tables.paper import beside
from anchorlora_lab.report.tables.references import PLAIN, References
from anchorlora_lab.report.tables.scores import ends, interval_over_examples, score, score_table, unlearned

PAIRS = tuple((name, method.entry.paired_with) for name, method in METHODS.items() if method.entry.paired_with)  # the paper's
DIFFERENCES = ("AA", "BWT", "FM")
TESTED = ("AA", "LA", "FM")  # BWT says almost the same as FM


@dataclass(frozen=True)
class Pair:
    """Two runs that differ in method alone."""

    one: Run
    other: Run

    @property
    def name(self) -> str:
        """The pair as "one - other"."""
        return pair_name(self.one.method, self.other.method)

    def change(self, name: str) -> float | None:
        """Return the score of `one` minus the score of `other`, in percentage points; None if either is undefined."""
        mine, theirs = score(self.one, name), score(self.other, name)
        return None if mine is None or theirs is None else mine - theirs


def pair_name(one: str, other: str) -> str:
    """Return "one - other"."""
    return f"{one} - {other}"


def pairs_of(runs: Sequence[Run]) -> list[Pair]:
    """Return the paper's comparisons, in its order: every order and seed at which both methods ran.

    Args:
        runs: Runs of one study.
    """
    grid = Grid.of(runs)
    return [pair for one, other in PAIRS for pair in pairs_between(grid, one, other)]


def pairs_between(grid: Grid, one: str, other: str) -> list[Pair]:
    """Return the runs of two methods at the same order and seed."""
    places = [(order, seed) for order in grid.orders for seed in grid.seeds]
    both = [(grid.there.get((one, *place)), grid.there.get((other, *place))) for place in places]
    return [Pair(mine, theirs) for mine, theirs in both if mine and theirs]


def paired_table(runs: Sequence[Run]) -> Table:
    """Differences of AA, BWT, and FM: one row per pair of runs, then their mean.

    Args:
        runs: Runs of one study.
    """
    pairs, references = pairs_of(runs), References.of(runs)
    rows: list[tuple[Value, ...]] = []
    marks: list[frozenset[str]] = []
    printed: dict[str, list[float | None]] = {name: [] for name in DIFFERENCES}
    for name in dict.fromkeys(pair.name for pair in pairs):
        mine = [pair for pair in pairs if pair.name == name]
        rows += [(name, order_label(p.one.order), p.one.seed, *(p.change(s) for s in DIFFERENCES)) for p in mine]
        rows.append((name, "mean", f"n = {len(mine)}", *(mean_of(p.change(s) for p in mine) for s in DIFFERENCES)))
        marks += [*(_unlearned(references, [p]) for p in mine), _unlearned(references, mine)]
        for s in DIFFERENCES:
            printed[s] += [*(_printed(p, s) for p in mine), None]
    columns = (Column("difference"), Column("order"), Column("seed"), *(Column(s, signed=True) for s in DIFFERENCES))
    note = (
        "Percentage points, first method minus second at the same order and seed; "
        "positive AA and BWT and negative FM favor the first."
    )
    table = references.mark(Table("paired", "Paired differences", columns, tuple(rows), note).noting(_missing(runs)), marks)
    return beside(table, printed, runs, printed_on=MISTRAL)


def compared(grid: Grid) -> list[tuple[str, str]]:
    """Return which methods are compared: the paper's pairs first, then each method with those that its catalog entry names.

    A method that is not in the catalog is compared with those of the study that it extends: all of their parts, in their order, are
    among its own, and no other of them has more.
    """
    pairs = [*PAIRS, *((name, other) for name, method in METHODS.items() for other in method.compared_with)]
    parts = {name: grid.of_method(name)[0].record.method.parts for name in grid.methods}
    for name in grid.methods:
        if name not in METHODS:
            shorter = [other for other in parts if len(parts[other]) < len(parts[name]) and _within(parts[other], parts[name])]
            longest = max((len(parts[other]) for other in shorter), default=0)
            pairs += [(name, other) for other in shorter if len(parts[other]) == longest]
    return list(dict.fromkeys(pairs))


def _within(few: Sequence[str], many: Sequence[str]) -> bool:
    """Whether all of the few are among the many, in their order."""
    left = iter(many)
    return all(part in left for part in few)


def comparisons(runs: Sequence[Run]) -> dict[tuple[str, str, str], PairedTest]:
    """Test every declared comparison of two methods that ran at the same orders and seeds, corrected for their number.

    Args:
        runs: Runs of one study.

    Returns:
        The method, the other method, and AA, LA, or FM -> the test of their paired differences.
    """
    grid = Grid.of(runs)
    changes: dict[tuple[str, str, str], dict[tuple[tuple[str, ...], int], float]] = {}
    for one, other in compared(grid):
        pairs = pairs_between(grid, one, other)
        for name in TESTED:
            found = {(p.one.order, p.one.seed): change for p in pairs if (change := p.change(name)) is not None}
            if found:
                changes[one, other, name] = found
    return dict(zip(changes, paired_tests(list(changes.values())), strict=True)) if changes else {}


def comparison_table(runs: Sequence[Run]) -> Table | None:
    """Mean paired differences with intervals and tests, corrected for the number of comparisons.

    Args:
        runs: Runs of one study.

    Returns:
        The table; None if no declared comparison has both of its methods.
    """
    found, references, grid = comparisons(runs), References.of(runs), Grid.of(runs)
    if not found:
        return None
    tested = any(test.interval for test in found.values())
    rows: list[tuple[Value, ...]] = []
    unjudged, covered = set(), False
    for (one, other, name), test in found.items():
        pairs = pairs_between(grid, one, other)
        for what in ("BWT", name) if name == "FM" and not tested else (name,):  # BWT has an interval over examples, FM has none
            over_examples = interval_over_examples([p.one for p in pairs], [p.other for p in pairs], name=what)
            if what != name and over_examples is None:
                continue
            covered = covered or over_examples is not None
            intervals = ends(test.interval, signed=True), ends(over_examples, signed=True)
            shares = (test.p, test.adjusted) if test.interval else (None, None)  # too few pairs could reject nothing
            if what in _unlearned(references, pairs):
                unjudged.add((len(rows), "mean"))
            rows.append((pair_name(one, other), what, test.n, mean_of(pair.change(what) for pair in pairs), *intervals, *shares))
    first = (Column("difference"), Column("score"), Column("pairs"), Column("mean", signed=True))
    columns = (*first, Column("95 % runs"), Column("95 % examples"), Column("p", "g"), Column("p adjusted", "g"))
    note = "Percentage points, first method minus second at the same order and seed. "
    if tested:
        note += (
            "95 % runs: interval of the mean over orders and seeds, which assumes no distribution but symmetry (six pairs at "
            "least); p: share of all sign flips of the pairs with a mean as far from zero; p adjusted: corrected for all "
            f"{len(found)} comparisons (Westfall and Young's step-down, Holm's with the same flips for all). "
        )
    else:
        note += "Orders and seeds are too few for a test over runs, which takes six pairs. "
    if covered:
        note += "95 % examples: interval of the same mean over test examples (paired bootstrap within each task)."
    else:
        note += "Test examples are the same in all runs: other examples are not covered: no predictions are next to the records."
    table = Table("comparisons", "Comparisons", columns, tuple(rows), note)
    for heading in (*(() if tested else ("95 % runs", "p", "p adjusted")), *(() if covered else ("95 % examples",))):
        table = table.without(heading)
    if not unjudged:
        return table
    return replace(table, unlearned=frozenset(unjudged)).noting(f"{DAGGER}: one of the two shows no learning.")


def learning_table(runs: Sequence[Run]) -> Table:
    """Differences of learning accuracy in each pair: means over the seeds of an order, and over all.

    Args:
        runs: Runs of one study.
    """
    pairs, rows, references = pairs_of(runs), [], References.of(runs)
    printed: list[float | None] = []
    marks: list[frozenset[str]] = []
    for name in dict.fromkeys(pair.name for pair in pairs):
        mine = [pair for pair in pairs if pair.name == name]
        orders = list(dict.fromkeys(pair.one.order for pair in mine))
        for order in orders:
            changes = [pair.change("LA") for pair in mine if pair.one.order == order]
            rows.append((name, order_label(order), len(changes), mean_of(changes)))
            marks.append(_unlearned(references, [pair for pair in mine if pair.one.order == order]))
            printed.append(printed_learning_change(name) if paper_order(order) == "order1" else None)
        if len(orders) > 1:
            rows.append((name, "all", len(mine), mean_of(pair.change("LA") for pair in mine)))
            marks.append(_unlearned(references, mine))
            printed.append(None)
    columns = (Column("difference"), Column("order"), Column("pairs"), Column("LA", signed=True))
    note = "Percentage points, mean over the pairs of runs at the same order and seed; negative: the first method learned less."
    partial = frozenset(i for i, row in enumerate(rows) if row[1] != "all" and row[2] < len(Grid.of(runs).seeds))
    table = Table("learning", "Differences in learning accuracy", columns, tuple(rows), note, partial).noting(_missing(runs))
    table = references.mark(table, marks)
    return beside(table, {"LA": printed}, runs, printed_on=MISTRAL)


def _unlearned(references: References, pairs: Sequence[Pair]) -> frozenset[str]:
    """A difference of two scores means something where both methods learned."""
    return unlearned(references, [pair.one for pair in pairs]) | unlearned(references, [pair.other for pair in pairs])


def _printed(pair: Pair, name: str) -> float | None:
    return printed_pair(pair.name, pair.one.seed, name) if paper_order(pair.one.order) == "order1" else None


def _missing(runs: Sequence[Run]) -> str:
    """The orders and seeds at which a comparison lacks one of its methods, or both."""
    grid = Grid.of(runs)
    gaps = [
        f"{pair_name(*pair)} at {order_label(order)}, seed {seed}"
        for pair in PAIRS
        if set(pair) <= set(grid.methods)
        for order in grid.orders
        for seed in grid.seeds
        if any((method, order, seed) not in grid.there for method in pair)
    ]
    return f"Missing pairs: {'; '.join(gaps)}." if gaps else ""


SCORES = ("AA", "LA", "BWT", "FM")


def shared_components(runs: Sequence[Run], others: Sequence[Run] = ()) -> Table:
    """Projected displacement and a frozen B, alone and together; over all orders.

    Args:
        runs: Runs of one study.
        others: Runs beside it, for the rows of references.
    """
    methods = components_of("shared")
    mine = _rows(runs, methods)

    def printed(method: str, name: str) -> float | None:
        """The paper's value."""
        return printed_score("projected_family_components_qwen3_8b", method, name)

    title, compared = "Components of the shared adapter", Grid.of(mine).is_paper
    table = score_table(
        "components-shared", title, mine, SCORES, printed=printed, compared=compared, others=(*_plain(runs), *others)
    )
    beside = any(column.heading.endswith(" paper") for column in table.columns)
    told = "The paper's projected-lora and sfor are means over three orders; for the other two it does not say."
    return _in_paper_order(table.noting_printed(told) if beside else table, methods, "")


def cumulative_components(runs: Sequence[Run], others: Sequence[Run] = ()) -> Table:
    """Retraction, gradient and displacement projection, and the effective penalty; on order1 alone, as in the paper, if it was run.

    Args:
        runs: Runs of one study.
        others: Runs beside it, for the rows of references.
    """
    methods = components_of("cumulative")
    rows = _rows(runs, methods)
    first = [run for run in rows if paper_order(run.order) == "order1"]
    mine = first or rows

    def printed(method: str, name: str) -> float | None:
        """The paper's value."""
        return printed_score("olora_components_qwen3_8b_order1", method, name)

    title, beside = "Components of one block per task", (*_plain(runs), *others)
    table = score_table("components-cumulative", title, mine, SCORES, printed=printed, compared=bool(first), others=beside)
    told = "Only order1, as in the paper." if first and len(first) < len(rows) else ""
    return _in_paper_order(table, methods, told)


def components_of(family: str) -> tuple[str, ...]:
    """Return the methods of a family that the paper's table of components has.

    Args:
        family: "shared" or "cumulative".
    """
    return tuple(name for name, method in METHODS.items() if method.entry.component and method.plan.family == family)


def _plain(runs: Sequence[Run]) -> list[Run]:
    """The study's runs whose first tasks were trained alone, which are not among the components."""
    return [run for run in runs if run.method == PLAIN]


def _rows(runs: Sequence[Run], methods: Sequence[str]) -> list[Run]:
    return [run for run in runs if run.method in methods]


def _in_paper_order(table: Table, methods: Sequence[str], told: str) -> Table:
    """The rows as the paper has them; methods that were not run are named."""
    there = [str(row[0]) for row in table.rows if row[0] in methods]
    absent = [method for method in methods if method not in there]
    missing = f"Not run: {', '.join(absent)}." if absent else ""
    below = range(len(there), len(table.rows))  # references, which stay where they are
    places = [*sorted(range(len(there)), key=lambda i: methods.index(there[i])), *below]
    partial = frozenset(places.index(i) for i in table.partial)
    unlearned = frozenset((places.index(i), heading) for i, heading in table.unlearned)
    rows = tuple(table.rows[i] for i in places)
    return replace(table, rows=rows, partial=partial, unlearned=unlearned, groups=()).noting(told, missing)
