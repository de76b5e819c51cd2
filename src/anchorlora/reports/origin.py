"""Where printed values come from and where ours do: the sentence that keeps the two apart."""

from __future__ import annotations

from collections.abc import Sequence

from anchorlora.reports.orders import TASKS, paper_tasks
from anchorlora.reports.published import QWEN
from anchorlora.reports.records import Run


def origin(runs: Sequence[Run], *, printed_on: str = QWEN) -> str:
    """Says on which backbone and tasks the printed values were measured, and on which ours."""
    first = runs[0].record
    order = runs[0].order if len({run.order for run in runs}) == 1 else tuple(sorted(runs[0].order))
    placed = "" if set(order) <= set(TASKS) else ", set beside them by their places in the order"
    return (
        f"Printed: the paper's values, measured on {printed_on} with {', '.join(paper_tasks(order) or TASKS)}; "
        f"ours: {first.backbone.name} ({first.backbone.parameters:,} parameters) with {', '.join(order)}{placed}. "
        "Diff: ours less printed; values of another backbone, data or size are no reproduction."
    )
