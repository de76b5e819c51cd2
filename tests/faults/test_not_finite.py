"""Numbers that are not numbers stop a run before the step: exit status 3, task and step named, what was saved untouched."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

import models
import small
from anchorlora import run_sequence
from anchorlora.adapters import AdapterStack
from anchorlora.cli.app import main
from anchorlora.cli.parsing import method_named
from anchorlora.constraints import distillation, overlap
from anchorlora.continual import batches as losses
from anchorlora.continual.batches import example_mean, windows
from anchorlora.continual.learn import Learner, Rules, learning
from anchorlora.continual.not_finite import StepAgain
from anchorlora.continual.past import Past
from anchorlora.continual.seeds import dropout_from, stream
from anchorlora.data import Encoded, Example
from anchorlora.errors import NotFinite
from anchorlora.features import FeatureStore, collector
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
    real = losses.MEANS["example_mean"]
    monkeypatch.setitem(losses.MEANS, "example_mean", lambda *args, **kwargs: real(*args, **kwargs) + value)


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

    def take(self, store, key, inputs):
        inputs = inputs.clone()
        inputs[0, -1, 5] = value
        real(self, store, key, inputs)

    monkeypatch.setattr(collector.Collector, "_take", take)


def wrong_core(value, monkeypatch):
    def meddle(caught):
        caught.anchor.layers[0].core.basis[3, 1] = value

    catching(monkeypatch, meddle)


PLACE = r"at \S+/SC/mood/train.json, example \d+ and 3 more of the 4 read with it \(float32, padded\); try a smaller learning_rate"
LOSS = rf"the loss is (nan|-?inf) at step 2; every layer is finite and the loss is not, {PLACE}"
GRADIENT = "the gradient norm is (nan|inf) at step 2; every layer and the loss are finite, and "
ROWS = f"feature rows at {FIRST} hold NaN or infinite values at step 2; read again, every layer and the loss are finite"
FAULTS = [
    (wrong_loss, "sfor", LOSS),
    (wrong_loss, "seq-lora", LOSS),
    (wrong_gradient, "sfor", rf"{GRADIENT}the gradient of A at {FIRST} is not, {PLACE}"),
    (wrong_gradient, "seq-lora", rf"{GRADIENT}the gradient of A at {FIRST} is not, {PLACE}"),
    (wrong_penalty, "o-lora", f"the gradient of A at {FIRST}, as constraints have made it, is NaN or infinite at step 2"),
    (wrong_distillation, "lwf", rf"{GRADIENT}what Distilling adds to it is not, {PLACE}"),
    (wrong_row, "sfor", ROWS),
    (wrong_row, "seq-lora", ROWS),
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


# what is not finite within a step of a small model, and what the message says of it

BATCHING = pytest.mark.parametrize("batching", ["padded", "packed"])
ODD, ROW = 33, 13  # a token that one example alone has, and the index of that example
AT_ROW = f"at new.jsonl, line {ROW + 1}"
MLP = "model.layers.0.mlp"


def adapted(dtype=torch.float32, dropout=0.1):
    torch.manual_seed(4)
    stack = AdapterStack(models.qwen3(dtype=dtype), targets=("q_proj", "v_proj"), rank=4, alpha=16, dropout=dropout)
    stack.open(stream(0, "start"))
    return stack


def rows():
    """Sixteen examples of several lengths, in which every token but one is below 32."""
    draw, out = torch.Generator().manual_seed(3), []
    for i in range(16):
        body = torch.randint(4, 32, (6 + i % 5,), generator=draw).tolist()
        body[1] = ODD if i == ROW else body[1]
        out.append(Encoded(Example(i, "", "", place=f"new.jsonl, line {i + 1}"), "", tuple(body), (30 + i % 2, 0), False))
    return out


def steps_of(batching, examples=None):
    """Two steps of eight examples, in micro-batches of four, or in rows of up to 48 tokens."""
    how = {"row_tokens": 48} if batching == "packed" else {}
    return list(windows(examples or rows(), range(16), size=8, micro=4, pad=1, **how))


def train(stack, steps, *, loss=example_mean, watch=lambda event: None):
    optimizer = torch.optim.AdamW(stack.trainable(), lr=1e-3)
    learner = Learner(stack.model, optimizer, stack.anchor(), (), Accelerator(cpu=True))
    with learning(learner, Rules(loss)) as training:
        for window in steps:
            watch(training.step(window))


def said_of(stack, batching, *, examples=None, loss=example_mean, watch=lambda event: None):
    """The message of the step that stops."""
    steps = steps_of(batching, examples)
    with dropout_from(0, "dropout"), pytest.raises(NotFinite) as stopped:
        train(stack, steps, loss=loss, watch=watch)
    assert "\n" not in str(stopped.value)
    return str(stopped.value)


def seen_by_one_token(stack, layer, size):
    """Let a layer multiply what token ODD alone has by a factor; what it reads has root mean square 1."""
    base = stack.model.get_base_model()
    with torch.no_grad():
        embedding = base.get_input_embeddings().weight
        embedding[:, 5] = 0
        embedding[ODD] = torch.nn.functional.one_hot(torch.tensor(5), 64).to(embedding)
        base.get_submodule("model.layers.0.self_attn.o_proj").weight[5] = 0
        base.get_submodule(layer).weight[:, 5] = size


@BATCHING
@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 3e4), (torch.bfloat16, 2e38)], ids=["float16", "bfloat16"])
def test_an_overflow_is_named_with_its_layer_its_example_and_the_two_switches(dtype, size, batching):
    stack = adapted(dtype)
    seen_by_one_token(stack, f"{MLP}.up_proj", size)
    said = said_of(stack, batching)
    assert said.startswith(f"the loss is nan at step 2; {MLP}.up_proj is the first layer whose output is not finite (infinite), ")
    switches = "--set dtype=float32" + " or --set batching=padded" * (batching == "packed")
    assert said.endswith(f", {AT_ROW} ({str(dtype).removeprefix('torch.')}, {batching}); try {switches}")


@BATCHING
def test_an_overflow_between_two_layers_is_named_by_the_layer_that_reads_it(batching):
    stack = adapted(torch.float16)
    for layer in ("gate_proj", "up_proj"):
        seen_by_one_token(stack, f"{MLP}.{layer}", 100.0)
    said = said_of(stack, batching)
    assert f"; {MLP}.down_proj is the first layer that reads what is not finite (infinite), {AT_ROW} (float16, {batching})" in said


@BATCHING
def test_an_overflow_is_named_while_feature_rows_are_taken_which_see_it_first(batching):
    stack = adapted(torch.float16)
    seen_by_one_token(stack, f"{MLP}.up_proj", 3e4)
    store = FeatureStore(1000, held_out=0)
    with store.collect(stack.model):
        said = said_of(stack, batching)
    assert said.startswith("feature rows at model.layers.1.self_attn.q_proj hold NaN or infinite values at step 2; ")
    assert f"{MLP}.up_proj is the first layer whose output is not finite (infinite), {AT_ROW} (float16, {batching})" in said


@BATCHING
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_weight_that_holds_one_is_named_with_the_first_layer_and_example(batching, value):
    stack = adapted()
    with torch.no_grad():
        stack.model.get_base_model().get_input_embeddings().weight[ODD, 7] = value
    said = said_of(stack, batching)
    kind = "NaN" if value != value else "infinite"
    assert said == (
        "the loss is nan at step 2; model.embed_tokens.weight holds NaN or infinite values: a step overflowed, or something other "
        "than the optimizer wrote it; model.embed_tokens is the first layer whose output is not finite "
        f"({kind}), {AT_ROW} (float32, {batching})"
    )


@BATCHING
def test_a_factor_that_holds_one_is_named_as_a_factor_at_its_layer(batching):
    stack = adapted()

    def poison(event):
        with torch.no_grad():
            stack.anchor().layers[1].factor("B")[3, 2] = float("nan")

    said = said_of(stack, batching, watch=poison)
    layer = "model.layers.0.self_attn.v_proj"
    assert f"B at {layer} holds NaN or infinite values" in said
    assert f"; {layer} is the first layer whose output is not finite (NaN), at new.jsonl, line 9 and " in said


@BATCHING
def test_a_loss_that_alone_is_not_finite_is_said_to_be_so_with_the_example_that_makes_it(batching):
    """The mean over the answer tokens of an example that has none."""
    examples = rows()
    examples[ROW] = replace(examples[ROW], answer=())
    switch = "--set batching=padded" if batching == "packed" else "a smaller learning_rate, or leave the example out"
    assert said_of(adapted(), batching, examples=examples) == (
        f"the loss is nan at step 2; every layer is finite and the loss is not, {AT_ROW} (float32, {batching}); try {switch}"
    )


@BATCHING
def test_a_gradient_that_alone_is_not_finite_is_named_with_the_micro_batch_that_makes_it(batching):
    stack, passes = adapted(), []
    each = len(steps_of(batching)[0].micro_batches)

    def overflow(gradient):
        passes.append(gradient)
        return gradient * float("inf") if len(passes) % each == 0 else gradient  # of a window's last micro-batch

    stack.anchor().layers[2].factor("A").register_hook(overflow)
    said = said_of(stack, batching)
    assert re.match(
        "the gradient norm is (nan|inf) at step 1; every layer and the loss are finite, and the gradient of A at "
        r"model.layers.1.self_attn.q_proj is not, at new.jsonl, line [5-8]( and \d more of the \d read with it)? "
        rf"\(float32, {batching}\)",
        said,
    ), said


@BATCHING
def test_what_is_read_again_draws_the_same_dropout_and_leaves_the_generators_as_they_were(batching, monkeypatch):
    read, states = [], []

    def no_number(logits, batch, window):
        read.append(logits.detach().clone())
        return example_mean(logits, batch, window) * float("nan")

    monkeypatch.setattr(StepAgain, "in_the_whole_step", around(StepAgain.in_the_whole_step, states))
    said_of(adapted(dropout=0.5), batching, loss=no_number)
    first, again = read[0], read[-1]
    assert len(read) >= 3  # two micro-batches and the first of them once more
    assert torch.equal(first, again)
    assert torch.equal(*states)


def around(call, states):
    def wrapped(self):
        states.append(torch.get_rng_state())
        try:
            return call(self)
        finally:
            states.append(torch.get_rng_state())

    return wrapped


def test_nothing_is_read_again_while_all_is_finite(monkeypatch):
    monkeypatch.setattr(StepAgain, "_first", lambda *_: pytest.fail("a step was read again"))
    stack = adapted()
    train(stack, steps_of("padded"))
    assert not [hook for module in stack.model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]
