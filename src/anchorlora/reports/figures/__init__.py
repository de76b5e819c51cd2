"""Figures of a report.  Each is drawn from runs and the looks of methods; `alt` says in words what it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from anchorlora.reports.figures.cost import cost_of_methods, energy_by_layer
from anchorlora.reports.figures.drift import drift_by_task, rho_on_cores, trajectories
from anchorlora.reports.figures.scores import accuracy_against_forgetting, accuracy_by_stage
from anchorlora.reports.figures.style import Look, Looks, as_png, looks_of
from anchorlora.reports.records import Run


@dataclass(frozen=True)
class Drawing:
    """A figure that can be made: how, and what it shows."""

    draw: Callable[[Sequence[Run], Looks], Figure]
    alt: str


FIGURES = {
    "accuracy": Drawing(accuracy_by_stage, "Mean accuracy on the tasks learned so far, after each task, by method"),
    "aa-fm": Drawing(accuracy_against_forgetting, "Final accuracy against forgetting, a mark a method"),
    "drift": Drawing(drift_by_task, "rho of every task on the core used during it, logarithmic"),
    "cores": Drawing(rho_on_cores, "rho of the last task on the current, the first and all past cores, logarithmic"),
    "energy": Drawing(energy_by_layer, "Retained energy of the cores by layer"),
    "cost": Drawing(cost_of_methods, "Seconds, memory, parameters and history of each method"),
    "trajectories": Drawing(trajectories, "rho over optimizer steps of the second task, and its last value, logarithmic"),
}

__all__ = ["FIGURES", "Drawing", "Look", "Looks", "as_png", "looks_of"]
