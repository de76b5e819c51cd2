"""Every table of a report, as data."""

from anchorlora.pages.record import triangle_table
from anchorlora.pages.table import Column, Table
from anchorlora_lab.report.tables.base_models import base_model_tables, runs_by_base_model
from anchorlora_lab.report.tables.drift import core_table, drift_table, endpoint_deviations, endpoint_table, violation_table
from anchorlora_lab.report.tables.energy import cost_table, energy_by_method, energy_table, layers_of
from anchorlora_lab.report.tables.evaluation import evaluation_table, invalid_by_seed, invalid_table
from anchorlora_lab.report.tables.mechanism import correlation_table, gradient_table
from anchorlora_lab.report.tables.metrics import metric_tables
from anchorlora_lab.report.tables.pairs import (
    comparison_table,
    comparisons,
    components_of,
    cumulative_components,
    learning_table,
    paired_table,
    pairs_of,
    shared_components,
)
from anchorlora_lab.report.tables.scores import complete_table, deviation_table, main_table, order_table, seed_table
from anchorlora_lab.report.tables.settings import methods_table, orders_table, settings_table
from anchorlora_lab.report.tables.transfer import flips_table, forward_table

__all__ = [
    "Column",
    "Table",
    "base_model_tables",
    "comparison_table",
    "comparisons",
    "complete_table",
    "components_of",
    "core_table",
    "correlation_table",
    "cost_table",
    "cumulative_components",
    "deviation_table",
    "drift_table",
    "endpoint_deviations",
    "endpoint_table",
    "energy_by_method",
    "energy_table",
    "evaluation_table",
    "flips_table",
    "forward_table",
    "gradient_table",
    "invalid_by_seed",
    "invalid_table",
    "layers_of",
    "learning_table",
    "main_table",
    "methods_table",
    "metric_tables",
    "order_table",
    "orders_table",
    "paired_table",
    "pairs_of",
    "runs_by_base_model",
    "seed_table",
    "settings_table",
    "shared_components",
    "triangle_table",
    "violation_table",
]
