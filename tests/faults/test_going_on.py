"""A run stops where it is asked to and goes on from there: the same end alone would also be that of a run that begins again."""

import json

import pytest

import small
from anchorlora import METHODS, run_sequence
from anchorlora.continual.callback import RunCallback
from anchorlora.errors import Interrupted
from faults.damages import flip
from faults.runs import run


class Beginnings(RunCallback):
    """Which task a run learns first and after how many steps, how many answers it has already, and what it complains of."""

    def __init__(self):
        self.learned, self.answered, self.said = [], [], []

    def on_task_begin(self, number, task, steps, done):
        self.learned.append((number, done))

    def on_evaluation_begin(self, number, examples, texts):
        self.answered.append(sum(map(len, texts.values())))

    def on_warning(self, message):
        self.said.append(message)


def stopped(recipe, out, said, **point):
    with pytest.raises(Interrupted, match=f"asked to stop: {said}; the same command continues from there"):
        run(recipe, out, "sfor", point=point)


def gone_on(recipe, out):
    watch = Beginnings()
    run_sequence(recipe, METHODS["sfor"], order=small.ORDER, seed=42, out=out, callbacks=[watch], save_every=0)
    assert not watch.said
    return watch


@pytest.mark.parametrize(("task", "step"), [(1, 2), (2, 3)])
def test_asked_within_a_task_it_stops_after_the_step_and_goes_on_with_the_next(task, step, small_recipe, tmp_path):
    stopped(small_recipe, tmp_path / "run", f"saved after step {step} of task {task}", task=task, step=step)
    assert gone_on(small_recipe, tmp_path / "run").learned[0] == (task, step)


def test_asked_while_a_task_is_answered_it_stops_after_the_batch_and_goes_on_with_the_next(small_recipe, tmp_path):
    stopped(small_recipe, tmp_path / "run", "saved while task 2 was being tested", task=2, batch=1)
    went_on = gone_on(small_recipe, tmp_path / "run")
    assert went_on.answered[0] > 0
    assert went_on.learned == [(3, 0)]


def test_a_task_that_has_ended_is_not_learned_again(small_recipe, tmp_path):
    stopped(small_recipe, tmp_path / "run", "saved after step 1 of task 3", task=3, step=1)
    facts = {number: json.loads((tmp_path / f"run/state/{number}/facts.json").read_text()) for number in (1, 2)}
    assert gone_on(small_recipe, tmp_path / "run").learned == [(3, 1)]
    assert all(json.loads((tmp_path / f"run/state/{n}/facts.json").read_text()) == facts[n] for n in facts)


def test_what_is_saved_stays_although_newer_states_that_are_damaged_lie_beside_it(small_recipe, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(small_recipe, out, "sfor", point={"task": 2, "step": 3}, save_every=1)
    damaged = sorted(out.glob("state/2-begun/step-*/tensors.safetensors"))
    for path in damaged:
        flip(path, None)
    assert len(damaged) == 2
    stopped(small_recipe, out, "saved after step 1 of task 2", task=2, step=1)
    assert [folder.name for folder in out.glob("state/2-begun/step-*")] == ["step-00000001"]
    assert gone_on(small_recipe, out).learned[0] == (2, 1)


@pytest.mark.parametrize("point", [{"task": 3, "step": 1}, {"task": 2, "batch": 1}], ids=str)
def test_what_was_learned_after_a_task_that_was_learned_again_is_not_gone_on_from(point, small_recipe, tmp_path):
    out, watch = tmp_path / "run", Beginnings()
    with pytest.raises(Interrupted):
        run(small_recipe, out, "sfor", point=point)
    flip(out / "state/1/rows.safetensors", None)
    with pytest.raises(Interrupted):
        run(small_recipe, out, "sfor", point={"task": 1, "phase": "ended"})
    run(small_recipe, out, "sfor", callback=watch)
    assert watch.learned == [(2, 0), (3, 0)]
    assert len(watch.said) == 1
    assert f"continues from another state than {out / 'state/1'}, which was trained again" in watch.said[0]


@pytest.mark.parametrize("name", [".config.yaml.tmp", "state/.recorded.json.7.tmp", "state/.provenance.json.tmp", ".log.jsonl.tmp"])
def test_a_file_that_a_killed_process_had_begun_is_in_nobody_s_way(name, small_recipe, tmp_path):
    out = tmp_path / "run"
    if name != ".config.yaml.tmp":
        stopped(small_recipe, out, "saved after step 1 of task 1", task=1, step=1)
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text("half")
    run(small_recipe, out, "sfor")
    assert not list(out.rglob(".*.tmp"))
