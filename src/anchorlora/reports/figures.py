"""Figures from records: accuracy by stage, and drift on a logarithmic axis."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # after the backend is chosen
from matplotlib.figure import Figure

from anchorlora.reports.records import Run, by_method, mean

MARKERS = "osD^vPX*"
SMALLEST = 1e-10  # what an exactly zero ratio is drawn at


def accuracy_by_stage(runs: Sequence[Run]) -> Figure:
    """Mean accuracy over the tasks learned so far, after each task; the band spans the runs."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    stages = max(len(run.order) for run in runs)
    for i, (method, mine) in enumerate(by_method(runs).items()):
        curves = [[mean(row) for row in run.record.accuracy] for run in mine]
        size = min(map(len, curves))
        middle = [mean([curve[t] for curve in curves]) for t in range(size)]
        axes.plot(range(1, size + 1), middle, marker=MARKERS[i % len(MARKERS)], label=_label(method, mine))
        if len(curves) > 1:
            low = [min(curve[t] for curve in curves) for t in range(size)]
            high = [max(curve[t] for curve in curves) for t in range(size)]
            axes.fill_between(range(1, size + 1), low, high, alpha=0.15)
    axes.set(xlabel="tasks learned", ylabel="mean accuracy on them, %", xticks=range(1, stages + 1), title="Accuracy by stage")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def drift_by_task(runs: Sequence[Run]) -> Figure:
    """rho of every task on the core used during it, logarithmic, with the chance level and the floor of float32 storage."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    stages = max(len(run.order) for run in runs)
    for i, (method, mine) in enumerate(by_method(runs).items()):
        points = [(d.task, max(d.rho, SMALLEST)) for run in mine for d in run.record.drift if d.rho is not None]
        if points:
            tasks = sorted({task for task, _ in points})
            middle = [_geometric([rho for task, rho in points if task == t]) for t in tasks]
            (line,) = axes.plot(tasks, middle, marker=MARKERS[i % len(MARKERS)], label=_label(method, mine))
            axes.scatter(*zip(*points, strict=True), s=10, color=line.get_color(), alpha=0.5)
    drifts = [d for run in runs for d in run.record.drift]
    for name, style, values in (
        ("chance", ":", {t: [d.chance for d in drifts if d.task == t and d.chance] for t in range(2, stages + 1)}),
        ("largest that counts as zero", "--", {t: [d.bound for d in drifts if d.task == t] for t in range(2, stages + 1)}),
    ):
        known = {t: mean(v) for t, v in values.items() if v}
        axes.plot(known.keys(), known.values(), style, color="grey", label=name)
    axes.set(
        yscale="log",
        xlabel="task",
        ylabel="rho on the protected core",
        xticks=range(2, stages + 1),
        title="Drift on protected directions",
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    return figure


def as_png(figure: Figure) -> bytes:
    """The picture's bytes, without time or version in them; closes the figure."""
    out = BytesIO()
    figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
    plt.close(figure)
    return out.getvalue()


FIGURES = {"accuracy": accuracy_by_stage, "drift": drift_by_task}


def _label(method: str, runs: Sequence[Run]) -> str:
    return f"{method} ({len(runs)} runs)" if len(runs) > 1 else method


def _geometric(values: Sequence[float]) -> float:
    product = 1.0
    for value in values:
        product *= value ** (1 / len(values))
    return product
