"""What takes protection from under a run that is going on: stopped with layer, step, numbers and cause, or protection holds."""

import json
import re
from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import small
from anchorlora import METHODS, run_sequence
from anchorlora.adapters import lora_layers
from anchorlora.cli.app import main
from anchorlora.constraints import displacement, innermost
from anchorlora.continual.callback import RunCallback
from anchorlora.devices import product_precision, set_product_precision
from anchorlora.errors import Interrupted, ProtectionLost
from faults.runs import assert_same, catching, command, hashes, run

FAMILIES = ("sfor", "o-lora-hard")  # a learned anchor, and a fresh block beside a history
NUMBERS = r"\|dA V\| at model\.layers\.\d\.self_attn\.[qv]_proj is \d\.\de[-+]\d\d, and rounding explains \d\.\de-\d\d at most"
MOVED = r"the frozen factor B at model\.layers\.\d\.self_attn\.[qv]_proj has moved by \d\.\de-\d\d, and 0 is allowed"


class Meddling(RunCallback):
    """Does something to what trains after a step of the second task."""

    def __init__(self, caught, deed, *, after):
        self.caught, self.deed, self.after, self.number = caught, deed, after, 0

    def on_task_begin(self, number, task, steps, done):
        self.number = number

    def on_step_end(self, event):
        if (self.number, event["step"]) == (2, self.after):
            self.deed(self.caught)


@pytest.fixture
def meddled(small_recipe, tmp_path, monkeypatch):
    """A run of a method in which a deed was done, in tmp_path / "run"."""
    caught = catching(monkeypatch)

    def run_with(deed, *, after, method="sfor", recipe=small_recipe, **settings):
        watch = Meddling(caught, deed, after=after)
        settings = {"save_every": 0, **settings}
        return run_sequence(
            recipe, METHODS[method], order=small.ORDER, seed=42, out=tmp_path / "run", callbacks=[watch], **settings
        )

    return run_with


def both_hooks_off(caught):
    inner = innermost(caught.optimizer)
    inner._optimizer_step_pre_hooks.clear()
    inner._optimizer_step_post_hooks.clear()


def first_hook_off(caught):
    innermost(caught.optimizer)._optimizer_step_pre_hooks.clear()


def last_hook_off(caught):
    innermost(caught.optimizer)._optimizer_step_post_hooks.clear()


def replaced_everywhere(caught):
    """As Accelerate does for FSDP2: new parameters, of which model and optimizer know, and the hooks do not."""
    groups = innermost(caught.optimizer).param_groups
    for layer in lora_layers(caught.model).values():
        for half in (layer.lora_A["default"], layer.lora_B["default"]):
            old, new = half.weight, nn.Parameter(half.weight.detach() + 1e-2, requires_grad=half.weight.requires_grad)
            half.weight = new
            for group in groups:
                group["params"] = [new if p is old else p for p in group["params"]]


def replaced_in_the_model(caught):
    for layer in lora_layers(caught.model).values():
        layer.lora_A["default"].weight = nn.Parameter(layer.lora_A["default"].weight.detach() + 1e-2)


def stored_in_bfloat16(caught):
    for layer in caught.anchor.layers:
        for name in ("A", "B"):
            layer.factor(name).data = layer.factor(name).data.bfloat16()


def frozen_written_to(caught):
    with torch.no_grad():
        caught.anchor.layers[1].factor("B")[0, 0] += 1e-3


OFF = f"the optimizer's step hooks were removed; leave them until the protected block ends; {NUMBERS}"
FIRST = "model.layers.0.self_attn.q_proj"
LOST = {  # after the first step: by which step it is found, and what is said
    both_hooks_off: (2, OFF),
    first_hook_off: (2, OFF),
    last_hook_off: (2, OFF),
    replaced_everywhere: (1, f"the optimizer no longer holds the factors of {FIRST}; .*; {NUMBERS}"),
    replaced_in_the_model: ("[12]", f"the factors of {FIRST} in the model are other parameters now; .*; {NUMBERS}"),
    stored_in_bfloat16: (1, f"factor A at {FIRST} was torch.float32 and is torch.bfloat16 now; .*; ({NUMBERS}|{MOVED})"),
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("method", FAMILIES)
@pytest.mark.parametrize("deed", LOST, ids=lambda deed: deed.__name__)
def test_a_run_whose_protection_is_taken_away_is_stopped_and_goes_on_from_before(deed, method, meddled, small_recipe, tmp_path):
    step, said = LOST[deed]
    kept = r"; the state after task 1 is kept"
    with pytest.raises(ProtectionLost, match=rf"^mood \(task 2\): protection was lost by step {step}: {said}.*{kept}$"):
        meddled(deed, after=1, method=method)
    assert [path.name for path in (tmp_path / "run/tasks").iterdir()] == ["1-fruit"]
    run(small_recipe, tmp_path / "run", method)
    run(small_recipe, tmp_path / "whole", method)
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_a_frozen_factor_that_is_written_to_is_named_with_both_numbers(meddled):
    lost = (
        r"by step 2: the frozen factor B at model.layers.0.self_attn.v_proj has moved by 1.0e-03, and 0 is allowed; it was written"
    )
    with pytest.raises(ProtectionLost, match=lost):
        meddled(frozen_written_to, after=1)


@pytest.mark.parametrize("deed", [both_hooks_off, replaced_everywhere, frozen_written_to], ids=lambda deed: deed.__name__)
def test_nothing_is_saved_whose_promise_does_not_hold(deed, meddled, small_recipe, tmp_path):
    """Looks are rarer than saves here."""
    with pytest.raises(Interrupted):
        run(small_recipe, tmp_path / "run", "sfor", point={"task": 2, "step": 2})
    before = hashes(tmp_path / "run")
    with pytest.raises(ProtectionLost, match=r"by step 3: .*; the state after step 2 of task 2 is kept"):
        meddled(deed, after=3, save_every=1, check_every=1000)
    assert hashes(tmp_path / "run") == before


def history_written_to(caught):
    layer = next(iter(lora_layers(caught.model).values()))
    with torch.no_grad():
        layer.lora_B["history"].weight[0, 0] += 1e-3


@pytest.mark.parametrize(("save_every", "kept"), [(1, "step 1 of task 2"), (0, "task 1")], ids=["before a save", "at the end"])
def test_a_frozen_history_that_is_written_to_stops_the_run(save_every, kept, meddled):
    lost = rf"^mood \(task 2\): .*lora_B.history.weight at {FIRST} was written to or replaced; .*; the state after {kept} is kept$"
    with pytest.raises(ProtectionLost, match=lost):
        meddled(history_written_to, after=2, method="o-lora-hard", save_every=save_every)


def test_the_watch_looks_as_often_as_it_is_asked_to(meddled, small_recipe):
    """Six steps a task: looks after the second one, after every so many, and at the end."""
    recipe = small_recipe.changed({"epochs": 2})
    for every, seen in ((1, 4), (5, 5), (100, 6)):
        with pytest.raises(ProtectionLost, match=f"by step {seen}: the frozen factor B"):
            meddled(frozen_written_to, after=3, recipe=recipe, check_every=every)


def test_the_command_line_says_how_often_to_look(small_recipe, tmp_path, monkeypatch):
    recipe, ends = small_recipe.changed({"epochs": 2}), []
    for every in ("5", "100"):
        words = command(recipe, tmp_path / every, "sfor")
        words[words.index("--save-every") :] = ["--save-every", "0", "--check-every", every]
        monkeypatch.setattr("anchorlora.cli.progress.ProgressCallback.on_step_end", _after_step_three(catching(monkeypatch)))
        with redirect_stderr(StringIO()) as said:
            assert main(words) == 3
        ends.append(re.search(r"by step (\d)", " ".join(said.getvalue().split()))[1])
    assert ends == ["5", "6"]


def _after_step_three(caught):
    def on_step_end(self, event):
        if event["step"] == 3 and caught.anchor.layers[0].core is not None:
            frozen_written_to(caught)

    return on_step_end


@pytest.fixture
def lowered():
    """Enters what lowers arithmetic and leaves it after the test, with the settings of before."""
    before, entered = product_precision(), []

    def enter(context):
        entered.append(context)
        context.__enter__()

    yield enter
    for context in entered:
        context.__exit__(None, None, None)
    set_product_precision(before)


def medium(enter):
    torch.set_float32_matmul_precision("medium")


def tf32(enter):
    torch.backends.cuda.matmul.allow_tf32 = True


def bfloat16_products(enter):
    if not hasattr(torch.backends.mkldnn, "matmul"):
        pytest.skip("torch before 2.9 has no setting of its own for products on the CPU")
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def autocast(enter):
    enter(torch.autocast("cpu", dtype=torch.bfloat16))


def rho_of(out, number, tasks):
    """|dW V| / |dW| over all layers of a task, dense in float64, from the files alone."""
    inside = whole = 0.0
    new, old = (updates(out / f"tasks/{n}-{tasks[n - 1]}/adapter") for n in (number, number - 1))
    path = out / f"tasks/{number - 1}-{tasks[number - 2]}/cores.safetensors"
    cores = load_file(path)
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    for layer, store in json.loads(header["__metadata__"]["layers"]).items():
        change = new[layer] - old[layer]
        inside += float((change @ cores[store].double()).square().sum())
        whole += float(change.square().sum())
    return (inside / whole) ** 0.5


def updates(folder):
    """s B A of each layer."""
    config, weights = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    names = {key.removeprefix("base_model.model.").split(".lora_")[0] for key in weights}
    half = "base_model.model.{}.lora_{}.weight"
    return {n: scale * weights[half.format(n, "B")].double() @ weights[half.format(n, "A")].double() for n in names}


@pytest.mark.parametrize("method", FAMILIES)
@pytest.mark.parametrize("lower", [medium, tf32, bfloat16_products, autocast], ids=lambda lower: lower.__name__)
def test_protection_holds_when_arithmetic_is_lowered_during_a_task(lower, method, meddled, lowered, tmp_path):
    """Products of float32 in bfloat16, which a CPU may have, would leave 1e-3."""
    meddled(lambda caught: lower(lowered), after=1, method=method)
    for number in (2, 3):
        assert rho_of(tmp_path / "run", number, small.ORDER) < 3e-7


def test_arithmetic_that_became_bfloat16_would_be_stopped(meddled, monkeypatch):
    def after_optimizer_step(self):
        for layer, core in self.targets:
            rows, anchor, V = layer.rows(self.factor), layer.start_rows(self.factor), core.basis.bfloat16()
            moved = (rows - anchor).bfloat16()
            rows.copy_(anchor + (moved - moved @ V @ V.T).float())

    monkeypatch.setattr(displacement._FromAnchor, "after_optimizer_step", after_optimizer_step)
    with pytest.raises(ProtectionLost, match=f"by step 2: {NUMBERS}"):
        meddled(lambda caught: None, after=1)
