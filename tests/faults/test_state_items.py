"""Every item of a saved state matters: without it, or as a task begins with it, a resumed run is refused or ends otherwise."""

import json
import random
import shutil

import numpy
import pytest
import torch
from safetensors.torch import save_file

import small
from anchorlora import METHODS
from anchorlora.continual import learn as learning
from anchorlora.continual.progress import MOMENTS
from anchorlora.errors import Interrupted, Stopped
from anchorlora.experiments.directory import RunDirectory
from faults.edits import edited, tensors_of
from faults.runs import contents, in_a_fresh_process, run

SAVED = {"sfor": "Freeze", "ewc": "remembered", "sd-lora": "gates", "o-lora-bsr": "wide", "replay": "rehearsal"}
STEP = {"task": 2, "step": 1}
STEP_FOLDER, TENSORS = "state/2-begun/step-00000001", "tensors.safetensors"


@pytest.fixture(scope="module")
def recipe(small_benchmark, small_model):
    """Rows for more than one step, so that a task is stopped before its store is full."""
    return small.recipe(small_benchmark, small_model, rows=300, trace_points=4)


@pytest.fixture(scope="module")
def kept(recipe, tmp_path_factory):
    """(method, point) -> the folder of a run that was stopped there, and the folder of one that was not; both to be copied."""
    made = {}

    def of(method, point):
        key = (method, tuple(point.items()))
        if (method, None) not in made:
            made[method, None] = tmp_path_factory.mktemp("whole") / method
            run(recipe, made[method, None], method)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("stopped") / method
            with pytest.raises(Interrupted):
                run(recipe, made[key], method, point=point)
        return made[key], made[method, None]

    return of


def end_of(out, recipe, method, resume=run):
    """The outcome of a resumed run: the files that it must have in common with another, or what it was refused with."""
    for generator in (torch.manual_seed, random.seed, numpy.random.seed):  # what a process happens to have drawn before
        generator(random.SystemRandom().randrange(2**31))
    try:
        resume(recipe, out, method)
    except (ValueError, LookupError, Stopped) as error:
        return "a crash, not a refusal" if isinstance(error, KeyError) else f"refused: {error}"
    return {name: content for name, content in contents(out).items() if not name.startswith("state/")}


def without(file, prefix):
    """Leave out the tensors whose names begin so."""

    def change(folder):
        tensors, metadata = tensors_of(folder / file)
        left = {name: t for name, t in tensors.items() if not name.startswith(prefix)}
        assert len(left) < len(tensors), f"{file} holds no {prefix}"
        save_file(left, folder / file, metadata=metadata)

    return change


def at_the_beginning(file, prefix):
    """Put zeros, with which an optimizer, a fisher and a sum begin, in place of the tensors whose names begin so."""

    def change(folder):
        tensors, metadata = tensors_of(folder / file)
        named = [name for name in tensors if name.startswith(prefix)]
        assert named, f"{file} holds no {prefix}"
        generator = torch.Generator().manual_seed(42).get_state()
        first = {n: generator if n.startswith("dropout") else torch.zeros_like(tensors[n]) for n in named}
        save_file({**tensors, **first}, folder / file, metadata=metadata)

    return change


def fact(name, value):
    def change(folder):
        facts = json.loads((folder / "facts.json").read_text())
        assert facts[name] != value
        (folder / "facts.json").write_text(json.dumps(facts | {name: value}))

    return change


def names_of(folder, at=STEP_FOLDER):
    """The tensors that are no longer as they began: the first step moves no A while B is zero."""
    return sorted(name for name, t in tensors_of(folder / at / TENSORS)[0].items() if t.any())


def assert_matters(change, method, recipe, kept, tmp_path, *, point=STEP, at=STEP_FOLDER, resume=run):
    stopped, whole = kept(method, point)
    wanted = {name: content for name, content in contents(whole).items() if not name.startswith("state/")}
    end = end_of(edited(stopped, tmp_path, change, at=at), recipe, method, resume)
    assert end != wanted, "nothing depends on it"
    assert end != "a crash, not a refusal"


@pytest.mark.parametrize("method", SAVED)
def test_a_state_that_is_sealed_again_unchanged_ends_the_same(method, recipe, kept, tmp_path):
    """Else every test below would pass for the sealing alone."""
    stopped, whole = kept(method, STEP)
    end = end_of(edited(stopped, tmp_path, lambda folder: None, at=STEP_FOLDER), recipe, method)
    assert end == {name: content for name, content in contents(whole).items() if not name.startswith("state/")}


KINDS = ("parameters/", *(f"optimizer/*/{moment}" for moment in MOMENTS), "optimizer/", "rows/core", "rows/held_out", "dropout/cpu")


def matching(names, kind):
    first, _, last = kind.partition("*")
    return [name for name in names if name.startswith(first) and name.endswith(last)]


@pytest.mark.parametrize("how", [without, at_the_beginning], ids=["left out", "as at the beginning"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_matters(kind, how, recipe, kept, tmp_path):
    """One drawn tensor of each kind; the long form tries every single one."""
    method = random.Random(kind).choice(list(SAVED))
    named = matching(names_of(kept(method, STEP)[0]), kind)
    if kind == "rows/held_out":  # rows for drift on held-out rows, which step 1 has not reached yet
        assert not named, "test it as the others"
        return
    assert_matters(how(TENSORS, random.Random(kind).choice(named)), method, recipe, kept, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", [without, at_the_beginning], ids=["left out", "as at the beginning"])
@pytest.mark.parametrize("method", SAVED)
@pytest.mark.parametrize("step", [1, 2])
def test_every_single_tensor_matters(step, method, how, recipe, kept, tmp_path):
    point, at = {"task": 2, "step": step}, f"state/2-begun/step-{step:08d}"
    stopped, _ = kept(method, point)
    for i, name in enumerate(names_of(stopped, at)):
        assert_matters(how(TENSORS, name), method, recipe, kept, tmp_path / str(i), point=point, at=at)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "rows/held_out"])
def test_every_kind_of_tensor_matters_in_a_fresh_process(kind, recipe, kept, tmp_path):
    named = matching(names_of(kept("sfor", STEP)[0]), kind)
    assert_matters(without(TENSORS, named[0]), "sfor", recipe, kept, tmp_path, resume=in_a_fresh_process)


def test_held_out_rows_matter(recipe, kept, tmp_path):
    point = {"task": 2, "step": 3}
    for how in (without, at_the_beginning):
        change = how(TENSORS, "rows/held_out")
        assert_matters(change, "sfor", recipe, kept, tmp_path / how.__name__, point=point, at="state/2-begun/step-00000003")


@pytest.mark.parametrize(("name", "value", "said"), [("step", 0, "step 0 of task 2"), ("number", 3, "step 1 of task 3")])
def test_progress_of_another_step_or_task_is_passed_over_by_name(name, value, said, recipe, kept, tmp_path):
    out, complaints = edited(kept("sfor", STEP)[0], tmp_path, fact(name, value), at=STEP_FOLDER), []
    assert RunDirectory(out).midway(2).read_progress(2, complaints.append) is None
    assert complaints == [f"{out / STEP_FOLDER} is of {said}; an older state is taken"]


def test_the_stores_matter_after_the_last_step_of_the_first_task(recipe, kept, tmp_path):
    """Before, the next forward would find them again."""
    with pytest.raises((ValueError, LookupError, AssertionError)):  # no layer has a core then
        assert_matters(
            fact("stores", {}), "sfor", recipe, kept, tmp_path, point={"task": 1, "step": 3}, at="state/1-begun/step-00000003"
        )
        raise AssertionError("it differs")


def test_the_seconds_count_in_the_cost(recipe, kept, tmp_path):
    out = edited(kept("sfor", STEP)[0], tmp_path, fact("seconds", 1e6), at=STEP_FOLDER)
    run(recipe, out, "sfor")
    assert json.loads((out / "record.json").read_text())["cost"]["train_seconds"][1] > 1e6


def test_the_mark_in_the_trace_matters(recipe, kept, tmp_path):
    nothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of no bytes
    assert_matters(fact("trace", {"size": 0, "sha256": nothing}), "sfor", recipe, kept, tmp_path)


class _Unwatched(list):
    step = 0

    def look(self, step=None):
        pass


@pytest.mark.parametrize("method", [m for m in SAVED if METHODS[m].constraints])
def test_the_constraints_that_are_attached_again_matter(method, recipe, kept, tmp_path, monkeypatch):
    from contextlib import contextmanager

    @contextmanager
    def unprotected(optimizer, scope, constraints, *, step=0, check_every=100):
        yield _Unwatched()

    stopped, whole = kept(method, STEP)
    shutil.copytree(stopped, tmp_path / "edited")
    monkeypatch.setattr(learning, "protect", unprotected)
    wanted = {name: content for name, content in contents(whole).items() if not name.startswith("state/")}
    assert end_of(tmp_path / "edited", recipe, method) != wanted


# what a task leaves for the next one, by the method that reads it
BOUNDARY = [
    ("sfor", without("rows.safetensors", "rows/core")),
    ("sfor", at_the_beginning("rows.safetensors", "rows/core")),
    ("sfor", without("rows.safetensors", "rows/held_out")),
    ("o-lora-bsr", without("wide.safetensors", "model")),
    ("ewc", without("remembered.safetensors", "")),
    ("ewc", at_the_beginning("remembered.safetensors", "")),
    ("sd-lora", without("stack.safetensors", "")),
    ("sd-lora", at_the_beginning("stack.safetensors", "")),
    ("o-lora-bsr", at_the_beginning("wide.safetensors", "model")),
    ("sfor", lambda folder: (folder / "stores.json").write_text("{}")),
]
ANSWERED = {"task": 1, "batch": 1}
LEARNED = [
    *BOUNDARY,
    ("sfor", at_the_beginning("cores.safetensors", "model")),
    ("sfor", without("cores.safetensors", "model.layers.0")),
    ("o-lora-bsr", at_the_beginning("adapter/adapter_model.safetensors", "base")),
    ("sfor", without("adapter/adapter_model.safetensors", "base_model.model.model.layers.1")),
    ("sfor", lambda folder: (folder / "sites.json").write_text("[]")),
]


def of_later_tasks(end):
    """What a task's state must not be copied into, but change."""
    return end if isinstance(end, str) else {n: c for n, c in end.items() if n.startswith(("tasks/2", "tasks/3", "record"))}


@pytest.mark.parametrize(("method", "change"), BOUNDARY, ids=lambda v: v if isinstance(v, str) else "")
def test_what_a_finished_task_left_matters_for_the_later_ones(method, change, recipe, kept, tmp_path):
    assert_matters(change, method, recipe, kept, tmp_path, at="state/1")


@pytest.mark.parametrize(("method", "change"), LEARNED, ids=lambda v: v if isinstance(v, str) else "")
def test_what_a_learned_task_left_matters_for_the_later_ones(method, change, recipe, kept, tmp_path):
    stopped, whole = kept(method, ANSWERED)
    end = end_of(edited(stopped, tmp_path, change, at="state/1-begun/learned"), recipe, method)
    assert of_later_tasks(end) != of_later_tasks(contents(whole))


def test_the_answers_that_were_given_are_those_of_the_record(recipe, kept, tmp_path):
    from dataclasses import asdict, replace

    from anchorlora.experiments.midway import Answers
    from anchorlora.experiments.sealed import write_sealed
    from anchorlora.sealed_file import read_sealed

    stopped, whole = kept("sfor", ANSWERED)
    shutil.copytree(stopped, tmp_path / "edited")
    path = tmp_path / "edited/state/1-begun/answers.json"
    answers = read_sealed(path, Answers)
    assert answers.texts["fruit"]
    write_sealed(path, asdict(replace(answers, texts={"fruit": dict.fromkeys(answers.texts["fruit"], "no label")})))
    end = end_of(tmp_path / "edited", recipe, "sfor")
    assert end["tasks/1-fruit/predictions.jsonl"] != contents(whole)["tasks/1-fruit/predictions.jsonl"]
