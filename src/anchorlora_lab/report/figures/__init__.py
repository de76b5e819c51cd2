"""Figures of a report, drawn from runs and the looks of methods."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.figure import Figure

from anchorlora_lab.report.figures import drift, mechanism, scores
from anchorlora_lab.report.figures.style import PlotStyle, PlotStyles, as_bytes, looks_of

FIGURES: dict[str, Callable[..., Figure]] = {  # each draws runs in the looks of their methods
    "stages": scores.task_by_task,
    "accuracy": scores.accuracy_by_stage,
    "aa-fm": scores.accuracy_against_forgetting,
    "heat": scores.heat_maps,
    "drift": drift.drift_by_task,
    "cores": drift.rho_on_cores,
    "paths": mechanism.paths_to_the_past,
    "forgetting": mechanism.forgetting_of_runs,
    "boundaries": mechanism.forgetting_of_boundaries,
    "energy": mechanism.energy_by_layer,
    "trajectories": drift.trajectories,
    "base-models": scores.one_base_model_against_another,
    "gradients": mechanism.gradients_and_moves,
}

__all__ = ["FIGURES", "PlotStyle", "PlotStyles", "as_bytes", "looks_of"]
