"""Two processes on one directory: one works, the other refuses; a dead one's is taken over, a suspended one notices."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import small
from anchorlora.cli.app import main
from anchorlora.config import RunConfig
from anchorlora.recipes import mini
from anchorlora.runs.directory import RunDirectory
from anchorlora.store import lock as leases
from anchorlora.store.files import write_first
from anchorlora.store.lock import InUse, Lease
from anchorlora_lab.grid.scheduler import LocalEngine, Planned
from faults.runs import assert_same, command, run

SHORT = 2.0  # seconds; a lease as every process of a test has it
PROGRAM = f"""
import os, signal, sys, time
from anchorlora.store import lock as lease
from anchorlora.store.log import EventLog
lease.LEASE, lease.HEARTBEAT = float(sys.argv[1]), {SHORT / 4}
lines, go = int(sys.argv[2]), sys.argv[3]
write = EventLog.write
def write_and_pause(self, event):
    global lines
    write(self, event)
    lines -= 1
    if lines == 0 and go:
        while not os.path.exists(go):
            time.sleep(0.05)
    elif lines == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
EventLog.write = write_and_pause
from anchorlora.cli.app import main
sys.exit(main(sys.argv[4:]))
"""


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(leases, "LEASE", SHORT)
    monkeypatch.setattr(leases, "HEARTBEAT", SHORT / 4)


@pytest.fixture
def traced(small_benchmark, small_model):
    return small.recipe(small_benchmark, small_model, trace_points=4)


def started(words, said, *, lines=0, go="", lease=SHORT):
    """A process that makes a run. After so many lines of its log, it waits for the file `go`, or suspends itself."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = [str(lease), str(lines), str(go), *words]
    with said.open("w") as file:
        return subprocess.Popen([sys.executable, "-c", PROGRAM, *given], env=environment, stdout=subprocess.DEVNULL, stderr=file)


def until(condition, process, seconds=900.0):
    """Wait for a condition: a process that other programs leave no time may take minutes for what takes a second."""
    began = time.monotonic()
    while True:
        ended = process.poll() is not None
        if condition():
            return
        assert not ended, "it has ended"
        assert time.monotonic() - began < seconds, "no sign of life"
        time.sleep(0.01)


def until_suspended(process):
    status = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert status.si_code == os.CLD_STOPPED, "it has ended"


def lines_of(log):
    return log.read_text().count("\n") if log.exists() else 0


def everything_in(out):
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def foreign(file, *, duration=SHORT):
    """A lease of a process on a machine that cannot be asked."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"filelock/2\npid=7\nhost=elsewhere\nmode=lease\ntoken={'0' * 32}\nduration={duration!r}\nstart=1\n")


@pytest.mark.slow
def test_the_second_call_refuses_while_the_first_one_lives_and_harms_nothing(traced, tmp_path, capsys, monkeypatch):
    out, longer, go = tmp_path / "parts", traced.changed({"epochs": 4}), tmp_path / "go"
    words, lease = command(longer, out, "sfor"), 60 * SHORT  # which no machine is too busy to renew
    monkeypatch.setattr(leases, "LEASE", lease)
    process = started(words, tmp_path / "said", lines=2, go=go, lease=lease)
    until(lambda: lines_of(out / "log.jsonl") > 1, process)
    status = main(words)
    go.touch()
    assert status == 2
    said = capsys.readouterr().err
    assert f"{out} is in use by process {process.pid} on " in said
    assert said.count("\n") == 1
    assert process.wait() == 0
    run(longer, tmp_path / "whole", "sfor")
    assert_same(out, tmp_path / "whole")
    assert not list(out.glob(".lease*"))


@pytest.mark.parametrize("lines", [4, *(1, 2, 3, 5, 6, 7, 8, 9, 10)])
@pytest.mark.slow
@pytest.mark.parametrize("woken", ["while the other works", "when the other has ended"])
def test_a_suspended_owner_notices_that_its_directory_was_taken_over(woken, lines, traced, tmp_path):
    """Suspended after so many lines of its log, which is within a task, at its end or at the beginning of the next."""
    out = tmp_path / "parts"
    words = command(traced, out, "sfor")
    first = started(words, tmp_path / "first", lines=lines)
    until_suspended(first)
    second = started(words, tmp_path / "second")
    if woken == "while the other works":
        until(lambda: "resumed" in (out / "log.jsonl").read_text() or second.poll() is not None, second)
    else:
        second.wait()
    before = everything_in(out)
    first.send_signal(signal.SIGCONT)
    status, said = first.wait(), (tmp_path / "first").read_text()
    assert status == 1, said
    assert f"{out} was taken over by " in said
    assert "Traceback" not in said
    if woken == "when the other has ended":
        assert everything_in(out) == before
    assert second.wait() == 0, (tmp_path / "second").read_text()
    run(traced, tmp_path / "whole", "sfor")
    assert_same(out, tmp_path / "whole")


def test_a_lease_of_another_machine_is_taken_over_when_it_is_not_renewed(tmp_path):
    foreign(tmp_path / "x/.lease")
    began = time.monotonic()
    with Lease(tmp_path / "x/.lease") as lease:
        lease.take()
        assert SHORT <= time.monotonic() - began < 2 * SHORT
        lease.check()
    assert not (tmp_path / "x/.lease").exists()


def test_a_lease_of_another_machine_is_respected_while_it_is_renewed(tmp_path):
    foreign(tmp_path / "x/.lease")
    ended = threading.Event()

    def renew():
        while not ended.wait(SHORT / 4):
            os.utime(tmp_path / "x/.lease")

    threading.Thread(target=renew).start()
    try:
        with Lease(tmp_path / "x/.lease") as lease, pytest.raises(InUse, match="in use by process 7 on elsewhere"):
            lease.take()
    finally:
        ended.set()
    assert "host=elsewhere" in (tmp_path / "x/.lease").read_text()


def test_a_lease_that_the_program_cannot_read_is_named_and_not_broken(tmp_path):
    foreign(tmp_path / "x/.lease", duration=1000.0)
    with Lease(tmp_path / "x/.lease") as lease, pytest.raises(InUse, match="of another version of this program"):
        lease.take()


@pytest.mark.slow
def test_a_grid_takes_the_runs_that_a_runner_of_another_machine_left_behind(tmp_path):
    runs = [Planned(tmp_path / f"run-{i}", RunConfig(method="sfor", order=("a", "b"), seed=i, recipe=mini())) for i in range(3)]
    foreign(tmp_path / ".runs/run-0.lease")  # the runner and its process
    foreign(tmp_path / "run-0/.lease")
    foreign(tmp_path / "run-1/.lease")  # a process whose runner has ended
    script = "import sys, pathlib; pathlib.Path(sys.argv[1], 'record.json').write_text('{}')"
    found = LocalEngine(2).run(runs, root=tmp_path, command=lambda folder, run: [sys.executable, "-S", "-c", script, str(folder)])
    assert [(o.planned.folder.name, o.status) for o in found[:1]] == [("run-2", "done")]
    assert {(o.planned.folder.name, o.status) for o in found} == {(f"run-{i}", "done") for i in range(3)}


def test_a_record_is_committed_once_whoever_comes_second(traced, tmp_path):
    out = tmp_path / "run"
    record = run(traced, out, "sfor")
    committed = (out / "record.json").read_bytes()
    other = record.model_copy(update={"started": "2000-01-01T00:00:00+00:00"})
    assert RunDirectory(out).write_record(other) == record
    assert (out / "record.json").read_bytes() == committed
    (out / "record.json").unlink()  # as when the process ends between the two
    assert run(traced, out, "sfor") == record
    assert (out / "record.json").read_bytes() == committed


def test_of_many_processes_that_write_one_file_the_first_has_written_it_whole(tmp_path):
    target, texts = tmp_path / "file", [str(i) * 100_000 for i in range(8)]
    children = []
    for text in texts:
        pid = os.fork()
        if pid == 0:
            os._exit(10 + write_first(target, text))
        children.append(pid)
    statuses = [os.WEXITSTATUS(os.waitpid(pid, 0)[1]) for pid in children]
    assert sorted(statuses) == [10] * 7 + [11]
    assert target.read_text() == texts[statuses.index(11)]
    assert [p.name for p in Path(tmp_path).iterdir()] == ["file"]


def test_whether_an_owner_lives_is_asked_without_a_signal(tmp_path, monkeypatch):
    """On Windows, os.kill(.., 0) is Ctrl-C."""
    with Lease(tmp_path / ".lease") as lease:
        lease.take()
        assert lease.live()
        monkeypatch.setattr(psutil, "pid_exists", lambda number: number != os.getpid())
        assert not lease.live()


def test_a_lease_is_given_back_when_its_block_ends(tmp_path):
    """Also by a process that goes on, as one that makes several runs does."""
    with Lease(tmp_path / ".lease") as lease:
        lease.take()
        assert lease.file.exists()
    assert not lease.file.exists()
