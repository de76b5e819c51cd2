"""Runs as tasks of a Slurm array, by plain `sbatch`.

A call submits what is missing and not in the queue, as one array, and returns. The array has a name of its own, in a file of the
folder that is written first: so the next call knows what is in the queue, even if this one was killed as it submitted. A run that
was interrupted (exit status 75) requeues its task; one that was killed does so three times. A node that does not see the folder
holds its task, and the next call says so.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from anchorlora.errors import InvalidValue
from anchorlora.store.files import write_text
from anchorlora.store.json import read_file
from anchorlora_lab.grid.folder import HERE, failure, name_of, submitting
from anchorlora_lab.grid.scheduler import Command, OnOutcome, Outcome, Planned, command_line, nobody_watches, to_begin

LARGEST = 1000  # tasks of an array; Slurm's own limit, unless an administrator has changed it
HELD = "SPECIAL_EXIT"  # the state of a task whose node does not see the folder
# the reason of a task whose node went down as it started; it waits for somebody to release it
STUCK = "launch failed requeued held"
PASSING = ("busy", "down, drained", "not available")  # what `--test-only` says of resources that may come back
# options that this engine sets, or cannot follow
OURS = ("--array", "-a", "--job-name", "-J", "--wait", "-W", "--wrap", "--test-only")
SCRIPT = (files("anchorlora_lab.grid") / "slurm.sh").read_text(encoding="utf-8")


@dataclass(frozen=True)
class SlurmEngine:
    """One array of Slurm tasks for all runs that are missing.

    Args:
        options: Options of `sbatch`, such as "--partition=gpu".
        max_running: Tasks of the array at a time.
        retry_failed: Submit runs that have failed, too.
        wait: Wait for the runs; by default they are handed over.
        per_task: Runs of a task, one after the other, which share their imports: for many short runs.
        poll: Seconds between two looks at the folder, while waiting; at the queue, six times that.

    Example:
        >>> from anchorlora_lab.grid.slurm import SlurmEngine
        >>> SlurmEngine(options=("--partition=gpu", "--gres=gpu:1"), max_running=8).words("anchorlora-1", 40)
        ['sbatch', '--parsable', '--job-name=anchorlora-1', '--array=0-39%8', '--partition=gpu', '--gres=gpu:1']
    """

    options: tuple[str, ...] = ()
    max_running: int | None = None
    retry_failed: bool = False
    wait: bool = False
    per_task: int = 1
    poll: float = 5.0

    def words(self, name: str, count: int) -> list[str]:
        """Return the command that submits an array; it reads the script from stdin.

        Args:
            name: The array's name.
            count: Its tasks.
        """
        at_a_time = f"%{self.max_running}" if self.max_running else ""
        return ["sbatch", "--parsable", f"--job-name={name}", f"--array=0-{count - 1}{at_a_time}", *self.options]

    def check(self) -> None:
        """Find what is wrong with the request before anything is written.

        Raises:
            InvalidValue: Slurm is not there, or refuses the options.
        """
        if shutil.which("sbatch") is None:
            raise InvalidValue(
                "--engine slurm: there is no sbatch on this machine; call this where Slurm is installed, such as a login node, "
                "or print the commands with `anchorlora grid .. --list`"
            )
        for option in self.options:
            if option.partition("=")[0] in OURS:
                raise InvalidValue(f"--sbatch={option}: this option is anchorlora's own; leave it out")
        tried = _call([*self.words("anchorlora", 1), "--test-only"], "#!/bin/bash\n")
        if tried.returncode and not any(words in tried.stderr for words in PASSING):
            raise self._refused(tried.stderr)

    def run(
        self, planned: Sequence[Planned], *, root: Path, watch: OnOutcome = nobody_watches, command: Command = command_line
    ) -> list[Outcome]:
        """Submit the runs that are missing and not in the queue; with `wait`, wait for all that are missing.

        Args:
            planned: The runs, finished ones included.
            root: A folder that holds all of them, on storage that the nodes share.
            watch: Called with each outcome.
            command: Returns the command line that fills a claimed run directory.

        Returns:
            One outcome for each run that was missing.

        Raises:
            InvalidValue: Slurm refuses the array, a node does not see the folder, or somebody else is submitting.
        """
        if all(run.done for run in planned):
            return []
        with submitting(root):
            queued = _read_queue(root, forget=True)
            fresh, outcomes = to_begin(planned, root, given=queued, retry_failed=self.retry_failed)
            for number in range(0, len(fresh), LARGEST * self.per_task):
                part = fresh[number : number + LARGEST * self.per_task]
                job = self._submit(part, root, command)
                outcomes += [Outcome(run, "submitted", note=f"Slurm job {job}") for run in part]
        given = [outcome for outcome in outcomes if outcome.note and self.wait]
        outcomes = [outcome for outcome in outcomes if outcome not in given]
        for outcome in outcomes:
            watch(outcome)
        return [*outcomes, *self._waited(given, root, watch)]

    def _submit(self, planned: Sequence[Planned], root: Path, command: Command) -> str:
        name = f"anchorlora-{secrets.token_hex(4)}"
        runs = root / HERE / f"{name}.json"
        groups = [planned[i : i + self.per_task] for i in range(0, len(planned), self.per_task)]
        cases = [self._case(number, group, root, command) for number, group in enumerate(groups)]
        values = {"RUNS": shlex.quote(str(root.absolute() / HERE)), "CASES": "\n".join(cases)}
        values |= {"HERE": shlex.quote(os.getcwd()), "ARRAY": name}
        text = re.sub("@([A-Z]+)@", lambda blank: values[blank[1]], SCRIPT)
        write_text(runs, json.dumps([[_place(run, root) for run in group] for group in groups]) + "\n")
        done = _call(self.words(name, len(groups)), text)
        if done.returncode:
            runs.unlink()
            raise self._refused(done.stderr)
        return done.stdout.strip().partition(";")[0]

    def _case(self, number: int, group: Sequence[Planned], root: Path, command: Command) -> str:
        """The lines of a task in the script: its name is that of its last run, which is finished when all are."""
        folder, config = group[-1].folder.absolute(), group[-1].config
        words = command(folder, config)
        if self.per_task > 1:  # by `cli/several.py`, with the same options
            options = words[len(command_line(folder, config)) :]
            names = [_place(run, root) for run in group]
            words = [sys.executable, "-m", "anchorlora_lab.cli.several", str(root.absolute()), *names, "--", *options]
        name = shlex.quote(name_of(group[-1].folder, root))
        return f"  {number}) name={name} folder={shlex.quote(str(folder))}\n    words=({shlex.join(words)}) ;;"

    def _refused(self, answer: str) -> InvalidValue:
        lines = [line.strip() for line in answer.splitlines() if line.strip()] or ["it said nothing"]
        reason = "; ".join(line.removeprefix("sbatch: error: ").removeprefix("allocation failure: ") for line in lines)
        asked = " ".join(self.options) or "no option"
        return InvalidValue(f"Slurm refuses the array ({asked}): {reason}; `sinfo` lists partitions and what they have")

    def _waited(self, given: Sequence[Outcome], root: Path, watch: OnOutcome) -> list[Outcome]:
        waiting, ended, began, looks = list(given), list[Outcome](), time.monotonic(), 0
        while waiting:
            looks += 1
            queued = _read_queue(root) if looks % 6 == 0 else None  # before looking into the folder
            for run in list(waiting):
                end = _end(run, root, queued, time.monotonic() - began)
                if end is not None:
                    waiting.remove(run)
                    ended.append(end)
                    watch(end)
            time.sleep(self.poll if waiting else 0)
        return ended


def _place(planned: Planned, root: Path) -> str:
    """The folder of a run within that of all runs."""
    return planned.folder.relative_to(root).as_posix()


def _end(given: Outcome, root: Path, queued: Mapping[Path, str] | None, seconds: float) -> Outcome | None:
    """How a run that was handed over ended; None if it has not."""
    if given.planned.done:
        return Outcome(given.planned, "done", seconds=seconds)
    reason = failure(given.planned.folder, root)
    if reason is None and queued is not None and given.planned.folder not in queued:
        reason = f"{given.note} ended without finishing it; the same command submits it again"
    return Outcome(given.planned, "failed", reason, seconds) if reason is not None else None


def _read_queue(root: Path, *, forget: bool = False) -> dict[Path, str]:
    """Runs of a folder that are in the queue -> their job.  forget: delete the files of arrays that have left it."""
    listed = {file.stem: file for file in (root / HERE).glob("anchorlora-*.json")}
    if not listed:
        return {}
    done = _call(["squeue", "-h", "-r", f"--name={','.join(listed)}", "-o", "%j %F %K %T %r"])
    if done.returncode:
        raise InvalidValue(f"Slurm does not say what is in the queue: {' '.join(done.stderr.split())}; call again when it does")
    tasks = [line.split(maxsplit=4) for line in done.stdout.splitlines()]
    remedy = "delete it, and cancel the array of that name"
    runs = {name: read_file(file, list[list[str]], remedy=remedy) for name, file in listed.items()}
    for _, job, number, state, reason in tasks:
        if reason == STUCK:
            _call(["scontrol", "release", f"{job}_{number}"])
        if state == HELD:
            _call(["scancel", f"--name={','.join(listed)}"])
            raise InvalidValue(
                f"a node does not see {root.absolute()} (Slurm job {job}, task {number}), so its jobs are cancelled; "
                "choose an --out on storage that all nodes share"
            )
    for name in listed.keys() - {name for name, *_ in tasks} if forget else ():
        listed[name].unlink(missing_ok=True)
    return {root / run: f"Slurm job {job}" for name, job, number, *_ in tasks for run in runs[name][int(number)]}


def _call(words: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise InvalidValue(f"there is no {words[0]} on this machine; call this where Slurm is installed") from None
