"""The Slurm engine, on a stand-in for Slurm's programs.  tests/engines has the real daemons."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from slurm_stand_in import install
from test_scheduler import RECORD, missing_runs, stand_in

from anchorlora.cli.app import main
from anchorlora.config import RunConfig
from anchorlora.errors import InvalidValue
from anchorlora.recipes import mini
from anchorlora.store.lock import Lease
from anchorlora_lab.grid.scheduler import Planned
from anchorlora_lab.grid.slurm import SlurmEngine


@pytest.fixture
def queue(tmp_path, monkeypatch):
    return install(tmp_path / "bin", monkeypatch)


def submit(root, script=RECORD, count=3, **how):
    outcomes = SlurmEngine(**how).run(missing_runs(root, count), root=root, command=stand_in(script))
    return {o.planned.folder.name: o.status for o in outcomes}


def until(condition):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 90
        time.sleep(0.02)


def test_missing_runs_are_one_array_and_a_second_call_submits_nothing(queue, tmp_path):
    root = tmp_path / "grid"
    (root / "run-1").mkdir(parents=True)
    (root / "run-1/record.json").write_text("{}")
    assert submit(root, max_running=2, options=("--partition=gpu",)) == {"run-0": "submitted", "run-2": "submitted"}
    assert queue.states() == {"17_0": "PENDING", "17_1": "PENDING"}
    options = queue.tasks["17_0"]["options"]
    assert "--array=0-1%2" in options
    assert options[-1] == "--partition=gpu"
    assert submit(root) == {"run-0": "elsewhere", "run-2": "elsewhere"}
    queue.drain()
    assert all((root / f"run-{i}/record.json").exists() for i in range(3))
    assert submit(root) == {}
    assert queue.states() == {"17_0": "COMPLETED", "17_1": "COMPLETED"}


def test_a_failed_run_is_submitted_again_on_request_alone(queue, tmp_path):
    fails = f"if name == 'run-1':\n    print('error: the disk is full')\n    sys.exit(2)\n{RECORD}"
    submit(tmp_path / "grid", fails)
    queue.drain()
    (failed,) = SlurmEngine().run(missing_runs(tmp_path / "grid", 3), root=tmp_path / "grid", command=stand_in(RECORD))
    assert (failed.planned.folder.name, failed.status, failed.error) == ("run-1", "failed", "exit status 2: the disk is full")
    assert submit(tmp_path / "grid", retry_failed=True) == {"run-1": "submitted"}
    queue.drain()
    assert submit(tmp_path / "grid") == {}


def test_a_run_that_was_interrupted_requeues_its_task(queue, tmp_path):
    script = f"""
    if not os.path.exists(folder + '/begun'):
        open(folder + '/begun', 'w')
        sys.exit(75)
    {RECORD}
    """
    submit(tmp_path / "grid", script, count=1)
    queue.drain()
    assert (queue.states(), queue.tasks["17_0"]["restarts"]) == ({"17_0": "COMPLETED"}, 1)


def test_a_run_that_is_killed_begins_again_three_times_and_then_has_failed(queue, tmp_path):
    submit(tmp_path / "grid", "os.kill(os.getpid(), 9)", count=1)
    queue.drain()
    assert (queue.states(), queue.tasks["17_0"]["restarts"]) == ({"17_0": "FAILED"}, 3)
    assert (tmp_path / "grid/.runs/run-0.failed").read_text().startswith("exit status 137: ")


@pytest.mark.slow
def test_a_task_carries_out_several_runs_and_goes_on_where_it_was_stopped(queue, tmp_path):
    """Real runs: one fails, one is stopped; the task is requeued, and begins neither the failed one nor the finished one again."""
    root = tmp_path / "grid"
    recipe = mini().changed({"train_limit": 8, "test_limit": 2, "epochs": 1, "max_new_tokens": 2, "threads": 1, "device": "cpu"})
    recipes = [recipe, recipe.changed({"data": str(tmp_path / "none")}), recipe, recipe]
    planned = [
        Planned(root / f"run-{i}", RunConfig(method="sfor", order=("reviews", "news"), seed=i, recipe=each))
        for i, each in enumerate(recipes)
    ]
    outcomes = SlurmEngine(per_task=3).run(planned, root=root)
    assert [o.status for o in outcomes] == ["submitted"] * 4
    assert list(queue.states()) == ["17_0", "17_1"]
    assert [o.status for o in SlurmEngine(per_task=3).run(planned, root=root)] == ["elsewhere"] * 4
    process = queue.start("17_0")
    until(lambda: (root / "run-2/log.jsonl").exists())
    process.send_signal(signal.SIGUSR1)
    assert queue.end("17_0", process) == 75
    assert not planned[2].done
    queue.drain()
    assert [each.done for each in planned] == [True, False, True, True]
    assert (queue.states(), queue.tasks["17_0"]["restarts"]) == ({"17_0": "COMPLETED", "17_1": "COMPLETED"}, 1)
    (failed,) = SlurmEngine(per_task=3).run(planned, root=root)
    assert (failed.status, "none" in failed.error) == ("failed", True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_python_can_handle_it_loses_no_run(number, queue, tmp_path):
    """The stand-in for a run never handles a signal, as Python in its first moments."""
    script = f"""
    if not os.path.exists(folder + '/begun'):
        open(folder + '/begun', 'w')
        time.sleep(60)
    {RECORD}
    """
    submit(tmp_path / "grid", script, count=1)
    process = queue.start("17_0")
    until((tmp_path / "grid/run-0/begun").exists)
    process.send_signal(number)
    assert queue.end("17_0", process) == 75
    assert queue.states() == {"17_0": "PENDING"}
    queue.drain()
    assert (tmp_path / "grid/run-0/record.json").exists()


def test_a_run_that_was_asked_to_save_is_waited_for(queue, tmp_path):
    script = """
    import signal
    def save(*_):
        time.sleep(0.5)
        open(folder + '/saved', 'w')
        sys.exit(75)
    signal.signal(signal.SIGTERM, save)
    open(folder + '/begun', 'w')
    time.sleep(60)
    """
    submit(tmp_path / "grid", script, count=1)
    process = queue.start("17_0")
    until((tmp_path / "grid/run-0/begun").exists)
    process.send_signal(signal.SIGUSR1)
    assert queue.end("17_0", process) == 75
    assert (tmp_path / "grid/run-0/saved").exists()


def test_a_cancelled_task_does_not_come_back(queue, tmp_path):
    submit(tmp_path / "grid", "open(folder + '/begun', 'w')\ntime.sleep(60)", count=1)
    process = queue.start("17_0")
    until((tmp_path / "grid/run-0/begun").exists)
    queue.set("17_0", state="CANCELLED")
    process.send_signal(signal.SIGTERM)
    assert queue.end("17_0", process) == 75
    assert queue.states() == {"17_0": "CANCELLED"}
    assert submit(tmp_path / "grid", count=1) == {"run-0": "submitted"}, "it has not failed"


def test_a_submitter_that_was_killed_leaves_nothing_unknown(queue, tmp_path, monkeypatch):
    """Killed between what it writes before, and what Slurm answers."""
    real = subprocess.run

    def killed(words, **how):
        done = real(words, **how)
        if words[0] == "sbatch":
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(subprocess, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        submit(tmp_path / "grid")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_STAND_IN", str(queue.file))
    assert set(submit(tmp_path / "grid").values()) == {"elsewhere"}
    assert len(queue.tasks) == 3


def test_waiting_ends_with_the_runs_also_with_those_of_an_earlier_call(queue, tmp_path):
    script = f"if name == 'run-1':\n    sys.exit('no room')\n{RECORD}"
    submit(tmp_path / "grid", script)
    draining = threading.Timer(0.5, queue.drain)
    draining.start()
    try:
        assert submit(tmp_path / "grid", wait=True, poll=0.05) == {"run-0": "done", "run-1": "failed", "run-2": "done"}
    finally:
        draining.join()


def test_waiting_ends_when_a_task_has_left_the_queue_without_a_word(queue, tmp_path):
    submit(tmp_path / "grid", count=1)
    cancel = threading.Timer(0.5, queue.set, ["17_0"], {"state": "CANCELLED"})
    cancel.start()
    engine = SlurmEngine(wait=True, poll=0.05)
    (outcome,) = engine.run(missing_runs(tmp_path / "grid", 1), root=tmp_path / "grid", command=stand_in(RECORD))
    cancel.join()
    assert outcome.status == "failed"
    assert outcome.error == "Slurm job 17 ended without finishing it; the same command submits it again"


def test_a_folder_that_nodes_do_not_see_is_one_clear_refusal(queue, tmp_path):
    submit(tmp_path / "grid")
    queue.set("17_1", state="SPECIAL_EXIT")
    with pytest.raises(InvalidValue, match="a node does not see .*grid .Slurm job 17, task 1.*choose an --out on storage"):
        submit(tmp_path / "grid")
    assert set(queue.states().values()) == {"CANCELLED"}
    assert set(submit(tmp_path / "grid").values()) == {"submitted"}


def test_a_task_whose_node_went_down_as_it_started_is_released(queue, tmp_path):
    submit(tmp_path / "grid")
    queue.set("17_1", reason="launch failed requeued held")
    assert set(submit(tmp_path / "grid").values()) == {"elsewhere"}
    assert queue.tasks["17_1"]["reason"] == "None"


@pytest.mark.slow
def test_a_node_that_does_not_see_the_folder_holds_its_task(queue, tmp_path):
    submit(tmp_path / "grid", count=1)
    (tmp_path / "grid").rename(tmp_path / "away")
    queue.end("17_0", queue.start("17_0"))
    assert queue.states() == {"17_0": "SPECIAL_EXIT"}


GRID = ["grid", "mini", "--methods", "sfor", "--orders", "order1", "--seeds", "1,2", "--engine", "slurm"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--partition", "gpus"], "Slurm refuses the array (--partition=gpus): invalid partition specified: gpus"),
        (["--sbatch=--array=3"], "--sbatch=--array=3: this option is anchorlora's own; leave it out"),
        (["--slots", "2"], "--slots is an option of --engine local, not of slurm"),
        (["--engine", "local", "--partition", "p"], "--partition is an option of --engine slurm, not of local"),
        (["--list"], "--list prints commands for you to start, and --engine slurm starts them; leave out one"),
    ],
)
def test_a_wrong_request_is_one_line_and_nothing_is_written(words, message, queue, tmp_path, capsys):
    assert main([*GRID, "--out", str(tmp_path / "g"), *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "g").exists()


def test_slurm_that_is_not_there_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*GRID, "--out", str(tmp_path / "g")]) == 2
    assert "--engine slurm: there is no sbatch on this machine; call this where Slurm is installed" in capsys.readouterr().err
    assert not (tmp_path / "g").exists()


def test_two_submitters_of_one_grid_are_one_line(queue, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("anchorlora.store.lock.HEARTBEAT", 0.2)
    (tmp_path / "g/.runs").mkdir(parents=True)
    with Lease(tmp_path / "g/.runs/submit.lease") as lease:
        lease.take()
        assert main([*GRID, "--out", str(tmp_path / "g")]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'g'}: process {os.getpid()} on" in said
    assert "is submitting its runs; wait for it to end, or choose another --out" in said
    assert queue.tasks == {}


def test_the_command_submits_and_says_where_to_look(queue, tmp_path, capsys):
    out = tmp_path / "g"
    assert main([*GRID, "--out", str(out), "--save-every", "7"]) == 0
    said = capsys.readouterr().out
    assert "0 of 2 runs are finished" in said
    assert "2 submitted: Slurm job 17" in said
    assert f"anchorlora status {out}" in said
    script = queue.tasks["17_0"]["script"]
    assert f"-m anchorlora run {out}/sfor/order1-1/config.yaml --method sfor --out {out}/sfor/order1-1 --save-every 7" in script
    assert "--signal=B:USR1@180" in script
    assert main([*GRID, "--out", str(out)]) == 0
    assert "2 submitted before: Slurm job 17" in capsys.readouterr().out
    assert main(["status", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["left"], [run["folder"] for run in found["runs"]]) == (2, ["sfor/order1-1", "sfor/order1-2"])


def test_a_trace_and_a_selection_are_submitted_step_by_step(queue, tmp_path, capsys):
    engine = ["--engine", "slurm", "--out"]
    assert main(["trace", "mini", "--methods", "sfor", "--seeds", "1", *engine, str(tmp_path / "t")]) == 0
    said = capsys.readouterr().out
    assert "0 of 1 trace is finished" in said
    assert "once it has finished, the same command starts them" in said
    assert len(queue.tasks) == 1
    assert main(["select", "mini", "--method", "lwf", *engine, str(tmp_path / "s")]) == 0
    assert "the same command chooses among the candidates once they have finished" in capsys.readouterr().out
    assert len(queue.tasks) == 5
    assert not (tmp_path / "s/selection.json").exists()


def test_the_script_is_what_a_shell_understands(queue, tmp_path):
    submit(tmp_path / "grid")
    assert subprocess.run(["bash", "-n", "-c", queue.tasks["17_0"]["script"]], check=False).returncode == 0
    assert sys.executable in queue.tasks["17_0"]["script"]
