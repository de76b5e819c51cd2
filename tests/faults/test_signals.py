"""Signals at random moments to a real process: exit status 75 within the grace time, and the same end as without them."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

import small
from anchorlora.cli.app import entry
from anchorlora.cli.signals import ASKING, asked_to_stop
from anchorlora.continual.recipe import Cell
from anchorlora.experiments.files import dump_yaml
from faults.runs import assert_same, run

GRACE = 30.0  # seconds


@pytest.fixture
def recipe(tmp_path, small_model):
    """More steps than a signal could come too late for."""
    return small.recipe(small.write_benchmark(tmp_path / "data", train=72), small_model)


@pytest.fixture
def command(recipe, tmp_path):
    cell = Cell(method="sfor", order=small.ORDER, seed=42, recipe=recipe)
    (tmp_path / "cell.yaml").write_text(dump_yaml(cell.model_dump(mode="json")))
    return [sys.executable, "-m", "anchorlora", "run", str(tmp_path / "cell.yaml"), "--out", str(tmp_path / "parts")]


def listen():
    """In the process that begins: a shell that runs the tests in the background has switched Ctrl-C off for all of them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def until(condition, process, seconds=120.0):
    """Wait for a sign of life, or for the end of the process."""
    began = time.monotonic()
    while not condition() and process.poll() is None:
        assert time.monotonic() - began < seconds, "the run shows no sign of life"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_signal_saves_and_stops_and_the_next_call_ends_the_same(number, command, recipe, tmp_path):
    draw, log = random.Random(number.name), tmp_path / "parts/log.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    statuses = []
    for _ in range(2 if number == signal.SIGTERM else 1):
        lines = log.read_text().count("\n") if log.exists() else 0
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, env=environment, text=True, preexec_fn=listen, **pipes)
        until(lambda lines=lines: log.exists() and log.read_text().count("\n") > lines + 1, process)
        time.sleep(draw.uniform(0, 0.3))
        process.send_signal(number)
        sent = time.monotonic()
        _, said = process.communicate(timeout=GRACE)
        assert time.monotonic() - sent < GRACE
        statuses.append(process.returncode)
        if process.returncode == 75:
            assert "the same command goes on from there" in said
            assert "Traceback" not in said
    assert 75 in statuses
    assert set(statuses) <= {0, 75}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run(recipe, tmp_path / "whole", "sfor")
    assert_same(tmp_path / "parts", tmp_path / "whole")


@pytest.fixture
def own():
    """Handlers of the test's own process, which it may change."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ASKING}
    yield dict.fromkeys(ASKING, signal.SIG_DFL)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_signal_stops_at_once(own):
    said = []
    with pytest.raises(KeyboardInterrupt), asked_to_stop(said.append) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.why == "SIGTERM"
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it goes on")
    assert said == ["SIGTERM: saving after this step; once more stops at once"]


def test_a_signal_that_the_caller_switched_off_stays_off(own):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with asked_to_stop(print) as stop:
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
