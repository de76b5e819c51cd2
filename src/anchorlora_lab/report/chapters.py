"""The chapters of a report: sections of tables and figures.  words.json has what explains each to a reader who ran nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from anchorlora.pages.record import order_label, paper_order, triangle_table
from anchorlora.pages.table import Table
from anchorlora.text import amount
from anchorlora_lab.report.comparability import Study, footnote, model_label
from anchorlora_lab.report.figures.mechanism import methods_with_paths
from anchorlora_lab.report.findings import Findings, findings_of
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.layout import WORDS
from anchorlora_lab.report.records import FAMILIES, Run, families_of
from anchorlora_lab.report.tables import answers, base_models, mechanism, pairs, scores, settings


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    title: str
    figures: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()  # tables that are shown
    folded: tuple[Table, ...] = ()  # tables that open on demand

    @property
    def words(self) -> str:
        """Sentences that say what the section is about."""
        return WORDS["sections"][self.title]


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
        """Findings of the study; None of what spans several."""
        return findings_of(self.study) if self.study else None

    def with_tables(self, change: Callable[[Table], Table]) -> Chapter:
        """Return the chapter with every table changed."""
        sections = (replace(s, tables=(*map(change, s.tables),), folded=(*map(change, s.folded),)) for s in self.sections)
        return replace(self, sections=tuple(sections), main=tuple(map(change, self.main)))

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
    across = tuple(base_models.base_model_tables(studies))
    if across:
        runs = tuple(run for cells in base_models.runs_by_base_model(studies) for group in cells.values() for run in group)
        section = Section("Scores by base model", ("base-models",), across)
        chapters.append(Chapter("Several base models", WORDS["chapters"]["base models"], (section,), across[:1], spanned=runs))
    return chapters


def _section(
    title: str, tables: Iterable[Table | None], folded: Iterable[Table | None] = (), figures: tuple[str, ...] = ()
) -> Section | None:
    """A section with the tables that there are; None without one."""
    shown, kept = (tuple(filter(None, some)) for some in (tables, folded))
    return Section(title, figures, shown, kept) if shown or kept else None


def _sequence(study: Study) -> Chapter:
    runs, others, grid = study.runs, study.others, Grid(study.runs)
    several = len(runs[0].order) > 1
    alone = [run for run in others if len(run.order) == 1 and run.trained]
    has_drift = all(run.record.drift for run in runs)
    has_labels = any(rate is not None for run in runs for row in run.record.invalid for rate in row)
    by_order = scores.order_table(runs, others, study.layout) if not grid.one_order or paper_order(grid.orders[0]) else None
    of_scores = (scores.main_table(runs, others, study.layout), scores.complete_table(runs, others, study.layout), by_order)
    differences = (pairs.comparison_table(runs, study.layout.reference), pairs.paired_table(runs), pairs.learning_table(runs))
    paths = any(methods_with_paths(runs, family) for family in FAMILIES)
    parts = (
        _section(
            *("Scores", of_scores, (scores.deviation_table(runs), scores.seed_table(runs))),
            figures=("stages", "accuracy", "aa-fm", "heat") if several else ("accuracy",),
        ),
        _section("Every metric", answers.metric_tables(runs)),
        _section("Transfer and single answers", (answers.forward_table(runs, alone), answers.flips_table(runs)) if several else ()),
        _section("Paired differences", differences),
        _section("Components", (pairs.component_table(runs, family, others) for family in FAMILIES)),
        has_drift
        and _section(
            *("Drift on protected directions", (mechanism.core_table(runs),), (mechanism.drift_table(runs),)),
            figures=("drift", "cores", *(("paths",) if paths else ())),
        ),
        _section("Forgetting against drift", (mechanism.correlation_table(runs),), figures=("forgetting", "boundaries")),
        has_labels and _section("Invalid predictions", (answers.invalid_table(runs),), (answers.invalid_by_seed(runs),)),
        _section("General capability", (answers.evaluation_table(runs),)),
        settings.layers_of(runs)
        and _section(
            *("Energy retained by the cores", (settings.energy_by_method(runs),), (settings.energy_table(runs),)),
            figures=("energy",),
        ),
        _section("Cost", (settings.cost_table(runs),)),
        _protocol(study),
        _section("All runs", (), (triangle_table(run.record) for group in grid.groups for run in group)),
    )
    sections = tuple(part for part in parts if part)
    return Chapter(
        study.title, f"{_what_ran(study)} {WORDS['chapters']['sequence']}", sections, of_scores[:1], footnote(runs), study
    )


def _trace(study: Study) -> Chapter:
    runs, families = study.runs, families_of(study.runs)
    means = tuple(mechanism.endpoint_table(of_family, family=family) for family, of_family in families.items())
    deviations = tuple(mechanism.endpoint_deviations(of_family, family=family) for family, of_family in families.items())
    parts = (
        _section("Where the change goes, step by step", (*means, *deviations), figures=("trajectories",)),
        _section("Optimizer steps before projection", (mechanism.violation_table(runs),)),
        _section("Gradients and moves", (mechanism.gradient_table(runs),), figures=("gradients",)),
        _protocol(study),
    )
    sections, about = tuple(part for part in parts if part), f"{_what_ran(study)} {WORDS['chapters']['trace']}"
    return Chapter(f"Mechanism trace: {study.title}", about, sections, means, footnote(runs), study)


def _protocol(study: Study) -> Section | None:
    runs = study.runs
    return _section("Protocol", (settings.methods_table(runs), settings.orders_table(runs)), (settings.settings_table(runs),))


def _what_ran(study: Study) -> str:
    grid, first = Grid(study.runs), study.runs[0].record
    orders = "; ".join(f"{order_label(order)}: {', '.join(order)}" for order in grid.orders)
    days = sorted({run.record.finished[:10] for run in study.runs})
    return (
        f"{amount(len(study.runs), 'run')} of {amount(len(grid.methods), 'method')}, {amount(len(grid.orders), 'order')} of "
        f"tasks ({orders}), {amount(len(grid.seeds), 'seed')} ({', '.join(map(str, grid.seeds))}); recipe {first.recipe}, "
        f"base model {model_label(first.base_model.name)} with {first.base_model.parameters:,} parameters in "
        f"{first.base_model.dtype}; finished {' to '.join(days[:1] + days[1:][-1:])}, "
        f"anchorlora {first.versions.get('anchorlora', 'of unknown version')}."
    )
