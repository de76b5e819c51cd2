"""Signals at random moments to a real process: exit status 75 within the grace time, and the same end as without them."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import small
from anchorlora.cli.app import entry, main
from anchorlora.cli.signals import ASKING, asked_to_stop
from anchorlora.experiments.midway import Midway
from faults.runs import LONG, command, differing, run

GRACE = 30.0  # seconds
SPREAD = 0.8  # seconds after the first task begins: about as long as what is left of a run then
METHOD = "sfor"
NUMBERS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


@pytest.fixture(scope="module")
def recipe(small_benchmark, small_model):
    """Steps of four micro-batches, and a batch for every answer."""
    return small.recipe(small_benchmark, small_model, **LONG | {"eval_batch": 1})


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    run(recipe, out, METHOD)
    return out


def listen():
    """In the process that begins: a shell that runs the tests in the background has switched Ctrl-C off for all of them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def until(condition, process, seconds=120.0):
    """Wait for a sign of life, or for the end of the process."""
    began = time.monotonic()
    while not condition() and process.poll() is None:
        assert time.monotonic() - began < seconds, "the run shows no sign of life"
        time.sleep(0.005)


def signalled(number, words, places, *, after):
    """(exit status, where the run was when it was asked, seconds from the signal to the end): one process and one signal."""
    places.write_text("")
    words = [sys.executable, str(Path(__file__).with_name("telling.py")), str(places), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, env=environment, text=True, preexec_fn=listen, **pipes)
    until(lambda: "began" in places.read_text(), process)
    time.sleep(after)
    process.send_signal(number)
    sent = time.monotonic()
    _, said = process.communicate(timeout=GRACE)
    seconds = time.monotonic() - sent
    if process.returncode == 75:
        assert "the same command goes on from there" in said
    assert "Traceback" not in said
    where = [line.split()[1] for line in places.read_text().splitlines() if line.startswith("asked")]
    return process.returncode, where[0] if where else None, seconds


def stopped_often(number, recipe, whole, tmp_path, *, signals):
    """Runs that are stopped until they end, and begun anew until that many signals have stopped one."""
    draw, found, places = random.Random(number.name), Counter(), Counter()
    slowest = 0.0
    while found["saved"] < signals:
        out = tmp_path / f"run-{found['runs']}"
        words = command(recipe, out, METHOD)[:-2]  # nothing is saved within a task but what a signal asks for
        while not (out / "record.json").exists():
            if found["saved"] < signals:
                status, where, seconds = signalled(number, words, tmp_path / "places", after=draw.uniform(0, SPREAD))
                assert status == 75 or (out / "record.json").exists(), (status, where)  # one that comes after the end ends nothing
                found["saved"] += status == 75
                places[where] += status == 75
                slowest = max(slowest, seconds)
            else:
                run(recipe, out, METHOD)
        different = differing(out, whole)
        found["runs"] += 1
        found["equal"] += not different
        assert not different, different
    return {**found, "signals": signals, "most_seconds": slowest} | {p: places[p] for p in ("accumulating", "answering")}


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: n.name)
def test_a_signal_saves_and_stops_and_the_next_call_ends_the_same(number, recipe, whole, tmp_path):
    assert stopped_often(number, recipe, whole, tmp_path, signals=1)["most_seconds"] < GRACE


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: n.name)
def test_twenty_signals_stop_runs_anywhere(number, recipe, whole, figure, tmp_path):
    """Some while a step gathers its gradient, and some while a task is answered."""
    found = stopped_often(number, recipe, whole, tmp_path, signals=20)
    figure("signals", **found)
    assert found["most_seconds"] < GRACE
    assert found["accumulating"]
    assert found["answering"]


@pytest.fixture
def own():
    """Handlers of the test's own process, which it may change."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ASKING}
    yield dict.fromkeys(ASKING, signal.SIG_DFL)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_ctrl_c_stops_at_once(own):
    said = []
    with pytest.raises(KeyboardInterrupt), asked_to_stop(said.append) as stop:
        stop.learning = True
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.why == "SIGINT"
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it goes on")
    assert said == ["SIGINT: saving after this step; once more stops at once"]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_second_ctrl_c_inside_a_save_harms_nothing(number, recipe, whole, tmp_path, monkeypatch, capsys):
    """It comes where the second save of the run puts something on disk for the n-th time."""
    saves, calls, write, sync = [], [], Midway.write_progress, os.fsync

    def syncing(descriptor):
        calls.append(descriptor)
        if len(saves) == 2 and len(calls) == number:
            raise KeyboardInterrupt
        sync(descriptor)

    def writing(midway, progress):
        saves.append(progress)
        calls.clear()
        write(midway, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Midway, "write_progress", writing)
        patch.setattr(os, "fsync", syncing)
        assert main(command(recipe, tmp_path / "run", METHOD)) == 75
    assert "the same command goes on from what was saved last" in capsys.readouterr().err
    assert not list((tmp_path / "run").rglob(".*.tmp"))
    assert Midway(tmp_path / "run/state/1-begun", tmp_path / "run/trace.jsonl").read_progress(1, pytest.fail).step == 1
    run(recipe, tmp_path / "run", METHOD)
    assert not differing(tmp_path / "run", whole)


@pytest.mark.parametrize("first", NUMBERS, ids=lambda n: n.name)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
def test_what_a_scheduler_sends_twice_or_a_grid_passes_on_stops_no_save(first, second, own):
    """Ctrl-C reaches a grid and its runs alike, and the grid then asks its runs with SIGTERM."""
    said = []
    with asked_to_stop(said.append) as stop:
        stop.learning = True
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), second)
        assert stop.why == first.name
    assert len(said) == 1


def test_ctrl_c_after_another_signal_is_told_and_a_second_one_stops_at_once(own):
    said = []
    with pytest.raises(KeyboardInterrupt), asked_to_stop(said.append) as stop:
        stop.learning = True
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it goes on")
    assert said == [
        "SIGTERM: saving after this step; Ctrl-C twice stops at once",
        "SIGINT: saving after this step; once more stops at once",
    ]


def test_a_signal_saves_although_nobody_reads_what_is_said(recipe, whole, tmp_path):
    """As behind `| tee`, which the same Ctrl-C has ended."""
    out = tmp_path / "run"
    words = [sys.executable, "-m", "anchorlora", *command(recipe, out, METHOD)[:-2]]
    reading, writing = os.pipe()
    process = subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=writing, stderr=writing, preexec_fn=listen)
    os.close(writing)
    until(lambda: (out / "log.jsonl").exists(), process)
    os.close(reading)
    process.send_signal(signal.SIGINT)
    assert process.wait(GRACE) == 75
    run(recipe, out, METHOD)
    assert not differing(out, whole)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: n.name)
def test_a_signal_before_anything_is_learned_stops_at_once(number, own):
    """Loading a large model takes longer than a scheduler waits."""
    with pytest.raises(KeyboardInterrupt), asked_to_stop(print):
        os.kill(os.getpid(), number)
        raise AssertionError("it goes on")


def test_a_signal_that_the_caller_switched_off_stays_off(own):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with asked_to_stop(print) as stop:
        stop.learning = True
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.why is None


def test_signals_are_given_back(own):
    with asked_to_stop(print):
        assert not [number for number in ASKING if signal.getsignal(number) is own[number]]
    assert {number: signal.getsignal(number) for number in ASKING} == own


def test_a_signal_after_the_end_changes_nothing(own, monkeypatch):
    monkeypatch.setitem(entry.__globals__, "main", lambda: 0)
    with pytest.raises(SystemExit, match="0"):
        entry()
    assert {signal.getsignal(number) for number in ASKING} == {signal.SIG_IGN}
