"""A stand-in for sbatch, squeue, scontrol and scancel: one queue in a file, whose tasks a test carries out one after the other.

As a program it is any of the four, by the name that it is called by. It knows the options that the engine uses, and answers in
Slurm's words.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

VARIABLE = "SLURM_STAND_IN"
PARTITIONS = ("p", "gpu")


class Queue:
    """The file with all tasks: their job's name, script, state, and how often they were requeued."""

    def __init__(self, file):
        self.file = Path(file)

    @property
    def tasks(self):
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def put(self, tasks):
        self.file.write_text(json.dumps(tasks))

    def set(self, task, **fields):
        tasks = self.tasks
        tasks[task] |= fields
        self.put(tasks)

    def states(self):
        return {task: each["state"] for task, each in self.tasks.items()}

    def start(self, task):
        """The process of a task."""
        self.set(task, state="RUNNING")
        each, (job, number) = self.tasks[task], task.split("_")
        numbers = {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": number, "SLURM_RESTART_COUNT": str(each["restarts"])}
        return subprocess.Popen(["bash", "-c", each["script"]], env={**os.environ, **numbers})

    def end(self, task, process):
        """Wait for a task; it is out of the queue, or pending again."""
        status = process.wait()
        if self.tasks[task]["state"] == "RUNNING":
            self.set(task, state="COMPLETED" if status == 0 else "FAILED")
        return status

    def drain(self):
        """Carry out what is pending until nothing is."""
        while pending := [task for task, state in self.states().items() if state == "PENDING"]:
            for task in pending:
                self.end(task, self.start(task))


def install(folder, monkeypatch):
    """Put the four programs on PATH and return their queue."""
    folder.mkdir()
    for name in ("sbatch", "squeue", "scontrol", "scancel"):
        (folder / name).write_text(f'#!/bin/bash\nexec {sys.executable} -SE {__file__} {name} "$@"\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(VARIABLE, str(folder / "queue.json"))
    return Queue(folder / "queue.json")


def sbatch(queue, options):
    script = sys.stdin.read()
    given = dict(option.removeprefix("--").partition("=")[::2] for option in options)
    if given.get("partition", "p") not in PARTITIONS:
        reason = f"invalid partition specified: {given['partition']}"
        return f"sbatch: error: {reason}\nsbatch: error: Batch job submission failed: Invalid partition name specified"
    if "test-only" in given:
        return None
    tasks = queue.tasks
    job = 1 + max((int(task.split("_")[0]) for task in tasks), default=16)
    last = int(re.match(r"0-(\d+)", given["array"])[1])
    new = {"name": given["job-name"], "script": script, "options": options, "state": "PENDING", "restarts": 0}
    queue.put(tasks | {f"{job}_{number}": new for number in range(last + 1)})
    print(job)
    return None


def squeue(queue, options):
    here = {task: each for task, each in queue.tasks.items() if each["state"] not in ("COMPLETED", "FAILED", "CANCELLED")}
    if "-j" in options:
        task = options[options.index("-j") + 1]
        print(here[task]["state"] if task in here else "")
        return
    names = next(option for option in options if option.startswith("--name=")).removeprefix("--name=").split(",")
    for task, each in here.items():
        if each["name"] in names:
            print(each["name"], *task.split("_"), each["state"], each.get("reason", "None"))


def scontrol(queue, options):
    if options[0] == "release":
        queue.set(options[1], reason="None")
        return
    state = "SPECIAL_EXIT" if options[0] == "requeuehold" else "PENDING"
    queue.set(options[-1], state=state, restarts=queue.tasks[options[-1]]["restarts"] + 1)


def scancel(queue, options):
    for task, each in queue.tasks.items():
        if f"--name={each['name']}" in options:
            queue.set(task, state="CANCELLED")


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](Queue(os.environ[VARIABLE]), sys.argv[2:]))
