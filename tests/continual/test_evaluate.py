import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GenerationConfig
from transformers.utils import generic

import models
from anchorlora.adapters import AdapterStack
from anchorlora.continual import evaluate
from anchorlora.continual.decode import Answering, decode, drafts_of
from anchorlora.continual.evaluate import Scorer
from anchorlora.data import LOSS, Encoded, Encoder, Example, Task
from anchorlora.models import head
from anchorlora.models.load import cache_argument
from anchorlora.models.packing import rows_at_once
from architectures.cases import GRIFFIN, LFM2, RWKV

CPU = torch.device("cpu")
TASK = Task("TC", "toys", "Choose one of the options.\n", ("ball", "doll"))
SENTENCES = [f"{'very ' * (i % 7)}old thing number {i}\n" for i in range(20)]


@pytest.fixture(scope="module")
def tokenizer():
    return models.tokenizer([TASK.prompt(s) + "ball doll" for s in SENTENCES])


@pytest.fixture(scope="module")
def encoded(tokenizer):
    return Encoder(tokenizer, max_tokens=200).encode(TASK, [Example(i, s, "ball") for i, s in enumerate(SENTENCES)])


def adapted(make, tokenizer, seed=0):
    torch.manual_seed(seed)
    model = make(vocab=len(tokenizer))
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    if make is models.gpt2:  # its Conv1D layers take no adapter of a run; as it begins, it would say one token for ever
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(std=0.4)
        return model.eval()
    blocks = AdapterStack(model, targets=("q_proj", "v_proj"), rank=4, alpha=16)
    with torch.no_grad():
        for p in blocks.trainable():
            p.normal_(std=0.2)
    return blocks.model


@pytest.fixture(scope="module")
def generated(tokenizer, encoded):
    """What transformers generates for each prompt alone by a model: its texts and its tokens, once for every way of batching."""

    @cache
    def of(make, count=12):
        tokens = greedy(adapted(make, tokenizer), [e.prompt for e in encoded], count)
        return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in tokens], tokens

    return of


HOW = {"padded": {}, "packed": {"packed": True}}


@pytest.mark.drawn(10)
@pytest.mark.parametrize("make", [models.qwen3, models.llama, models.mistral, models.gpt2])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_batching_sorting_and_sharing_change_no_text_in_float32(make, how, batch, tokenizer, encoded, generated):
    """Random weights: every answer runs to the limit, through flat logits."""
    model = adapted(make, tokenizer)
    answers = Scorer(model, tokenizer, max_new_tokens=12, batch=batch, device=CPU, **HOW[how]).score(TASK, encoded)
    assert [a.text for a in answers] == generated(make)[0]
    assert len({a.text for a in answers}) > 1


@pytest.mark.parametrize("case", [RWKV, GRIFFIN], ids=str)
def test_a_model_that_knows_no_mask_reads_no_padding(case, tokenizer, encoded):
    """Its answers and losses are those of rows alone, in batches of seven."""
    model = case.model().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0)  # the weights of a new model say too little for a difference to be seen
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    scorer = Scorer(model, tokenizer, max_new_tokens=6, batch=7, device=CPU)
    tokens = greedy(model, [e.prompt for e in encoded], 6)
    answers = scorer.score(TASK, encoded)
    assert [a.text for a in answers] == [tokenizer.decode(row, skip_special_tokens=True).strip() for row in tokens]
    for e, answer in zip(encoded, answers, strict=True):
        ids, labels = torch.tensor([e.prompt + e.answer]), torch.tensor([(-100,) * len(e.prompt) + e.answer])
        with torch.no_grad():
            assert answer.scores[LOSS] == pytest.approx(float(model(input_ids=ids, labels=labels).loss), rel=1e-4)
    assert [rows_at_once(m, 7) for m in (model, adapted(models.qwen3, tokenizer), LFM2.model())] == [1, 7, 7]


@cache
def windowed(longest):
    """Makes a model with layers that attend to so many tokens back, and one layer that attends to all."""

    def gemma3(vocab):
        layers = {"sliding_window": longest, "layer_types": ["sliding_attention", "full_attention"]}
        return Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=vocab, head_dim=16, **layers, **models.SMALL))

    return gemma3


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("longer", [0, 3, 40])
def test_rows_that_are_longer_than_a_window_change_no_text_where_every_prompt_fits_into_it(
    how, longer, tokenizer, encoded, generated
):
    """Answers of 12 tokens go past the window, unless it is 40 longer than the longest prompt."""
    longest = max(len(e.prompt) for e in encoded)
    assert sum(len(e.prompt) for e in encoded) > 2 * (longest + longer)
    make, prompts = windowed(longest + longer), [e.prompt for e in encoded]
    model, (expected, tokens) = adapted(make, tokenizer), generated(make)
    scorer = Scorer(model, tokenizer, max_new_tokens=12, batch=64, device=CPU, **HOW[how])
    assert scorer.texts(prompts) == expected
    drafts = {row[0]: (*row[:3], 3, 4) for row in tokens}
    assert decode(model, prompts, Answering({tokenizer.eos_token_id}, 12, drafts)) == tokens


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("batch", [1, 64])
def test_an_answer_ends_where_the_model_has_no_more_positions(how, batch, tokenizer, encoded, generated):
    """Of the longest prompts, three tokens can be read again; a token more is generated, and of shorter ones all."""
    model, (_, tokens) = adapted(models.gpt2, tokenizer), generated(models.gpt2)
    most = max(len(e.prompt) for e in encoded) + 3
    model.config.n_positions, model.transformer.wpe = most, torch.nn.Embedding.from_pretrained(model.transformer.wpe.weight[:most])
    expected = [row[: min(8, most - len(e.prompt) + 1)] for row, e in zip(tokens, encoded, strict=True)]
    assert {4, 8} <= {len(row) for row in expected}
    scorer = Scorer(model, tokenizer, max_new_tokens=8, batch=batch, device=CPU, **HOW[how])
    texts = [tokenizer.decode(row, skip_special_tokens=True).strip() for row in expected]
    assert [a.text for a in scorer.score(TASK, encoded)] == texts
    drafts = [(*row, 3, 4) for row in tokens]
    assert [text.strip() for text in scorer.texts([e.prompt for e in encoded], likely=drafts)] == texts


def greedy(model, prompts, tokens):
    """New tokens of each prompt, one prompt at a time; random weights end no answer."""
    with torch.no_grad():
        ids = [model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=tokens)[0] for prompt in prompts]
    return [row[len(prompt) :].tolist() for row, prompt in zip(ids, prompts, strict=True)]


@pytest.mark.parametrize("right", [0, 1, 3, 8, 12], ids=lambda n: f"the first {n} tokens of a draft are right")
@pytest.mark.parametrize("make", [models.qwen3, models.gpt2])
def test_a_draft_changes_no_token_however_much_of_it_is_right(make, right, tokenizer, encoded, generated):
    model, prompts = adapted(make, tokenizer), [e.prompt for e in encoded]
    (_, expected), end = generated(make), tokenizer.eos_token_id
    drafts = {tokens[0]: (*tokens[:right], 3, 4, end)[: max(right, 1) + 3] for tokens in expected[::2] if right}
    drafts = {first: draft for first, draft in drafts.items() if draft[0] == first}
    forwards = []
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    found = decode(model, prompts, Answering({end}, 12, drafts))
    hook.remove()
    assert found == expected
    assert bool(drafts) is (right > 0)
    assert len(forwards) <= 12 + bool(drafts)


def test_rows_that_end_leave_the_batch_and_the_others_go_on_unchanged(tokenizer, encoded):
    """The token that half of the rows generate early is taken for the end."""
    model, prompts = adapted(models.qwen3, tokenizer), [e.prompt for e in encoded]
    whole = greedy(model, prompts, 30)
    end = max(range(len(tokenizer)), key=lambda t: sum(t in row[:15] for row in whole))
    expected = [row[: row.index(end) + 1] if end in row else row for row in whole]
    assert len({len(row) for row in expected}) > 1
    sizes = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True)
    found = decode(model, prompts, Answering({end}, 30))
    hook.remove()
    assert found == expected
    assert min(sizes[1:]) < len(prompts), "nobody left"


class Older(models.LlamaForCausalLM):
    """A model whose code came with it, written before transformers 5.24 renamed the cache."""

    def forward(self, input_ids=None, past_key_values=None, **settings):
        return super().forward(input_ids, **{cache_argument(models.LlamaForCausalLM.forward): past_key_values}, **settings)


def test_a_model_that_has_the_older_name_of_the_cache_is_decoded_alike(tokenizer, encoded):
    model, prompts = adapted(models.llama, tokenizer), [e.prompt for e in encoded]
    expected = greedy(model, prompts, 12)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.__class__ = Older
    assert decode(model, prompts, Answering({tokenizer.eos_token_id}, 12)) == expected


def test_decoding_uses_no_name_of_the_cache_that_transformers_warns_of(tokenizer, encoded, monkeypatch):
    warned = []
    monkeypatch.setattr(generic.logger, "warning_once", lambda *words: warned.append(words))
    decode(adapted(models.llama, tokenizer), [e.prompt for e in encoded], Answering({tokenizer.eos_token_id}, 12))
    assert warned == []


def turns(tokenizer, draw):
    """Examples with drawn answers, some of which go on from the one before, as turns of a chat do."""
    ids, found = range(5, len(tokenizer) - 1), []
    for i in range(12):
        before = found[-1].prompt + found[-1].answer if found and i % 3 else tuple(draw.choices(ids, k=4))
        prompt = before + tuple(draw.choices(ids, k=draw.randrange(1, 9)))
        found.append(Encoded(Example(i, "", "ball"), "", prompt, tuple(draw.choices(ids, k=draw.randrange(1, 9))), False))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_one_reading_gives_the_loss_and_the_answer_however_much_of_the_right_one_is_said(seed, tokenizer, monkeypatch):
    """Beginnings of the greedy answers stand in for right ones, followed by what the model does not say."""
    draw, model = random.Random(seed), adapted(models.qwen3, tokenizer, seed).eval()
    examples = turns(tokenizer, draw)
    said = greedy(model, [e.prompt for e in examples], 8)
    right = [tuple(tokens[: draw.randrange(9)]) + e.answer for tokens, e in zip(said, examples, strict=True)]
    examples = [replace(e, answer=answer) for e, answer in zip(examples, right, strict=True)] + examples
    end = said[0][3]
    monkeypatch.setattr(evaluate, "stop_ids", lambda *_: frozenset({end}))
    monkeypatch.setattr(evaluate, "TOKENS", draw.choice([1, 60, 10_000]))
    scorer = Scorer(model, tokenizer, max_new_tokens=8, batch=1, device=CPU, packed=True)
    answers, losses = scorer.score(TASK, examples), scorer.losses(examples)
    told = tokenizer.batch_decode([row[: (*row, end).index(end)] for row in said], skip_special_tokens=True)
    assert [a.text for a in answers] == [text.strip() for text in told] * 2
    assert [a.scores[LOSS] for a in answers] == pytest.approx([each[LOSS] for each in losses], abs=4e-6)


def test_right_answers_take_one_forward_and_large_logits_are_made_in_chunks(tokenizer, encoded, monkeypatch):
    model = adapted(models.qwen3, tokenizer).eval()
    said = greedy(model, [e.prompt for e in encoded], 6)
    right = [replace(e, answer=tuple(tokens)) for e, tokens in zip(encoded, said, strict=True)]
    scorer = Scorer(model, tokenizer, max_new_tokens=6, batch=64, device=CPU, packed=True)
    forwards = []
    with model.register_forward_pre_hook(lambda *_: forwards.append(1)):
        whole = scorer.score(TASK, right)
    assert len(forwards) == 1
    for name in ("LARGE", "CHUNK", "SMALL"):
        for module in (evaluate, head):
            monkeypatch.setattr(module, name, 400, raising=False)
    for p in model.parameters():
        p.requires_grad_(False)
    sizes = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, W, b=None: sizes.append((len(x), len(W))) or linear(x, W, b))
    chunked = scorer.score(TASK, right)
    assert max(rows for rows, words in sizes if words == len(tokenizer)) == max(1, 400 // len(tokenizer))
    assert [(a.text, a.scores[LOSS]) for a in chunked] == [(a.text, pytest.approx(a.scores[LOSS], abs=4e-6)) for a in whole]


def test_the_labels_are_drafts_and_two_that_begin_alike_share_what_is_common():
    assert drafts_of([(5, 6, 0), (7, 8, 1, 0), (7, 8, 2, 0), (9, 1), (9, 2), (4,), (3, 1, 0), (3, 1, 0)]) == {
        5: (5, 6, 0),
        7: (7, 8),
        3: (3, 1, 0),
    }


def test_a_model_with_a_sliding_window_reads_every_prompt_whole(tokenizer, encoded, generated):
    def make(vocab):
        config = models.MistralConfig(vocab_size=vocab, head_dim=16, sliding_window=16, **models.SMALL)
        return models.MistralForCausalLM(config)

    model = adapted(make, tokenizer)
    answers = Scorer(model, tokenizer, max_new_tokens=4, batch=1, device=CPU).score(TASK, encoded)
    assert [a.text for a in answers] == generated(make, 4)[0]


def test_decoding_stops_at_the_end_of_sequence_and_at_nothing_else(tokenizer, encoded):
    """A model that says: newline, "ball", end of sequence, and then nonsense for ever."""
    script = [*tokenizer("\nball", add_special_tokens=False).input_ids, tokenizer.eos_token_id, 50, 51, 52]
    calls = []

    class Scripted(models.Qwen3ForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = torch.zeros_like(out.logits)
            out.logits[..., script[min(len(calls), len(script) - 1)]] = 9.0
            calls.append(1)
            return out

    model = Scripted(models.qwen3(vocab=len(tokenizer)).config)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=1)
    (answer,) = Scorer(model, tokenizer, max_new_tokens=50, batch=4, device=CPU).score(TASK, encoded[:1])
    assert answer.text == "ball"
    assert answer.label == "ball"
    assert len(calls) == len(script) - 3, "one forward for each token up to the end, and no more"


def test_progress_tells_every_example_once_and_what_is_known_is_not_asked_again(tokenizer, encoded):
    batches, later = [], []
    model = adapted(models.qwen3, tokenizer)
    scorer = Scorer(model, tokenizer, max_new_tokens=2, batch=7, device=CPU)
    answers = scorer.score(TASK, encoded, watch=batches.append)
    assert [len(batch) for batch in batches] == [7, 7, 6]
    assert sorted(i for batch in batches for i in batch) == list(range(20))
    again = scorer.score(TASK, encoded, known=batches[0] | batches[2], watch=later.append)
    assert later == [batches[1]]
    assert again == answers


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("tokens", [1, 60, 10_000])
def test_the_loss_of_every_answer_is_the_models_own_whatever_is_read_together(packed, tokens, tokenizer, monkeypatch):
    model = adapted(models.qwen3, tokenizer).eval()
    long = Task("TC", "toys", "Choose.\n", ("ball doll ball", "doll"))
    examples = Encoder(tokenizer, max_tokens=200).encode(
        long, [Example(i, s, long.labels[i % 2]) for i, s in enumerate(SENTENCES[:9])]
    )
    monkeypatch.setattr(evaluate, "TOKENS", tokens)
    found = Scorer(model, tokenizer, max_new_tokens=1, batch=1, device=CPU, packed=packed).losses(examples)
    for e, each in zip(examples, found, strict=True):
        ids, labels = torch.tensor([e.prompt + e.answer]), torch.tensor([(-100,) * len(e.prompt) + e.answer])
        with torch.no_grad():
            outputs = model(input_ids=ids, labels=labels)
        said = outputs.logits[0, len(e.prompt) - 1 : -1].argmax(-1)
        assert each["loss"] == pytest.approx(float(outputs.loss), abs=1e-5)
        assert each["token_accuracy"] == pytest.approx(float((said == torch.tensor(e.answer)).float().mean()))
