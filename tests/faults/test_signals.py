"""Signals at any moment to a real process: exit status 75 within the grace time, and the same end as without them."""

import importlib
import io
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

import small
from anchorlora.__main__ import entry
from anchorlora.cli.app import main
from anchorlora.cli.progress import ProgressCallback
from anchorlora.cli.signals import ASKING, asked_to_stop, leaving_at_once, stopping_at_once
from anchorlora.errors import Interrupted
from anchorlora.runs.checkpoint import Checkpoint
from anchorlora.store.lock import Lease
from faults.runs import LONG, command, differing, run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
        assert "the same command continues from there" in said
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


@pytest.mark.slow
@pytest.mark.drawn(1)
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
        stop.training = True
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.why == "SIGINT"
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it goes on")
    assert said == ["SIGINT: saving after this step; press Ctrl-C again to stop at once"]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_second_ctrl_c_inside_a_save_harms_nothing(number, recipe, whole, tmp_path, monkeypatch, capsys):
    """It comes where the second save of the run puts something on disk for the n-th time."""
    saves, calls, write, sync = [], [], Checkpoint.write_progress, os.fsync

    def syncing(descriptor):
        calls.append(descriptor)
        if len(saves) == 2 and len(calls) == number:
            raise KeyboardInterrupt
        sync(descriptor)

    def writing(checkpoint, progress):
        saves.append(progress)
        calls.clear()
        write(checkpoint, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "write_progress", writing)
        patch.setattr(os, "fsync", syncing)
        assert main(command(recipe, tmp_path / "run", METHOD)) == 75
    assert "the same command continues from the last save" in capsys.readouterr().err
    assert not list((tmp_path / "run").rglob(".*.tmp"))
    assert Checkpoint(tmp_path / "run/state/1-begun", tmp_path / "run/trace.jsonl").read_progress(1, pytest.fail).step == 1
    run(recipe, tmp_path / "run", METHOD)
    assert not differing(tmp_path / "run", whole)


@pytest.mark.parametrize("first", NUMBERS, ids=lambda n: n.name)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
def test_what_a_scheduler_sends_twice_or_a_grid_passes_on_stops_no_save(first, second, own):
    """Ctrl-C reaches a grid and its runs alike, and the grid then asks its runs with SIGTERM."""
    said = []
    with asked_to_stop(said.append) as stop:
        stop.training = True
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), second)
        assert stop.why == first.name
    assert len(said) == 1


def test_ctrl_c_after_another_signal_is_told_and_a_second_one_stops_at_once(own):
    said = []
    with pytest.raises(KeyboardInterrupt), asked_to_stop(said.append) as stop:
        stop.training = True
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it goes on")
    assert said == [
        "SIGTERM: saving after this step; press Ctrl-C twice to stop at once",
        "SIGINT: saving after this step; press Ctrl-C again to stop at once",
    ]


@pytest.mark.slow
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


class Left(BaseException):
    """The process would have ended."""


@pytest.fixture
def left(monkeypatch):
    def leave(status):
        raise Left(status)

    monkeypatch.setattr(os, "_exit", leave)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: n.name)
def test_a_signal_before_anything_is_learned_ends_the_process_and_gives_back_the_lease(number, own, left, tmp_path, capfd):
    """Loading a large model takes longer than a scheduler waits, and another machine cannot know that the owner has ended."""
    with pytest.raises(Left, match="75"), asked_to_stop(print) as stop, Lease(tmp_path / ".lease") as lease:
        lease.take()
        stop.leaving = lease.leave
        try:
            os.kill(os.getpid(), number)
            raise AssertionError("it goes on")
        finally:
            assert not lease.file.exists()
    assert capfd.readouterr().err == f"error: interrupted by {number.name}; the same command continues\n"


def test_a_lease_that_is_another_process_s_by_now_is_not_given_back(tmp_path):
    with Lease(tmp_path / ".lease") as lease:
        lease.leave()  # was never taken
        lease.take()
        other = lease.file.read_text().replace(lease._lease.token, "0" * 32)
        lease.file.write_text(other)
        lease.leave()
        assert lease.file.read_text() == other


def test_the_terminal_is_left_alone_until_something_is_learned():
    """A bar hides the cursor, and a process that ends where it is does not show it again."""
    console = Console(file=io.StringIO(), force_terminal=True)
    with ProgressCallback(console, tasks=2) as bars:
        assert console.file.getvalue() == ""
        bars.on_task_begin(1, "fruit", 9, 0)
        assert "\x1b[?25l" in console.file.getvalue()


def test_texts_of_the_models_own_have_a_bar_that_hides_no_cursor_and_goes_before_training():
    console = Console(file=io.StringIO(), force_terminal=True)
    with ProgressCallback(console, tasks=1) as bars:
        bars.on_progress("writing texts of its own", 16, 256)
        bars.progress.refresh()
        shown = console.file.getvalue()
        assert "writing texts of its own" in shown
        assert "16/256" in shown
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
        bars.on_progress("writing texts of its own", 256, 256)
        assert bars.bar is None
        bars.on_task_begin(1, "fruit", 9, 0)
        assert "fruit: training" in console.file.getvalue()


def test_what_nohup_switched_off_stays_off_from_the_first_line_on(own):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    leaving_at_once()
    with stopping_at_once():
        os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not [number for number in ASKING if signal.getsignal(number) is own[number]]


def test_a_signal_that_the_caller_switched_off_stays_off(own):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with asked_to_stop(print) as stop:
        stop.training = True
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.why is None


def test_signals_are_given_back(own):
    with asked_to_stop(print):
        assert not [number for number in ASKING if signal.getsignal(number) is own[number]]
    assert {number: signal.getsignal(number) for number in ASKING} == own


def test_a_signal_after_the_end_changes_nothing(own, monkeypatch):
    monkeypatch.setattr("anchorlora.cli.app.main", lambda: 0)
    with pytest.raises(SystemExit, match="0"):
        entry()
    assert {signal.getsignal(number) for number in ASKING} == {signal.SIG_IGN}


TIDYING = {
    "export": "anchorlora.export.export.write_adapter",
    "cores": "anchorlora.models.cores_from_text.write_cores",
    "data import": "anchorlora.data.importing._copy",
    "general": "anchorlora_lab.suites.measure._measure",
}


@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "turned into another error"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
@pytest.mark.parametrize("name", TIDYING)
def test_a_command_that_is_stopped_leaves_nothing_behind(
    name, number, turned, own, left, whole, small_benchmark, small_model, tmp_path, monkeypatch, capsys
):
    """Where it has just begun to write; a library may have caught what the signal raised."""
    leaving_at_once()  # as the program does first of all
    owner, _, attribute = TIDYING[name].rpartition(".")
    to, text, adapter = tmp_path / "to", tmp_path / "text.jsonl", whole / "tasks/3-metal/adapter"
    words = {
        "export": ["export", str(whole), "--out", str(to)],
        "cores": ["cores", str(small_model), str(adapter), str(text), "--out", str(to), "--at-least", "1"],
        "data import": ["data", "import", str(small_benchmark), "--out", str(to)],
        "general": ["eval", str(shutil.copytree(adapter, tmp_path / "adapter")), "--task", "none"],
    }[name]
    text.write_text('{"text": "an apple or a pear"}\n' * 8)

    def stopped(*given, **more):
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            if turned:
                raise RuntimeError("initialization failed") from None
            raise
        raise AssertionError("it goes on")

    monkeypatch.setattr(importlib.import_module(owner), attribute, stopped)
    before = sorted(tmp_path.rglob("*"))
    assert main(words) == 75
    assert "the same command continues" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def listens(process, number):
    """Whether a process has a handler of its own for a signal."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> number - 1 & 1)


def maps(process, library):
    """Whether a process has loaded a library, and so is importing what needs it."""
    try:
        return library in Path(f"/proc/{process.pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def begun(words, program=(sys.executable, "-m", "anchorlora"), **environment):
    """The program as a scheduler starts it, and listening; its own first line is the earliest moment at which it can."""
    process = subprocess.Popen(
        [*program, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen,
    )
    until(lambda: listens(process, ASKING[-1]), process)
    return process


def stopped(process, number):
    """(exit status, what was said, seconds until then) of a process that gets a signal now."""
    process.send_signal(number)
    sent = time.monotonic()
    out, err = process.communicate(timeout=GRACE)
    assert out == ""
    return process.returncode, err, time.monotonic() - sent


def once(number):
    return f"error: interrupted by {number.name}; the same command continues\n"


@pytest.fixture(params=["python -m anchorlora", "anchorlora"])
def program(request, tmp_path):
    """Both ways to call it; the second is the script that pip writes for what pyproject.toml names."""
    if request.param == "python -m anchorlora":
        return sys.executable, "-m", "anchorlora"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["anchorlora"].partition(":")
    script = tmp_path / "anchorlora"
    script.write_text(f"import sys\nfrom {module} import {name}\nif __name__ == '__main__':\n    sys.exit({name}())\n")
    return sys.executable, str(script)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: n.name)
def test_a_run_that_has_just_begun_ends_with_75(number, program, tmp_path):
    process = begun(["run", "mini", "--method", "sfor", "--out", str(tmp_path / "run")], program)
    assert not maps(process, "libtorch")
    assert stopped(process, number)[:2] == (75, once(number))
    assert not (tmp_path / "run").exists()


FIRST = """
import signal, sys

def listening(number, handler):
    slow = {"click", "rich", "torch", "pydantic", "importlib.metadata", "anchorlora.cli.app"} & set(sys.modules)
    sys.exit(f"{sorted(slow)} come first" if slow else 0)

signal.signal = listening
from anchorlora.__main__ import entry
entry()
"""


def test_the_program_listens_before_it_imports_what_takes_time():
    subprocess.run([sys.executable, "-c", FIRST], check=True)


CATCHING = """
import os, signal
try:
    os.kill(os.getpid(), signal.{name})
    signal.sigtimedwait([], 5)
except BaseException:
    pass
raise ImportError("half of it is missing")
"""
COMMANDS = {
    "run": ["run", "mini", "--method", "sfor", "--out", "OUT"],
    "grid": ["grid", "mini", "--methods", "sfor", "--out", "OUT"],
    "trace": ["trace", "mini", "--out", "OUT"],
    "select": ["select", "mini", "--method", "ewc", "--out", "OUT"],
    "export": ["export", "OUT", "--out", "OUT"],
    "general": ["eval", "OUT"],
    "audit": ["audit", "OUT", "OUT"],
}


@pytest.mark.parametrize(("name", "number"), [("run", n) for n in NUMBERS] + [(n, signal.SIGUSR1) for n in COMMANDS if n != "run"])
def test_no_library_catches_a_signal_while_it_is_imported(name, number, tmp_path):
    """One that stands for torch: it sends the signal itself, and catches whatever comes of it."""
    fake, out = tmp_path / "fake/torch", tmp_path / "out"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text(CATCHING.format(name=number.name))
    path = os.pathsep.join([str(fake.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = begun([str(out) if word == "OUT" else word for word in COMMANDS[name]], PYTHONPATH=path)
    assert process.communicate(timeout=GRACE) == ("", once(number))
    assert process.returncode == 75
    assert not out.exists()


def test_a_run_that_imports_torch_ends_with_75(tmp_path):
    process = begun(["run", "mini", "--method", "sfor", "--out", str(tmp_path / "run")])
    until(lambda: maps(process, "libtorch_cpu"), process)
    status, said, seconds = stopped(process, signal.SIGUSR1)
    assert (status, said) == (75, once(signal.SIGUSR1))
    assert seconds < GRACE


@pytest.mark.slow
def test_a_run_that_is_taken_up_and_loads_its_model_ends_with_75_and_gives_back_its_lease(recipe, whole, tmp_path):
    """It holds the lease by then; the job that a scheduler starts next may be on another machine."""
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(recipe, out, METHOD, point={"task": 1, "step": 2})
    process = begun(command(recipe, out, METHOD))
    until(lambda: (out / ".lease").exists(), process)
    status, said, _ = stopped(process, signal.SIGTERM)
    assert status == 75
    assert said == once(signal.SIGTERM)
    assert not list(out.glob(".lease*"))
    run(recipe, out, METHOD)
    assert not differing(out, whole)


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: n.name)
def test_signals_at_any_moment_from_the_first_line_on(number, recipe, whole, figure, tmp_path):
    """Twenty to a run that is taken up, drawn over the time until it learns: imports, the lease, the model, what was saved."""
    draw, kept, out = random.Random(number.name), tmp_path / "kept", tmp_path / "run"
    with pytest.raises(Interrupted):
        run(recipe, kept, METHOD, point={"task": 1, "step": 2})
    log, seconds, slowest, early = (kept / "log.jsonl").stat().st_size, GRACE, 0.0, 0
    for i in range(20):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(kept, out)
        process, began = begun(command(recipe, out, METHOD)), time.monotonic()
        moment = began + draw.uniform(0, seconds) if i else math.inf  # the first one says how long it takes
        until(lambda moment=moment: time.monotonic() > moment or (out / "log.jsonl").stat().st_size > log, process)
        seconds = seconds if i else time.monotonic() - began
        status, said, taken = stopped(process, number)
        assert status == 75, (status, said)
        assert "Traceback" not in said
        assert not list(out.glob(".lease*"))
        slowest, early = max(slowest, taken), early + (said == once(number))
        run(recipe, out, METHOD)
        assert not differing(out, whole)
    figure("early", signals=20, stopped=20, early=early, most_seconds=slowest)
