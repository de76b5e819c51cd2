"""Tables that isolate one change: paired differences of two methods at the same order and seed, and each family's components."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from anchorlora.methods import METHODS
from anchorlora.pages.record import order_label, paper_order
from anchorlora.pages.table import Column, Table, Value
from anchorlora_lab.report.grid import Grid, Pair
from anchorlora_lab.report.layout import NOTES
from anchorlora_lab.report.paired_tests import PairedTest, paired_tests
from anchorlora_lab.report.published import MISTRAL, beside, printed_learning_change, printed_of_seed
from anchorlora_lab.report.records import Family, Run, mean_of
from anchorlora_lab.report.tables.references import PLAIN, References
from anchorlora_lab.report.tables.scores import BETTER, OF_ORDER1, ends, interval_over_examples, score_table

PAIRS = tuple((name, method.entry.paired_with) for name, method in METHODS.items() if method.entry.paired_with)  # the paper's
DIFFERENCES = ("AA", "BWT", "FM")
TESTED = ("AA", "LA", "FM")  # BWT says almost the same as FM


def pairs_of(runs: Sequence[Run]) -> dict[str, list[Pair]]:
    """Return the paper's comparisons by name, in its order: every order and seed at which both methods ran."""
    grid = Grid(runs)
    return {pairs[0].name: pairs for names in PAIRS if (pairs := grid.pairs(*names))}


def paired_table(runs: Sequence[Run]) -> Table | None:
    """Differences of AA, BWT, and FM: one row per pair of runs, then their mean."""
    groups: list[Group] = []
    for name, pairs in pairs_of(runs).items():
        groups += [((name, order_label(pair.one.order), pair.one.seed), [pair], True) for pair in pairs]
        groups.append(((name, "mean", f"n = {len(pairs)}"), pairs, False))
    table = Table("paired", "Paired differences", tuple(map(Column, ("difference", "order", "seed"))), (), NOTES["paired"])
    return _fill(table, groups, DIFFERENCES, lambda pair, score: printed_of_seed("paired", pair.name, pair.one.seed, score), runs)


def learning_table(runs: Sequence[Run]) -> Table | None:
    """Differences of learning accuracy in each pair: means over the seeds of an order, and over all."""
    groups: list[Group] = []
    for name, pairs in pairs_of(runs).items():
        orders = dict.fromkeys(pair.one.order for pair in pairs)
        for order in orders:
            same = [pair for pair in pairs if pair.one.order == order]
            groups.append(((name, order_label(order), len(same)), same, True))
        groups += [((name, "all", len(pairs)), pairs, False)] if len(orders) > 1 else []
    seeds = len(Grid(runs).seeds)
    partial = frozenset(i for i, (_, pairs, one_order) in enumerate(groups) if one_order and len(pairs) < seeds)
    columns = tuple(map(Column, ("difference", "order", "pairs")))
    table = Table("learning", "Differences in learning accuracy", columns, (), NOTES["learning"], partial)
    return _fill(table, groups, ("LA",), lambda pair, _: printed_learning_change(pair.name), runs)


Group = tuple[tuple[Value, ...], Sequence[Pair], bool]  # the first cells of a row, its pairs, and whether they have one order


def _fill(
    table: Table, groups: Sequence[Group], scores: Sequence[str], printed: Callable[[Pair, str], float | None], runs: Sequence[Run]
) -> Table | None:
    """The table with a row of mean differences for each group of pairs, marked, and the paper's beside those in order1."""
    if not groups:
        return None
    references = References.of(runs)
    columns = (*table.columns, *(Column(name, signed=True) for name in scores))
    rows = tuple((*cells, *(mean_of(pair.change(name) for pair in pairs) for name in scores)) for cells, pairs, _ in groups)
    table = replace(table, columns=columns, rows=rows).noting(_missing(runs))
    table = references.mark(table, [_unlearned(references, pairs) for _, pairs, _ in groups])
    own = [one_order and paper_order(pairs[0].one.order) == "order1" for _, pairs, one_order in groups]
    paper = {
        name: [printed(pairs[0], name) if has else None for (_, pairs, _), has in zip(groups, own, strict=True)] for name in scores
    }
    return beside(table, paper, runs, printed_on=MISTRAL)


def methods_to_compare(grid: Grid, reference: str | None = None) -> list[tuple[str, str]]:
    """Return which methods are compared: all with the reference or, without one, the paper's pairs and those that catalog entries
    name.

    A method outside the catalog is compared with the largest methods of the study whose parts, in order, are all among its own.
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
    """Return whether all of the few are among the many, in their order."""
    left = iter(many)
    return all(part in left for part in few)


def comparisons(runs: Sequence[Run], reference: str | None = None) -> dict[tuple[str, str, str], PairedTest]:
    """Test every comparison of two methods that ran at the same orders and seeds, corrected for their number."""
    grid = Grid(runs)
    changes: dict[tuple[str, str, str], dict[tuple[tuple[str, ...], int], float]] = {}
    for one, other in methods_to_compare(grid, reference):
        pairs = grid.pairs(one, other)
        for name in TESTED:
            differences = {(p.one.order, p.one.seed): change for p in pairs if (change := p.change(name)) is not None}
            if differences:
                changes[one, other, name] = differences
    return dict(zip(changes, paired_tests(list(changes.values())), strict=True)) if changes else {}


def comparison_table(runs: Sequence[Run], reference: str | None = None) -> Table | None:
    """Mean paired differences with intervals and tests, corrected for the number of comparisons."""
    tests, references, grid = comparisons(runs, reference), References.of(runs), Grid(runs)
    if not tests:
        return None
    tested = any(test.interval for test in tests.values())
    rows: list[tuple[Value, ...]] = []
    unjudged, covered = set(), False
    for (one, other, name), test in tests.items():
        pairs = grid.pairs(one, other)
        for what in ("BWT", name) if name == "FM" and not tested else (name,):  # BWT has an interval over examples, FM has none
            over_examples = interval_over_examples([p.one for p in pairs], [p.other for p in pairs], name=what)
            if what != name and over_examples is None:
                continue
            covered = covered or over_examples is not None
            intervals = ends(test.interval, signed=True), ends(over_examples, signed=True)
            shares = (test.p, test.adjusted) if test.interval else (None, None)  # too few pairs could reject nothing
            if what in _unlearned(references, pairs):
                unjudged.add((len(rows), "mean"))
            rows.append((f"{one} - {other}", what, test.n, mean_of(pair.change(what) for pair in pairs), *intervals, *shares))
    first = (Column("difference"), Column("score"), Column("pairs"), Column("mean", signed=True))
    columns = (*first, Column("95 % runs"), Column("95 % examples"), Column("p", "g"), Column("p adjusted", "g"))
    runs_note = NOTES["comparisons over runs" if tested else "comparisons of few runs"].format(comparisons=len(tests))
    examples_note = NOTES["comparisons over examples" if covered else "comparisons without predictions"]
    table = Table("comparisons", "Comparisons", columns, tuple(rows), NOTES["comparisons"]).noting(runs_note, examples_note)
    for heading in (*(() if tested else ("95 % runs", "p", "p adjusted")), *(() if covered else ("95 % examples",))):
        table = table.without(heading)
    if not unjudged:
        return table
    return replace(table, unlearned=frozenset(unjudged)).noting(NOTES["comparisons without learning"])


def _unlearned(references: References, pairs: Sequence[Pair]) -> frozenset[str]:
    """A difference of two scores means something where both methods learned."""
    return references.unlearned([pair.one for pair in pairs]) | references.unlearned([pair.other for pair in pairs])


def _missing(runs: Sequence[Run]) -> str:
    """The orders and seeds at which a comparison lacks one of its methods, or both."""
    grid = Grid(runs)
    gaps = [
        f"{' - '.join(pair)} at {order_label(order)}, seed {seed}"
        for pair in PAIRS
        if set(pair) <= set(grid.methods)
        for order, seed in product(grid.orders, grid.seeds)
        if any((method, order, seed) not in grid.there for method in pair)
    ]
    return f"Missing pairs: {'; '.join(gaps)}." if gaps else ""


# family -> how its components are called, where the paper has them, and what it says of them
FAMILY_COMPONENTS: dict[Family, tuple[str, str, str]] = {
    "shared": (
        "Components of the shared adapter",
        "projected_family_components_qwen3_8b",
        "The paper's projected-lora and sfor are means over three orders; for the other two it does not say.",
    ),
    "cumulative": ("Components of one block per task", OF_ORDER1, ""),
}


def component_table(runs: Sequence[Run], family: Family, others: Sequence[Run] = ()) -> Table | None:
    """Methods of a family that differ in single parts: shared ones over all orders, blocks on order1 if it was run."""
    title, printed_in, sentence = FAMILY_COMPONENTS[family]
    of_family = {name: method.entry for name, method in METHODS.items() if method.plan.family == family}
    methods = tuple(name for name, entry in of_family.items() if entry.traced or entry.component)
    components = [run for run in runs if run.method in methods]
    if len({run.method for run in components}) < 2:
        return None
    first = [run for run in components if paper_order(run.order) == "order1"] if family == "cumulative" else []
    only = "Only order1, as in the paper." if first and len(first) < len(components) else ""
    # rows of references: the study's runs whose first tasks were trained alone are not among the components
    plain = [*(run for run in runs if run.method == PLAIN), *others]
    table = score_table(f"components-{family}", title, first or components, tuple(BETTER), others=plain, printed_in=printed_in)
    beside = sentence and any(column.heading.endswith(" paper") for column in table.columns)
    return _in_paper_order(table.noting_printed(sentence) if beside else table, methods, only)


def _in_paper_order(table: Table, methods: Sequence[str], sentence: str = "") -> Table:
    """The rows as the paper has them; methods that were not run are named."""
    there = [str(row[0]) for row in table.rows if row[0] in methods]
    absent = [method for method in methods if method not in there]
    missing = f"Not run: {', '.join(absent)}." if absent else ""
    below = range(len(there), len(table.rows))  # references, which stay where they are
    places = [*sorted(range(len(there)), key=lambda i: methods.index(there[i])), *below]
    return table.arranged(places).noting(sentence, missing)
