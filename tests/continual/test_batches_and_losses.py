import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM

import models
from anchorlora.adapters import AdapterStack
from anchorlora.constraints import Distillation
from anchorlora.constraints.protect import Protection
from anchorlora.continual import learn as learning
from anchorlora.continual.batches import IGNORED, MEANS, TOKEN_WEIGHTS, MicroBatch, Window, loss_named, windows
from anchorlora.continual.data import joining, remember
from anchorlora.data import Encoded, EncodedExamples, Example, Rehearsal
from anchorlora.models import head
from anchorlora.models.packing import packed
from anchorlora.processes import accelerator_on


def window_of(*batches):
    examples = sum(map(len, batches))
    return Window(batches, examples, sum(int((batch.targets != IGNORED).sum()) for batch in batches), examples)


def encoded(lengths, answers, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def ids(n):
        return tuple(torch.randint(3, 60, (n,), generator=draw).tolist())

    return [Encoded(Example(i, "", ""), "", ids(n), ids(a), False) for i, (n, a) in enumerate(zip(lengths, answers, strict=True))]


EPS = torch.finfo(torch.float32).eps
EXAMPLES = encoded([5, 12, 7, 3, 9, 9, 4, 11], [2, 1, 4, 2, 3, 1, 2, 5])


def weight_of(logits, token, kind):
    """The weight of a token by its definition, as a number through which no gradient can go."""
    if kind is None:
        return 1.0
    p = logits.detach().double().softmax(-1)
    if kind == "dft":
        return float(p[token])
    top = sorted(p.tolist(), reverse=True)[:20]
    return -sum(q / sum(top) * math.log(q / sum(top)) for q in top) / math.log(20)


def reference(model, examples, kind, weights=None):
    """One forward an example, no padding; the loss written out."""
    losses = []
    for e in examples:
        ids = torch.tensor([e.prompt + e.answer])
        logits = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        first = len(e.prompt)
        rows = [logits[first + j - 1] for j in range(len(e.answer))]
        pairs = list(zip(rows, e.answer, strict=True))
        losses.append(torch.stack([-row[token] * weight_of(row, token, weights) for row, token in pairs]))
    return torch.stack([x.mean() for x in losses]).mean() if kind == "example_mean" else torch.cat(losses).mean()


def gradients(model, examples, kind, micro, weights=None):
    (window,) = windows(examples, range(len(examples)), size=len(examples), micro=micro, pad=1)
    model.zero_grad()
    total = 0.0
    for batch in window.micro_batches:
        out = model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False)
        share = loss_named(kind, weights)(out.logits, batch, window)
        share.backward()
        total += float(share.detach())
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("weights", TOKEN_WEIGHTS)
@pytest.mark.parametrize("kind", MEANS)
@pytest.mark.parametrize("micro", [1, 3, 8])
@pytest.mark.parametrize("make", [models.qwen3, models.llama, models.mistral])
def test_every_batch_form_has_the_loss_and_gradient_of_single_unpadded_forwards(kind, micro, make, weights):
    model = make()
    value = reference(model, EXAMPLES, kind, weights)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))])
    total, found = gradients(model, EXAMPLES, kind, micro, weights)
    assert total == pytest.approx(float(value.detach()), rel=1e-5)
    assert float((found - expected).norm()) < 5e-6 * float(expected.norm())


@pytest.mark.parametrize("kind", MEANS)
@pytest.mark.parametrize("how", [{"micro": 3}, {"micro": 8}, {"micro": 8, "row_tokens": 10_000}])
def test_the_loss_is_the_mean_over_what_is_learned(kind, how):
    model, old = models.qwen3(), [replace(e, remembered=True, learned=False) for e in encoded([6, 4], [3, 2], seed=1)]
    value = reference(model, EXAMPLES, kind)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))])
    (window,) = windows(EXAMPLES, range(8), size=8, pad=1, rehearsed=lambda start, end: old, **how)
    model.zero_grad()
    total = 0.0
    for batch in window.micro_batches:
        with packed(model, batch.layout, batch.kept):
            logits = model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False).logits
        loss = loss_named(kind)(logits, batch, window)
        loss.backward()
        total += float(loss.detach())
    assert total == pytest.approx(float(value.detach()), rel=1e-5)
    assert float((torch.cat([p.grad.flatten() for p in model.parameters()]) - expected).norm()) < 5e-6 * float(expected.norm())


@pytest.mark.parametrize("how", [{"micro": 3}, {"micro": 8, "row_tokens": 10_000}])
def test_rehearsed_text_that_is_not_learned_adds_its_divergence_over_the_number_of_new_examples(how):
    blocks, old = AdapterStack(models.qwen3(), targets=("q_proj", "v_proj"), rank=4, alpha=16), encoded([6, 4], [3, 2], seed=1)
    blocks.open(torch.Generator().manual_seed(0))
    model, trained = blocks.model, [p for p in blocks.model.parameters() if p.requires_grad]
    anchor = blocks.anchor()
    with torch.no_grad():
        texts = [(torch.tensor([e.prompt + e.answer]), len(e.prompt) - 1) for e in old]
        before = [model(input_ids=ids).logits[0, first:-1].log_softmax(-1) for ids, first in texts]
        for p in trained:
            torch.nn.init.normal_(p, std=0.3)
    value = reference(model, EXAMPLES, "example_mean")
    for p, (ids, first) in zip(before, texts, strict=True):
        q = model(input_ids=ids).logits[0, first:-1].log_softmax(-1)
        value = value + 0.7 * (p.exp() * (p - q)).sum(-1).mean() / len(EXAMPLES)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(value, trained)])
    mixed = [replace(e, remembered=True, learned=False) for e in old]
    (window,) = windows(EXAMPLES, range(8), size=8, pad=1, rehearsed=lambda start, end: mixed, **how)
    model.zero_grad()
    learner = learning.Learner(model, torch.optim.SGD(trained), anchor, (), accelerator_on(torch.device("cpu")))
    protection = Protection([Distillation(0.7, 1.0, "remembered").begin_task(anchor)])
    training = learning.Training(learner, learning.Rules(), protection, None)
    for batch in window.micro_batches:
        training.gradients(window, batch)
    found = torch.cat([p.grad.flatten() for p in trained])
    assert float((found - expected).norm()) < 5e-6 * float(expected.norm())


def drawn(words):
    """Logits (3, 5, words) and a batch with answers of two, four and one token."""
    draw = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(3, 5, words, generator=draw)).requires_grad_()
    targets = torch.randint(0, words, (3, 4), generator=draw)
    targets[0, :2] = targets[2, :3] = IGNORED
    return logits, MicroBatch({}, 5, targets)


@pytest.mark.parametrize("kind", MEANS)
def test_the_gradient_over_150_thousand_words_is_no_further_from_float64_than_one_sum_of_them_rounds(kind):
    """d l / d z = w (softmax(z) - one_hot), w the token's weight.  Every probability has the relative error of the sum that it is
    divided by, and a sum of n float32 numbers is off by about sqrt(n) eps."""
    words = 151_936
    logits, batch = drawn(words)
    window = window_of(batch, batch)
    found = torch.autograd.grad(loss_named(kind)(logits, batch, window), logits)[0].double()
    counts = (batch.targets != IGNORED).sum(1)
    error = size = 0.0
    for i, j in (batch.targets != IGNORED).nonzero().tolist():
        weight = float(1 / (counts[i] * len(window))) if kind == "example_mean" else 1 / window.answer_tokens
        expected, label = weight * torch.softmax(logits[i, j].detach().double(), -1), batch.targets[i, j]
        expected[label] -= weight
        assert float(found[i, j, label]) == pytest.approx(float(expected[label]), rel=words**0.5 * EPS)
        found[i, j, label] = expected[label] = 0.0  # near -1, it would hide how far all other probabilities are off
        error, size = error + float((found[i, j] - expected).square().sum()), size + float(expected.square().sum())
    assert error < words * EPS**2 * size


@pytest.mark.parametrize("kind", MEANS)
def test_positions_that_predict_no_answer_take_no_part_even_where_they_hold_no_numbers(kind):
    logits, batch = drawn(50)
    value = loss_named(kind)(logits, batch, window_of(batch))
    violation = logits.detach().clone()
    violation[:, :-1][batch.targets == IGNORED] = violation[:, -1] = float("nan")
    again = loss_named(kind)(violation.requires_grad_(), batch, window_of(batch))
    assert torch.equal(again, value)
    found, expected = (torch.autograd.grad(loss, x)[0] for loss, x in ((again, violation), (value, logits)))
    assert torch.equal(found, expected)
    assert not found[:, :-1][batch.targets == IGNORED].any()


def test_an_example_without_an_answer_has_no_mean_and_adds_nothing_to_a_sum():
    logits, batch = drawn(50)
    batch.targets[1] = IGNORED
    window = window_of(batch)
    assert loss_named("example_mean")(logits, batch, window).isnan()
    found = torch.autograd.grad(loss_named("token_mean")(logits, batch, window), logits)[0]
    assert bool(torch.isfinite(found).all())
    assert not found[1].any()
    assert found[0].any()


def test_the_two_losses_differ_where_answers_have_unlike_lengths():
    model = models.qwen3()
    one, other = (gradients(model, EXAMPLES, kind, 8)[1] for kind in ("example_mean", "token_mean"))
    assert float((one - other).norm()) > 0.05 * float(one.norm())


def test_an_example_does_not_see_its_neighbors_in_the_batch():
    model = models.qwen3()
    changed = [*encoded([5], [2], seed=9), *EXAMPLES[1:]]
    losses = []
    for examples in (EXAMPLES, changed):
        (window,) = windows(examples, range(8), size=8, micro=8, pad=1)
        batch = window.micro_batches[0]
        logits = model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False).logits[1:, -2]
        losses.append(logits.detach())
    assert torch.allclose(*losses, atol=1e-5)


def test_windows_follow_the_order_and_the_last_one_may_be_smaller():
    order = [3, 1, 7, 0, 2, 6, 5]
    found = list(windows(EXAMPLES, order, size=3, micro=2, pad=1))
    assert [len(w) for w in found] == [3, 3, 1]
    assert [len(b) for w in found for b in w.micro_batches] == [2, 1, 2, 1, 1]
    first = found[0].micro_batches[0]
    rows = [
        [t for t, m in zip(ids, mask, strict=True) if m]
        for ids, mask in zip(first.inputs["input_ids"].tolist(), first.inputs["attention_mask"].tolist(), strict=True)
    ]
    assert rows == [list(EXAMPLES[i].prompt + EXAMPLES[i].answer) for i in (3, 1)]


def test_a_short_window_weighs_its_examples_like_any_other():
    """The mean over the window, not over its nominal size."""
    model = models.qwen3()
    total, _ = gradients(model, EXAMPLES[:3], "example_mean", 2)
    assert total == pytest.approx(float(reference(model, EXAMPLES[:3], "example_mean").detach()), rel=1e-5)


def test_remembered_examples_join_the_window_of_the_example_that_they_are_due_after():
    old = encoded([6, 6, 6], [1, 1, 1], seed=9)
    rehearsal = Rehearsal(memory=3, share=0.25)  # one after every fourth
    join = joining(rehearsal, old, seed=1, task="new")
    found = list(windows(EXAMPLES, range(8), size=3, micro=2, pad=1, rehearsed=join))
    assert [len(w) for w in found] == [3, 4, 3]  # the 4th and the 8th new example bring one each
    assert [len(b) for b in found[1].micro_batches] == [2, 2]
    joined = [tuple(w.micro_batches[-1].inputs["input_ids"][-1].tolist()) for w in found[1:]]
    assert all(any(e.prompt + e.answer == row[-7:] for e in old) for row in joined)


def test_the_memory_is_cycled_through_without_replacement():
    old = encoded([4] * 5, [1] * 5, seed=9)
    drawn = joining(Rehearsal(memory=5, share=1.0), old, seed=1, task="new")(0, 10)
    assert [drawn.count(e) for e in old] == [2] * 5
    assert drawn[:5] == drawn[5:]
    assert drawn[:5] != joining(Rehearsal(memory=5, share=1.0), old, seed=2, task="new")(0, 5)


def test_the_memory_of_a_later_boundary_is_a_beginning_of_the_earlier_one():
    tasks = {name: EncodedExamples(encoded([4] * 40, [1] * 40, seed=i)) for i, name in enumerate("abc")}
    first = remember(Rehearsal(memory=30), {"a": tasks["a"]}, 42)
    later = remember(Rehearsal(memory=30), tasks, 42)
    assert len(first) == len(later) == 30
    assert later[:10] == first[:10]
    assert [sum(e in tasks[name] for e in later) for name in "abc"] == [10, 10, 10]


class LargestTensor(TorchDispatchMode):
    """Note the most elements that a computed tensor has."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, each.numel())
        return made


@pytest.mark.parametrize("weights", TOKEN_WEIGHTS)
@pytest.mark.parametrize("at_once", [1, 700, 10**6])
def test_losses_in_chunks_are_those_of_all_logits_in_float64_and_only_a_chunk_of_them_exists(weights, at_once, monkeypatch):
    monkeypatch.setattr(head, "CHUNK", at_once)
    draw, n, d, words = torch.Generator().manual_seed(1), 37, 16, 300
    layer = torch.nn.Linear(d, words, bias=at_once == 700).requires_grad_(requires_grad=False)
    layer.weight += 2  # what all words share, which cancels: an error of the probabilities' sum would not
    hidden, targets = 3 * torch.randn(n, d, generator=draw), torch.randint(0, words, (n,), generator=draw)
    shares = torch.rand(n, generator=draw)
    exact = hidden.double().requires_grad_()
    logits = torch.nn.functional.linear(exact, layer.weight.double(), None if layer.bias is None else layer.bias.double())
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    if weights is not None:
        expected = expected * TOKEN_WEIGHTS[weights](logits.detach(), expected.detach())
    (dense,) = torch.autograd.grad((expected * shares).sum(), exact)
    with LargestTensor() as seen:
        losses = head.losses_in_chunks(hidden.requires_grad_(), layer, targets, TOKEN_WEIGHTS[weights])
        (found,) = torch.autograd.grad((losses * shares).sum(), hidden)
    off, expected = losses.detach().double() - expected.detach(), expected.detach()
    assert float(off.norm()) <= 20 * EPS * float(expected.norm())
    assert float((found.double() - dense).norm()) <= 60 * EPS * float(dense.norm())
    if at_once < n * words:
        assert seen.largest <= max(at_once, words * d) < n * words, "the weight is the largest"
    with torch.no_grad():
        assert torch.equal(head.losses_in_chunks(hidden, layer, targets, TOKEN_WEIGHTS[weights]), losses)


def soft_capped():
    capped = Gemma2Config(vocab_size=64, head_dim=16, final_logit_softcapping=5.0, **models.SMALL)
    return Gemma2ForCausalLM(capped)


@pytest.mark.parametrize("kind", MEANS)
@pytest.mark.parametrize("row_tokens", [None, 10_000])
def test_a_training_step_without_logits_has_the_gradients_of_one_with_them(kind, row_tokens, monkeypatch):
    blocks = AdapterStack(models.qwen3(), targets=("q_proj", "v_proj"), rank=4, alpha=16)
    blocks.open(torch.Generator().manual_seed(0))
    trained = [p for p in blocks.model.parameters() if p.requires_grad]
    for p in trained:
        torch.nn.init.normal_(p, std=0.1)
    (window,) = windows(EXAMPLES, range(8), size=8, micro=3, pad=1, row_tokens=row_tokens)
    monkeypatch.setattr(head, "SMALL", 0)
    plain, sums = head.plain_head(blocks.model), []
    assert plain is blocks.model.get_output_embeddings()
    learner = learning.Learner(blocks.model, torch.optim.SGD(trained), blocks.anchor(), (), accelerator_on(torch.device("cpu")))
    for largest, chosen in ((learning.LARGE, plain), (0, plain), (0, None)):
        monkeypatch.setattr(learning, "LARGE", largest)
        blocks.model.zero_grad()
        training = learning.Training(learner, learning.Rules(loss_named(kind)), Protection(), chosen)
        total = sum(training.gradients(window, batch) for batch in window.micro_batches)
        sums.append((total, torch.cat([p.grad.flatten() for p in trained])))
    (total, whole), (chunked, parts), (again, same) = sums
    assert chunked == pytest.approx(total, rel=20 * EPS)
    assert float((parts - whole).norm()) <= 4e-6 * float(whole.norm())
    assert torch.equal(same, whole)
    assert again == total


def test_a_head_that_is_trained_heard_or_followed_by_something_makes_its_logits_itself(monkeypatch):
    monkeypatch.setattr(head, "SMALL", 0)
    trained, heard = models.qwen3(), models.qwen3().requires_grad_(requires_grad=False)
    assert head.plain_head(trained) is None
    assert head.plain_head(soft_capped().requires_grad_(requires_grad=False)) is None
    assert head.plain_head(heard) is heard.lm_head
    heard.lm_head.register_forward_hook(lambda *_: None)
    assert head.plain_head(heard) is None
    monkeypatch.undo()
    assert head.plain_head(models.qwen3().requires_grad_(requires_grad=False)) is None, "few words"
