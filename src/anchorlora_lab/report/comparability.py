"""Settings that the runs of one table must share, and those that only a footnote mentions.

A table's axes (method, order, seed), the results, and settings that belong to a method or a single run are never compared. All
else must be equal, or the means would mix unlike runs: those are refused, with the fields in which they differ.

Runs belong to one study if they share recipe, base model, and set of tasks (sequences) or order of tasks (traces). A base model is
known by the hash of its files, wherever they lay, or by its name if its record has no hash.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from anchorlora.errors import InvalidValue
from anchorlora.pages.record import tasks_in
from anchorlora.store.record import Record
from anchorlora.text import file_name
from anchorlora_lab.report.layout import AS_IS, Layout
from anchorlora_lab.report.records import Run, by_method, group_by

COMPARED = ("recipe", "base_model", "protocol")
OWNED = (
    "protocol.selection",
    "protocol.start.old_cores",
    "protocol.start.old_memory",
    "protocol.tuned",
    "protocol.task1_state",
    "protocol.trace",
)
NOTED = ("threads", "versions", "host", "protocol.base_model.threads", "protocol.base_model.device")
OF_ALL = ("protocol.metric", "protocol.own_wording", "protocol.holdout_sha256")  # of all tasks of a run together
OF_TOKENS = ("protocol.passages_cut", "protocol.unknown_in_prompts", "protocol.prompts_inside_a_token")
BY_TASK = ("protocol.examples", "protocol.test_labels_not_listed", *OF_TOKENS, *OF_ALL)
REMEDY = "report them separately, or repeat those that differ"


def leaves(record: Record, *, fields: Collection[str]) -> dict[str, Any]:
    """Return every value below some fields of a record, by its dotted path; lists count as values."""
    content = record.model_dump(by_alias=True)
    return {path: value for field in fields for path, value in _walk(field, content[field])}


def model_of(run: Run) -> str:
    """Return what tells a run's base model from others: the hash of its files, or else its name."""
    return run.record.base_model.sha256 or run.record.base_model.name


def model_labels(runs: Sequence[Run]) -> dict[str, str]:
    """Return a name for each base model: without its folders, where no two are alike without them."""
    names = {model_of(run): run.record.base_model.name for run in reversed(runs)}
    short = [model_label(name) for name in names.values()]
    return {model: name if short.count(model_label(name)) > 1 else model_label(name) for model, name in names.items()}


def refuse_unlike(runs: Sequence[Run], *, axes: Collection[str] = ()) -> None:
    """Refuse runs that cannot share a table."""
    free = (*OWNED, *NOTED, *axes)
    known = [(run, {p: v for p, v in _facts(run).items() if not within(p, free)}) for run in runs]
    unlike = [  # a file that a run never opened does not contradict one that another opened
        _difference(path, [(facts.get(path), run) for run, facts in known if path in facts or not path.startswith("data.")])
        for path in sorted({path for _, facts in known for path in facts})
    ]
    for method, group in by_method(runs).items() if not axes else ():
        unlike.append(_difference(f"definition of {method}", [(run.record.method.definition, run) for run in group]))
    _refuse([line for line in unlike if line])


def alike(run: Run, other: Run) -> bool:
    """Tell whether two runs differ in nothing but method, seed, and which tasks they learned. What records say of single tasks is
    compared for those that both learned.
    """
    if run.record.recipe != other.record.recipe:
        return False
    ours, others = ({p: v for p, v in _facts(r).items() if not within(p, (*OWNED, *NOTED))} for r in (run, other))
    shared = set(run.order) & set(other.order)
    if any(_primary(run, task) != _primary(other, task) for task in shared):
        return False
    one_sided = {path for path in ours.keys() ^ others.keys() if not within(path, (*BY_TASK, "data"))}
    return not one_sided and all(ours[path] == others[path] or within(path, OF_ALL) for path in ours.keys() & others.keys())


def _primary(run: Run, task: str) -> str:
    """The metric that is a task's accuracy."""
    named = run.setting("metric", task)
    return str(named[0]) if isinstance(named, list) and named else "exact_match"


def refuse_other_starts(runs: Sequence[Run]) -> None:
    """Refuse traces of one seed that did not start from one first-task state, and traces with different recorded steps."""
    starts = {seed: [(run.task1_state, run) for run in runs if run.seed == seed] for seed in sorted({run.seed for run in runs})}
    unlike = [_difference(f"protocol.task1_state of seed {seed}", states) for seed, states in starts.items()]
    unlike.append(_difference("recorded steps", [([point.step for point in run.trace], run) for run in runs]))
    _refuse([line for line in unlike if line])


def footnote(runs: Sequence[Run]) -> str:
    """Return a sentence on the hosts, versions, and threads in which runs differ; empty if they agree."""
    known = [leaves(run.record, fields=("threads", "versions", "host", "protocol")) for run in runs]
    notes = [{path: value for path, value in facts.items() if within(path, NOTED)} for facts in known]
    parts = []
    for path in sorted({path for facts in notes for path in facts}):
        values = sorted({str(facts.get(path, "absent")) for facts in notes})
        if len(values) > 1:
            parts.append(f"{path} ({', '.join(values)})")
    return f"The runs differ in {'; '.join(parts)}." if parts else ""


def _facts(run: Run) -> dict[str, Any]:
    data = {f"data.{path}": file.sha256 for path, file in run.record.data.items()}
    facts = leaves(run.record, fields=COMPARED) | data
    if run.record.base_model.sha256:
        del facts["base_model.name"]  # the same model may lie elsewhere
    return facts


def _difference(path: str, values: Sequence[tuple[Any, Run]]) -> str:
    """ "path is X in FOLDER, Y in FOLDER", or nothing where all values are one."""
    first: dict[str, Run] = {}
    for value, run in values:
        first.setdefault("absent" if value is None else str(value), run)
    values_there = ", ".join(f"{value:.80} in {run.folder}" for value, run in first.items())
    return f"{path} is {values_there}" if len(first) > 1 else ""


def _refuse(unlike: Sequence[str]) -> None:
    if unlike:
        raise InvalidValue(f"these runs cannot share a table: {'; '.join(unlike)}; {REMEDY}")


def within(path: str, roots: Collection[str]) -> bool:
    """Tell whether a dotted path is one of some fields, or lies below one."""
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _walk(f"{path}.{name}", inner)
    else:
        yield path, value


Kind = Literal["sequence", "trace"]
Key = tuple[Kind, str, str, tuple[str, ...]]  # with recipe, base model and tasks


@dataclass(frozen=True)
class Study:
    """Runs that may share tables."""

    kind: Kind  # "sequence" or "trace"
    runs: tuple[Run, ...]
    prefix: str = ""  # what the names of its files begin with, if a report has several studies of a kind
    others: tuple[Run, ...] = ()
    layout: Layout = AS_IS

    @property
    def title(self) -> str:
        """Recipe and base model."""
        first = self.runs[0].record
        return f"{first.recipe} on {model_label(first.base_model.name)}"


def studies_of(runs: Sequence[Run]) -> list[Study]:
    """Group runs into studies, sequences first. Runs of one task join a study of sequences with that task at the same settings, and
    runs at learning rate 0 join any study; without one to join, they make studies of their own.
    """
    others = tuple(run for run in runs if len(run.order) == 1 or not run.trained)
    asked, labels = [run for run in runs if run.trained] or runs, model_labels(runs)
    begun = {run.task1_state for run in asked if run.trace}

    def key_of(run: Run) -> Key:
        kind, tasks = ("trace", run.order) if run.trace else ("sequence", tuple(sorted(run.order)))
        return kind, run.record.recipe, labels[model_of(run)], tasks  # type: ignore[return-value]  # a kind

    # a run of one task may only have made the state that traces start from
    groups = group_by([run for run in asked if len(run.order) > 1 or run.task1_state not in begun], key_of)
    for (kind, *_), group in groups.items():
        refuse_unlike(group)
        _refuse_twice(group)
        if kind == "trace":
            refuse_other_starts(group)
    sequences = [group[0] for group in groups.values() if len(group[0].order) > 1]
    for key in [key for key, group in groups.items() if len(group[0].order) == 1]:
        if any(set(key[3]) <= set(first.order) and alike(first, groups[key][0]) for first in sequences):
            del groups[key]
    return [Study(key[0], tuple(groups[key]), _prefix(key, list(groups)), others) for key in sorted(groups)]


def _refuse_twice(runs: Sequence[Run]) -> None:
    seen: dict[tuple[str, tuple[str, ...], int], Run] = {}
    for run in runs:
        other = seen.setdefault((run.method, run.order, run.seed), run)
        if other is not run:
            what = f"{run.method}, {tasks_in(run.order)}, seed {run.seed}"
            raise InvalidValue(f"{other.folder} and {run.folder} are the same run ({what}); give only one of them")


def _prefix(key: Key, keys: Sequence[Key]) -> str:
    """recipe-base model-, with a number where that is not enough; nothing for the only study of its kind."""
    kind, recipe, base_model, _ = key
    alike = [k for k in keys if k[0] == kind]
    if len(alike) == 1:
        return ""
    again = [k for k in alike if file_name(f"{k[1]}-{k[2]}") == file_name(f"{recipe}-{base_model}")]
    number = f"-{sorted(again).index(key) + 1}" if len(again) > 1 else ""
    return file_name(f"{recipe}-{base_model}"[:60] + number) + "-"


def model_label(name: str) -> str:
    """Return the last part of a folder's path; a name on the hub, or of an embedded model, as it is."""
    parts = [part for part in re.split(r"[/\\]", name) if part not in ("", ".", "..")]
    is_place = name.startswith(("/", ".", "~")) or "\\" in name or len(parts) > 2
    return parts[-1] if is_place and parts else name
