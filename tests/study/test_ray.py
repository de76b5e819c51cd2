"""The Ray engine, on a stand-in for Ray that carries out a task where it is called.  tests/engines has two real raylets."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_scheduler import RECORD, missing_runs, stand_in

from anchorlora.cli.app import main
from anchorlora.errors import InvalidValue
from anchorlora_lab.grid.ray import RayEngine, carry_out

GRID = ["grid", "mini", "--methods", "sfor", "--orders", "order1", "--seeds", "1,2", "--engine", "ray"]


class TaskError(Exception):
    """What Ray raises for a task that raised; `cause` is what it raised."""

    def __init__(self, cause):
        self.cause = cause


class Reference:
    """How a task ended."""

    def __init__(self, value=None, error=None):
        self.value, self.error = value, error


class StandIn:
    """What the engine uses of Ray."""

    def __init__(self):
        self.exceptions = SimpleNamespace(RayTaskError=TaskError, RayError=TaskError)
        self.asked, self.calls = [], 0

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return {"CPU": 2.0, "GPU": 1.0}

    def remote(self, *, max_retries, retry_exceptions):
        def call(function, words):
            for _ in range(1 + max_retries):
                self.calls += 1
                try:
                    return Reference(function(*words))
                except tuple(retry_exceptions) as error:
                    last = error
                except Exception as error:
                    return Reference(error=error)
            return Reference(error=last)

        def options(function, how):
            self.asked.append(how)
            return SimpleNamespace(remote=lambda *words: call(function, words))

        return lambda function: SimpleNamespace(options=lambda **how: options(function, how))

    def get(self, reference):
        if reference.error is not None:
            raise TaskError(reference.error)
        return reference.value

    def wait(self, references, *, num_returns):
        return references[:num_returns], references[num_returns:]

    def cancel(self, reference, *, force):
        pass


@pytest.fixture
def ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", StandIn())
    return sys.modules["ray"]


def run(root, script=RECORD, **how):
    outcomes = RayEngine(**how).run(missing_runs(root, 3), root=root, command=stand_in(script))
    return {o.planned.folder.name: (o.status, o.error) for o in outcomes}


def test_missing_runs_are_tasks_and_a_second_call_has_none(ray, tmp_path):
    assert run(tmp_path, max_running=1) == {f"run-{i}": ("done", "") for i in range(3)}
    assert ray.asked == [{"num_cpus": 1, "num_gpus": 1}] * 3
    assert run(tmp_path) == {}


def test_an_interrupted_run_begins_again_and_a_failed_one_on_request_alone(ray, tmp_path):
    script = f"""
    if name == 'run-1':
        sys.exit('no room')
    if not os.path.exists(folder + '/begun'):
        open(folder + '/begun', 'w')
        sys.exit(75)
    {RECORD}
    """
    failed = ("failed", "exit status 1: no room")
    assert run(tmp_path, script) == {"run-0": ("done", ""), "run-1": failed, "run-2": ("done", "")}
    assert ray.calls == 5
    assert run(tmp_path) == {"run-1": failed}
    assert ray.calls == 5
    assert run(tmp_path, retry_failed=True) == {"run-1": ("done", "")}


def test_a_node_that_does_not_see_the_folder_is_one_clear_refusal(ray, tmp_path, monkeypatch):
    monkeypatch.setattr("anchorlora_lab.grid.ray.HERE", ".elsewhere")
    with pytest.raises(InvalidValue, match="does not see .*; choose an --out on storage that all nodes share"):
        run(tmp_path)


def test_ray_that_is_not_installed_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([*GRID, "--out", str(tmp_path / "g")]) == 2
    assert capsys.readouterr().err == "error: --engine ray needs Ray: pip install 'anchorlora[ray]'\n"
    assert not (tmp_path / "g").exists()


def _runs(pid):
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_text())  # a process that nobody has waited for has none
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the child is told of its parent's end on Linux alone")
def test_a_run_ends_with_the_worker_that_started_it(tmp_path):
    (tmp_path / ".runs").mkdir()
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    worker = f"""
    from anchorlora_lab.grid.ray import carry_out
    carry_out([{sys.executable!r}, '-S', '-c', {child!r}], {str(tmp_path / "run")!r}, {str(tmp_path)!r}, '/')
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(worker)])
    began = time.monotonic()
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() - began < 60
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while _runs(int(pid.read_text())):
        assert time.monotonic() - began < 60, "it outlives its worker"
        time.sleep(0.05)


def test_a_path_that_a_node_lacks_does_not_stop_it(tmp_path):
    (tmp_path / ".runs").mkdir()
    assert carry_out([sys.executable, "-S", "-c", ""], str(tmp_path / "run"), str(tmp_path), "/no/such/folder") is None
