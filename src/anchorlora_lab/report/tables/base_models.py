"""The same comparison on several base models, over the seeds of one order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from anchorlora.pages.record import order_label, paper_order
from anchorlora.pages.table import Column, Table, Value
from anchorlora_lab.report.comparability import OF_TOKENS, Study, footnote, model_labels, model_of, refuse_unlike
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.layout import NOTES, value_of
from anchorlora_lab.report.published import CROSS, DELTA, MISTRAL, QWEN, any_printed, is_papers_own, printed, printed_by_order
from anchorlora_lab.report.records import Run, by_method, deviation_of, group_by, mean_of
from anchorlora_lab.report.tables.mechanism import DRAWS, METHODS, rank_correlation
from anchorlora_lab.report.tables.references import References
from anchorlora_lab.report.tables.scores import BETTER, by_example, ends

Row = tuple[str, list[Run]]  # a base model's label, and the runs of one method on it
SCORES = ("AA", "BWT", "FM")
RANKED = ("AA", "LA", "BWT", "FM")
OWN = ("recipe", "base_model", "protocol.base_model", *OF_TOKENS)  # what comes with a base model: its name, its tokenizer
PRINTED = f"paper: the published values, in rows of its own base models ({QWEN}, {MISTRAL}) with the same data. {DELTA}"


def base_model_tables(studies: Sequence[Study]) -> list[Table]:
    """For every set of tasks that several base models learned in a common order: means, deviations, and whether they agree."""
    table_sets = [_tables(cells) for cells in runs_by_base_model(studies)]
    numbered = len(table_sets) > 1
    return [table.called(f"{table.name}-{i}") if numbered else table for i, tables in enumerate(table_sets, 1) for table in tables]


def runs_by_base_model(studies: Sequence[Study]) -> list[dict[str, list[Run]]]:
    """Return, for every set of tasks that several base models were trained on, their runs of the first order that all share."""
    comparisons, sequences = [], [study for study in studies if study.kind == "sequence"]
    for group in group_by(sequences, lambda study: tuple(sorted(study.runs[0].order))).values():
        common = set.intersection(*({run.order for run in study.runs} for study in group))
        if common and len({model_of(study.runs[0]) for study in group}) > 1:
            order = next(order for order in Grid([run for study in group for run in study.runs]).orders if order in common)
            comparisons.append({label: [r for r in study.runs if r.order == order] for label, study in _labels(group).items()})
            refuse_unlike([run for runs in comparisons[-1].values() for run in runs], axes=OWN)
    return comparisons


def _tables(cells: dict[str, list[Run]]) -> list[Table]:
    """Over the seeds of one order: one row per base model and method."""
    every = [run for runs in cells.values() for run in runs]
    order = every[0].order
    rows = [(label, group) for label, runs in cells.items() for group in by_method(runs).values()]
    seeds = Grid(every).seeds
    note = " ".join(filter(None, (_absent(cells, seeds), footnote(every))))
    partial = frozenset(i for i, (_, group) in enumerate(rows) if len(group) < len(seeds))
    where = f"{order_label(order)}, seeds {', '.join(map(str, seeds))}"
    whole = [row for i, row in enumerate(rows) if i not in partial]
    agreement = _agreement(whole, f"Whether base models agree: {where}")
    means = _table("base-models", f"Base models: {where}", rows, "", partial)
    deviations = _table("base-models-sd", f"Base models, standard deviations: {where}", rows, " sd", partial)
    return [means.noting(note), deviations.noting(note), *agreement]


def _table(called: str, title: str, rows: Sequence[Row], sd: str, partial: frozenset[int]) -> Table:
    """Means of scores, or with sd " sd" their deviations, one row per base model and method, with the paper's beside them."""
    of = deviation_of if sd else mean_of
    columns = (Column(f"{name}{sd}", better=None if sd else BETTER[name]) for name in SCORES)
    cells = tuple(
        (runs[0].method, label, len(runs), *(of(value_of(run, name) for run in runs) for name in SCORES)) for label, runs in rows
    )
    headings = (Column("method"), Column("base model"), Column("n"), *columns)
    table = Table(called, title, headings, cells, NOTES[called], partial, within=None if sd else "base model")
    references = References.of([run for _, runs in rows for run in runs])  # levels of the test examples, which are the same for all
    table = table if sd else references.mark(table, [references.unlearned(runs) for _, runs in rows])
    values = {f"{name}{sd}": [_paper_value(runs[0], name, sd) for _, runs in rows] for name in SCORES}
    return table.beside(values).noting_printed(PRINTED) if any_printed(values) else table


def _agreement(rows: Sequence[Row], title: str) -> list[Table]:
    """Of each two base models, whether they put the methods that both have in one order; nothing for a handful of methods."""
    references = References.of([run for _, group in rows for run in group])
    groups = {label: {group[0].method: group for _, group in own} for label, own in group_by(rows, lambda row: row[0]).items()}
    unfit = {(label, group[0].method, name) for label, group in rows for name in references.unlearned(group)}
    cells: list[tuple[Value, ...]] = []
    for (one, ours), (other, others) in combinations(groups.items(), 2):
        for name in RANKED:
            methods = [m for m in ours if m in others and not {(one, m, name), (other, m, name)} & unfit]
            if len(methods) < METHODS:
                continue
            means = [[mean_of(value_of(run, name) for run in of[method]) for method in methods] for of in (ours, others)]
            x, y = ([value for value in row if value is not None] for row in means)
            correlation = rank_correlation(x, y) if len(x) == len(y) == len(methods) else None
            if correlation is not None:
                drawn = _bootstrap_means([[of[method] for method in methods] for of in (ours, others)], name)
                compared = (None, None) if drawn is None else _agreement_of_draws(*drawn)
                cells.append((f"{one}, {other}", name, len(methods), correlation[0], *compared))
    if not cells:
        return []
    known = (Column("base models"), Column("score"), Column("methods"), Column("Spearman", signed=True))
    columns = (*known, Column("95 % examples"), Column("one way, of pairs told apart"))
    note = NOTES["base-models-order"]
    if unfit:
        left = [f"{name} of {method} on {label}" for label, method, name in sorted(unfit) if name in RANKED]
        note += f" Left out, as it shows no learning: {', '.join(left)}."
    return [Table("base-models-order", title, columns, tuple(cells), note)]


def _bootstrap_means(groups: Sequence[Sequence[Sequence[Run]]], name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Bootstrap means of a score on two base models (draws, methods); None unless all runs have answers to the same examples."""
    answered = [[by_example(runs, name) for runs in methods] for methods in groups]
    known = [shares for methods in answered for shares in methods if shares]
    if len(known) < len(answered[0]) + len(answered[1]) or any(shares.keys() != known[0].keys() for shares in known):
        return None
    rng, tasks = np.random.default_rng(0), list(dict.fromkeys(task for task, _ in known[0]))
    sums = [np.zeros((DRAWS, len(methods))) for methods in answered]
    for task in tasks:
        places = [key for key in known[0] if key[0] == task]
        weights = rng.multinomial(len(places), [1 / len(places)] * len(places), size=DRAWS) / len(places)
        for means, methods in zip(sums, answered, strict=True):
            means += weights @ np.array([[shares[key] for shares in methods if shares] for key in places]) / len(tasks)
    one, other = (means.round(9) for means in sums)  # equal shares of right answers are equal, whatever order they were added in
    return one, other


def _agreement_of_draws(one: np.ndarray, other: np.ndarray) -> tuple[str | None, str]:
    """The interval of the rank correlation, and how many of the pairs of methods that both tell apart have one sign."""
    draws = [r[0] for x, y in zip(one, other, strict=True) if (r := rank_correlation(x, y))]  # but where all are alike
    reach = [float(end) for end in np.quantile(draws, (0.025, 0.975))]
    signs = []
    for i, j in combinations(range(one.shape[1]), 2):
        limits = [np.quantile(m[:, i] - m[:, j], (0.025, 0.975)) for m in (one, other)]
        if all(least > 0 or most < 0 for least, most in limits):
            signs.append((limits[0][0] > 0) == (limits[1][0] > 0))
    return ends((reach[0], reach[1]), signed=True), f"{sum(signs)} of {len(signs)}"


def _paper_value(run: Run, name: str, sd: str) -> float | None:
    """The paper's value in the first order: for the first base model AA alone, for the second deviations, too."""
    if paper_order(run.order) != "order1":
        return None
    if is_papers_own(run, QWEN):
        return printed_by_order(run.method, "order1") if name == "AA" and not sd else None
    return printed(CROSS, run.method, f"{name}_std" if sd else name) if is_papers_own(run, MISTRAL) else None


def _labels(studies: Sequence[Study]) -> dict[str, Study]:
    labels = model_labels([study.runs[0] for study in studies])
    names = [labels[model_of(study.runs[0])] for study in studies]
    recipes = [study.runs[0].record.recipe for study in studies]
    unique = [name if names.count(name) == 1 else f"{name} ({recipe})" for name, recipe in zip(names, recipes, strict=True)]
    return dict(zip(unique, studies, strict=True))


def _absent(cells: dict[str, list[Run]], seeds: Sequence[int]) -> str:
    """Which seed of which method a base model lacks."""
    methods = by_method([run for runs in cells.values() for run in runs])
    gaps = [
        f"{method} on {label}: seed{'s' if len(missing) > 1 else ''} {' '.join(map(str, missing))}"
        for label, runs in cells.items()
        for method in methods
        if (missing := [seed for seed in seeds if (method, seed) not in {(run.method, run.seed) for run in runs}])
    ]
    return f"Missing runs: {'; '.join(gaps)}. Rows with missing runs are not ranked or compared." if gaps else ""
