"""Where printed values come from and where ours do: the sentence that keeps the two apart."""

from __future__ import annotations

from collections.abc import Sequence

from anchorlora.reports.orders import TASKS, paper_tasks
from anchorlora.reports.published import QWEN
from anchorlora.reports.records import Run


def origin(runs: Sequence[Run], *, printed_on: str = QWEN) -> str:
    """Says on which backbone and tasks the printed values were measured, and on which ours."""
    first = runs[0]
    ours = f"{first.record.backbone.name} ({first.record.backbone.parameters:,} parameters)"
    tasks = ", ".join(sorted(set(first.order)))
    placed = "" if set(first.order) <= set(TASKS) else ", set beside them by their places in the order"
    return (
        f"Printed: the paper's values, measured on {printed_on} with {', '.join(sorted(_theirs(first)))}; "
        f"ours: {ours} with {tasks}{placed}. "
        "Diff: ours less printed; values of another backbone, data or size are no reproduction."
    )


def _theirs(run: Run) -> tuple[str, ...]:
    return paper_tasks(run.order) or TASKS
