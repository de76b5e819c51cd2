"""EWC, distillation and effective sparsity against dense references written from their equations."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_penalties import gradients_added

import models
from anchorlora import Distillation, EffectiveSparsity, FisherAnchor, protect
from anchorlora.adapters import AdapterStack
from anchorlora.constraints.fisher import FISHER, WEIGHTED
from anchorlora.continual.batches import IGNORED, MicroBatch, padded
from anchorlora.errors import InvalidValue
from toys import anchor_of, optimizer_for, parameters

EPS = torch.finfo(torch.float32).eps


def with_losses(anchor, *, seed=3, count=12):
    """The scope with losses of single examples: regressions on one row each, a function of the live factors."""
    draw = torch.Generator().manual_seed(seed)
    rows = [[torch.randn(s.factor("A").shape[1], generator=draw, dtype=torch.float64) for s in anchor.layers] for _ in range(count)]

    def one(row):
        parts = ((s.factor("A"), s.factor("B"), x) for s, x in zip(anchor.layers, row, strict=True))
        return sum((B @ (A @ x.to(A)) - 1).square().mean() for A, B, x in parts)

    return replace(anchor, losses=lambda n: (one(row) for row in rows[:n])), lambda: [one(row) for row in rows]


def move(anchor, by):
    draw = torch.Generator().manual_seed(int(1e6 * by))
    with torch.no_grad():
        for p in parameters(anchor):
            p.add_(by * torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p))


def test_the_fisher_is_the_mean_of_squared_single_example_gradients_and_not_of_batches():
    anchor, losses = with_losses(anchor_of(dtype=torch.float64))
    found = FisherAnchor(examples=8).fisher(anchor)
    singles = [torch.autograd.grad(loss, parameters(anchor)) for loss in losses()[:8]]
    for i, fisher in enumerate(found):
        expected = sum(g[i] ** 2 for g in singles) / 8
        assert torch.allclose(fisher, expected, rtol=1e-12)
        batch = (sum(g[i] for g in singles) / 8) ** 2
        assert not torch.allclose(fisher, batch, rtol=0.1)


def test_two_tensors_hold_the_quadratics_of_all_earlier_tasks():
    """Value and gradient equal the written sum over three tasks of (lambda / 2) F_t (theta - theta*_t)^2."""
    anchor, past, terms = anchor_of(dtype=torch.float64), {}, []
    start = FisherAnchor(strength=7.0)
    for task in range(3):
        move(anchor, 0.1 * (task + 1))
        seen, _ = with_losses(anchor, seed=task)
        seen = replace(seen, past=past)
        terms.append(([p.detach().clone() for p in parameters(anchor)], start.fisher(seen)))
        kept = {name: tensor.clone() for name, tensor in past.items()}
        later = start.end_task(seen)
        assert all(torch.equal(past[name], tensor) for name, tensor in kept.items()), (
            "a task that is ended again finds the same past"
        )
        assert not any(tensor.requires_grad for tensor in later.values())
        past = later
    assert sum(t.numel() for t in past.values()) == 2 * sum(p.numel() for p in parameters(anchor)) + 1
    move(anchor, 0.05)
    found, readings = gradients_added(replace(anchor, past=past), start)
    value = 0.0
    for starts, fishers in terms:
        value = value + sum((f * (p - b) ** 2).sum() / 2 for p, b, f in zip(parameters(anchor), starts, fishers, strict=True))
    expected = torch.autograd.grad(7.0 * value, parameters(anchor))
    assert readings == {"fisher": pytest.approx(float(value.detach()), rel=1e-9)}
    for mine, want in zip([g for pair in found for g in pair], expected, strict=True):
        assert torch.allclose(mine, want, rtol=1e-9, atol=1e-12)


def test_a_fisher_that_is_missing_or_of_another_adapter_is_refused():
    anchor, _ = with_losses(anchor_of())
    optimizer = torch.optim.SGD(parameters(anchor), lr=0.1)
    with pytest.raises(ValueError, match="finds no Fisher of earlier tasks"), protect(optimizer, anchor, [FisherAnchor()]):
        pass
    past = {name.replace("layer1", "layer9"): t for name, t in FisherAnchor().end_task(anchor).items()}
    assert {name.split("/")[0] for name in past} == {FISHER, WEIGHTED, "fisher_constant"}
    other = replace(anchor, past=past)
    with pytest.raises(LookupError, match=r"knows no fisher/layer1\.A of shape"), protect(optimizer, other, [FisherAnchor()]):
        pass
    narrow = replace(anchor, past={**FisherAnchor().end_task(anchor), "fisher/layer1.B": torch.ones(28, 2)})
    with pytest.raises(LookupError, match=r"knows no fisher/layer1\.B of shape \(28, 4\)"):
        FisherAnchor().begin_task(narrow)
    with pytest.raises(ValueError, match="needs losses of single examples"):
        FisherAnchor().end_task(anchor_of())


@pytest.mark.parametrize(("d_in", "d_out"), [(24, 700), (512, 40), (30, 30)])
def test_sparsity_agrees_with_the_dense_sum_also_where_the_layer_is_not_square(d_in, d_out):
    anchor = anchor_of(sizes=((d_in, d_out),), dtype=torch.float64)
    A, B = parameters(anchor)
    found, readings = gradients_added(anchor, EffectiveSparsity(0.3))
    total = (4.0 * B @ A).abs().sum()
    expected = torch.autograd.grad(0.3 * total, [A, B])
    assert readings == {"sparsity": pytest.approx(float(total.detach()), rel=1e-12)}
    for mine, want in zip(found[0], expected, strict=True):
        assert torch.allclose(mine, want, rtol=1e-10)


def test_sparsity_acts_from_the_first_task_on_and_is_silent_while_b_is_zero():
    assert EffectiveSparsity().first_task == 1
    found, readings = gradients_added(anchor_of(fresh=True), EffectiveSparsity(1.0))
    assert readings == {"sparsity": 0.0}
    assert not any(g.any() for pair in found for g in pair)


@pytest.fixture
def student():
    """An adapted model that has moved since its anchor, with dropout, and a batch with answers of unequal length."""
    torch.manual_seed(5)
    blocks = AdapterStack(models.qwen3(), targets=("q_proj", "v_proj"), rank=4, alpha=16, dropout=0.3)
    blocks.open(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in blocks.trainable():
            p.add_(0.2 * torch.randn_like(p))
    anchor = blocks.anchor()
    with torch.no_grad():
        for p in blocks.trainable():
            p.add_(0.2 * torch.randn_like(p))
    targets = torch.tensor([[IGNORED, 5, 0], [7, 9, 0], [IGNORED, IGNORED, 0]])
    rows = [[1, 2, 3, 4, 5, 0], [3, 4, 7, 9, 0], [6, 6, 6, 6, 6, 6, 0]]
    return blocks, anchor, MicroBatch(padded(rows, 1), 4, targets)


def asked(blocks, batch):
    return blocks.model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False)


def test_distillation_is_the_written_divergence_from_the_model_of_the_tasks_start(student):
    blocks, anchor, batch = student
    blocks.model.eval()
    now = [p.detach().clone() for p in blocks.trainable()]
    starts = [layer.start_factor(name) for layer in anchor.layers for name in ("A", "B")]
    with torch.no_grad():
        for p, start in zip(blocks.trainable(), starts, strict=True):
            p.copy_(start)
        teacher = asked(blocks, batch).logits.double()
        for p, value in zip(blocks.trainable(), now, strict=True):
            p.copy_(value)
    outputs = asked(blocks, batch)
    expected, largest = 0.0, 0.0
    for n, (row, said, taught) in enumerate(zip(batch.targets, outputs.logits.double(), teacher, strict=True)):
        answered = [j for j, target in enumerate(row) if target != IGNORED]
        for j in answered:
            p, q = (torch.softmax(logits[j] / 3.0, -1) for logits in (taught, said))
            expected = expected + (p * (p / q).log()).sum() / len(answered) / 3
            largest = max(largest, -float(p.log().min()), -float(q.detach().log().min()))
        assert len(answered) == [2, 3, 1][n]
    # a float32 log-probability is off by a few eps of its size, and the divergence is a mean of differences of two of them
    off = 8 * EPS * largest
    with protect(torch.optim.SGD(blocks.trainable(), lr=0.0), anchor, [Distillation(0.5, 3.0)]) as held:
        loss = held[0].loss(batch, outputs)
        held[0].after_backward()
        assert float(loss.detach()) == pytest.approx(0.5 * 9 * float(expected.detach()), abs=4.5 * off)
        assert held[0].readings() == {"distillation": pytest.approx(float(expected.detach()), abs=off)}
        held[0].loss(batch, outputs)
        held[0].after_backward()
        assert held[0].readings() == {"distillation": pytest.approx(float(expected.detach()), abs=off)}, "of one step, not a sum"
        held[0].after_backward()
        assert held[0].readings() == {"distillation": 0.0}, "a step without examples"
        mine = torch.autograd.grad(loss, blocks.trainable(), retain_graph=True)
    # the gradient begins with a difference of two probabilities that are about the root of the divergence apart
    relative = off / float(expected.detach()) ** 0.5
    for got, want in zip(mine, torch.autograd.grad(4.5 * expected, blocks.trainable()), strict=True):
        assert float((got - want).norm()) < relative * float(want.norm())


def test_on_remembered_examples_the_others_count_as_nothing(student):
    blocks, anchor, batch = student
    blocks.model.eval()
    remembered = torch.tensor([True, False, True])[: len(batch)]
    with protect(torch.optim.SGD(blocks.trainable(), lr=0.0), anchor, [Distillation(0.5, 1.0)]) as held:
        outputs = asked(blocks, batch)
        p, q = (batch.answer_logits(logits).double().log_softmax(-1) for logits in (held[0].teacher_logits(batch), outputs.logits))
    answers = batch.targets != IGNORED
    tokens = torch.zeros(answers.shape, dtype=torch.float64).masked_scatter(answers, (p.exp() * (p - q)).sum(-1).detach())
    means = tokens.sum(1) / answers.sum(1)
    expected = 0.5 * float(means[remembered].sum()) / len(batch)
    with protect(torch.optim.SGD(blocks.trainable(), lr=0.0), anchor, [Distillation(0.5, 1.0, "remembered")]) as held:
        assert float(held[0].loss(batch, outputs)) == 0.0, "none is remembered"
        loss = held[0].loss(replace(batch, remembered=remembered), outputs)
        held[0].after_backward()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-3)
    assert held[0].readings()["distillation"] == pytest.approx(float(means[remembered].mean()), rel=1e-3)
    with pytest.raises(InvalidValue, match='"new" or "remembered"'):
        Distillation(on="old")


def test_distillation_reads_no_position_but_those_that_predict_answers(student, monkeypatch):
    blocks, anchor, batch = student
    blocks.model.eval()
    ignored = batch.targets == IGNORED

    def violation(logits):
        logits = logits.detach().clone()
        logits[:, :-1][ignored] = logits[:, -1] = float("nan")
        return logits

    with protect(torch.optim.SGD(blocks.trainable(), lr=0.0), anchor, [Distillation()]) as held:
        outputs, taught = asked(blocks, batch), held[0].teacher_logits(batch)
        expected = held[0].loss(batch, outputs)
        monkeypatch.setattr(held[0], "teacher_logits", lambda batch: violation(taught))
        assert torch.equal(held[0].loss(batch, SimpleNamespace(logits=violation(outputs.logits))), expected)


def test_the_teacher_has_no_dropout_keeps_no_graph_and_leaves_the_student_training(student):
    blocks, anchor, batch = student
    blocks.model.train()
    with protect(torch.optim.SGD(blocks.trainable(), lr=0.0), anchor, [Distillation()]) as held:
        first, second = held[0].teacher_logits(batch), held[0].teacher_logits(batch)
        held[0].loss(batch, asked(blocks, batch))
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert all(m.training for m in blocks.model.modules())
    assert [p.requires_grad for p in blocks.trainable()] == [True] * len(blocks.trainable())


def test_at_the_start_of_a_task_there_is_nothing_to_distil(student):
    blocks, _, batch = student
    blocks.model.eval()
    with protect(torch.optim.SGD(blocks.trainable(), lr=0.0), blocks.anchor(), [Distillation()]) as held:
        loss = held[0].loss(batch, asked(blocks, batch))
    assert float(loss.detach()) == pytest.approx(0.0, abs=4 * 8 * EPS * 5)  # T^2, of log-probabilities down to -5


def test_distillation_without_a_model_or_in_a_loop_that_never_asks_is_refused(student):
    blocks, anchor, batch = student
    toy = anchor_of()
    with pytest.raises(ValueError, match="needs the model"), protect(optimizer_for(toy, "sgd"), toy, [Distillation()]):
        pass
    optimizer = torch.optim.SGD(blocks.trainable(), lr=0.1)
    asked(blocks, batch).logits.sum().backward()
    with protect(optimizer, anchor, [Distillation()]), pytest.raises(TypeError, match="Distilling adds to the loss"):
        optimizer.step()
    with protect(optimizer, anchor, Distillation()) as held, pytest.raises(TypeError, match="takes a MicroBatch .*, not a dict"):
        held[0].loss(batch.inputs, None)
