"""The chapters of a report: sections of tables and figures, with the sentences that explain them to a reader who ran nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from anchorlora.pages.labels import model_label, order_label, paper_order
from anchorlora_lab.report import tables as t
from anchorlora_lab.report.comparability import Study, footnote
from anchorlora_lab.report.figures.mechanism import methods_with_paths
from anchorlora_lab.report.findings import Findings, findings_of
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.records import FAMILIES, Run, families_of
from anchorlora_lab.report.tables import Table


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

    def ours(self) -> Chapter:
        """Return the chapter without the paper's values in its tables."""

        def own(tables: Sequence[Table]) -> tuple[Table, ...]:
            return tuple(table.ours() for table in tables)

        sections = tuple(replace(s, tables=own(s.tables), folded=own(s.folded)) for s in self.sections)
        return replace(self, sections=sections, main=own(self.main))

    @property
    def tables(self) -> list[Table]:
        """All tables, in the order of the page."""
        return [table for section in self.sections for table in (*section.tables, *section.folded)]


def chapters_of(studies: Sequence[Study]) -> list[Chapter]:
    """Return one chapter per study, then the comparison over base models if there are several."""
    chapters = [_prefixed(_trace(study) if study.kind == "trace" else _sequence(study), study.prefix) for study in studies]
    across = tuple(t.base_model_tables(studies))
    if across:
        runs = tuple(run for cells in t.runs_by_base_model(studies) for mine in cells.values() for run in mine)
        section = Section("Scores by base model", "", ("base-models",), across)
        chapters.append(Chapter("Several base models", BASE_MODELS, (section,), across[:1], spanned=runs))
    return chapters


def _sequence(study: Study) -> Chapter:
    first = (_scores, _metrics, _transfer, _pairs, _components, _drift, _forgetting)
    parts = (*first, _invalid, _capability, _energy, _cost, _protocol, _every_run)
    sections = tuple(section for part in parts if (section := part(study)))
    main = sections[0].tables[:1]
    return Chapter(study.title, f"{_what_ran(study)} {SEQUENCE}", sections, main, footnote(study.runs), study)


def _trace(study: Study) -> Chapter:
    runs, families = study.runs, families_of(study.runs)
    means = tuple(t.endpoint_table(mine, family=family) for family, mine in families.items())
    deviations = tuple(t.endpoint_deviations(mine, family=family) for family, mine in families.items())
    sections = [Section("Where the change goes, step by step", TRACE, ("trajectories",), (*means, *deviations))]
    if any(run.trace[-1].wrp_before is not None for run in runs):
        sections.append(Section("Optimizer steps before projection", VIOLATIONS, (), (t.violation_table(runs),)))
    if gradients := t.gradient_table(runs):
        sections.append(Section("Gradients and moves", GRADIENTS, ("gradients",), (gradients,)))
    sections.append(_protocol(study))
    about = f"{_what_ran(study)} {STARTS}"
    return Chapter(f"Mechanism trace: {study.title}", about, tuple(sections), means, footnote(runs), study)


def _scores(study: Study) -> Section:
    runs, grid = study.runs, Grid.of(study.runs)
    by_order = (t.order_table(runs, study.others),) if not grid.one_order or paper_order(grid.orders[0]) else ()
    tables = (t.main_table(runs, study.others), t.complete_table(runs, study.others), *by_order)
    figures = ("stages", "accuracy", "aa-fm", "heat") if len(runs[0].order) > 1 else ("accuracy",)
    return Section("Scores", SCORES, figures, tables, (t.deviation_table(runs), t.seed_table(runs)))


def _metrics(study: Study) -> Section | None:
    tables = tuple(t.metric_tables(study.runs))
    return Section("Every metric", METRICS, (), tables) if tables else None


def _transfer(study: Study) -> Section | None:
    if len(study.runs[0].order) == 1:
        return None
    alone = [run for run in study.others if len(run.order) == 1 and run.trained]
    tables = tuple(table for table in (t.forward_table(study.runs, alone), t.flips_table(study.runs)) if table)
    return Section("Transfer and single answers", TRANSFER, (), tables) if tables else None


def _pairs(study: Study) -> Section | None:
    compared, paired = t.comparison_table(study.runs), bool(t.pairs_of(study.runs))
    tables = (t.paired_table(study.runs), t.learning_table(study.runs)) if paired else ()
    every = (*((compared,) if compared else ()), *tables)
    return Section("Paired differences", PAIRS, (), every) if every else None


def _components(study: Study) -> Section | None:
    there = {run.method for run in study.runs}
    kinds = ((t.components_of("shared"), t.shared_components), (t.components_of("cumulative"), t.cumulative_components))
    tables = tuple(make(study.runs, study.others) for names, make in kinds if len(there & set(names)) > 1)
    return Section("Components", COMPONENTS, (), tables) if tables else None


def _drift(study: Study) -> Section | None:
    if not all(run.record.drift for run in study.runs):
        return None
    tables, folded = (t.core_table(study.runs),), (t.drift_table(study.runs),)
    figures = ("drift", "cores", *(("paths",) if any(methods_with_paths(study.runs, family) for family in FAMILIES) else ()))
    return Section("Drift on protected directions", DRIFT, figures, tables, folded)


def _forgetting(study: Study) -> Section | None:
    table = t.correlation_table(study.runs)
    return Section("Forgetting against drift", FORGETTING, ("forgetting", "boundaries"), (table,)) if table else None


def _invalid(study: Study) -> Section | None:
    if all(rate is None for run in study.runs for row in run.record.invalid for rate in row):
        return None  # tasks without labels
    return Section("Invalid predictions", INVALID, (), (t.invalid_table(study.runs),), (t.invalid_by_seed(study.runs),))


def _capability(study: Study) -> Section | None:
    if not any(run.evaluation for run in study.runs):
        return None
    return Section("General capability", CAPABILITY, (), (t.evaluation_table(study.runs),))


def _energy(study: Study) -> Section | None:
    if not t.layers_of(study.runs):
        return None
    tables, folded = (t.energy_by_method(study.runs),), (t.energy_table(study.runs),)
    return Section("Energy retained by the cores", ENERGY, ("energy",), tables, folded)


def _cost(study: Study) -> Section:
    return Section("Cost", COST, ("cost",), (t.cost_table(study.runs),))


def _protocol(study: Study) -> Section:
    tables = (t.methods_table(study.runs), t.orders_table(study.runs))
    return Section("Protocol", PROTOCOL, (), tables, (t.settings_table(study.runs),))


def _every_run(study: Study) -> Section:
    grid = Grid.of(study.runs)
    every = [run for method in grid.methods for run in grid.of_method(method)]
    return Section("All runs", RUNS, folded=tuple(t.triangle_table(run.record) for run in every))


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


def _prefixed(chapter: Chapter, prefix: str) -> Chapter:
    """The chapter with its tables named for its study."""

    def named(tables: Sequence[Table]) -> tuple[Table, ...]:
        """Tables under the study's prefix."""
        return tuple(table.called(prefix + table.name) for table in tables)

    sections = tuple(replace(s, tables=named(s.tables), folded=named(s.folded)) for s in chapter.sections)
    return replace(chapter, sections=sections)


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
