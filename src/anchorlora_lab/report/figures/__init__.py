"""Figures of a report, drawn from runs and the looks of methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from anchorlora_lab.report.figures.cost import cost_of_methods, energy_by_layer
from anchorlora_lab.report.figures.drift import drift_by_task, rho_on_cores, trajectories
from anchorlora_lab.report.figures.mechanism import (
    forgetting_of_boundaries,
    forgetting_of_runs,
    gradients_and_moves,
    paths_to_the_past,
)
from anchorlora_lab.report.figures.scores import accuracy_against_forgetting, accuracy_by_stage, one_base_model_against_another
from anchorlora_lab.report.figures.stages import heat_maps, task_by_task
from anchorlora_lab.report.figures.style import Look, Looks, as_bytes, as_png, looks_of


@dataclass(frozen=True)
class Drawing:
    """A kind of figure."""

    draw: Callable[..., Figure]  # draws it from runs and the looks of methods
    alt: str  # a sentence on what it shows
    compares: bool = False  # whether `draw` also takes the method that others are compared with


FIGURES = {
    "stages": Drawing(
        task_by_task,
        "Accuracy of every task from when it was learned to the end, without protection and with it, one panel a task",
        compares=True,
    ),
    "accuracy": Drawing(accuracy_by_stage, "Mean accuracy on all tasks so far, after each task, by method"),
    "aa-fm": Drawing(accuracy_against_forgetting, "Final accuracy against forgetting, one mark per method"),
    "heat": Drawing(heat_maps, "Accuracy of each task after each stage, one map per method on one scale of colors"),
    "drift": Drawing(drift_by_task, "rho of every task on the core used during it, on a logarithmic axis"),
    "cores": Drawing(
        rho_on_cores, "rho of the last task on the current core, the first core, and all past cores, on a logarithmic axis"
    ),
    "paths": Drawing(
        paths_to_the_past, "rho of every task by which path to the core a method leaves open, with chance and numerical tolerance"
    ),
    "forgetting": Drawing(forgetting_of_runs, "Forgetting against rho, change of held-out rows, and size of the change, by run"),
    "boundaries": Drawing(
        forgetting_of_boundaries, "What earlier tasks lost during a task, against the drift of that task, one dot per boundary"
    ),
    "energy": Drawing(energy_by_layer, "Energy retained by the cores, by layer"),
    "cost": Drawing(cost_of_methods, "Seconds, memory, parameters, and history of each method"),
    "trajectories": Drawing(
        trajectories, "rho over the optimizer steps of the second task, and its last value, on a logarithmic axis"
    ),
    "base-models": Drawing(
        one_base_model_against_another, "Final accuracy and backward transfer of each method on one base model against another"
    ),
    "gradients": Drawing(
        gradients_and_moves, "Norms of the gradients of task and penalties, and how far the factors moved, over optimizer steps"
    ),
}

__all__ = ["FIGURES", "Drawing", "Look", "Looks", "as_bytes", "as_png", "looks_of"]
