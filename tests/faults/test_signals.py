"""Signals at random moments to a real process: exit status 75 within the grace time, and the same end as without them."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

import small
from anchorlora.continual.recipe import Cell
from anchorlora.experiments.files import dump_yaml
from faults.runs import assert_same, run

GRACE = 30.0  # seconds


@pytest.fixture
def command(small_recipe, tmp_path):
    cell = Cell(method="sfor", order=small.ORDER, seed=42, recipe=small_recipe)
    (tmp_path / "cell.yaml").write_text(dump_yaml(cell.model_dump(mode="json")))
    return [sys.executable, "-m", "anchorlora", "run", str(tmp_path / "cell.yaml"), "--out", str(tmp_path / "parts")]


def until(condition, process, seconds=120.0):
    """Wait for a sign of life, or for the end of the process."""
    began = time.monotonic()
    while not condition() and process.poll() is None:
        assert time.monotonic() - began < seconds, "the run shows no sign of life"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_signal_saves_and_stops_and_the_next_call_ends_the_same(number, command, small_recipe, tmp_path):
    draw, log = random.Random(number.name), tmp_path / "parts/log.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    statuses = []
    for _ in range(2 if number == signal.SIGTERM else 1):
        lines = log.read_text().count("\n") if log.exists() else 0
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
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
    run(small_recipe, tmp_path / "whole", "sfor")
    assert_same(tmp_path / "parts", tmp_path / "whole")
