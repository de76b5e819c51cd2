"""A run that was begun under other versions, or on another device, is not gone on with in silence; another system is as good."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import small
from anchorlora.cli.app import main
from anchorlora.errors import Interrupted
from anchorlora.runs import provenance as origin
from anchorlora.store.run_folder import RunFolder
from faults.runs import assert_same, command, contents, run
from skills import FEW, NARROW, rows, written

POINT = {"task": 2, "step": 2}
CPU = torch.device("cpu")
COMPUTING = origin.computing(CPU)


@pytest.fixture
def stopped(small_benchmark, small_model, tmp_path):
    recipe = small.recipe(small_benchmark, small_model)
    with pytest.raises(Interrupted):
        run(recipe, tmp_path / "parts", "sfor", point=POINT)
    return recipe, tmp_path / "parts"


def with_other(monkeypatch, name, version):
    found = COMPUTING | {name: version}
    monkeypatch.setattr(origin, "computing", lambda device: found)


@pytest.mark.parametrize("name", ["torch", "transformers", "peft", "anchorlora", "device", "instructions"])
def test_another_version_is_refused_and_named_and_nothing_is_touched(name, stopped, monkeypatch, capsys):
    recipe, out = stopped
    before = contents(out)
    was = COMPUTING[name]
    with_other(monkeypatch, name, "9.9.9")
    assert main(command(recipe, out, "sfor")) == 2
    said = capsys.readouterr().err
    assert f"{out} was begun under other conditions ({name} {was} then and 9.9.9 now)" in said
    assert "--allow-inexact" in said
    assert contents(out) == before


def test_the_record_says_that_it_was_allowed_and_what_changed(stopped, monkeypatch, capsys):
    recipe, out = stopped
    was = COMPUTING["torch"]
    with_other(monkeypatch, "torch", "9.9.9")
    assert main([*command(recipe, out, "sfor"), "--allow-inexact"]) == 0
    assert json.loads((out / "record.json").read_text())["protocol"]["inexact"] == [f"torch {was} then and 9.9.9 now"]


def test_the_change_is_allowed_once_and_the_next_one_is_asked_for_again(stopped, monkeypatch):
    recipe, out = stopped
    with_other(monkeypatch, "torch", "9.9.9")
    with pytest.raises(Interrupted):
        run(recipe, out, "sfor", point={"task": 2, "step": 3}, allow_inexact=True)
    with pytest.raises(Interrupted):
        run(recipe, out, "sfor", point={"task": 3, "step": 1})  # the versions that were allowed are its own now
    with_other(monkeypatch, "torch", "10.0")
    with pytest.raises(ValueError, match=r"torch 9.9.9 then and 10.0 now"):
        run(recipe, out, "sfor")
    record = run(recipe, out, "sfor", allow_inexact=True)
    assert [said.split(" then")[0] for said in record.protocol["inexact"]] == [
        f"torch {COMPUTING['torch']}",
        "torch 9.9.9",
    ]


def test_the_same_software_goes_on_without_a_word(stopped, tmp_path):
    recipe, out = stopped
    record = run(recipe, out, "sfor")
    assert "inexact" not in record.protocol
    run(recipe, tmp_path / "whole", "sfor")
    assert_same(out, tmp_path / "whole")


def test_a_finished_run_is_read_under_any_version(stopped, monkeypatch):
    recipe, out = stopped
    record = run(recipe, out, "sfor")
    with_other(monkeypatch, "torch", "9.9.9")
    assert run(recipe, out, "sfor") == record


def test_it_goes_on_with_as_many_threads_as_it_began_with(stopped, tmp_path):
    """Sums of more threads are rounded in another order."""
    recipe, out = stopped
    torch.set_num_threads(2)
    try:
        assert run(recipe, out, "sfor").threads == 1
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("threads", ["many", "0", "99999999", "-1"])
def test_a_number_of_threads_that_is_none_is_not_taken(threads, stopped):
    recipe, out = stopped
    known = origin.Provenance(out / "state/provenance.json", out / "config.yaml")
    known._write(known._known() | {"threads": threads})
    with pytest.raises(ValueError, match="threads is not what this run began with"):
        run(recipe, out, "sfor")
    assert torch.get_num_threads() == 1


# what the program finds on Windows: fewer modules, signals and calls; names that are taken; files in use that stay; lines that end
# in two characters; and an encoding without Greek. Libraries are left alone: they know Windows
WINDOWS = """
import builtins, errno, fcntl, io, json, os, shutil, signal, sys, tempfile
import accelerate, filelock, multiprocessing.util, peft, psutil, subprocess, torch, transformers

for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
signals = "SIGABRT SIGFPE SIGILL SIGINT SIGSEGV SIGTERM SIG_DFL SIG_IGN".split()
for name in [name for name in dir(signal) if name.startswith("SIG") and name not in signals] + ["pthread_sigmask", "alarm"]:
    delattr(signal, name)
for name in "O_DIRECTORY O_NOFOLLOW fork geteuid getuid mkfifo pread pwrite sched_getaffinity statvfs sysconf uname waitid".split():
    delattr(os, name)
shutil._use_fd_functions = False
psutil.pid_exists = lambda pid: os.path.exists(f"/proc/{pid}")
call, opened = {name: getattr(os, name) for name in "fsync kill open remove rename replace rmdir unlink".split()}, io.open

def ours():
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] not in ("filelock", "tempfile"):
        if frame.f_globals.get("__name__", "").startswith("anchorlora"):
            return True
        frame = frame.f_back
    return False

def refuse_in_use(path):
    held = [line.split(maxsplit=5)[5].strip() for line in opened("/proc/self/maps") if len(line.split(maxsplit=5)) == 6]
    held += [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    if any(name == os.path.realpath(path) or name.startswith(os.path.realpath(path) + os.sep) for name in held):
        sys.stdout.write(f"in use: {path}\\n")
        raise PermissionError(errno.EACCES, "in use", os.fspath(path))

def opening(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *others, **how):
    if ours() and "b" not in mode:
        encoding = "cp1252" if encoding in (None, "locale") else encoding
        newline = "\\r\\n" if newline is None and set(mode) & set("wax") else newline
    return opened(file, mode, buffering, encoding, errors, newline, *others, **how)

def changing(name):
    def change(path, *to, **how):
        if ours() and not how and os.path.lexists(path):
            for place in (path, *to):
                refuse_in_use(place)
            if to and os.path.exists(to[0]) and (name == "rename" or os.path.isdir(to[0])):
                raise FileExistsError(errno.EEXIST, "exists", os.fspath(to[0]))
        return call[name](path, *to, **how)
    return change

def syncing(number):
    if ours() and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "not open for writing")
    call["fsync"](number)

def opening_folders(path, *others, **how):
    if ours() and os.path.isdir(path):
        raise PermissionError(errno.EACCES, "a folder", os.fspath(path))
    return call["open"](path, *others, **how)

def killing(number, which):
    assert not ours(), "this is Ctrl-C"
    call["kill"](number, which)

io.open = builtins.open = opening
os.fsync, os.open, os.kill = syncing, opening_folders, killing
for name in ("remove", "rename", "replace", "rmdir", "unlink"):
    setattr(os, name, changing(name))

from anchorlora.__main__ import entry
from anchorlora.runs.autosave import Autosave

def stopping(self, step, snapshot):
    if step == 2 and not stopped:
        stopped.append(step)
        self.stop.ask("SIGINT")
    return boundary(self, step, snapshot)

stopped, boundary, Autosave.on_step_boundary = [], Autosave.on_step_boundary, stopping
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        entry()
    except SystemExit as end:
        print("status", end.code, *words[:1], flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells which files are in use")
def test_what_windows_lacks_is_not_asked_for(small_model, tmp_path):
    data = {name: written(tmp_path / f"{name}.jsonl", rows(name, "train", 16)) for name in ("news", "reviews")}
    out, exported = tmp_path / "out", str(tmp_path / "exported")
    train = ["train", str(small_model), "--data", data["news"], "--keep", data["reviews"], "--out", str(out), *FEW, *NARROW]
    others = [["ask", str(out), "-", "--max-new-tokens", "2"], ["export", str(out), "--out", exported], ["check", "sfor"]]
    words = [*[[*train, "--save-every", "1"]] * 3, *others, ["audit", str(small_model), str(out), "--weights", "2", "--json"]]
    plain = {"PYTHONUTF8": "0", "PYTHONIOENCODING": "cp1252", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", WINDOWS, json.dumps(words)]
    done = subprocess.run(program, env={**os.environ, **plain}, input="Where is Ägir? Á!\n".encode(), capture_output=True)
    shown = done.stdout.decode("cp1252")
    ended = [line.split()[1:] for line in shown.splitlines() if line.startswith("status")]
    assert ended == [[str(75 * (i == 0)), call[0]] for i, call in enumerate(words)], done.stderr.decode("cp1252")
    assert "in use" not in shown
    assert "\\u0394A" in shown  # of `check`
    for file in ("config.yaml", "log.jsonl", "record.json", "skill/verdict.json", "index.html"):
        assert b"\r" not in (out / file).read_bytes()
    assert RunFolder.open(out).is_finished
