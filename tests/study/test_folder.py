"""What `anchorlora status` reads in a folder."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anchorlora.cli.app import main
from anchorlora.store.lock import Lease
from anchorlora_lab.grid.folder import RunState, beside, mark_failed, remember, seconds_left, states

RECORDS = Path(__file__).parents[2] / "results/mini-en/trace"
CONFIG = "order: [reviews, news]\n"


@pytest.fixture
def grid(tmp_path):
    """One run of each state; `waits` was asked for and has not begun."""
    root = tmp_path / "grid"
    remember([root / name for name in ("ended", "runs", "fails", "waits", "again")], root)
    shutil.copytree(RECORDS / "o-lora-2026", root / "ended")
    (root / "runs").mkdir()
    (root / "runs/config.yaml").write_text(CONFIG)
    log = [{"event": "task", "task": 1, "name": "reviews", "steps": 4}]
    log += [{"event": "step", "task": 1, "step": i, "seconds": 2.0} for i in (1, 2)]
    (root / "runs/log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    mark_failed(root / "fails", root, "exit status 2: the disk is full")
    return root


def test_every_state_is_told_from_the_folder(grid, capsys):
    with Lease(beside(grid / "runs", grid, "lease")) as lease:
        lease.take()
        found = {run.folder: run for run in states(grid)}
        assert main(["status", str(grid)]) == 0
    assert {name: run.state for name, run in found.items()} == {
        "ended": "done",
        "runs": "running",
        "fails": "failed",
        "waits": "left",
        "again": "left",
    }
    assert (found["runs"].progress, found["runs"].seconds) == (0.25, 4.0)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{grid}: 1 done, 1 running, 1 failed, 2 left of 5"
    assert said[1:3] == ["running  runs  task 1/2 reviews, step 2 of 4", "failed   fails  exit status 2: the disk is full"]
    assert said[3].startswith("expected end: 20")


def test_a_run_whose_process_is_gone_is_left_and_not_running(grid):
    program = f"""
import os, sys
from pathlib import Path
from anchorlora.store.lock import Lease
lease = Lease(Path({str(grid / "runs/.lease")!r}))
lease.take()
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    assert (grid / "runs/.lease").exists()
    assert {run.folder: run.state for run in states(grid)}["runs"] == "left"


def test_a_lease_of_another_host_counts_while_it_is_renewed(grid, monkeypatch):
    with Lease(grid / "runs/.lease") as lease:
        lease.take()
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        assert {run.folder: run.state for run in states(grid)}["runs"] == "running"
        os.utime(grid / "runs/.lease", (time.time() - 100, time.time() - 100))
        assert {run.folder: run.state for run in states(grid)}["runs"] == "left"


def test_a_single_run_has_a_status_too(grid, capsys):
    (grid / "fails").mkdir()
    (grid / "fails/config.yaml").write_text(CONFIG)
    assert main(["status", str(grid / "fails"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["failed"], found["runs"][0]["error"]) == (1, "exit status 2: the disk is full")


def test_a_folder_of_several_grids_has_the_status_of_all(grid):
    found = {run.folder: run.state for run in states(grid.parent)}
    assert found == {"grid/ended": "done", "grid/runs": "left"}, "those that have begun"
    (grid / "fails").mkdir()
    (grid / "fails/config.yaml").write_text(CONFIG)
    assert {run.folder: run.state for run in states(grid.parent)}["grid/fails"] == "failed"


def test_a_damaged_record_is_no_finished_run(grid):
    (grid / "ended/record.json").write_text("{}")
    found = {run.folder: run for run in states(grid)}["ended"]
    assert found.state == "failed"
    assert "record.json" in found.error


@pytest.mark.parametrize("line", ["{", '{"event": "task"}', '{"event": "task", "task": 1, "name": "x", "steps": "many"}'])
def test_a_damaged_log_has_no_progress_and_stops_nothing(line, grid):
    (grid / "runs/log.jsonl").write_text(line + "\n")
    assert {run.folder: run.progress for run in states(grid)}["runs"] == 0.0


def test_the_end_is_expected_at_the_pace_of_finished_runs_else_of_running_ones():
    done, half = RunState("a", "done", seconds=60.0), RunState("b", "running", progress=0.5, seconds=40.0)
    left = RunState("c", "left")
    assert seconds_left([done, half, left]) == 90.0
    assert seconds_left([half, left]) == 120.0
    assert seconds_left([half, half, left, left]) == 120.0
    assert seconds_left([done, left]) is None


def test_a_folder_without_runs_is_one_line(tmp_path, capsys):
    assert main(["status", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} holds no run")
    assert main(["status", str(tmp_path / "no")]) == 2
    assert list(tmp_path.iterdir()) == []
