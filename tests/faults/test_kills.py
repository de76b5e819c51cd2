"""kill -9 at random moments, many of them inside a save: nothing unreadable, nothing acknowledged lost, the same end."""

import os
import random
import signal
import time

import pytest

import small
from anchorlora.experiments.directory import RunDirectory
from anchorlora.experiments.midway import Midway
from faults.runs import assert_same, run

METHODS = ("sfor", "o-lora-hard", "sd-lora", "ewc")


def child(recipe, out, method, pipe):
    """Learns, and tells on the pipe: S a save begins, E it is done and what now counts (task, step); never returns."""

    def telling(call, said):
        def wrapped(self, *args, **kwargs):
            os.write(pipe, b"S\n")
            result = call(self, *args, **kwargs)
            os.write(pipe, f"E {said(*args)}\n".encode())
            return result

        return wrapped

    Midway.write_progress = telling(Midway.write_progress, lambda progress: f"{progress.number} {progress.step}")
    RunDirectory.write_stage = telling(RunDirectory.write_stage, lambda stage: f"{stage.number + 1} 0")
    try:
        run(recipe, out, method, save_every=1)
        os._exit(0)
    finally:
        os._exit(1)


def killed_once(recipe, out, method, after):
    """(exit status or None when killed, whether inside a save, the last (task, step) that was acknowledged)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        child(recipe, out, method, writing)
    os.close(writing)
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reading) as said:
        lines = said.read().splitlines()
    acknowledged = [tuple(map(int, line.split()[1:])) for line in lines if line.startswith("E") and len(line.split()) == 3]
    inside = bool(lines) and lines[-1] == "S"
    return (os.WEXITSTATUS(status) if os.WIFEXITED(status) else None), inside, max(acknowledged, default=(1, 0))


def standing(out):
    """(task, step) that a resumed run would go on from, and what it would complain of."""
    directory, complaints = RunDirectory(out), []
    done = len(directory.finished_tasks(small.ORDER, complaints.append))
    if done == len(small.ORDER):
        return (done + 1, 0), complaints
    midway = directory.midway(done + 1)
    if midway.read_learned(complaints.append) is not None:
        return (done + 1, 10**6), complaints
    progress = midway.read_progress(done + 1, complaints.append)
    return (done + 1, progress.step if progress else 0), complaints


def killed_often(recipe, tmp_path, *, kills, seed):
    draw, inside, count, rounds = random.Random(seed), 0, 0, 0
    wholes = {}
    while count < kills:
        method = METHODS[rounds % len(METHODS)]
        if method not in wholes:
            wholes[method] = tmp_path / f"whole-{method}"
            run(recipe, wholes[method], method)
        out, reached = tmp_path / f"round-{rounds}", (1, 0)
        rounds += 1
        while not (out / "record.json").exists():
            status, within, acknowledged = killed_once(recipe, out, method, draw.uniform(0.05, 1.5))
            assert status in (None, 0), "the resumed run failed"
            reached = max(reached, acknowledged)
            if status is None:
                count, inside = count + 1, inside + within
            if not (out / "record.json").exists() and (out / "config.yaml").exists():
                stands, complaints = standing(out)
                assert not complaints, complaints
                assert stands >= reached, f"acknowledged {reached}, and only {stands} is there"
        assert_same(out, wholes[method])
    return inside, rounds


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forking beside idle threads is what is wanted here
def test_killed_at_random_nothing_is_lost_and_the_end_is_the_same(small_recipe, tmp_path):
    _, rounds = killed_often(small_recipe, tmp_path, kills=6, seed=1)
    assert rounds >= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_killed_two_hundred_times_fifty_of_them_inside_a_save(small_recipe, tmp_path):
    inside, _ = killed_often(small_recipe, tmp_path, kills=200, seed=2)
    assert inside >= 50
