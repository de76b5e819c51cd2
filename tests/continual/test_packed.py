"""Packed rows: the loss, gradients, feature rows and teacher of separate forwards, and no way from one example to another."""

import json
import warnings
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)

import models
import small
from anchorlora import METHODS, AnswerSensitivity, Distillation, FeatureStore, GradientStart, run_sequence
from anchorlora.adapters import AdapterStack, lora_layers
from anchorlora.adapters.kinds import AddedProducts, add_products
from anchorlora.constraints import recording
from anchorlora.constraints.recording import answers_drawn
from anchorlora.continual.batches import MEANS, micro_batch, packed_row, rows_of, windows
from anchorlora.continual.callback import RunCallback
from anchorlora.continual.data import TaskData
from anchorlora.continual.inputs import RunInputs
from anchorlora.continual.sequence import TaskSequence
from anchorlora.data import Benchmark, Encoded, EncodedExamples, Example
from anchorlora.features.layout import reading
from anchorlora.models import packing
from anchorlora.models.load import load_base_model
from anchorlora.models.packing import RMSNorm, at_once, packed, packed_attention, unpackable
from architectures.cases import GRIFFIN, LFM2

WORDS = 64


def olmo2():
    return Olmo2ForCausalLM(Olmo2Config(vocab_size=WORDS, **models.SMALL))


def gemma3():
    return Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=WORDS, head_dim=16, **models.SMALL))


# olmo2 and gemma3 normalize the output of attention, so what follows it reads other rows than in the others
MAKE = {
    "qwen3": models.qwen3,
    "llama": models.llama,
    "mistral": models.mistral,
    "gpt2": models.gpt2,
    "olmo2": olmo2,
    "gemma3": gemma3,
}


def encoded(prompts, answers, seed=0):
    """Examples with prompts and answers of these lengths, drawn."""
    draw = torch.Generator().manual_seed(seed)

    def ids(n):
        return tuple(torch.randint(3, 60, (n,), generator=draw).tolist())

    return [Encoded(Example(i, "", ""), "", ids(n), ids(a), False) for i, (n, a) in enumerate(zip(prompts, answers, strict=True))]


def headed(examples, head=(5, 6, 7, 8, 9)):
    """The same examples, with prompts that begin alike."""
    return [Encoded(e.example, e.text, (*head, *e.prompt), e.answer, e.cut) for e in examples]


APART = encoded([5, 12, 7, 3, 9], [2, 1, 4, 2, 3])
FORMS = {
    "nothing in common": APART,
    "a common beginning": headed(APART),
    "one example": APART[:1],
    "twice the same": [APART[0]] * 2,
}


def chat(turns, seed=0, head=(5, 6, 7)):
    """The turns of a chat: each prompt is what was said before it, with more of the user's."""
    said, examples = head, []
    for question, answer in zip(encoded([3] * turns, [2] * turns, seed), encoded([1] * turns, [4] * turns, seed + 1), strict=True):
        examples.append(replace(answer, prompt=(*said, *question.prompt), answer=(*answer.answer, 2)))
        said = examples[-1].prompt + examples[-1].answer
    return examples


FOUR = chat(4)
CHATS = {
    "one chat": FOUR,
    "chats that begin alike, and an example": [*FOUR, *chat(2, seed=5), *headed(APART[:1])],
    "turns that others leave out": [FOUR[0], FOUR[2], FOUR[3], *chat(3, seed=7)[1:]],
    "turns that do not go on from each other": [FOUR[1], FOUR[0], FOUR[3]],
}


def window_of(examples, row_tokens=10_000, rehearsed=()):
    (found,) = windows(
        examples, range(len(examples)), size=len(examples), micro=1, pad=1, rehearsed=lambda *_: rehearsed, row_tokens=row_tokens
    )
    return found


def loss_of(model, window, kind):
    total = 0.0
    for batch in window.micro_batches:
        with packed(model, batch.layout, batch.keep):
            outputs = model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False)
        total = total + MEANS[kind](outputs.logits, batch, window)
    return total


def separate(model, examples, kind):
    """One forward an example; the loss written out."""
    losses = []
    for e in examples:
        logits = model(input_ids=torch.tensor([e.prompt + e.answer]), use_cache=False).logits[0].log_softmax(-1)
        losses.append(torch.stack([-logits[len(e.prompt) + j - 1, token] for j, token in enumerate(e.answer)]))
    return torch.stack([x.mean() for x in losses]).mean() if kind == "example_mean" else torch.cat(losses).mean()


@pytest.mark.drawn(10)
@pytest.mark.parametrize("kind", MEANS)
@pytest.mark.parametrize("form", [*FORMS, *CHATS])
@pytest.mark.parametrize("name", MAKE)
def test_loss_and_gradient_are_those_of_separate_forwards(name, form, kind):
    examples = (FORMS | CHATS)[form]
    model = MAKE[name]().double().eval()
    model.config._attn_implementation = "sdpa"
    found, expected = loss_of(model, window_of(examples), kind), separate(model, examples, kind)
    parameters = [p for p in model.parameters() if p.requires_grad]
    mine, theirs = (torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (found, expected))
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6), "token losses are taken in float32"
    off = sum((a - b).square().sum() for a, b in zip(mine, theirs, strict=True) if a is not None) ** 0.5
    assert off <= 1e-6 * sum(b.square().sum() for b in theirs if b is not None) ** 0.5
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("turns", [1, 2, 4, 8])
def test_a_chat_is_read_once_however_many_turns_it_has_and_counts_once_in_its_row(turns):
    examples = chat(turns)
    whole = len(examples[-1].prompt) + len(examples[-1].answer)
    row = packed_row(examples)
    assert (row.inputs["input_ids"].numel(), len(row), row.chats) == (whole, turns, (turns,))
    assert row.inputs["input_ids"][0, row.keep + 1].tolist() == [token for e in examples for token in e.answer]
    assert [len(group) for group in rows_of([*examples, *examples[:1]], whole)] == [turns, 1]
    assert packed_row(examples, share=False).inputs["input_ids"].numel() == sum(len(e.prompt) + len(e.answer) for e in examples)
    assert list(EncodedExamples([*examples, *APART, *examples]).begins) == [0, *range(turns, turns + 6)]


def test_an_epoch_keeps_the_turns_of_a_chat_together_and_the_order_of_single_examples_as_it_was():
    apart, turned = (
        EncodedExamples(encoded([4] * 40, [2] * 40)),
        EncodedExamples([e for i in range(12) for e in chat(1 + i % 4, seed=i)]),
    )
    data = TaskData(("a", "b"), 3, {}, {"a": apart, "b": turned}, {})
    assert data.chats_shuffled("a", 1) == data.shuffled("a", 1)
    order, starts = data.chats_shuffled("b", 1), {0, *turned.begins}
    assert sorted(order) == list(range(len(turned)))
    assert all(after == before + 1 for before, after in pairwise(order) if after not in starts)
    assert [i for i in order if i in starts] != sorted(starts)


def test_a_window_is_split_into_rows_and_remembered_examples_have_their_own():
    new, old = headed(APART), encoded([4, 4], [1, 2], seed=9)
    window = window_of(new, row_tokens=45, rehearsed=old)
    assert [len(batch) for batch in window.micro_batches] == [2, 3, 2]
    assert [batch.layout.prefix for batch in window.micro_batches] == [5, 5, 0]
    assert len(window) == 7
    model = models.qwen3().double().eval()
    found, expected = loss_of(model, window, "example_mean"), separate(model, [*new, *old], "example_mean")
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_changing_one_example_changes_no_others_logits(form):
    model, examples = models.qwen3().double().eval(), FORMS[form]
    with torch.no_grad():
        for changed, e in enumerate(examples):
            other = Encoded(e.example, e.text, (*e.prompt[:-1], 63), tuple(62 for _ in e.answer), e.cut)
            both = []
            for listed in (examples, [other if i == changed else each for i, each in enumerate(examples)]):
                batch = packed_row(listed)
                with packed(model, batch.layout):
                    logits = model(input_ids=batch.inputs["input_ids"], position_ids=batch.inputs["position_ids"], use_cache=False)
                both.append(batch.layout.examples(logits.logits))
            for i, (a, b) in enumerate(zip(*both, strict=True)):
                same = torch.equal(a[: len(e.prompt) - 1], b[: len(e.prompt) - 1]) if i == changed else torch.equal(a, b)
                assert same, (changed, i)


@pytest.mark.parametrize("adapted", [False, True])
def test_the_last_layer_computes_the_kept_positions_alone(adapted):
    model, batch, work = models.qwen3().eval(), packed_row(headed(APART)), []
    linear = [each for each in model.model.layers[-1].modules() if isinstance(each, torch.nn.Linear)]
    if adapted:
        blocks = AdapterStack(model, targets=("q_proj", "v_proj"), rank=4, alpha=16, dropout=0.1)
        blocks.open(torch.Generator().manual_seed(0))
    for keep in (None, batch.keep):
        with FlopCounterMode(display=False) as counted, torch.no_grad(), packed(model, batch.layout, keep):
            model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False)
        work.append(counted.get_total_flops())
    left_out, read = batch.inputs["input_ids"].shape[1] - len(batch.keep), model.model.layers[-1].self_attn
    of_keys = sum(2 * each.in_features * each.out_features for each in (read.k_proj, read.v_proj))
    assert work[0] - work[1] >= (2 * sum(each.weight.numel() for each in linear) - of_keys) * left_out
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_in_packed_rows_keeps_the_share_and_the_mean(p):
    model, layer, x = models.qwen3(), torch.nn.Dropout(p), torch.ones(999, 1001, requires_grad=True)
    model.extra = layer
    with packed(model.train(), packed_row(APART).layout):
        found, again = layer(x), layer(x)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    dropped, n = found == 0, x.numel()
    assert float(dropped.double().mean()) == pytest.approx(p, abs=5 * (p * (1 - p) / n) ** 0.5)
    both = float((dropped & (again == 0)).double().mean())
    assert both == pytest.approx(p * p, abs=5 * (p * p * (1 - p * p) / n) ** 0.5), "independent draws"
    beside = float((dropped[:, 1:] & dropped[:, :-1]).double().mean())
    assert beside == pytest.approx(p * p, abs=10 * (p * p * (1 - p * p) / n) ** 0.5), "independent elements"
    torch.testing.assert_close(found[~dropped], torch.full_like(found[~dropped], 1 / (1 - p)), rtol=2**-15 / (1 - p), atol=0)
    assert torch.equal(gradient, found)
    torch.manual_seed(3)
    expected = torch.nn.functional.dropout(x, p)
    torch.manual_seed(3)
    assert torch.equal(layer(x), expected), "outside, it is torch's again"


def test_a_frozen_rms_norm_of_a_packed_row_is_the_models_own():
    x = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(16, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: RMSNorm.apply(x, weight, 1e-6), x)
    model, window, grads = models.llama(), window_of(headed(APART)), {}
    batch = window.micro_batches[0]
    for trains in (True, False):  # one that trains is left as it is
        for norm in (part for part in model.modules() if type(part).__name__.endswith("RMSNorm")):
            torch.nn.init.normal_(norm.weight, 1.0, 0.3, generator=torch.Generator().manual_seed(0))
            norm.weight.requires_grad_(trains)
        with packed(model, batch.layout, batch.keep):
            own = [part for part in model.modules() if type(part).__name__.endswith("RMSNorm") and "forward" in part.__dict__]
            assert len(own) == (0 if trains else 2 * model.config.num_hidden_layers + 1)
        weights = [p for name, p in model.named_parameters() if "norm" not in name]
        grads[trains] = torch.autograd.grad(loss_of(model, window, "example_mean"), weights)
        assert not any("forward" in part.__dict__ for part in model.modules())
    for mine, theirs in zip(grads[False], grads[True], strict=True):
        assert (mine - theirs).norm() <= 100 * torch.finfo(torch.float32).eps * theirs.norm()


def test_who_listens_to_the_last_layer_sees_every_position():
    model, batch = models.qwen3().eval(), packed_row(headed(APART))
    layer, seen = model.model.layers[-1], {}
    for part in (layer.self_attn.q_proj, layer.post_attention_layernorm, model.model.norm):
        part.register_forward_hook(lambda part, _, output: seen.setdefault(part, []).append(output))
    with torch.no_grad():
        for keep in (None, batch.keep):
            with packed(model, batch.layout, keep):
                model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False)
    assert [a.shape == b.shape for a, b in seen.values()] == [True] * 3
    torch.testing.assert_close(*seen[layer.self_attn.q_proj])


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("up_proj", "down_proj"), ("o_proj",)])
def test_feature_rows_are_those_of_separate_forwards_in_the_same_order(targets):
    blocks = AdapterStack(models.qwen3(), targets=targets, rank=4, alpha=16)
    blocks.open(torch.Generator().manual_seed(0))
    model, taken = blocks.model.train(), []
    for how in (packed_row, None):
        rows = FeatureStore(limit=50, held_out=12)
        with rows.collect(model), torch.no_grad():
            for e in [headed(APART)] if how else [[e] for e in headed(APART)]:
                batch = how(e) if how else micro_batch(e, pad=1)
                if how:
                    with packed(model, batch.layout, batch.keep):
                        model(**batch.inputs, use_cache=False)
                else:
                    model(**batch.inputs, use_cache=False)
        taken.append((rows.last.core, rows.last.held_out))
    for mine, theirs in zip(*taken, strict=True):
        assert mine.keys() == theirs.keys()
        for name, found in mine.items():
            assert found.shape == theirs[name].shape
            torch.testing.assert_close(found, theirs[name], rtol=2e-5, atol=2e-5)


def test_the_teacher_reads_the_row_as_the_student_does():
    blocks = AdapterStack(models.qwen3(), targets=("q_proj", "v_proj"), rank=4, alpha=16)
    blocks.open(torch.Generator().manual_seed(0))
    active, examples = Distillation(0.7, 2.0).begin_task(blocks.anchor()), headed(APART)
    with torch.no_grad():
        for p in blocks.trainable():
            p.add_(0.3 * torch.randn_like(p))

    def loss(batch):
        outputs = blocks.model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False)
        return active.loss(batch, outputs)

    blocks.model.eval()
    row = packed_row(examples)
    with packed(blocks.model, row.layout):
        found = loss(row)
    alone = torch.stack([loss(micro_batch([e], pad=1)) for e in examples]).mean()
    assert float(found.detach()) > 1e-3
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-6)


def mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=4))


def sliding():
    return MistralForCausalLM(MistralConfig(vocab_size=WORDS, head_dim=16, sliding_window=6, **models.SMALL))


def gemma2():
    return Gemma2ForCausalLM(Gemma2Config(vocab_size=WORDS, head_dim=16, **models.SMALL))


def mpt():
    return MptForCausalLM(MptConfig(vocab_size=WORDS, d_model=32, n_heads=4, n_layers=2))


@pytest.mark.parametrize(
    ("make", "why"), [(mamba, "logits differ by"), (sliding, "sliding_window"), (gemma2, "softcap"), (mpt, "AttributeError")]
)
def test_models_that_mix_tokens_in_another_way_are_found(make, why):
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)  # the weights of a new model say too little for a difference to be seen
    assert why in unpackable(model, [e.prompt + e.answer for e in headed(APART)])


def test_a_model_with_other_layers_is_found_although_its_weights_say_too_little():
    model = LFM2.model()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.3)
    assert unpackable(model, [e.prompt + e.answer for e in headed(APART)]) == "it has layers of conv"


@pytest.mark.parametrize("name", MAKE)
def test_models_with_causal_attention_can_be_packed(name):
    assert unpackable(MAKE[name](), [e.prompt + e.answer for e in headed(APART)]) is None


class Warned(RunCallback):
    def __init__(self):
        self.warnings = []

    def on_warning(self, message):
        self.warnings.append(message)


def test_a_packed_run_has_the_losses_of_a_padded_one_and_says_so(small_benchmark, small_model, tmp_path):
    recipe, losses, records = small.recipe(small_benchmark, small_model, dropout=0.0), {}, {}
    for batching in ("padded", "packed"):
        out = tmp_path / batching
        records[batching] = run_sequence(
            recipe.changed({"batching": batching}), METHODS["lwf"], order=small.ORDER[:2], seed=42, out=out
        )
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        losses[batching] = [line["loss"] for line in lines if "loss" in line]
    assert losses["packed"] == pytest.approx(losses["padded"], rel=2e-3)
    assert losses["packed"] != losses["padded"]
    assert records["packed"].protocol["training"]["batching"] == "packed"
    assert "unpacked" not in records["packed"].protocol


def test_a_model_that_reads_no_packed_rows_is_trained_on_padded_ones_with_one_sentence(
    small_benchmark, small_model, tmp_path, monkeypatch
):
    monkeypatch.setattr("anchorlora.continual.inputs.unpackable", lambda model, rows, **more: "it is recurrent")
    recipe, told = small.recipe(small_benchmark, small_model), Warned()
    ends = {}
    for batching in ("padded", "packed"):
        ends[batching] = tmp_path / batching
        record = run_sequence(
            recipe.changed({"batching": batching}),
            METHODS["sfor"],
            order=small.ORDER[:1],
            seed=42,
            out=ends[batching],
            callbacks=[told],
        )
    assert told.warnings == ["this model reads no packed rows (it is recurrent), so examples are padded instead"]
    assert record.protocol["unpacked"] == "it is recurrent"
    one, other = ((end / "tasks/1-fruit/adapter/adapter_model.safetensors").read_bytes() for end in ends.values())
    assert one == other


def test_a_model_that_knows_no_mask_learns_from_rows_alone(small_benchmark, tmp_path):
    """With up to four examples in a forward it learns what it learns with one."""
    model = GRIFFIN.model()
    for p in model.parameters():
        p.data *= 2.0
    model.save_pretrained(GRIFFIN.write(tmp_path / "model"))
    recipe, files = small.recipe(small_benchmark, tmp_path / "model"), []
    for rows in (1, 4):
        out = tmp_path / str(rows)
        run_sequence(recipe.changed({"micro_batch": rows}), METHODS["seq-lora"], order=small.ORDER[:1], seed=42, out=out)
        files.append((out / "tasks/1-fruit/adapter/adapter_model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_examples_that_are_read_together_say_what_they_say_alone(small_benchmark, small_model, monkeypatch):
    """Statistics and starts of constraints: the same answers are drawn, and no row of one example is added to another's."""
    recipe = small.recipe(small_benchmark, small_model)
    inputs = RunInputs.of(load_base_model(recipe.base_model), Benchmark(small_benchmark), recipe, order=small.ORDER, seed=1)
    sequence = TaskSequence(inputs, METHODS["seq-lora"])
    blocks, losses = sequence.blocks, sequence.inputs.losses("fruit")
    sequence.method.plan.begin_task(blocks, torch.Generator().manual_seed(3), first=True)
    blocks.model.train()
    assert [len(each) for each in losses.together(9)] == [9]
    torch.testing.assert_close(torch.cat(list(losses.together(9))), torch.stack(list(losses(9))), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sum(losses.summed(9)), sum(losses(9)), rtol=1e-5, atol=1e-6)
    rows, kept, starts = [], [], []
    for several, counts in ((losses, [9]), (losses.__call__, [1] * 9)):  # the bare method has no `together`
        anchor = blocks.anchor(losses=several)
        drawn = list(answers_drawn(anchor, 9, seed=0))
        assert [count for count, _ in drawn] == counts
        with monkeypatch.context() as patched:  # answers are drawn one token at a time, as with a vocabulary of millions
            patched.setattr(recording, "ENTRIES", 1)
            slowly = list(answers_drawn(anchor, 9, seed=0))
        for (_, some), (_, same) in zip(drawn, slowly, strict=True):
            assert all(torch.equal(a, b) for name in some for a, b in zip(some[name], same[name], strict=True))
        rows.append([torch.cat([each[layer.name][side] for _, each in drawn]) for layer in anchor.layers for side in (0, 1)])
        past = AnswerSensitivity(examples=9, inputs=64, outputs=64).end_task(anchor)
        kept.append([root @ root.T for name, root in past.items() if not name.endswith("/tail")])
        with torch.no_grad():
            GradientStart(examples=9).begin_task(anchor)
        starts.append([layer.factor("A").detach().clone() for layer in anchor.layers])
    together, alone = starts  # a singular vector's sign is anyone's, so a row of A may have either
    starts = [[A * (A * B).sum(1, keepdim=True).sign() for A, B in zip(together, alone, strict=True)], alone]
    for found, tolerance in ((rows, 1e-4), (kept, 1e-4), (starts, 1e-3)):
        for together, alone in zip(*found, strict=True):
            assert float((together - alone).norm()) <= tolerance * float(alone.norm())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_one_call_of_flex_attention_is_one_call_per_example(form, heads, monkeypatch):
    """Uncompiled, as CPUs can; a GPU compiles the same function with the same mask."""
    from torch.nn.attention.flex_attention import flex_attention
    from transformers.integrations import flex_attention as offered

    monkeypatch.setattr(offered, "WrappedFlexAttention", lambda training: lambda: flex_attention)
    (batch,) = window_of(FORMS[form]).micro_batches
    tokens, draw = batch.inputs["input_ids"].shape[1], torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, tokens, 16, generator=draw, dtype=torch.float64) for n in (heads[0], heads[1], heads[1]))
    with reading(batch.layout):
        one_by_one, _ = packed_attention(torch.nn.Module(), q, k, v, None, scaling=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is not compiled
        whole = at_once(batch.layout, q, k, v, scale=0.3, training=False)
    assert (whole.transpose(1, 2) - one_by_one).abs().max() <= 1e-12


@pytest.mark.parametrize(
    "error", [ImportError("no flex attention"), RuntimeError("no compiler\nsee the log"), ValueError("too wide")]
)
def test_flex_attention_that_fails_is_said_in_one_line_and_left_for_good(error, monkeypatch, caplog):
    calls = []

    def fails(*rows, **how):
        calls.append(rows)
        raise error

    monkeypatch.setattr(packing, "at_once", fails)
    monkeypatch.setattr(packing, "_refused", set())
    for _ in range(2):
        assert packing._tried_at_once(None, torch.ones(1), torch.ones(1), torch.ones(1), scale=None, training=True) is None
    said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert len(calls) == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"packed rows cannot be read by flex attention ({said}); from now on, attention is one call per example"
    ]


def test_memory_that_is_short_is_no_fault_of_flex_attention(monkeypatch):
    def fails(*rows, **how):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(packing, "at_once", fails)
    monkeypatch.setattr(packing, "_refused", set())
    with pytest.raises(torch.OutOfMemoryError):
        packing._tried_at_once(None, torch.ones(1), scale=None, training=True)
    assert not packing._refused


@pytest.mark.filterwarnings("ignore:`lora_bias=True`")
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    kinds=st.lists(st.sampled_from(["plain", "frozen", "dora", "bias", "drops"]), min_size=1, max_size=2),
    state=st.sampled_from(["on", "off", "merged", "heard", "half"]),
    rank=st.integers(1, 5),
    tokens=st.integers(0, 3),
)
def test_a_layer_of_a_packed_row_computes_what_peft_computes(seed, kinds, state, rank, tokens):
    torch.manual_seed(seed)
    how = {"dora": {"use_dora": True}, "bias": {"lora_bias": True}, "drops": {"lora_dropout": 0.5}}
    base = nn.ModuleDict({"layer": nn.Linear(6, 7, bias=False)})
    for number, kind in enumerate(kinds):
        config = LoraConfig(r=rank, lora_alpha=3, target_modules=["layer"], init_lora_weights=False, **how.get(kind, {}))
        if number == 0:
            model = get_peft_model(base, config, adapter_name="0")
        else:
            model.add_adapter(str(number), config)
    names = list(map(str, range(len(kinds))))
    model.base_model.set_adapter(names)
    (layer,) = lora_layers(model).values()
    for name, kind in zip(names, kinds, strict=True):
        layer.lora_A[name].requires_grad_(kind != "frozen")
        layer.lora_B[name].requires_grad_(kind != "frozen")
    if state == "off":
        layer.enable_adapters(False)
    elif state == "merged":
        assume("bias" not in kinds)  # which PEFT merges into a bias alone
        layer.merge()
    elif state == "heard":
        heard = []
        layer.lora_A["0"].register_forward_hook(lambda *given: heard.append(1))
    elif state == "half":
        model.half()
    x = torch.randn(2, tokens, 6, dtype=torch.float16 if state == "half" else torch.float32)

    def outcome(call):
        torch.manual_seed(seed)
        model.zero_grad()
        given = x.clone().requires_grad_()
        out = call(given)
        out.square().sum().backward()
        return [out, given.grad, *(p.grad for p in layer.parameters())]

    expected, found = outcome(layer), outcome(lambda given: add_products(layer, given))
    assert [one is None for one in found] == [one is None for one in expected]
    exact = state in ("off", "merged", "heard", "half") or {"dora", "bias", "drops"} & set(kinds)
    for one, other in zip(found, expected, strict=True):
        if one is not None:
            allowed = 0.0 if exact else 64 * torch.finfo(torch.float32).eps * (float(other.detach().norm()) + 1)
            assert float((one - other).detach().norm()) <= allowed
    if state == "heard" and kinds[0] != "dora":  # which calls no factor as a module
        assert len(heard) == 2


def test_the_gradients_of_added_products_are_those_of_finite_differences():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True), torch.randn(4, 5, dtype=torch.float64)
    shapes = ((2, 5), (4, 2), (1, 5), (4, 1))
    factors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda x, *factors: AddedProducts.apply(x, [0.5, 2.0], weight, *factors), (x, *factors))
