"""Which part does what: each family's controls, from the plain method to the protected one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from anchorlora.reports.grid import Grid
from anchorlora.reports.orders import paper_order
from anchorlora.reports.published import printed_score
from anchorlora.reports.records import Run
from anchorlora.reports.tables.form import Table
from anchorlora.reports.tables.scores import score_table

SHARED = ("projected-lora", "projected-lora-wrp", "projected-lora-freeze-b", "sfor")
CUMULATIVE = ("o-lora", "o-lora-retract", "o-lora-retract-gradient", "o-lora-hard", "o-lora-effective", "o-lora-bsr")
SCORES = ("AA", "LA", "BWT", "FM")


def shared_components(runs: Sequence[Run]) -> Table:
    """Weight residual projection and a frozen companion, alone and together; over all orders."""
    mine = _rows(runs, SHARED)

    def printed(method: str, name: str) -> float | None:
        return printed_score("projected_family_components_qwen3_8b", method, name)

    title, compared = "Components of the shared adapter", Grid.of(mine).is_paper
    table = score_table("components-shared", title, mine, SCORES, printed=printed, compared=compared)
    beside = any(column.heading.endswith("printed") for column in table.columns)
    told = "The printed projected-lora and sfor are three-order means; of the other two the paper does not say." if beside else ""
    return _in_paper_order(table, SHARED, told)


def cumulative_components(runs: Sequence[Run]) -> Table:
    """Retraction, gradient and displacement projection, and the effective penalty; on order1, as in the paper, if run."""
    rows = _rows(runs, CUMULATIVE)
    first = [run for run in rows if paper_order(run.order) == "order1"]
    mine = first or rows

    def printed(method: str, name: str) -> float | None:
        return printed_score("olora_components_qwen3_8b_order1", method, name)

    table = score_table(
        "components-cumulative", "Components of a block per task", mine, SCORES, printed=printed, compared=bool(first)
    )
    told = "order1 only, as in the paper." if first and len(first) < len(rows) else ""
    return _in_paper_order(table, CUMULATIVE, told)


def _rows(runs: Sequence[Run], methods: Sequence[str]) -> list[Run]:
    return [run for run in runs if run.method in methods]


def _in_paper_order(table: Table, methods: Sequence[str], told: str) -> Table:
    """The rows as the paper has them; methods that were not run are named."""
    there = [str(row[0]) for row in table.rows]
    absent = [method for method in methods if method not in there]
    missing = f"Not run: {', '.join(absent)}." if absent else ""
    places = sorted(range(len(there)), key=lambda i: methods.index(there[i]))
    partial = frozenset(places.index(i) for i in table.partial)
    return replace(table, rows=tuple(table.rows[i] for i in places), partial=partial).noting(told, missing)
