import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_utils import SchedulerType

import models
from anchorlora.adapters import AdapterStack
from anchorlora.constraints import Freeze, ProjectDisplacement
from anchorlora.continual.batches import example_mean, windows
from anchorlora.continual.learn import Learner, Rules, learning, rate_at
from anchorlora.continual.seeds import dropout_from, number, stream
from anchorlora.data import Encoded, Example
from anchorlora.errors import NotFinite
from anchorlora.geometry import Subspace
from anchorlora.methods import METHODS, Shared


@pytest.fixture
def blocks():
    b = AdapterStack(models.qwen3(), targets=("q_proj", "v_proj"), rank=4, alpha=16, dropout=0.1)
    b.open(stream(0, "start"))
    return b


def examples(n=32):
    draw = torch.Generator().manual_seed(3)
    out = []
    for i in range(n):
        body = torch.randint(4, 60, (10,), generator=draw)
        body[0] = 10 + i % 2
        out.append(Encoded(Example(i, "", ""), "", tuple(body.tolist()), (30 + i % 2, 0), False))
    return out


def train(blocks, *, epochs=4, constraints=(), cores=None, lr=5e-3, watch=lambda e: None, **kwargs):
    anchor = blocks.anchor(cores=cores or {})
    rows = [w for _ in range(epochs) for w in windows(examples(), range(32), size=8, micro=4, pad=1)]
    learner = Learner(blocks.model, torch.optim.AdamW(blocks.trainable(), lr=lr), anchor, constraints, Accelerator(cpu=True))
    with dropout_from(0, "dropout"), learning(learner, Rules(**kwargs)) as training:
        for row in rows:
            watch(training.step(row))
        return sum(p.numel() for p in training.trained)


def test_the_loss_falls_and_every_step_is_reported(blocks):
    events = []
    trained = train(blocks, watch=events.append, epochs=12)
    assert [e["step"] for e in events] == list(range(1, 49))
    assert sum(e["loss"] for e in events[-4:]) < 0.9 * sum(e["loss"] for e in events[:4])
    assert set(events[0]) == {"step", "loss", "learning_rate", "seconds", "grad_norm", "penalties"}
    assert trained == sum(p.numel() for p in blocks.trainable())


def test_the_base_model_does_not_move(blocks):
    before = {n: p.detach().clone() for n, p in blocks.model.named_parameters() if "lora_" not in n}
    train(blocks)
    assert all(torch.equal(p, before[n]) for n, p in blocks.model.named_parameters() if n in before)


def test_frozen_factors_are_not_counted_as_trained(blocks):
    layer = blocks.anchor().layers[0]
    cores = {s.name: Subspace(torch.linalg.qr(torch.randn(64, 4)).Q) for s in blocks.anchor().layers}
    layer.factor("B").data.add_(0.1)  # a new block's B is zero, and could not leave it
    trained = train(blocks, constraints=[Freeze("B"), ProjectDisplacement("A")], cores=cores, epochs=1)
    assert trained == 4 * layer.current.A.numel()


def test_the_same_streams_give_bitwise_the_same_factors():
    ends = []
    for _ in range(2):
        torch.manual_seed(1)
        b = AdapterStack(models.qwen3(), targets=("q_proj", "v_proj"), rank=4, alpha=16, dropout=0.1)
        b.open(stream(0, "start"))
        torch.rand(17)  # whatever the global generator did before does not matter
        train(b)
        ends.append([p.detach().clone() for p in b.trainable()])
    assert all(torch.equal(x, y) for x, y in zip(*ends, strict=True))


def test_streams_are_independent_of_each_other_and_stable():
    assert number(42, "order/dbpedia/1") == 3780878238024870204
    assert len({number(seed, purpose) for seed in (1, 2) for purpose in ("a", "b")}) == 4


def test_the_global_generator_is_put_back():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with dropout_from(5, "x"):
        torch.rand(9)
    assert torch.equal(torch.rand(2), expected)


def test_a_loss_that_is_no_number_stops_before_the_step(blocks):
    events = []

    def poison(event):
        events.append(event)
        if event["step"] == 2:
            with torch.no_grad():
                blocks.model.get_input_embeddings().weight[30] = float("nan")

    with pytest.raises(NotFinite, match="the loss is nan at step 3"):
        train(blocks, watch=poison)
    assert len(events) == 2
    assert all(bool(torch.isfinite(p).all()) for p in blocks.trainable())


def test_an_infinite_gradient_stops_before_the_step(blocks):
    blocks.trainable()[0].register_hook(lambda g: g * float("inf"))
    before = [p.detach().clone() for p in blocks.trainable()]
    with pytest.raises(NotFinite, match="the gradient norm is .* at step 1"):
        train(blocks)
    assert all(torch.equal(x, y) for x, y in zip(before, blocks.trainable(), strict=True))


def test_clipping_is_off_unless_asked_for(blocks, monkeypatch):
    calls = []
    monkeypatch.setattr(nn.utils, "clip_grads_with_norm_", lambda parameters, limit, norm: calls.append(limit))
    train(blocks, epochs=1)
    assert calls == []
    train(blocks, epochs=1, clip_norm=0.5)
    assert calls == [0.5] * 4


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "warmup_stable_decay"])
@pytest.mark.parametrize(("rising", "falling"), [(0, 5), (1, 40), (3, 95)])
def test_a_schedule_is_that_of_transformers_and_no_step_stands_still(schedule, rising, falling):
    """transformers' rate of step 1 is 0 with a warmup, and its last is not used; here both count from 1."""
    steps = rising + falling
    options = {"num_warmup_steps": rising}
    if schedule == "warmup_stable_decay":
        options |= {"num_decay_steps": falling // 5, "num_stable_steps": falling - falling // 5, "decay_type": "linear"}
    elif schedule == "constant":
        schedule = "constant_with_warmup"
    else:
        options["num_training_steps"] = steps
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    factor = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(schedule)](optimizer, **options).lr_lambdas[0]
    ours = schedule.removesuffix("_with_warmup")
    rates = [rate_at(step, schedule=ours, warmup=rising / steps, steps=steps) for step in range(1, steps + 1)]
    expected = [factor(step if step <= rising else step - 1) for step in range(1, steps + 1)]
    assert rates == pytest.approx(expected, abs=1e-15)
    assert min(rates) > 0


def test_b_moves_at_the_ratio_times_the_rate_at_every_step_of_a_schedule(blocks):
    """LoRA+ against plain gradient steps: A at the rate, B at sixteen times the rate, both times the schedule."""
    rows = list(windows(examples(), range(16), size=8, micro=8, pad=1))
    blocks.model.eval()
    blocks.model.train = lambda mode=True: blocks.model  # no dropout

    def losses(window):
        (batch,) = window.micro_batches
        return example_mean(blocks.model(**batch.inputs, logits_to_keep=batch.keep).logits, batch, window)

    with torch.no_grad():
        blocks.trainable()[1].normal_(generator=torch.Generator().manual_seed(1))
    begun = [p.detach().clone() for p in blocks.trainable()]
    for window, rate in zip(rows, (0.5, 1.0), strict=True):
        for place, g in enumerate(torch.autograd.grad(losses(window), blocks.trainable())):
            with torch.no_grad():
                blocks.trainable()[place].sub_(g * rate * 1e-2 * (16 if place % 2 else 1))
    expected = [p.detach().clone() for p in blocks.trainable()]
    with torch.no_grad():
        for p, was in zip(blocks.trainable(), begun, strict=True):
            p.copy_(was)
    seen = []
    optimizer = torch.optim.SGD(METHODS["lora-plus"].plan.param_groups(blocks), lr=1e-2)
    learner = Learner(blocks.model, optimizer, blocks.anchor(), (), Accelerator(cpu=True))
    with learning(learner, Rules(rate=lambda step: (0.5, 1.0)[step - 1])) as training:
        seen += [training.step(row) for row in rows]
    assert [e["learning_rate"] for e in seen] == [0.5e-2, 1e-2]  # that of A
    assert all(float((a.detach() - b).abs().max()) < 1e-6 for a, b in zip(blocks.trainable(), expected, strict=True))
    assert all(float((a - b).norm()) > 1e-4 for a, b in zip(expected[1::2], begun[1::2], strict=True))


def test_a_ratio_of_one_is_the_plain_adapter_and_no_ratio_below_is_taken(blocks):
    assert METHODS["lora-plus"].changed({"Shared.ratio": 1.0}) == METHODS["seq-lora"]
    assert len(Shared().param_groups(blocks)) == 1
    for wrong in (0.0, -2.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"Shared\(ratio=..\) must be a finite number above 0"):
            Shared(ratio=wrong)
