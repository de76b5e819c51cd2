"""The chapters of a report: sections of tables and figures, with the sentences that explain them to a reader who ran nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from anchorlora.pages.labels import order_label, paper_order
from anchorlora.pages.record import triangle_table
from anchorlora.pages.table import Table
from anchorlora_lab.report.comparability import Study, footnote, model_label
from anchorlora_lab.report.figures.mechanism import methods_with_paths
from anchorlora_lab.report.findings import Findings, findings_of
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.records import FAMILIES, Run, families_of
from anchorlora_lab.report.tables.base_models import base_model_tables, runs_by_base_model
from anchorlora_lab.report.tables.drift import core_table, drift_table, endpoint_deviations, endpoint_table, violation_table
from anchorlora_lab.report.tables.energy import cost_table, energy_by_method, energy_table, layers_of
from anchorlora_lab.report.tables.evaluation import evaluation_table, invalid_by_seed, invalid_table
from anchorlora_lab.report.tables.mechanism import correlation_table, gradient_table
from anchorlora_lab.report.tables.metrics import metric_tables
from anchorlora_lab.report.tables.pairs import (
    comparison_table,
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


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    title: str
    words: str
    figures: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()  # tables that are shown
    folded: tuple[Table, ...] = ()  # tables that open on demand


@dataclass(frozen=True)
class Chapter:
    """A chapter of the page: one study, or what spans several."""

    title: str
    words: str
    sections: tuple[Section, ...]
    main: tuple[Table, ...] = ()  # the tables that `anchorlora report` prints
    note: str = ""  # in what its runs differ, if in anything
    study: Study | None = None  # the study; None for what spans several
    spanned: tuple[Run, ...] = ()  # the runs of what spans several studies, for its figures

    @cached_property
    def findings(self) -> Findings | None:
        """What the study shows; None of what spans several."""
        return findings_of(self.study) if self.study else None

    def with_tables(self, change: Callable[[Table], Table]) -> Chapter:
        """Return the chapter with every table changed."""

        def all_of(tables: Sequence[Table]) -> tuple[Table, ...]:
            return tuple(map(change, tables))

        sections = tuple(replace(s, tables=all_of(s.tables), folded=all_of(s.folded)) for s in self.sections)
        return replace(self, sections=sections, main=all_of(self.main))

    @property
    def tables(self) -> list[Table]:
        """All tables, in the order of the page."""
        return [table for section in self.sections for table in (*section.tables, *section.folded)]


def chapters_of(studies: Sequence[Study]) -> list[Chapter]:
    """Return one chapter per study, with its tables named for it, then the comparison over base models if there are several."""
    chapters = []
    for study in studies:
        chapter = _trace(study) if study.kind == "trace" else _sequence(study)
        chapters.append(chapter.with_tables(lambda table, prefix=study.prefix: table.called(prefix + table.name)))  # type: ignore[misc]
    across = tuple(base_model_tables(studies))
    if across:
        runs = tuple(run for cells in runs_by_base_model(studies) for mine in cells.values() for run in mine)
        section = Section("Scores by base model", "", ("base-models",), across)
        chapters.append(Chapter("Several base models", BASE_MODELS, (section,), across[:1], spanned=runs))
    return chapters


def _section(
    title: str, words: str, tables: Iterable[Table | None], folded: Iterable[Table | None] = (), figures: tuple[str, ...] = ()
) -> Section | None:
    """A section with the tables that there are; None without one."""
    shown, kept = (tuple(table for table in some if table) for some in (tables, folded))
    return Section(title, words, figures, shown, kept) if shown or kept else None


def _sequence(study: Study) -> Chapter:
    runs, others, grid = study.runs, study.others, Grid.of(study.runs)
    several, there = len(runs[0].order) > 1, {run.method for run in runs}
    alone = [run for run in others if len(run.order) == 1 and run.trained]
    components = {"shared": shared_components, "cumulative": cumulative_components}
    has_drift = all(run.record.drift for run in runs)
    has_labels = any(rate is not None for run in runs for row in run.record.invalid for rate in row)
    by_order = order_table(runs, others, study.layout) if not grid.one_order or paper_order(grid.orders[0]) else None
    scores = (main_table(runs, others, study.layout), complete_table(runs, others, study.layout), by_order)
    paths = any(methods_with_paths(runs, family) for family in FAMILIES)
    parts = (
        _section(
            *("Scores", SCORES, scores, (deviation_table(runs), seed_table(runs))),
            figures=("stages", "accuracy", "aa-fm", "heat") if several else ("accuracy",),
        ),
        _section("Every metric", METRICS, metric_tables(runs)),
        _section("Transfer and single answers", TRANSFER, (forward_table(runs, alone), flips_table(runs)) if several else ()),
        _section(
            "Paired differences",
            PAIRS,
            (
                comparison_table(runs, study.layout.reference),
                *((paired_table(runs), learning_table(runs)) if pairs_of(runs) else ()),
            ),
        ),
        _section(
            "Components",
            COMPONENTS,
            (make(runs, others) for family, make in components.items() if len(there & set(components_of(family))) > 1),
        ),
        has_drift
        and _section(
            *("Drift on protected directions", DRIFT, (core_table(runs),), (drift_table(runs),)),
            figures=("drift", "cores", *(("paths",) if paths else ())),
        ),
        _section("Forgetting against drift", FORGETTING, (correlation_table(runs),), figures=("forgetting", "boundaries")),
        has_labels and _section("Invalid predictions", INVALID, (invalid_table(runs),), (invalid_by_seed(runs),)),
        _section("General capability", CAPABILITY, (evaluation_table(runs),) if any(run.evaluation for run in runs) else ()),
        layers_of(runs)
        and _section("Energy retained by the cores", ENERGY, (energy_by_method(runs),), (energy_table(runs),), figures=("energy",)),
        _section("Cost", COST, (cost_table(runs),), figures=("cost",)),
        _protocol(study),
        _section("All runs", RUNS, (), (triangle_table(run.record) for mine in grid.groups for run in mine)),
    )
    sections = tuple(part for part in parts if part)
    return Chapter(study.title, f"{_what_ran(study)} {SEQUENCE}", sections, scores[:1], footnote(runs), study)


def _trace(study: Study) -> Chapter:
    runs, families = study.runs, families_of(study.runs)
    means = tuple(endpoint_table(mine, family=family) for family, mine in families.items())
    deviations = tuple(endpoint_deviations(mine, family=family) for family, mine in families.items())
    stepped = any(run.trace[-1].wrp_before is not None for run in runs)
    parts = (
        _section("Where the change goes, step by step", TRACE, (*means, *deviations), figures=("trajectories",)),
        _section("Optimizer steps before projection", VIOLATIONS, (violation_table(runs),) if stepped else ()),
        _section("Gradients and moves", GRADIENTS, (gradient_table(runs),), figures=("gradients",)),
        _protocol(study),
    )
    sections, about = tuple(part for part in parts if part), f"{_what_ran(study)} {STARTS}"
    return Chapter(f"Mechanism trace: {study.title}", about, sections, means, footnote(runs), study)


def _protocol(study: Study) -> Section | None:
    runs = study.runs
    return _section("Protocol", PROTOCOL, (methods_table(runs), orders_table(runs)), (settings_table(runs),))


def _what_ran(study: Study) -> str:
    grid, first = Grid.of(study.runs), study.runs[0].record
    orders = "; ".join(f"{order_label(order)}: {', '.join(order)}" for order in grid.orders)
    days = sorted({run.record.finished[:10] for run in study.runs})
    return (
        f"{_amount(len(study.runs), 'run')} of {_amount(len(grid.methods), 'method')}, {_amount(len(grid.orders), 'order')} of "
        f"tasks ({orders}), {_amount(len(grid.seeds), 'seed')} ({', '.join(map(str, grid.seeds))}); recipe {first.recipe}, "
        f"base model {model_label(first.base_model.name)} with {first.base_model.parameters:,} parameters in "
        f"{first.base_model.dtype}; finished {' to '.join(days[:1] + days[1:][-1:])}, "
        f"anchorlora {first.versions.get('anchorlora', 'of unknown version')}."
    )


def _amount(n: int, what: str) -> str:
    return f"{n} {what}{'s' if n != 1 else ''}"


SEQUENCE = (
    "Each method trains LoRA on the tasks one after another. After every task, all tasks so far are tested. A method that "
    "protects the past should preserve the accuracy of earlier tasks."
)
TRACE = (
    "At recorded steps of training on the second task, rho is measured: the share of the task's change that lies on directions "
    "that the first task used. An unaligned change has rho at the chance level; a method that protects these directions stays "
    "within the numerical tolerance. The figure shows means over seeds with one standard deviation."
)
STARTS = "All methods of a seed start from the same state after the first task."
VIOLATIONS = (
    "One optimizer step moves the routing factor A. The violation is the part of that step that lies on protected directions, "
    "before and after the method's projection. Projecting the gradient does not keep the step of an adaptive optimizer off them."
)
SCORES = (
    "AA: accuracy over all tasks at the end. LA: accuracy of each task right after training on it. BWT: change of earlier tasks' "
    "accuracy since then; negative means forgetting. FM: drop from the best earlier accuracy; lower is better. Other papers call "
    "AA average performance (AP), and FM forgetting rate (F.Ra). Accuracy is each task's primary metric. Bold is best, "
    "underlined second. runs: how many runs a mean is over, out of all combinations of order and seed. Bands in the figure, drawn "
    "if there is a single order, are one standard deviation over its seeds; bars, for six runs or more, the 95 % interval "
    "of the mean."
)
METRICS = "Every metric that tasks are scored by, in addition to the primary one, and the loss on the right answers."
TRANSFER = (
    "Forward transfer (FWT): how much better a task is learned after the others than alone. Flips: how single answers to earlier "
    "tasks changed; a mean hides answers that were lost behind others that were gained."
)
PAIRS = (
    "Runs that differ in one intervention only, at the same order and seed. A difference is a finding where its adjusted p is "
    "below 0.05; where it is not, the interval says how large it could be. The difference in learning accuracy shows whether "
    "protection came at the expense of learning."
)
COMPONENTS = "Methods that differ in single parts show what each part contributes."
DRIFT = (
    "rho is the share of a task's change that lies on protected directions (the core), which earlier tasks used. Cores are "
    "estimated from samples, so the same share is also given on the first task's core and on all past cores together, along with "
    "the effect on feature rows that no core was built from."
)
FORGETTING = (
    "Does a run that moves its past more forget more? Large marks are means of methods, dots their runs. A correlation over "
    "methods that share parts describes these runs; it is no proof of a cause."
)
GRADIENTS = (
    "The gradient of the task's loss, that of the penalties over it, and how far the two factors have moved. Under an optimizer "
    "that divides by the root of the squared gradient, a large penalty also shortens the steps that the task asks for."
)
INVALID = (
    "Predictions after the last task that are not a label of their task. They count as wrong; a high rate means that the model "
    "lost the answer format."
)
CAPABILITY = "Scores before and after training on a benchmark that no method was trained on."
ENERGY = (
    "A core holds the leading directions of sampled features. The share of the features' energy that it retains tells, layer by "
    "layer, how much of the past it represents."
)
COST = "Time and memory depend on the machine. Compare methods only if they ran on one machine under the same load."
PROTOCOL = "Each method's definition, the task orders, and every setting."
RUNS = "Accuracy of every task (columns) after every task (rows)."
BASE_MODELS = "The same methods, tasks, order, and seeds on several base models: does the comparison depend on the base model?"
