"""Runs that are stopped, and what must be equal to a run that was not."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

import small
from anchorlora import METHODS, run_sequence
from anchorlora.config import RunConfig
from anchorlora.continual import sequence
from anchorlora.continual.callback import RunCallback
from anchorlora.continual.past import Past
from anchorlora.errors import Interrupted
from anchorlora.runs.autosave import Stop
from anchorlora.runs.directory import RunDirectory
from anchorlora.store.files import dump_yaml

TASKS, STEPS = len(small.ORDER), 3  # the small benchmark: 24 examples a task, 8 a step
EPOCHS = 3
# four micro-batches a step, two batches of a task's answers, and rows that are taken in the first five steps of nine
LONG = {"epochs": EPOCHS, "micro_batch": 2, "eval_batch": 4, "rows": 400, "held_out_rows": 96}


class AskToStop(RunCallback):
    """Asks to stop after a step of a task, while its cores are made ("trained"), or after a batch of its answers.

    "ended": stops where the task's state has its name and nothing of the next task, or of the record, has begun.
    """

    def __init__(self, stop, *, task, step=None, batch=None, phase=None):
        self.stop, self.task, self.step, self.batch, self.phase = stop, task, step, batch, phase
        self.now, self.batches = 0, 0

    def on_task_begin(self, number, task, steps, done):
        self.now = number

    def on_step_end(self, event):
        if self.step is not None and (self.now, event["step"]) == (self.task, self.step):
            self.stop.ask("asked to stop")

    def on_evaluation_begin(self, number, examples, texts):
        self.now, self.batches = number, 0

    def on_batch_evaluated(self, task, texts, seconds):
        self.batches += 1
        if self.batch is not None and (self.now, self.batches) == (self.task, self.batch):
            self.stop.ask("asked to stop")

    @contextmanager
    def at_boundaries(self):
        """Moments of which a run tells nobody."""
        make, write = Past.made, RunDirectory.write_task

        def making(past, remembered, *more, **others):
            if (self.phase, self.task) == ("trained", past.tasks + 1):
                self.stop.ask("asked to stop")
            return make(past, remembered, *more, **others)

        def writing(directory, state, **more):
            facts = write(directory, state, **more)
            if (self.phase, self.task) == ("ended", state.result.number):
                raise Interrupted("stopped where a task has ended; the same command continues from there")
            return facts

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Past, "made", making)
            patch.setattr(RunDirectory, "write_task", writing)
            yield


def run(recipe, out, method, *, point=None, save_every=0, callback=None, **more):
    """One run, or the first part of one; point: where it is asked to stop."""
    stop = Stop()
    asking = AskToStop(stop, **point) if point else None
    with asking.at_boundaries() if asking else nullcontext():
        settings = {"callbacks": [each for each in (asking, callback) if each], "stop": stop, "save_every": save_every, **more}
        return run_sequence(small.roomy(recipe, method), METHODS[method], order=small.ORDER, seed=42, out=out, **settings)


def command(recipe, out, method):
    """The words that do what `run` does, with a configuration beside `out`."""
    run_config = RunConfig(method=method, order=small.ORDER, seed=42, recipe=recipe)
    config = out.with_name(f"{out.name}.yaml")
    config.write_text(dump_yaml(run_config.model_dump(mode="json")))
    return ["run", str(config), "--out", str(out), "--save-every", "1"]


def in_a_fresh_process(recipe, out, method):
    """A run as the program makes it.  Raises ValueError with what it said where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "anchorlora", *command(recipe, out, method)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr)


def contents(out):
    """Every byte that must not depend on where a run was stopped, by file; times left out."""
    found = {}
    for path in sorted([*out.glob("tasks/**/*"), *out.glob("state/**/*"), *out.glob("*.jsonl"), *out.glob("record.json")]):
        name = path.relative_to(out).as_posix()
        if not path.is_file() or path.name == "SEAL.json" or name in ("log.jsonl", "state/recorded.json"):  # hashes of times
            continue
        found[name] = steady(json.loads(path.read_text())) if path.suffix == ".json" else path.read_bytes()
    return found


def steady(content):
    """A record or facts without what is measured in seconds and bytes of the machine."""
    if not isinstance(content, dict):
        return content
    moving = ("cost", "host", "started", "finished", "train_seconds", "evaluate_seconds", "peak_memory_bytes", "sha256")
    return {key: value for key, value in content.items() if key not in moving}


def differing(parts, whole):
    """The names of the files that two runs do not have in common."""
    a, b = contents(parts), contents(whole)
    return sorted(name for name in a.keys() | b.keys() if name not in a or name not in b or a[name] != b[name])


def assert_same(parts, whole):
    different = differing(parts, whole)
    assert not different, f"differ after resuming: {different}"


def catching(monkeypatch, meddle=lambda caught: None):
    """What the loop of a task works on: model, optimizer, scope and the optimizer steps made before.  meddle: is given it first."""
    caught, real = SimpleNamespace(), sequence.learning

    def learning(learner, rules, *, step):
        caught.model, caught.optimizer, caught.anchor, caught.step = learner.model, learner.optimizer, learner.anchor, step
        meddle(caught)
        return real(learner, rules, step=step)

    monkeypatch.setattr(sequence, "learning", learning)
    return caught


def hashes(out):
    """The SHA-256 of every file that a stopped run must leave alone, all but the log."""
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.name != "log.jsonl"]
    return {path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
