"""Every item of a saved state matters: without it, or as a task begins with it, a resumed run is refused or ends otherwise.

The short form tries every kind of item here; the long form also in a fresh process, and every single tensor.
"""

import random
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy
import pytest
import torch

import small
from anchorlora import METHODS
from anchorlora.continual import learn as learning
from anchorlora.continual.progress import MOMENTS
from anchorlora.errors import Stopped
from anchorlora.runs.checkpoint import Answers
from anchorlora.runs.directory import RunDirectory
from anchorlora.store.record import TaskResult
from anchorlora.store.seal import read_sealed, write_sealed
from faults.editing import HOW, MISFITS, TENSORS, edited, fact, moved, one_of, put, without
from faults.runs import contents, in_a_fresh_process, run

SAVED = {"sfor": "Freeze", "ewc": "remembered", "sd-lora": "gates", "o-lora-bsr": "wide", "replay": "rehearsal"}
STEP, LAST_OF_FIRST, FULL = {"task": 2, "step": 1}, {"task": 1, "step": 3}, {"task": 2, "step": 3}
ANSWERED, LAST_ANSWERED = {"task": 1, "batch": 1}, {"task": 3, "batch": 1}
ENDED = {"task": 3, "phase": "ended"}
NOTHING = {"size": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}  # SHA-256 of no bytes


def folder_of(point):
    """The folder of the state that a run saves when it is stopped there."""
    if "step" in point:
        return f"state/{point['task']}-begun/step-{point['step']:08d}"
    return f"state/{point['task']}-begun/trained" if "batch" in point else f"state/{point['task']}"


@dataclass(frozen=True)
class Item:
    """What is changed in the state of a method's run that was stopped at a point; at: its folder, if not the newest."""

    name: str
    method: str
    change: Any
    point: Any
    at: str | None = None

    def __str__(self):
        return f"{self.name}, {self.method}"


KINDS = dict.fromkeys(("parameters/", *(f"optimizer/*/{m}" for m in MOMENTS), "optimizer/", "rows/core", "dropout/cpu"), STEP)
KINDS["rows/held_out"] = FULL  # they are taken after the others
# what a task leaves for the next one, by the method that reads it
LEFT = [
    ("sfor", "rows.safetensors", "rows/core"),
    ("o-lora-bsr", "wide.safetensors", "model"),
    ("ewc", "remembered.safetensors", ""),
    ("sd-lora", "stack.safetensors", ""),
]
OF_LEARNED = [
    ("sfor", "cores.safetensors", "model.layers.0"),
    ("o-lora-bsr", "adapter/adapter_model.safetensors", "base_model.model.model.layers.1"),
]
ITEMS = [
    *(
        Item(f"{kind} {how}", random.Random(kind).choice(list(SAVED)), one_of(kind, make), point)
        for kind, point in KINDS.items()
        for how, make in HOW.items()
    ),
    *(Item(f"{file} {start} {how}", m, make(file, start), STEP, "state/1") for m, file, start in LEFT for how, make in HOW.items()),
    *(
        Item(f"{file} {start} {how}, learned", m, make(file, start), ANSWERED)
        for m, file, start in (*LEFT, *OF_LEARNED)
        for how, make in HOW.items()
    ),
    Item("no held-out rows", "sfor", without("rows.safetensors", "rows/held_out"), STEP, "state/1"),
    Item("no held-out rows, learned", "sfor", without("rows.safetensors", "rows/held_out"), ANSWERED),
    Item("no stores", "sfor", put("stores.json", "{}"), STEP, "state/1"),
    Item("no stores, learned", "sfor", put("stores.json", "{}"), ANSWERED),
    Item("no stores, after the last step", "sfor", fact("stores", {}), LAST_OF_FIRST),  # before, the next forward finds them again
    Item("no layers, learned", "sfor", fact("layers", []), ANSWERED),
    Item("another task", "sfor", fact("task", "other"), ENDED),
    *(Item(f"the mark in the trace, {point}", "sfor", fact("trace", NOTHING), point) for point in (STEP, LAST_ANSWERED, ENDED)),
]


@pytest.fixture(params=[run, pytest.param(in_a_fresh_process, marks=pytest.mark.slow)], ids=["here", "in a fresh process"])
def resume(request):
    return request.param


def end_of(out, recipe, method, resume=run):
    """The outcome of a resumed run: the files that it must have in common with another, or what it was refused with."""
    for generator in (torch.manual_seed, random.seed, numpy.random.seed):  # what a process happens to have drawn before
        generator(random.SystemRandom().randrange(2**31))
    try:
        resume(recipe, out, method)
    except (ValueError, LookupError, Stopped) as error:
        if isinstance(error, KeyError) or "Traceback" in str(error):
            pytest.fail(f"a crash, not a refusal: {error}")
        return f"refused: {error}"
    return outcome(out)


def outcome(out):
    """What later tasks, the record and whoever reads it see.  A task's own files may be a copy of the state that was changed."""
    return {name: content for name, content in contents(out).items() if not name.startswith("state/")}


def copied(point):
    """The beginning of the names of files that are only renamed from the state of a learned task."""
    return (f"tasks/{point['task']}-",) if "batch" in point else ()


def matters(item, recipe, kept, tmp_path, resume=run):
    """Whether a resumed run tells that the item was changed."""
    stopped, whole = kept(item.method, item.point)
    at = item.at or folder_of(item.point)
    end, wanted = end_of(edited(stopped, tmp_path, item.change, at=at), recipe, item.method, resume), outcome(whole)
    if isinstance(end, str):
        return True
    return any(end.get(name) != wanted.get(name) for name in end | wanted if not name.startswith(copied(item.point)))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("method", "point"), {(i.method, str(i.point)): (i.method, i.point) for i in ITEMS}.values(), ids=str)
def test_a_state_that_is_sealed_again_unchanged_ends_the_same(method, point, recipe, kept, tmp_path):
    """Else every test below would pass for the sealing alone."""
    assert not matters(Item("nothing", method, lambda folder: None, point), recipe, kept, tmp_path)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("item", ITEMS, ids=str)
def test_every_item_matters(item, resume, recipe, kept, figure, tmp_path):
    detected = matters(item, recipe, kept, tmp_path, resume)
    figure("items", items=1, fresh=resume is in_a_fresh_process, detected=detected)
    assert detected, "nothing depends on it"


FORGED = [
    *(("ewc", one_of(kind, make), point, None, f"{kind} {how}") for kind, point in KINDS.items() for how, make in MISFITS.items()),
    *((m, make(file, start), STEP, "state/1", f"{file} {start} {how}") for m, file, start in LEFT for how, make in MISFITS.items()),
    *(
        (m, make(file, start), ANSWERED, None, f"{file} {start} {how}, learned")
        for m, file, start in (*LEFT, *OF_LEARNED)
        for how, make in MISFITS.items()
    ),
]


@pytest.mark.parametrize(("method", "change", "point", "at"), [pytest.param(*f[:4], id=f[4]) for f in FORGED])
def test_what_fits_no_run_is_refused_even_under_a_seal(method, change, point, at, recipe, kept, tmp_path):
    out = edited(kept(method, point)[0], tmp_path, change, at=at or folder_of(point))
    assert str(end_of(out, recipe, method)).startswith("refused: ")


def test_after_the_last_step_nothing_is_kept_that_only_a_step_reads(recipe, kept):
    kinds = {point["step"]: moved(kept("sfor", point)[0] / folder_of(point)) for point in (STEP, FULL)}
    assert {name.partition("/")[0] for name in kinds[1]} == {"parameters", "rows", "optimizer", "dropout"}
    assert {name.partition("/")[0] for name in kinds[3]} == {"parameters", "rows"}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("method", SAVED)
@pytest.mark.parametrize("step", [1, 2, 3])
def test_every_single_tensor_matters(step, method, how, recipe, kept, figure, tmp_path):
    point = {"task": 2, "step": step}
    names = moved(kept(method, point)[0] / folder_of(point))
    items = [Item(name, method, HOW[how](TENSORS, name), point) for name in names]
    needless = [str(item) for i, item in enumerate(items) if not matters(item, recipe, kept, tmp_path / str(i))]
    figure("tensors", items=len(items), detected=len(items) - len(needless))
    assert not needless, f"nothing depends on {needless}"


DIGITS = "77257725"  # of numbers that nothing measures
SHARE, COUNT, SECONDS = 0.77257725, 7725772500, 7725772500.5
OF_ENDED = {
    "accuracy": [77.257725] * 3,
    "invalid": [SHARE] * 3,
    "metrics": [{"exact_match": 77.257725}] * 3,
    "drift": lambda drift: drift | {"rho_union": SHARE},
    "layers": lambda layers: [layer | {"retained_energy": SHARE} for layer in layers],
    "train_seconds": SECONDS,
    "evaluate_seconds": SECONDS,
    "trained_parameters": COUNT,
    "stored_parameters": COUNT,
    "history_bytes": COUNT,
    "peak_memory_bytes": COUNT * 1000,
}
PLANTED = [
    *((ENDED, name, value) for name, value in OF_ENDED.items()),
    *((LAST_ANSWERED, name, OF_ENDED[name]) for name in ("drift", "train_seconds", "trained_parameters", "history_bytes")),
    (STEP, "seconds", SECONDS),
]


def test_every_number_of_a_task_is_planted():
    assert {each.name for each in fields(TaskResult)} == {"number", "task", *OF_ENDED}


@pytest.mark.parametrize(("point", "name", "value"), PLANTED, ids=lambda v: "" if callable(v) else str(v))
def test_what_was_measured_before_the_stop_stands_in_the_record(point, name, value, resume, recipe, kept, figure, tmp_path):
    stopped, whole = kept("sfor", point)
    out = edited(stopped, tmp_path, fact(name, value), at=folder_of(point))
    resume(recipe, out, "sfor")
    before, after = ((folder / "record.json").read_text().replace(".", "") for folder in (whole, out))
    figure("items", items=1, fresh=resume is in_a_fresh_process, detected=DIGITS in after)
    assert DIGITS not in before
    assert DIGITS in after


@pytest.mark.parametrize(("name", "value", "said"), [("step", 0, "step 0 of task 2"), ("number", 3, "step 1 of task 3")])
def test_progress_of_another_step_or_task_is_passed_over_by_name(name, value, said, recipe, kept, tmp_path):
    at, complaints = folder_of(STEP), []
    out = edited(kept("sfor", STEP)[0], tmp_path, fact(name, value), at=at)
    assert RunDirectory(out).checkpoint(2).read_progress(2, complaints.append) is None
    assert complaints == [f"{out / at} is of {said}; an older state is used"]


def test_the_state_of_another_task_is_passed_over_by_name(recipe, kept, tmp_path):
    complaints = []
    out = edited(kept("sfor", ENDED)[0], tmp_path, fact("number", 2), at="state/3")
    assert len(RunDirectory(out).finished_tasks(small.ORDER, complaints.append)) == 2
    assert complaints == [f"{out / 'state/3'} is of task 2; task 3 is trained again"]


class _Unwatched(list):
    step = 0

    def look(self, step=None):
        pass


@pytest.mark.parametrize("method", [m for m in SAVED if METHODS[m].constraints])
def test_the_constraints_that_are_attached_again_matter(method, recipe, kept, tmp_path, monkeypatch):
    @contextmanager
    def unprotected(optimizer, anchor, constraints, *, step=0, check_every=100):
        yield _Unwatched()

    stopped, whole = kept(method, STEP)
    shutil.copytree(stopped, tmp_path / "edited")
    monkeypatch.setattr(learning, "enforcing", unprotected)
    assert end_of(tmp_path / "edited", recipe, method) != outcome(whole)


@pytest.mark.parametrize("name", ["texts", "seconds"])
def test_the_answers_that_were_given_are_those_of_the_record(name, resume, recipe, kept, figure, tmp_path):
    stopped, whole = kept("sfor", LAST_ANSWERED)
    shutil.copytree(stopped, tmp_path / "edited")
    path = tmp_path / "edited/state/3-begun/answers.json"
    answers = read_sealed(path, Answers)
    others = {task: dict.fromkeys(texts, DIGITS) for task, texts in answers.texts.items()}
    assert others["fruit"]
    write_sealed(path, asdict(replace(answers, **{name: others if name == "texts" else SECONDS})))
    resume(recipe, tmp_path / "edited", "sfor")
    file = "tasks/3-metal/predictions.jsonl" if name == "texts" else "record.json"
    before, after = ((folder / file).read_text().replace(".", "") for folder in (whole, tmp_path / "edited"))
    figure("items", items=1, fresh=resume is in_a_fresh_process, detected=DIGITS in after)
    assert DIGITS not in before
    assert DIGITS in after
