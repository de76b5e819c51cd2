"""The same comparison on several backbones, over the seeds of one order."""

from __future__ import annotations

from collections.abc import Sequence

from anchorlora.reports.agreement import footnote, refuse_unlike
from anchorlora.reports.grid import Grid
from anchorlora.reports.orders import order_label, paper_order
from anchorlora.reports.published import MISTRAL, QWEN, printed_by_order, printed_cross
from anchorlora.reports.records import Run, by_method, deviation_of, mean_of
from anchorlora.reports.studies import Study
from anchorlora.reports.tables.form import Cell, Column, Table
from anchorlora.reports.tables.scores import BETTER, any_printed, score

SCORES = ("AA", "BWT", "FM")
OWN = ("recipe", "backbone", "protocol.backbone", "protocol.passages_cut")  # what comes with a backbone: its name, its tokenizer


def backbone_tables(studies: Sequence[Study]) -> list[Table]:
    """A table for every set of tasks that several backbones learned in a common order.  Raises ValueError for unlike cells."""
    groups: dict[tuple[str, ...], list[Study]] = {}
    for study in studies:
        if study.kind == "sequence":
            groups.setdefault(tuple(sorted(study.runs[0].order)), []).append(study)
    tables = [backbone_table(group) for group in groups.values() if _comparable(group)]
    return [table.called(f"{table.name}-{i}") for i, table in enumerate(tables, 1)] if len(tables) > 1 else tables


def backbone_table(studies: Sequence[Study]) -> Table:
    """Means and sample standard deviations over seeds, one row a method and backbone."""
    order = _common_orders(studies)[0]
    columns = [Column("method"), Column("backbone"), Column("seeds")]
    for name in SCORES:
        columns += [Column(name, better=BETTER[name]), Column(f"{name} sd")]
    cells = {label: [run for run in study.runs if run.order == order] for label, study in _labels(studies).items()}
    every = [run for runs in cells.values() for run in runs]
    refuse_unlike(every, axes=OWN)
    seeds, rows, mine_of = Grid.of(every).seeds, [], []
    for method in by_method(every):
        for label, runs in cells.items():
            if mine := [run for run in runs if run.method == method]:
                rows.append(_row(method, label, mine, len(seeds)))
                mine_of.append(mine)
    partial = frozenset(i for i, mine in enumerate(mine_of) if len(mine) < len(seeds))
    title = f"Backbones: {order_label(order)}, means over seeds {', '.join(map(str, seeds))}"
    table = Table("backbones", title, tuple(columns), tuple(rows), "Best and second over all rows.", partial)
    return _beside(table, mine_of).noting(_absent(cells, seeds), footnote(every))


def _row(method: str, label: str, runs: Sequence[Run], seeds: int) -> tuple[Cell, ...]:
    values = {name: [score(run, name) for run in runs] for name in SCORES}
    return method, label, f"{len(runs)} of {seeds}", *(f(values[name]) for name in SCORES for f in (mean_of, deviation_of))


def _beside(table: Table, mine_of: Sequence[Sequence[Run]]) -> Table:
    first = [mine[0] for mine in mine_of]
    values = {name: [_printed(run, name) for run in first] for name in SCORES}
    values |= {f"{name} sd": [_printed_sd(run, name) for run in first] for name in SCORES}
    told = (
        f"Printed: {QWEN} in rows of that backbone, {MISTRAL} in all others, so that only rows of these two compare like with like."
    )
    return table.beside(values).noting(told if any_printed(values) else "")


def _printed(run: Run, name: str) -> float | None:
    if paper_order(run.order) != "order1":
        return None
    if _is(run, QWEN):
        return printed_by_order(run.method, "order1") if name == "AA" else None
    return printed_cross(run.method, name)


def _printed_sd(run: Run, name: str) -> float | None:
    return printed_cross(run.method, f"{name}_std") if paper_order(run.order) == "order1" and not _is(run, QWEN) else None


def _is(run: Run, backbone: str) -> bool:
    return run.record.backbone.name.rstrip("/").split("/")[-1].lower() == backbone.split("/")[-1].lower()


def _comparable(studies: Sequence[Study]) -> bool:
    return len({study.runs[0].record.backbone.name for study in studies}) > 1 and bool(_common_orders(studies))


def _common_orders(studies: Sequence[Study]) -> list[tuple[str, ...]]:
    common = set.intersection(*({run.order for run in study.runs} for study in studies))
    return [order for order in Grid.of([run for study in studies for run in study.runs]).orders if order in common]


def _labels(studies: Sequence[Study]) -> dict[str, Study]:
    names = [study.runs[0].record.backbone.name for study in studies]
    return {
        name if names.count(name) == 1 else f"{name} ({study.runs[0].record.recipe})": study
        for name, study in zip(names, studies, strict=True)
    }


def _absent(cells: dict[str, list[Run]], seeds: Sequence[int]) -> str:
    """Which seed of which method a backbone lacks."""
    methods = by_method([run for runs in cells.values() for run in runs])
    gaps = [
        f"{method} on {label}: seed{'s' if len(missing) > 1 else ''} {' '.join(map(str, missing))}"
        for label, runs in cells.items()
        for method in methods
        if (missing := [seed for seed in seeds if (method, seed) not in {(run.method, run.seed) for run in runs}])
    ]
    return f"Missing cells: {'; '.join(gaps)}. Rows that lack cells are not ranked or compared." if gaps else ""
