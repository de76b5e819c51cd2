"""Figures of a report, drawn from runs and the looks of methods."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.figure import Figure

from anchorlora_lab.report.figures.drift import drift_by_task, rho_on_cores, trajectories
from anchorlora_lab.report.figures.mechanism import (
    cost_of_methods,
    energy_by_layer,
    forgetting_of_boundaries,
    forgetting_of_runs,
    gradients_and_moves,
    paths_to_the_past,
)
from anchorlora_lab.report.figures.scores import (
    accuracy_against_forgetting,
    accuracy_by_stage,
    heat_maps,
    one_base_model_against_another,
    task_by_task,
)
from anchorlora_lab.report.figures.style import PlotStyle, PlotStyles, as_bytes, looks_of

FIGURES: dict[str, Callable[..., Figure]] = {  # each draws runs in the looks of their methods
    "stages": task_by_task,
    "accuracy": accuracy_by_stage,
    "aa-fm": accuracy_against_forgetting,
    "heat": heat_maps,
    "drift": drift_by_task,
    "cores": rho_on_cores,
    "paths": paths_to_the_past,
    "forgetting": forgetting_of_runs,
    "boundaries": forgetting_of_boundaries,
    "energy": energy_by_layer,
    "cost": cost_of_methods,
    "trajectories": trajectories,
    "base-models": one_base_model_against_another,
    "gradients": gradients_and_moves,
}

__all__ = ["FIGURES", "PlotStyle", "PlotStyles", "as_bytes", "looks_of"]
