"""A run stops where it is asked to and goes on from there: the same end alone would also be that of a run that begins again."""

import json

import pytest

import small
from anchorlora import METHODS, run_sequence
from anchorlora.continual.sequence import Watch
from anchorlora.errors import Interrupted
from faults.runs import run


class Beginnings(Watch):
    """Which task a run learns first and after how many steps, how many answers it has already, and what it complains of."""

    def __init__(self):
        self.learned, self.answered, self.said = [], [], []

    def task_begins(self, number, task, steps, done):
        self.learned.append((number, done))

    def examples_done(self, count):
        self.answered.append(count)

    def damaged(self, sentence):
        self.said.append(sentence)


def stopped(recipe, out, said, **point):
    with pytest.raises(Interrupted, match=f"asked to stop: {said}; the same command goes on from there"):
        run(recipe, out, "sfor", point=point)


def gone_on(recipe, out):
    watch = Beginnings()
    run_sequence(recipe, METHODS["sfor"], order=small.ORDER, seed=42, out=out, watch=watch, save_every=0)
    assert not watch.said
    return watch


@pytest.mark.parametrize(("task", "step"), [(1, 2), (2, 3)])
def test_asked_within_a_task_it_stops_after_the_step_and_goes_on_with_the_next(task, step, small_recipe, tmp_path):
    stopped(small_recipe, tmp_path / "run", f"saved after step {step} of task {task}", task=task, step=step)
    assert gone_on(small_recipe, tmp_path / "run").learned[0] == (task, step)


def test_asked_while_a_task_is_answered_it_stops_after_the_batch_and_goes_on_with_the_next(small_recipe, tmp_path):
    stopped(small_recipe, tmp_path / "run", "saved while task 2 was answered", task=2, batch=1)
    went_on = gone_on(small_recipe, tmp_path / "run")
    assert went_on.answered[0] > 0
    assert went_on.learned == [(3, 0)]


def test_a_task_that_has_ended_is_not_learned_again(small_recipe, tmp_path):
    stopped(small_recipe, tmp_path / "run", "saved after step 1 of task 3", task=3, step=1)
    facts = {number: json.loads((tmp_path / f"run/state/{number}/facts.json").read_text()) for number in (1, 2)}
    assert gone_on(small_recipe, tmp_path / "run").learned == [(3, 1)]
    assert all(json.loads((tmp_path / f"run/state/{n}/facts.json").read_text()) == facts[n] for n in facts)
