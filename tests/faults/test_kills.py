"""kill -9 at random moments, many of them inside a save: nothing unreadable, nothing acknowledged lost, the same end."""

import os
import random
import select
import signal
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest

import small
from anchorlora.continual.callback import RunCallback
from anchorlora.runs.autosave import Autosave
from anchorlora.runs.checkpoint import Checkpoint
from anchorlora.runs.directory import RunDirectory
from faults.runs import EPOCHS, LONG, STEPS, assert_same, run

METHODS = ("sfor", "o-lora-hard", "sd-lora", "ewc")
LEARNED = 10**6  # the step of a task that is learned
SAVE = 0.02  # seconds, about as long as one takes


class Telling(RunCallback):
    """Tells on a pipe which step of which task is done."""

    def __init__(self, pipe):
        self.pipe, self.number = pipe, 0

    def on_task_begin(self, number, task, steps, done):
        self.number = number

    def on_step_end(self, event):
        os.write(self.pipe, f"D {self.number} {event['step']}\n".encode())


def child(recipe, out, method, pipe, save_every):
    """Learns and never returns.  Tells on the pipe: D a step is done, S a save begins, E it is done, each with what counts then."""

    def telling(call, said):
        def wrapped(self, *args, **kwargs):
            os.write(pipe, b"S\n")
            result = call(self, *args, **kwargs)
            os.write(pipe, f"E {said(*args)}\n".encode())
            return result

        return wrapped

    Checkpoint.write_progress = telling(Checkpoint.write_progress, lambda progress: f"{progress.number} {progress.step}")
    Autosave.on_task_trained = telling(Autosave.on_task_trained, lambda state: f"{state.result.number} {LEARNED}")
    RunDirectory.write_task = telling(RunDirectory.write_task, lambda state: f"{state.result.number + 1} 0")
    try:
        run(recipe, out, method, save_every=save_every, callback=Telling(pipe))
        os._exit(0)
    finally:
        os._exit(1)


@dataclass(frozen=True)
class Killed:
    """What a process had told when it was killed, or ended by itself: then `status` is a number."""

    status: int | None
    inside: bool  # a save
    acknowledged: tuple[int, int]  # (task, step) of the last save
    done: tuple[int, int]  # (task, step) of the last step


def heard(pipe, *, seconds, aimed):
    """What is told on a pipe until the seconds are over and, if aimed, a save has begun since; or until nobody is left to tell."""
    said, end = b"", time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 or aimed:
        if select.select([pipe], [], [], left if left > 0 else None)[0]:
            more = os.read(pipe, 4096)
            said += more
            if not more or (left <= 0 and b"S" in more):
                break
    return said


def killed_once(recipe, out, method, *, after, into, save_every):
    """One process, killed after so many seconds; into: or so many seconds into the first save after them."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        child(recipe, out, method, writing, save_every)
    os.close(writing)
    said = heard(reading, seconds=after, aimed=into is not None)
    time.sleep(into or 0.0)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as rest:
        lines = [line.split() for line in (said + rest.read()).decode().splitlines()]
    told = {kind: [(int(line[1]), int(line[2])) for line in lines if line[0] == kind and len(line) == 3] for kind in "DE"}
    return Killed(
        os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        [line[0] for line in lines if line[0] in "SE"][-1:] == ["S"],
        max(told["E"], default=(1, 0)),
        max(told["D"], default=(1, 0)),
    )


def standing(out):
    """(task, step) that a resumed run would go on from, and what it would complain of."""
    directory, complaints = RunDirectory(out), []
    done = len(directory.finished_tasks(small.ORDER, complaints.append))
    if done == len(small.ORDER):
        return (done + 1, 0), complaints
    checkpoint = directory.checkpoint(done + 1)
    if checkpoint.read_trained(done + 1, complaints.append) is not None:
        return (done + 1, LEARNED), complaints
    progress = checkpoint.read_progress(done + 1, complaints.append)
    return (done + 1, progress.step if progress else 0), complaints


def steps_of(place, per_task):
    """All steps that were made up to a (task, step)."""
    task, step = place
    return (task - 1) * per_task + min(step, per_task)


def losses(out, killed, reached, *, per_task, save_every):
    """What a kill cost: complaints of what was saved, acknowledged states, steps.  reached: the last that was acknowledged."""
    stands, complaints = standing(out)
    steps = steps_of(killed.done, per_task) - steps_of(stands, per_task)
    assert not complaints, complaints
    assert stands >= reached, f"acknowledged {reached}, and only {stands} is there"
    assert steps <= save_every, f"{killed.done} was reached with a save every {save_every}, and {stands} is there"
    return len(complaints), int(stands < reached), steps


def killed_often(recipe, tmp_path, *, kills, seed, intervals, inside=0):
    """Runs that are killed until they end, so many times and so often inside a save.

    intervals: the steps between two saves, one of which is drawn for each run
    """
    draw, rounds, found = random.Random(seed), 0, Counter(most_steps_lost=0, most_interval=max(intervals), unreadable=0, lost=0)
    whole = cache(lambda method: run(recipe, tmp_path / f"whole-{method}", method) and tmp_path / f"whole-{method}")

    def wanted():
        return found["kills"] < kills or found["inside"] < inside

    while wanted():
        method, save_every = METHODS[rounds % len(METHODS)], draw.choice(intervals)
        out, reached = tmp_path / f"round-{rounds}", (1, 0)
        rounds += 1
        while wanted() and not (out / "record.json").exists():
            into = draw.uniform(0, SAVE) if draw.random() < 0.5 else None  # at random, a kill is seldom inside a save
            killed = killed_once(recipe, out, method, after=draw.uniform(0.05, 1.5), into=into, save_every=save_every)
            assert killed.status in (None, 0), "the resumed run failed"
            reached = max(reached, killed.acknowledged)
            found.update(kills=killed.status is None, inside=killed.status is None and killed.inside)
            if not (out / "record.json").exists() and (out / "config.yaml").exists():
                unreadable, lost, steps = losses(
                    out, killed, reached, per_task=STEPS * recipe.training.epochs, save_every=save_every
                )
                found.update(unreadable=unreadable, lost=lost)
                found["most_steps_lost"] = max(found["most_steps_lost"], steps)
        run(recipe, out, method)
        assert_same(out, whole(method))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forking beside idle threads is what is wanted here
def test_killed_at_random_nothing_is_lost_and_the_end_is_the_same(small_recipe, tmp_path):
    found = killed_often(small_recipe, tmp_path, kills=4, seed=1, intervals=(1, 2))
    assert found["kills"] >= 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_killed_two_hundred_times_fifty_of_them_inside_a_save(part, small_benchmark, small_model, figure, tmp_path):
    recipe = small.recipe(small_benchmark, small_model, **LONG)
    figure("kills", **killed_often(recipe, tmp_path, kills=50, inside=13, seed=2 + part, intervals=(1, 2, EPOCHS * STEPS)))
