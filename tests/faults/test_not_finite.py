"""Numbers that are not numbers stop a run before the step: exit status 3, task and step named, what was saved untouched."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from accelerate import Accelerator
from safetensors.torch import save_file

import small
from anchorlora import run_sequence
from anchorlora.cli.app import main
from anchorlora.cli.parsing import method_named
from anchorlora.constraints import distillation, overlap
from anchorlora.continual import batches as losses
from anchorlora.continual.past import Past
from anchorlora.features import collector
from faults.editing import edited, tensors_of
from faults.runs import assert_same, catching, command, hashes, run

AT = {"task": 2, "step": 1}  # the last step that was saved; the fault comes with the next one
NO_NUMBERS = pytest.mark.parametrize("value", [float("nan"), -float("inf")], ids=str)
FIRST = "model.layers.0.self_attn.q_proj"


def gone_on_with(recipe, out, method):
    """(exit status, the last line) of the command line."""
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        status = main(command(recipe, out, method))
    assert "Traceback" not in said.getvalue()
    return status, " ".join(said.getvalue().split()).rpartition("error: ")[2]


# what goes wrong in the second step of the second task, which is the first one after the run has gone on


def wrong_loss(value, monkeypatch):
    real = losses.LOSSES["example_mean"]
    monkeypatch.setitem(losses.LOSSES, "example_mean", lambda *args: real(*args) + value)


def wrong_gradient(value, monkeypatch):
    caught, real = catching(monkeypatch), Accelerator.backward

    def backward(self, loss, **kwargs):
        real(self, loss, **kwargs)
        caught.anchor.layers[0].factor("A").grad[0, 0] = value

    monkeypatch.setattr(Accelerator, "backward", backward)


def wrong_penalty(value, monkeypatch):
    real = overlap._Overlapping.pieces

    def pieces(self, layer):
        penalty, gradients = real(self, layer)
        gradients["A"][0, 0] = value
        return penalty, gradients

    monkeypatch.setattr(overlap._Overlapping, "pieces", pieces)


def wrong_distillation(value, monkeypatch):
    real = distillation._Distilling.divergence
    monkeypatch.setattr(distillation._Distilling, "divergence", lambda *args: real(*args) * value)


def wrong_row(value, monkeypatch):
    """Only as it is kept: the loss is a number."""
    real = collector.Collector._take

    def take(self, store, inputs):
        inputs = inputs.clone()
        inputs[0, -1, 5] = value
        real(self, store, inputs)

    monkeypatch.setattr(collector.Collector, "_take", take)


def wrong_core(value, monkeypatch):
    def meddle(caught):
        caught.anchor.layers[0].core.basis[3, 1] = value

    catching(monkeypatch, meddle)


FAULTS = [
    (wrong_loss, "sfor", r"the loss is (nan|-?inf) at step 2"),
    (wrong_loss, "seq-lora", r"the loss is (nan|-?inf) at step 2"),
    (wrong_gradient, "sfor", r"the gradient norm is (nan|inf) at step 2"),
    (wrong_gradient, "seq-lora", r"the gradient norm is (nan|inf) at step 2"),
    (wrong_penalty, "o-lora", f"the gradient of A at {FIRST}, as constraints have made it, is NaN or infinite at step 2"),
    (wrong_distillation, "lwf", r"the gradient norm is (nan|inf) at step 2"),
    (wrong_row, "sfor", f"feature rows at {FIRST} hold NaN or infinite values at step 2"),
    (wrong_row, "seq-lora", f"feature rows at {FIRST} hold NaN or infinite values at step 2"),
    (wrong_core, "sfor", f"the core at {FIRST} holds NaN or infinite values before step 2"),
]


@pytest.mark.drawn(3)
@NO_NUMBERS
@pytest.mark.parametrize(("fault", "method", "said"), FAULTS, ids=[f"{fault.__name__}-{method}" for fault, method, _ in FAULTS])
def test_a_run_stops_before_the_step_and_goes_on_once_the_fault_is_gone(fault, method, said, value, recipe, kept, tmp_path):
    saved, whole = kept(method, AT)
    out = tmp_path / "run"
    shutil.copytree(saved, out)
    before = hashes(out)
    with pytest.MonkeyPatch.context() as monkeypatch:
        fault(value, monkeypatch)
        status, last = gone_on_with(recipe, out, method)
    assert status == 3, last
    assert re.search(rf"^stopped: mood \(task 2\): {said}.*; the state after step 1 of task 2 is kept$", last), last
    assert hashes(out) == before
    assert gone_on_with(recipe, out, method)[0] == 0
    assert_same(out, whole)


def holding(file, prefix, value):
    """Put `value` into the first entry of the first tensor whose name begins so."""

    def change(folder):
        tensors, metadata = tensors_of(folder / file)
        name = min(name for name in tensors if name.startswith(prefix))
        tensors[name].view(-1)[0] = value
        save_file(tensors, folder / file, metadata=metadata)

    return change


BEGUN, TASK = "state/2-begun/step-00000001", "../../tasks/1-fruit"
NAN, INF = float("nan"), float("inf")
SEALED = [
    ("sfor", BEGUN, "tensors.safetensors", "parameters/", NAN),
    ("sfor", BEGUN, "tensors.safetensors", "optimizer/0/exp_avg_sq", INF),
    ("sfor", BEGUN, "tensors.safetensors", "rows/core", NAN),
    ("sfor", "state/1", f"{TASK}/cores.safetensors", "model", NAN),
    ("sfor", "state/1", f"{TASK}/cores.safetensors", "model", -INF),
    ("sfor", "state/1", f"{TASK}/adapter/adapter_model.safetensors", "base", NAN),
    ("sfor", "state/1", "rows.safetensors", "rows/core", INF),
    ("sfor", "state/1", "wide.safetensors", "model", NAN),
    ("ewc", "state/1", "remembered.safetensors", "fisher/", INF),
    ("sd-lora", "state/1", "stack.safetensors", "", NAN),
]


@pytest.mark.parametrize(("method", "at", "file", "prefix", "value"), SEALED)
def test_a_sealed_state_that_holds_one_is_not_gone_on_from(method, at, file, prefix, value, recipe, kept, tmp_path):
    """Its hashes are right: something wrote it.  No older state is taken in silence, since it would come to the same again."""
    out = edited(kept(method, AT)[0], tmp_path, holding(file, prefix, value), at=at)
    before = hashes(out)
    status, last = gone_on_with(recipe, out, method)
    assert status == 3, last
    assert last.startswith("stopped: ")
    assert Path(file).name in last
    assert ("step-00000001" if at == BEGUN else "state/1" if TASK not in file else "1-fruit") in last
    assert "NaN or infinite" in last
    assert hashes(out) == before


def test_a_sealed_core_that_is_not_orthonormal_is_refused_with_its_layer_and_both_numbers(recipe, kept, tmp_path):
    out = edited(kept("sfor", AT)[0], tmp_path, holding(f"{TASK}/cores.safetensors", "model", 0.5), at="state/1")
    before = hashes(out)
    status, last = gone_on_with(recipe, out, "sfor")
    assert status == 2
    assert re.search(rf"cores.safetensors: the core of '{FIRST}': .*\|V\^T V - I\| = \d\.\de[-+]\d+, allowed 1e-05; ortho", last), (
        last
    )
    assert hashes(out) == before


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", ["core", "wide", "remembered"])
def test_nothing_that_holds_one_is_saved_at_a_boundary(kind, recipe, tmp_path, monkeypatch):
    """Memory that went wrong after the cores were made; the task is learned again."""
    real = Past.append

    def append(self, cores, remembered):
        real(self, cores, remembered)
        if self.tasks == 2:
            holds = self.remembered[f"fisher/{FIRST}.A"] if kind == "remembered" else getattr(cores[FIRST], kind).basis
            holds[0, 0] = float("nan")

    with monkeypatch.context() as patched:
        patched.setattr(Past, "append", append)
        status, last = gone_on_with(recipe, tmp_path / "run", "ewc")
    assert status == 3, last
    assert re.search(r"mood \(task 2\): .*NaN or infinite values; the state after step 3 of task 2 is kept", last), last
    assert not (tmp_path / "run/tasks/2-mood").exists()
    assert not [path.name for path in (tmp_path / "run/state").rglob("*.tmp")]
    assert gone_on_with(recipe, tmp_path / "run", "ewc")[0] == 0
    run(recipe, tmp_path / "whole", "ewc")
    assert_same(tmp_path / "run", tmp_path / "whole")


WRONG = {
    "core": (
        lambda caught: caught.anchor.layers[0].core.basis,
        f"the core at {FIRST} holds NaN or infinite values",
    ),
    "held-out rows": (lambda caught: caught.rows(), "total is nan"),
}


@pytest.mark.parametrize("method", ["sfor", "seq-lora"])
@pytest.mark.parametrize("kind", WRONG)
def test_drift_that_is_no_number_is_not_saved(kind, method, small_recipe, tmp_path, monkeypatch):
    """Memory that went wrong while the task was learned: constraints hold a copy of a core, and what is measured does not."""
    memory, said = WRONG[kind]

    def meddle(caught):
        caught.rows = lambda: next(iter(pasts[-1].rows.last.held_out.values()))
        if caught.anchor.layers[0].core is not None:
            hook = lambda parameter: memory(caught).__setitem__((0, 0), float("nan"))  # noqa: E731
            caught.anchor.layers[0].factor("A").register_post_accumulate_grad_hook(hook)

    pasts, real = [], Past.append
    monkeypatch.setattr(Past, "append", lambda self, cores, remembered: pasts.append(self) or real(self, cores, remembered))
    catching(monkeypatch, meddle)
    status, last = gone_on_with(small_recipe, tmp_path / method, method)
    assert status == 3, last
    assert re.search(rf"mood \(task 2\): {said} at the task's end; .*; the state after step 3 of task 2 is kept", last), last


METHOD = """
from dataclasses import dataclass
from pathlib import Path
from anchorlora import METHODS
from anchorlora.constraints import ActiveConstraint

@dataclass(frozen=True)
class Faulty:
    first_task = 2
    requires = ()
    def begin_task(self, anchor):
        return _Faulty(anchor)
    def end_task(self, anchor):
        return {}

class _Faulty(ActiveConstraint):
    def __init__(self, anchor):
        self.anchor = anchor
    def begin(self, step):
        self.step = step
    def before_optimizer_step(self):
        self.step += 1
        if self.step == 2 and Path(__file__).with_name("fault").exists():
            self.anchor.layers[0].factor("A").grad[0, 0] = float("nan")

method = METHODS["sfor"].plus(Faulty(), name="faulty")
"""


@pytest.mark.slow
def test_the_program_itself_ends_with_status_3_and_goes_on(recipe, tmp_path):
    """A method of one's own that makes a gradient NaN, run from the shell, with the fault and without it."""
    (tmp_path / "faulty.py").write_text(METHOD)
    (tmp_path / "fault").touch()
    method, out = f"{tmp_path / 'faulty.py'}:method", tmp_path / "run"
    words = [sys.executable, "-m", "anchorlora", *command(recipe, out, method), "--method", method]

    def program():
        done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        return done.returncode, " ".join(done.stderr.split())

    status, said = program()
    assert status == 3, said
    assert f"stopped: mood (task 2): the gradient of A at {FIRST}" in said
    assert said.endswith("is NaN or infinite at step 2; the state after step 1 of task 2 is kept")
    (tmp_path / "fault").unlink()
    assert program()[0] == 0
    run_sequence(recipe, method_named(method), order=small.ORDER, seed=42, out=tmp_path / "whole", name=method, save_every=0)
    assert_same(out, tmp_path / "whole")
