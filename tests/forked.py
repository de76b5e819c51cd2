"""Processes that import nothing again: forks of the one that tests.  Each has its own output and environment."""

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import warnings

import torch
from accelerate.state import AcceleratorState


def fork(target, *args, said, fresh=False, **environment):
    """Start `target(*args)`, and return its Process; said: the file for what it says; fresh: a process that imports all anew."""
    how = "spawn" if fresh or torch.cuda.is_available() else "fork"  # no fork of a process that has opened CUDA computes
    process = multiprocessing.get_context(how).Process(target=_run, args=(target, args, said, environment))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: the threads of pytest-xdist hold no lock of ours
        process.start()
    return process


def program(words, *, said, **environment):
    """Start `anchorlora WORDS`."""
    return fork(_program, words, said=said, **environment)


def run(command, **_):
    """Take the place of `subprocess.run` for `python -m anchorlora WORDS`."""
    with tempfile.NamedTemporaryFile("r+") as said:
        process = program(command[3:], said=said.name)
        process.join()
        return subprocess.CompletedProcess(command, process.exitcode, stdout="", stderr=said.read())


def without(libraries, program, *, said):
    """Run a program that imports us anew and finds none of these libraries; return what it says, or fail with it."""
    return alone(_without, libraries, program, said=said)


def alone(target, *args, said):
    """Run `target(*args)`, which may change all that it has imported; return what it says, or fail with it."""
    process = fork(target, *args, said=said)
    process.join()
    assert process.exitcode == 0, said.read_text()
    return said.read_text()


def pair(target, *args, folder):
    """Run `target(*args)` in two processes that know of each other as those of torchrun do; fail with what one says that fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    files = [folder / f"said-{rank}" for rank in "01"]
    ranks = [fork(target, *args, said=file, RANK=file.name[-1], LOCAL_RANK=file.name[-1], **common) for file in files]
    for process in ranks:
        process.join(900)
    assert [process.exitcode for process in ranks] == [0, 0], "\n".join(file.read_text()[-3000:] for file in files)


def _run(target, args, said, environment):
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))
    os.environ.update(environment)
    AcceleratorState._reset_state(reset_partial_state=True)  # of a run that the tests made in this process
    warnings.simplefilter("ignore")  # in the tests they are errors
    target(*args)


def _without(libraries, program):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("anchorlora", "anchorlora_lab", *libraries)]:
        del sys.modules[name]
    sys.modules |= dict.fromkeys(libraries)  # an import of None fails
    exec(program, {})


def _program(words):
    from anchorlora.__main__ import entry

    sys.argv = ["anchorlora", *words]
    entry()
