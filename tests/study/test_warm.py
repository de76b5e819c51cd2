"""Processes of runs that are forked from one that has imported everything: as fresh ones, bit by bit and signal by signal."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from anchorlora.config import RunConfig
from anchorlora.recipes import mini
from anchorlora_lab.grid.scheduler import LocalEngine, Planned
from anchorlora_lab.grid.warm import WarmProcess, launching
from records import VOLATILE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
SHORT = {"train_limit": 8, "test_limit": 2, "epochs": 1, "max_new_tokens": 2, "threads": None}
GRACE = 180.0  # seconds


def short(root, seeds):
    recipe = mini().changed(SHORT)
    return [Planned(root / str(s), RunConfig(method="sfor", order=("reviews", "news"), seed=s, recipe=recipe)) for s in seeds]


def words(*arguments):
    return [sys.executable, "-m", "anchorlora", *map(str, arguments)]


def long_run(root, name):
    return words("run", "mini", "--method", "sfor", "--set", "epochs=1000", "--out", root / name)


@pytest.fixture(scope="class")
def launch():
    with launching(os.environ, warm=True) as started:
        yield started


def until(condition, process=None):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < GRACE
        assert process is None or process.poll() is None, "it has ended"
        time.sleep(0.02)


def in_steps(folder):
    log = folder / "log.jsonl"
    return lambda: log.exists() and '"step"' in log.read_text()


@pytest.mark.slow
def test_a_forked_run_is_a_fresh_run_bit_by_bit(tmp_path, monkeypatch):
    """With two threads, since a pool of threads does not survive a fork."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for name, warm, seeds in (("warm", True, (1, 2)), ("fresh", False, (2,))):
        outcomes = LocalEngine(1, warm=warm).run(short(tmp_path / name, seeds), root=tmp_path / name)
        assert {outcome.status for outcome in outcomes} == {"done"}
    one, other = tmp_path / "warm/2", tmp_path / "fresh/2"
    files = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(other) for p in other.rglob("*") if p.is_file())
    kept = [f for f in files if f.suffix == ".safetensors" or f.name in ("predictions.jsonl", "adapter_config.json", "config.yaml")]
    assert len([f for f in kept if f.name == "adapter_model.safetensors"]) == 2
    for file in kept:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file
    records = [json.loads((place / "record.json").read_text()) for place in (one, other)]
    assert records[0]["host"] == records[1]["host"]
    assert records[0]["threads"] == 2
    for record in records:
        for field in VOLATILE:
            record.pop(field)
    assert records[0] == records[1]
    said = [(tmp_path / name / ".runs/2.txt").read_text() for name in ("warm", "fresh")]
    tables = [text[text.index("Accuracy (%)") :].partition("record:")[0] for text in said]
    assert tables[0] == tables[1]


class TestOneServer:
    def test_a_command_of_somebody_elses_is_an_ordinary_process(self, launch, tmp_path):
        with (tmp_path / "said").open("w") as out:
            process = launch([sys.executable, "-S", "-c", "import os; print(os.environ['MINE'])"], {"MINE": "yes"}, out)
            assert isinstance(process, subprocess.Popen)
            assert process.wait() == 0
        assert (tmp_path / "said").read_text() == "yes\n"

    @pytest.mark.slow
    def test_a_forked_process_has_an_output_an_environment_and_an_exit_status_of_its_own(self, launch, tmp_path):
        """The environment is seen by a method in a file, which the process runs."""
        idea = tmp_path / "idea.py"
        idea.write_text("import os, sys\nprint(os.environ['MINE'], os.getpid(), len(sys.argv))\nraise SystemExit(7)\n")
        processes = []
        for name in ("one", "two"):
            with (tmp_path / name).open("w") as out:
                processes.append(launch(words("run", "mini", "--method", f"{idea}:m", "--dry-run"), {"MINE": name}, out))
        assert all(isinstance(each, WarmProcess) for each in processes)
        statuses = [each.wait() for each in processes]
        for name, process, status in zip(("one", "two"), processes, statuses, strict=True):
            assert (tmp_path / name).read_text().splitlines()[0] == f"{name} {process.pid} 6"
            assert status == process.poll() == process.wait() != 0
        with (tmp_path / "wrong").open("w") as out:
            assert launch(words("run", "nothing"), {}, out).wait() == 2
        assert (tmp_path / "wrong").read_text().startswith("error: ")
        assert "MINE" not in os.environ

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda n: n.name)
    def test_a_signal_ends_a_forked_run_with_75_from_its_first_moment_on(self, number, launch, tmp_path):
        if signal.getsignal(number) is signal.SIG_IGN:
            pytest.skip(f"whoever started the tests has turned {number.name} off, as a shell does in the background")
        with (tmp_path / "said").open("w") as out:
            process = launch(long_run(tmp_path, "run"), {}, out)
        until(lambda: (tmp_path / "run").exists(), process)
        process.send_signal(number)
        assert process.wait() == 75
        assert "the same command continues" in (tmp_path / "said").read_text()
        assert not list((tmp_path / "run").glob(".lease*"))

    def test_a_killed_run_takes_no_other_with_it(self, launch, tmp_path):
        runs = {}
        for name in ("killed", "asked"):
            with (tmp_path / f"{name}.txt").open("w") as out:
                runs[name] = launch(long_run(tmp_path, name), {}, out)
        for name, process in runs.items():
            until(in_steps(tmp_path / name), process)
        runs["killed"].send_signal(signal.SIGKILL)
        assert runs["killed"].wait() == -signal.SIGKILL
        assert runs["asked"].poll() is None
        runs["asked"].send_signal(signal.SIGTERM)
        assert runs["asked"].wait() == 75
        runs["killed"].send_signal(signal.SIGTERM)  # to nobody
        with (tmp_path / "next").open("w") as out:
            assert launch(words("--version"), {}, out).wait() == 0


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_a_server_that_dies_takes_no_run_with_it_and_later_runs_start_as_usual(tmp_path):
    with launching(os.environ, warm=True) as launch:
        with (tmp_path / "one").open("w") as out:
            process = launch(long_run(tmp_path, "run"), {}, out)
        until(in_steps(tmp_path / "run"), process)
        assert isinstance(process, WarmProcess)
        os.kill(parent(process.pid), signal.SIGKILL)
        time.sleep(0.2)
        assert process.poll() is None
        with (tmp_path / "two").open("w") as out:
            later = launch(words("--version"), {}, out)
            assert isinstance(later, subprocess.Popen)
            assert later.wait() == 0
        process.send_signal(signal.SIGTERM)
        until(lambda: process.poll() is not None)
        assert process.wait() == 255, "nobody knows how it ended"
    assert "the same command continues from there" in (tmp_path / "one").read_text()


@pytest.mark.slow
def test_runs_go_on_when_their_runner_is_killed_and_the_server_ends_with_them(tmp_path):
    program = f"""
    import os, pathlib, sys, time
    from anchorlora_lab.grid.warm import launching
    with launching(os.environ, warm=True) as launch, open({str(tmp_path / "said")!r}, "w") as out:
        process = launch({long_run(tmp_path, "run")!r}, {{}}, out)
        pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(process.pid))
        time.sleep(600)
    """
    runner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    until(in_steps(tmp_path / "run"), runner)
    pid = int((tmp_path / "pid").read_text())
    server = parent(pid)
    runner.kill()
    runner.wait()
    try:
        assert alive(pid)
    finally:
        os.kill(pid, signal.SIGTERM)
        until(lambda: not alive(pid) and not alive(server))
    assert "the same command continues from there" in (tmp_path / "said").read_text()


@pytest.mark.slow
def test_what_a_killed_run_and_a_killed_runner_leave_is_finished_by_the_same_command_as_by_fresh_processes(tmp_path):
    limits = ("train_limit=64", "test_limit=2", "epochs=2", "max_new_tokens=2", "threads=1")
    settings = [word for limit in limits for word in ("--set", limit)] + ["--save-every", "2"]
    methods = ("seq-lora", "sfor")
    grid = words("grid", "mini", "--methods", ",".join(methods), "--orders", "order1", "--seeds", "1", "--slots", "1", *settings)
    grid += ["--out", str(tmp_path / "grid")]
    runs = [tmp_path / "grid" / method / "order1-1" for method in methods]

    runner = subprocess.Popen(grid, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for run, victims in zip(runs, ("run", "both"), strict=True):
        until(in_steps(run), runner)
        until(lambda folder=run: (folder / "state").exists(), runner)
        (pid,) = [pid for server in children(runner.pid) for pid in children(server)]
        if victims == "both":
            runner.kill()
            runner.wait()
        os.kill(pid, signal.SIGKILL)
    assert not [run for run in runs if (run / "record.json").exists()]
    assert subprocess.run(grid, stdout=subprocess.DEVNULL).returncode == 0
    for run, method in zip(runs, methods, strict=True):
        fresh = tmp_path / f"fresh-{method}"
        once = words("run", "mini", "--method", method, "--order", "order1", "--seed", "1", *settings, "--out", fresh)
        assert subprocess.run(once, stdout=subprocess.DEVNULL).returncode == 0
        resumed, whole = (json.loads((folder / "record.json").read_text()) for folder in (run, fresh))
        for field in VOLATILE:
            del resumed[field], whole[field]
        assert resumed == whole
        for file in sorted(fresh.glob("tasks/*/adapter/*.safetensors")):
            assert file.read_bytes() == (run / file.relative_to(fresh)).read_bytes()


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_where_an_import_has_opened_a_device_processes_are_fresh(tmp_path, monkeypatch):
    """Torch says after a fork that nothing can be computed there; nothing else needs to be imported for that."""
    monkeypatch.setattr("anchorlora_lab.grid.warm.LIBRARIES", ("torch",))
    monkeypatch.setattr("anchorlora_lab.grid.warm.WITH_PEFT", ())
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "def spoil():\n"
        "    if 'torch' in sys.modules: sys.modules['torch'].cuda._is_in_bad_fork = lambda: True\n"
        "os.register_at_fork(after_in_child=spoil)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with launching({**os.environ, "PYTHONPATH": path}, warm=True) as launch, (tmp_path / "said").open("w") as out:
        process = launch(words("--version"), {}, out)
        assert isinstance(process, subprocess.Popen)
        assert process.wait() == 0


@pytest.mark.slow
def test_the_programs_own_file_is_not_run_again(tmp_path):
    """It may have no guard of its main part."""
    program = f"""
    import os
    from anchorlora_lab.grid.warm import launching
    print("once", flush=True)
    with launching(os.environ, warm=True) as launch, open({str(tmp_path / "said")!r}, "w") as out:
        print(type(launch({words("--version")!r}, {{}}, out)).__name__)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("once\nWarmProcess\n", "")


def test_a_server_that_cannot_import_is_done_without(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('half of it is missing')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with launching({**os.environ, "PYTHONPATH": path}, warm=True) as launch, (tmp_path / "said").open("w") as out:
        process = launch(words("--version"), {}, out)
        assert isinstance(process, subprocess.Popen)
        assert process.wait() == 0
