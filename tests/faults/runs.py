"""Runs that are stopped, and what must be equal to a run that was not."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import small
from anchorlora import METHODS, run_sequence
from anchorlora.continual import sequence
from anchorlora.continual.recipe import Cell
from anchorlora.continual.sequence import Watch
from anchorlora.experiments.files import dump_yaml
from anchorlora.experiments.keeping import Stop

TASKS, STEPS = len(small.ORDER), 3  # the small benchmark: 24 examples a task, 8 a step


class AskToStop(Watch):
    """Asks to stop after a step of a task, when a task is learned, or after a batch of its answers."""

    def __init__(self, stop, *, task, step=None, batch=None):
        self.stop, self.task, self.step, self.batch = stop, task, step, batch
        self.now, self.batches = 0, 0

    def task_begins(self, number, task, steps, done):
        self.now = number

    def step_done(self, event):
        if self.step is not None and (self.now, event["step"]) == (self.task, self.step):
            self.stop.ask("asked to stop")

    def evaluation_begins(self, number, examples):
        self.now, self.batches = number, 0

    def examples_done(self, count):
        self.batches += count > 0
        if self.batch is not None and (self.now, self.batches) == (self.task, self.batch):
            self.stop.ask("asked to stop")


def run(recipe, out, method, *, point=None, save_every=0, **more):
    """One run, or the first part of one; point: where it is asked to stop."""
    stop = Stop()
    watch = AskToStop(stop, **point) if point else None
    how = {"watch": watch, "stop": stop, "save_every": save_every, **more}
    return run_sequence(recipe, METHODS[method], order=small.ORDER, seed=42, out=out, **how)


def command(recipe, out, method):
    """The words that do what `run` does, with a configuration beside `out`."""
    cell = Cell(method=method, order=small.ORDER, seed=42, recipe=recipe)
    config = out.with_name(f"{out.name}.yaml")
    config.write_text(dump_yaml(cell.model_dump(mode="json")))
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
    moving = ("cost", "host", "started", "finished", "train_seconds", "evaluate_seconds", "peak_memory_bytes")
    return {key: value for key, value in content.items() if key not in moving}


def assert_same(parts, whole):
    a, b = contents(parts), contents(whole)
    assert a.keys() == b.keys()
    differing = [name for name in a if a[name] != b[name]]
    assert not differing, f"differ after resuming: {differing}"


def catching(monkeypatch, meddle=lambda caught: None):
    """What the loop of a task works on: model, optimizer, scope and the optimizer steps made before.  meddle: is given it first."""
    caught, real = SimpleNamespace(), sequence.learn

    def learn(model, optimizer, scope, *rest, step, **settings):
        caught.model, caught.optimizer, caught.scope, caught.step = model, optimizer, scope, step
        meddle(caught)
        return real(model, optimizer, scope, *rest, step=step, **settings)

    monkeypatch.setattr(sequence, "learn", learn)
    return caught


def hashes(out):
    """The SHA-256 of every file that a stopped run must leave alone, all but the log."""
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.name != "log.jsonl"]
    return {path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
