"""What a report says, in which order: chapters of sections of tables and figures.

Sentences of the page that explain its tables and figures to a reader who ran nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anchorlora.reports import tables as t
from anchorlora.reports.comparability import Study, footnote
from anchorlora.reports.grid import Grid
from anchorlora.reports.labels import order_label, paper_order
from anchorlora.reports.records import families_of
from anchorlora.reports.tables import Table


@dataclass(frozen=True)
class Section:
    """A heading, what it shows and how to read it, its figures by name, its tables; `folded` ones open on demand."""

    title: str
    words: str
    figures: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    folded: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Chapter:
    """A study, or what spans several: its sections, and a footnote of what its runs differ in."""

    title: str
    words: str
    sections: tuple[Section, ...]
    main: tuple[Table, ...] = ()  # what the command prints
    note: str = ""
    study: Study | None = None

    @property
    def tables(self) -> list[Table]:
        return [table for section in self.sections for table in (*section.tables, *section.folded)]


def chapters_of(studies: Sequence[Study]) -> list[Chapter]:
    """A chapter a study, then the comparison over base models, if there are several."""
    chapters = [_prefixed(_trace(study) if study.kind == "trace" else _sequence(study), study.prefix) for study in studies]
    across = tuple(t.base_model_tables(studies))
    if across:
        chapters.append(
            Chapter("Several base models", BACKBONES, (Section("Scores by base model", "", tables=across),), across[:1])
        )
    return chapters


def _sequence(study: Study) -> Chapter:
    parts = (_scores, _pairs, _components, _drift, _answers, _general, _energy, _cost, _protocol, _every_run)
    sections = tuple(section for part in parts if (section := part(study)))
    main = sections[0].tables[:1]
    return Chapter(study.title, f"{_what_ran(study)} {SEQUENCE}", sections, main, footnote(study.runs), study)


def _trace(study: Study) -> Chapter:
    runs, families = study.runs, families_of(study.runs)
    means = tuple(t.endpoint_table(mine, family=family) for family, mine in families.items())
    deviations = tuple(t.endpoint_deviations(mine, family=family) for family, mine in families.items())
    sections = [Section("Where the change went, step by step", TRACE, ("trajectories",), (*means, *deviations))]
    if any(run.trace[-1].wrp_before is not None for run in runs):
        sections.append(Section("What the optimizer did before projection", VIOLATIONS, (), (t.violation_table(runs),)))
    sections.append(_protocol(study))
    about = f"{_what_ran(study)} {STARTS}"
    return Chapter(f"Mechanism trace: {study.title}", about, tuple(sections), means, footnote(runs), study)


def _scores(study: Study) -> Section:
    runs, grid = study.runs, Grid.of(study.runs)
    by_order = (t.order_table(runs),) if not grid.one_order or paper_order(grid.orders[0]) else ()
    tables = (t.main_table(runs), t.complete_table(runs), *by_order)
    return Section("Scores", SCORES, ("accuracy", "aa-fm"), tables, (t.deviation_table(runs), t.seed_table(runs)))


def _pairs(study: Study) -> Section | None:
    if not t.pairs_of(study.runs):
        return None
    return Section("Paired differences", PAIRS, (), (t.paired_table(study.runs), t.learning_table(study.runs)))


def _components(study: Study) -> Section | None:
    there = {run.method for run in study.runs}
    kinds = ((t.SHARED, t.shared_components), (t.CUMULATIVE, t.cumulative_components))
    tables = tuple(make(study.runs) for names, make in kinds if len(there & set(names)) > 1)
    return Section("Components", COMPONENTS, (), tables) if tables else None


def _drift(study: Study) -> Section | None:
    if not all(run.record.drift for run in study.runs):
        return None
    tables, folded = (t.core_table(study.runs),), (t.drift_table(study.runs),)
    return Section("Was the past touched?", DRIFT, ("drift", "cores"), tables, folded)


def _answers(study: Study) -> Section:
    return Section("Invalid predictions", ANSWERS, (), (t.invalid_table(study.runs),), (t.invalid_by_seed(study.runs),))


def _general(study: Study) -> Section | None:
    if not any(run.general for run in study.runs):
        return None
    return Section("General capability", GENERAL, (), (t.evaluation_table(study.runs),))


def _energy(study: Study) -> Section | None:
    if not t.layers_of(study.runs):
        return None
    tables, folded = (t.energy_by_method(study.runs),), (t.energy_table(study.runs),)
    return Section("How much the cores hold", ENERGY, ("energy",), tables, folded)


def _cost(study: Study) -> Section:
    return Section("Cost", COST, ("cost",), (t.cost_table(study.runs),))


def _protocol(study: Study) -> Section:
    tables = (t.methods_table(study.runs), t.orders_table(study.runs))
    return Section("Protocol", PROTOCOL, (), tables, (t.settings_table(study.runs),))


def _every_run(study: Study) -> Section:
    grid = Grid.of(study.runs)
    cells = [run for method in grid.methods for run in grid.of_method(method)]
    return Section("Every run", RUNS, folded=tuple(t.triangle_table(run) for run in cells))


def _what_ran(study: Study) -> str:
    grid, first = Grid.of(study.runs), study.runs[0].record
    orders = "; ".join(f"{order_label(order)}: {', '.join(order)}" for order in grid.orders)
    days = sorted({run.record.finished[:10] for run in study.runs})
    return (
        f"{_amount(len(study.runs), 'run')} of {_amount(len(grid.methods), 'method')}, {_amount(len(grid.orders), 'order')} of "
        f"tasks ({orders}), {_amount(len(grid.seeds), 'seed')} ({', '.join(map(str, grid.seeds))}); recipe {first.recipe}, "
        f"base model {first.base_model.name} with {first.base_model.parameters:,} parameters in {first.base_model.dtype}; finished "
        f"{' to '.join(days[:1] + days[1:][-1:])}, anchorlora {first.versions.get('anchorlora', 'of an unknown version')}."
    )


def _prefixed(chapter: Chapter, prefix: str) -> Chapter:
    """The chapter with its tables named for its study."""

    def named(tables: Sequence[Table]) -> tuple[Table, ...]:
        return tuple(table.called(prefix + table.name) for table in tables)

    sections = tuple(replace(s, tables=named(s.tables), folded=named(s.folded)) for s in chapter.sections)
    return replace(chapter, sections=sections)


def _amount(n: int, what: str) -> str:
    return f"{n} {what}{'s' if n != 1 else ''}"


SEQUENCE = (
    "Each method learns the tasks one after another with LoRA; after every task, all tasks so far are tested. A method that "
    "protects the past should keep the accuracy of earlier tasks."
)
TRACE = (
    "While the second task is learned, every recorded step measures rho, the share of the task's change that falls on "
    "directions which the first task used. An unaligned change reads the chance level; a method that protects these "
    "directions stays under the largest value that counts as zero. The figure shows means over seeds with one standard "
    "deviation."
)
STARTS = "All methods of a seed start from one and the same state after the first task."
VIOLATIONS = (
    "One optimizer step moves the routing factor A; the violation is the part of that move on protected directions, as the "
    "optimizer made it and after the method's projection. A projected gradient does not keep an adaptive optimizer's step "
    "off them."
)
SCORES = (
    "AA: accuracy over all tasks at the end. LA: accuracy right after learning. BWT: change of earlier tasks since then; "
    "negative means forgetting. FM: loss since the best earlier score; lower is better. Bold is best, underlined second. "
    "cells: how many runs a mean is over, of how many there would be if every method had every order and seed. Bands in the "
    "figure, drawn where there is one order, are one standard deviation over its seeds."
)
PAIRS = (
    "Runs that differ in one intervention only, at the same order and seed. Learning accuracy tells whether protection was "
    "paid for with less learning."
)
COMPONENTS = "Methods that differ by single parts: which part does what?"
DRIFT = (
    "Did a task's change touch the directions that earlier tasks used? rho is the share of the change on protected "
    "directions (the core). Those directions are chosen from samples, so the same share is also shown on the first task's "
    "core and on all past cores together, and the effect on feature rows that no core was made from."
)
ANSWERS = (
    "Answers that are no label of their task, after the last task. They count as wrong; many of them mean that the format was lost."
)
GENERAL = "What the model could do before, and can still do: a benchmark that no method was trained on."
ENERGY = (
    "A core is the leading directions of sampled features. The share of their energy that it holds says how much of the "
    "past it stands for, layer by layer."
)
COST = "Time and memory depend on the machine; compare methods only where they ran on one machine in one go."
PROTOCOL = "What each method is made of, in which order tasks were learned, and every setting."
RUNS = "Accuracy of every task (columns) after every task (rows)."
BACKBONES = "The same methods, tasks, order and seeds on several base models: does the comparison depend on one of them?"
