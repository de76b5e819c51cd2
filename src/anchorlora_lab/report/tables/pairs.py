"""Tables that isolate one change: paired differences of two methods at the same order and seed, and each family's components."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from anchorlora.methods import METHODS
from anchorlora.pages.labels import order_label, paper_order
from anchorlora.pages.table import DAGGER, Column, Table, Value
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.layout import value_of
from anchorlora_lab.report.paired_tests import PairedTest, paired_tests
from anchorlora_lab.report.published import MISTRAL, printed_learning_change, printed_pair, printed_score
from anchorlora_lab.report.records import Run, mean_of
from anchorlora_lab.report.tables.paper import beside
from anchorlora_lab.report.tables.references import PLAIN, References
from anchorlora_lab.report.tables.scores import BETTER, ends, interval_over_examples, score_table, unlearned

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
        mine, theirs = value_of(self.one, name), value_of(self.other, name)
        return None if mine is None or theirs is None else mine - theirs


def pair_name(one: str, other: str) -> str:
    """Return "one - other"."""
    return f"{one} - {other}"


def pairs_of(runs: Sequence[Run]) -> list[Pair]:
    """Return the paper's comparisons, in its order: every order and seed at which both methods ran."""
    grid = Grid.of(runs)
    return [pair for one, other in PAIRS for pair in pairs_between(grid, one, other)]


def pairs_between(grid: Grid, one: str, other: str) -> list[Pair]:
    """Return the runs of two methods at the same order and seed."""
    places = [(order, seed) for order in grid.orders for seed in grid.seeds]
    both = [(grid.there.get((one, *place)), grid.there.get((other, *place))) for place in places]
    return [Pair(mine, theirs) for mine, theirs in both if mine and theirs]


def paired_table(runs: Sequence[Run]) -> Table:
    """Differences of AA, BWT, and FM: one row per pair of runs, then their mean."""
    groups: list[Group] = []
    for name, mine in _by_name(runs).items():
        groups += [((name, order_label(pair.one.order), pair.one.seed), [pair], True) for pair in mine]
        groups.append(((name, "mean", f"n = {len(mine)}"), mine, False))
    note = (
        "Percentage points, first method minus second at the same order and seed; "
        "positive AA and BWT and negative FM favor the first."
    )
    table = Table("paired", "Paired differences", tuple(map(Column, ("difference", "order", "seed"))), (), note)
    return _filled(table, groups, DIFFERENCES, lambda pair, score: printed_pair(pair.name, pair.one.seed, score), runs)


def learning_table(runs: Sequence[Run]) -> Table:
    """Differences of learning accuracy in each pair: means over the seeds of an order, and over all."""
    groups: list[Group] = []
    for name, mine in _by_name(runs).items():
        orders = dict.fromkeys(pair.one.order for pair in mine)
        for order in orders:
            same = [pair for pair in mine if pair.one.order == order]
            groups.append(((name, order_label(order), len(same)), same, True))
        groups += [((name, "all", len(mine)), mine, False)] if len(orders) > 1 else []
    note = "Percentage points, mean over the pairs of runs at the same order and seed; negative: the first method learned less."
    seeds = len(Grid.of(runs).seeds)
    partial = frozenset(i for i, (_, mine, one_order) in enumerate(groups) if one_order and len(mine) < seeds)
    columns = tuple(map(Column, ("difference", "order", "pairs")))
    table = Table("learning", "Differences in learning accuracy", columns, (), note, partial)
    return _filled(table, groups, ("LA",), lambda pair, _: printed_learning_change(pair.name), runs)


Group = tuple[tuple[Value, ...], Sequence[Pair], bool]  # the first cells of a row, its pairs, and whether they have one order


def _by_name(runs: Sequence[Run]) -> dict[str, list[Pair]]:
    pairs: dict[str, list[Pair]] = {}
    for pair in pairs_of(runs):
        pairs.setdefault(pair.name, []).append(pair)
    return pairs


def _filled(
    table: Table, groups: Sequence[Group], scores: Sequence[str], printed: Callable[[Pair, str], float | None], runs: Sequence[Run]
) -> Table:
    """The table with a row of mean differences for each group of pairs, marked, and the paper's beside those in order1."""
    references = References.of(runs)
    columns = (*table.columns, *(Column(name, signed=True) for name in scores))
    rows = tuple((*cells, *(mean_of(pair.change(name) for pair in mine) for name in scores)) for cells, mine, _ in groups)
    table = replace(table, columns=columns, rows=rows).noting(_missing(runs))
    table = references.mark(table, [_unlearned(references, mine) for _, mine, _ in groups])
    own = [one_order and paper_order(mine[0].one.order) == "order1" for _, mine, one_order in groups]
    theirs = {
        name: [printed(mine[0], name) if has else None for (_, mine, _), has in zip(groups, own, strict=True)] for name in scores
    }
    return beside(table, theirs, runs, printed_on=MISTRAL)


def compared(grid: Grid, reference: str | None = None) -> list[tuple[str, str]]:
    """Return which methods are compared: all others with the reference or, without one, those that are declared.

    Declared are the paper's pairs, then each method with those that its catalog entry names. A method that is not in the catalog is
    compared with those of the study that it extends: all of their parts, in their order, are among its own, and no other of them
    has more.
    """
    if reference in grid.methods:
        return [(method, reference) for method in grid.methods if method != reference]
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


def comparisons(runs: Sequence[Run], reference: str | None = None) -> dict[tuple[str, str, str], PairedTest]:
    """Test every comparison of two methods that ran at the same orders and seeds, corrected for their number."""
    grid = Grid.of(runs)
    changes: dict[tuple[str, str, str], dict[tuple[tuple[str, ...], int], float]] = {}
    for one, other in compared(grid, reference):
        pairs = pairs_between(grid, one, other)
        for name in TESTED:
            found = {(p.one.order, p.one.seed): change for p in pairs if (change := p.change(name)) is not None}
            if found:
                changes[one, other, name] = found
    return dict(zip(changes, paired_tests(list(changes.values())), strict=True)) if changes else {}


def comparison_table(runs: Sequence[Run], reference: str | None = None) -> Table | None:
    """Mean paired differences with intervals and tests, corrected for the number of comparisons."""
    found, references, grid = comparisons(runs, reference), References.of(runs), Grid.of(runs)
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


def _unlearned(references: References, pairs: Sequence[Pair]) -> frozenset[str]:
    """A difference of two scores means something where both methods learned."""
    return unlearned(references, [pair.one for pair in pairs]) | unlearned(references, [pair.other for pair in pairs])


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


def shared_components(runs: Sequence[Run], others: Sequence[Run] = ()) -> Table:
    """Projected displacement and a frozen B, alone and together; over all orders."""
    methods = components_of("shared")
    mine = [run for run in runs if run.method in methods]
    printed, title = partial(printed_score, "projected_family_components_qwen3_8b"), "Components of the shared adapter"
    how: Any = {"printed": printed, "compared": Grid.of(mine).is_paper, "others": _plain(runs, others)}
    table = score_table("components-shared", title, mine, tuple(BETTER), **how)
    told = "The paper's projected-lora and sfor are means over three orders; for the other two it does not say."
    beside = any(column.heading.endswith(" paper") for column in table.columns)
    return _in_paper_order(table.noting_printed(told) if beside else table, methods)


def cumulative_components(runs: Sequence[Run], others: Sequence[Run] = ()) -> Table:
    """Retraction, both projections, and the effective penalty; on order1 alone if it was run, as in the paper."""
    methods = components_of("cumulative")
    mine = [run for run in runs if run.method in methods]
    first = [run for run in mine if paper_order(run.order) == "order1"]
    printed, title = partial(printed_score, "olora_components_qwen3_8b_order1"), "Components of one block per task"
    how: Any = {"printed": printed, "compared": bool(first), "others": _plain(runs, others)}
    table = score_table("components-cumulative", title, first or mine, tuple(BETTER), **how)
    return _in_paper_order(table, methods, "Only order1, as in the paper." if first and len(first) < len(mine) else "")


def components_of(family: str) -> tuple[str, ...]:
    """Return the methods of a family that the paper's table of components has."""
    return tuple(name for name, method in METHODS.items() if method.entry.component and method.plan.family == family)


def _plain(runs: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    """Runs for the rows of references: the study's whose first tasks were trained alone are not among the components."""
    return [*(run for run in runs if run.method == PLAIN), *others]


def _in_paper_order(table: Table, methods: Sequence[str], told: str = "") -> Table:
    """The rows as the paper has them; methods that were not run are named."""
    there = [str(row[0]) for row in table.rows if row[0] in methods]
    absent = [method for method in methods if method not in there]
    missing = f"Not run: {', '.join(absent)}." if absent else ""
    below = range(len(there), len(table.rows))  # references, which stay where they are
    places = [*sorted(range(len(there)), key=lambda i: methods.index(there[i])), *below]
    return table.arranged(places).noting(told, missing)
