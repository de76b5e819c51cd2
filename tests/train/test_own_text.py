"""Text that a model writes itself: from its own template or from nothing, repeatable, and from its own distribution."""

import json
import math
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Cache

from anchorlora.adapters import lora_layers
from anchorlora.cli.app import main
from anchorlora.config import BaseModelSettings
from anchorlora.data import Encoder, TextTask, examples_of, read_samples, token_ids
from anchorlora.errors import InvalidValue
from anchorlora.models import own_text as module
from anchorlora.models.load import load_base_model
from anchorlora.models.own_text import defects, own_text
from anchorlora.train.kept import row_of
from architectures.cases import ARCHITECTURES, EXPERTS, GRIFFIN, OF_8, RWKV, Architecture

ASKING = "{% if add_generation_prompt %}assistant:\n{% endif %}"
TEMPLATE = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}{{ eos_token }}{% endfor %}" + ASKING


def loaded_in(dtype):
    settings = BaseModelSettings(model="embedded:mini", dtype=dtype, device="cpu")
    return load_base_model(settings)


@pytest.fixture(autouse=True)
def as_on_a_processor_without_bfloat16(monkeypatch):
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda device: False)


@pytest.fixture
def loaded():
    return loaded_in("float32")


def test_a_chat_begins_with_the_templates_own_words_and_is_answered(loaded, monkeypatch):
    loaded.tokenizer.chat_template = TEMPLATE
    asked = []
    drawn = module.draw

    def noted(model, reading, numbers, **how):
        pairs = zip(reading.ids, reading.mask, strict=True)
        asked.append(loaded.tokenizer.batch_decode([ids[there.bool()] for ids, there in pairs]))
        return drawn(model, reading, numbers, **how)

    monkeypatch.setattr(module, "draw", noted)
    rows = own_text(loaded.model, loaded.tokenizer, count=3, seed=1, max_tokens=12)
    assert [[message["role"] for message in row["messages"]] for row in rows] == [["user", "assistant"]] * 3
    assert set(asked[0]) == {"user:\n"}
    end = loaded.tokenizer.eos_token
    assert asked[-1][:3] == [f"user:\n{row['messages'][0]['content']}{end}assistant:\n" for row in rows]


def test_empty_adapters_are_left_out_while_text_is_written(loaded):
    bare = own_text(loaded.model, loaded.tokenizer, count=3, seed=1, max_tokens=12)
    adapted = get_peft_model(loaded.model, LoraConfig(target_modules=["q_proj", "down_proj"]))
    used = []
    for layer in lora_layers(adapted).values():
        layer.lora_A["default"].register_forward_hook(lambda *_: used.append(1))
    assert own_text(adapted, loaded.tokenizer, count=3, seed=1, max_tokens=12) == bare
    assert not used


def test_what_was_drawn_is_learned_token_for_token_and_a_stop_loses_nothing(loaded, tmp_path, monkeypatch):
    """Tokens of a text that is tokenized again may be others: what is kept, trained and measured are those that were drawn."""
    loaded.tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr(module, "TOGETHER", 1)
    whole = own_text(loaded.model, loaded.tokenizer, count=20, seed=1, max_tokens=12)
    samples = read_samples(whole)
    encoded = list(TextTask("self").encoded(Encoder(loaded.tokenizer, max_tokens=200), examples_of(samples)))
    assert [[list(e.prompt), list(e.answer)] for e in encoded] == [[r["prompt_ids"], r["completion_ids"]] for r in whole]
    assert list(token_ids(samples, loaded.tokenizer, max_tokens=200)) == [r["prompt_ids"] + r["completion_ids"] for r in whole]
    assert [row_of(sample) for sample in samples] == whole
    file, drawn, calls = tmp_path / "self.jsonl", module.draw, []

    def stopped(*args, **how):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return drawn(*args, **how)

    monkeypatch.setattr(module, "draw", stopped)
    with pytest.raises(KeyboardInterrupt):
        own_text(loaded.model, loaded.tokenizer, count=20, seed=1, max_tokens=12, written=file)
    file.write_bytes(file.read_bytes() + b'[{"messa')  # as a kill leaves it
    assert own_text(loaded.model, loaded.tokenizer, count=20, seed=1, max_tokens=12, written=file) == whole
    assert len(calls) == 5, "the first batch was not drawn again"


@torch.inference_mode()
def drawn_by_itself(model, prompt, numbers, *, stops, longest):
    """Tokens after a prompt: the first whose cumulated probability exceeds the number; one forward of the whole text a token."""
    ids = list(prompt)
    for number in numbers.tolist()[:longest]:
        p = model(torch.tensor([ids])).logits[0, -1].double().softmax(0)
        ids.append(int((p.cumsum(0) > number * p.sum()).nonzero()[0]))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("alike", [False, True])
def test_texts_drawn_at_once_whose_ended_rows_leave_are_those_drawn_by_themselves(alike, loaded, monkeypatch):
    """About every sixteenth token stops, so rows leave at many steps; where a cache cannot select rows, they stay."""
    model, tokenizer, read = loaded.model.eval(), loaded.tokenizer, []
    stops = frozenset(range(0, len(tokenizer), 16))
    prompts = [[1 + (7 * i + j) % 50 for j in range(1 + i % 5)] if not alike else [5, 6, 7] for i in range(42)]
    numbers = torch.cat([module.numbers_of(seed, 20)[0] for seed in range(3)])[: len(prompts)]
    alone = [drawn_by_itself(model, p, n, stops=stops, longest=20) for p, n in zip(prompts, numbers, strict=True)]
    assert {1, 20} <= {len(row) for row in alone}
    model.register_forward_pre_hook(lambda _, args, inputs: read.append(len(inputs["input_ids"])), with_kwargs=True)
    assert module.draw(model, module.DecodingState.of(model, tokenizer, prompts), numbers, stops=stops, longest=20) == alone
    assert module.draw(model, module.DecodingState.of(model, tokenizer, []), numbers[:0], stops=stops, longest=20) == []
    assert min(read) < len(prompts) / 2
    read.clear()
    monkeypatch.delattr(Cache, "batch_select_indices")
    assert module.draw(model, module.DecodingState.of(model, tokenizer, prompts), numbers, stops=stops, longest=20) == alone
    assert alike or len(set(read)) <= 2


RECURRENT = {
    f"linear_{each}": size
    for each, size in {"num_value_heads": 4, "num_key_heads": 2, "key_head_dim": 8, "value_head_dim": 8}.items()
}
RECURRENT |= {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 24}
HYBRID = Architecture("Qwen3-Next", "qwen3_next", (), {**OF_8, **EXPERTS, **RECURRENT})


@pytest.mark.parametrize("architecture", [*(each for each in ARCHITECTURES if not each.refused), HYBRID, RWKV, GRIFFIN], ids=str)
def test_an_answer_goes_on_from_what_was_read_of_the_users_message(architecture, loaded, monkeypatch):
    """Users' messages of many lengths, some without an end; each answer is the one that is drawn after its whole prompt alone.

    Where something else than all keys and values is kept, or the model is not told places, prompts are read again; each alone where
    a model knows no mask.
    """
    model, tokenizer, read, stops = (
        architecture.model().eval(),
        loaded.tokenizer,
        [],
        frozenset(range(0, len(loaded.tokenizer), 16)),
    )
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.ndim > 1 else 1  # so that tokens depend on those before
    tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr(module, "stop_ids", lambda *_: stops)
    hook = model.register_forward_pre_hook(lambda _, args, given: read.append(given["input_ids"].numel()), with_kwargs=True)
    rows = own_text(model, tokenizer, count=12, seed=3, max_tokens=12)
    hook.remove()
    before, after = module.frame(tokenizer, chat=True)
    again = architecture.model_type in (
        "mistral",
        "gemma2",
        "gemma3_text",
        "cohere2",
        "bloom",
        "gpt_oss",
        "llama4_text",
        "qwen3_next",
    )
    assert (max(read) > module.BATCH * (1 + len(after))) == again
    alone = []
    for first, second in zip(*module.numbers_of(3 * 1_000_003, 6), strict=True):
        user = drawn_by_itself(model, before, first, stops=stops | {after[0]}, longest=6)
        user = user[:-1] if user[-1] in stops | {after[0]} else user
        if tokenizer.decode(user, skip_special_tokens=True).strip():
            prompt = [*before, *user, *after]
            alone.append((prompt, drawn_by_itself(model, prompt, second, stops=stops, longest=6)))
        if len(alone) == 12:
            break
    assert [(row["prompt_ids"], row["completion_ids"]) for row in rows] == alone
    assert len({len(prompt) for prompt, _ in alone}) > 1


@pytest.mark.parametrize(("fast", "free", "copied"), [(True, None, True), (True, 100, False), (False, None, False)])
def test_a_processor_that_multiplies_in_bfloat16_writes_what_the_model_in_bfloat16_writes(fast, free, copied, loaded, monkeypatch):
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda device: fast)
    monkeypatch.setattr(module, "free_memory", lambda device: free)
    before = {name: p.clone() for name, p in loaded.model.named_parameters()}
    texts = own_text(loaded.model, loaded.tokenizer, count=20, seed=1, max_tokens=12)
    assert all(torch.equal(p, before[name]) for name, p in loaded.model.named_parameters())
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda device: False)
    other = loaded_in("bfloat16") if copied else loaded
    assert own_text(other.model, other.tokenizer, count=20, seed=1, max_tokens=12) == texts


def test_without_a_template_every_second_text_is_a_question_with_the_models_answer(loaded):
    """Each question and each answer ends where its first line does, and is what is drawn after its beginning alone."""
    model, tokenizer = loaded.model.eval(), loaded.tokenizer
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.ndim > 1 else 1  # so that tokens depend on those before
    lines = frozenset(i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i]))
    stops, start = frozenset({tokenizer.eos_token_id}), [tokenizer.eos_token_id]
    head, middle = (tokenizer(part, add_special_tokens=False).input_ids for part in ("Q:", "\nA:"))
    expected = []
    for seed in (7 * 1_000_003, 7 * 1_000_003 + 1):
        for i, (first, second) in enumerate(zip(*module.numbers_of(seed, 40), strict=True)):
            if i % 2 == 0:
                expected.append((start, drawn_by_itself(model, start, first, stops=stops, longest=40)))
                continue
            question = drawn_by_itself(model, start + head, first, stops=stops | lines, longest=40)
            prompt = [*start, *head, *(i for i in question if i not in stops | lines), *middle]
            expected.append((prompt, drawn_by_itself(model, prompt, second, stops=stops | lines, longest=40)))
            if not tokenizer.decode(question, skip_special_tokens=True).strip():
                expected.pop()
    expected = [row for row in expected if tokenizer.decode(row[1], skip_special_tokens=True).strip()]
    rows = own_text(model, tokenizer, count=len(expected), seed=7, max_tokens=40)
    assert [(row["prompt_ids"], row["completion_ids"]) for row in rows] == expected
    asked = [row for row in rows if len(row["prompt_ids"]) > 1]
    assert len(asked) > 8
    assert all(re.fullmatch(r"Q:[^\n]+\nA:[^\n]+\n*", row["text"]) for row in asked)
    assert any(row["completion_ids"][-1] in lines for row in asked), "no answer ended with its line"
    begun = [ids for prompt, ids in expected if ids[-1] not in (stops | lines if len(prompt) > 1 else stops)]
    assert defects(rows, stops=stops)["unfinished"] == len(begun)


def test_own_texts_leave_room_for_the_template_and_its_end(loaded):
    loaded.tokenizer.chat_template = TEMPLATE
    rows = own_text(loaded.model, loaded.tokenizer, count=8, seed=1, max_tokens=256, room=64)
    assert all(len(row["prompt_ids"] + row["completion_ids"]) <= 64 for row in rows)
    with pytest.raises(InvalidValue, match="max_tokens is 16, and a text of the model's own takes at least .*; raise max_tokens"):
        own_text(loaded.model, loaded.tokenizer, count=8, seed=1, max_tokens=256, room=16)


def test_a_template_that_ends_the_users_message_with_no_token_of_its_own_is_refused(loaded):
    loaded.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(InvalidValue, match="ends the user's message with no token of its own.*; give a file of old text"):
        own_text(loaded.model, loaded.tokenizer, count=2, seed=1, max_tokens=4)


def test_the_same_seed_writes_the_same_and_nobody_elses_draws_change(loaded):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    first = own_text(loaded.model, loaded.tokenizer, count=4, seed=1, max_tokens=12)
    assert torch.equal(torch.rand(3), expected)
    assert own_text(loaded.model, loaded.tokenizer, count=4, seed=1, max_tokens=12) == first
    assert own_text(loaded.model, loaded.tokenizer, count=4, seed=2, max_tokens=12) != first


def test_tokens_come_from_the_whole_distribution_whatever_the_models_own_settings(loaded, monkeypatch):
    """First tokens of many texts: their mean surprise is the model's entropy, within four standard errors."""
    model, tokenizer = loaded.model, loaded.tokenizer
    model.generation_config.top_k, model.generation_config.temperature = 2, 0.1
    model.generation_config.repetition_penalty = 5.0
    start = tokenizer.eos_token_id
    with torch.no_grad():
        log = model(torch.tensor([[start]])).logits[0, -1].double().log_softmax(0)
    entropy, spread = float(-(log.exp() * log).sum()), float((log.exp() * (log + (log.exp() * -log).sum()) ** 2).sum()) ** 0.5
    torch.manual_seed(0)
    seen, drawn = [], module.draw

    def noted(model, state, *args, **how):
        first = state.ids.shape[1] == 1  # of a text that nothing begins
        rows = drawn(model, state, *args, **how)
        seen.extend(ids[0] for ids in rows if first)
        return rows

    monkeypatch.setattr(module, "draw", noted)
    own_text(model, tokenizer, count=200, seed=5, max_tokens=2)
    surprise = [-float(log[token]) for token in seen]
    assert abs(sum(surprise) / len(surprise) - entropy) < 4 * spread / math.sqrt(len(surprise))


def test_a_model_that_writes_nothing_and_a_template_without_the_message_are_refused(loaded):
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight.zero_()
    loaded.tokenizer.chat_template = "always the same"
    with pytest.raises(InvalidValue, match="does not write the user's message; give a file of old text"):
        own_text(loaded.model, loaded.tokenizer, count=2, seed=1, max_tokens=4)
    loaded.tokenizer.chat_template = None
    loaded.tokenizer.eos_token = None
    with pytest.raises(InvalidValue, match="no end-of-sequence token"):
        own_text(loaded.model, loaded.tokenizer, count=2, seed=1, max_tokens=4)


@pytest.mark.parametrize(("free", "way_out"), [(11 * 2**20, "set a smaller max_tokens, or give"), (2**20, "quantized=nf4")])
def test_texts_that_take_more_memory_than_is_left_are_refused_before_any_weights_are_read(
    free, way_out, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(module, "free_memory", lambda device: free)
    monkeypatch.setattr("anchorlora.train.stages.before", lambda *_, **__: pytest.fail("no model is loaded for what cannot be"))
    rows = [{"prompt": f"{i} and one", "completion": f" {i + 1}"} for i in range(20)]
    (tmp_path / "new.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out"
    assert main(["train", "embedded:mini", "--data", str(tmp_path / "new.jsonl"), "--keep", "self", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert re.search(r"--keep self takes .* MiB on .* weights, .* keys and values of 16 texts of .* logits.*are free; ", said)
    assert way_out in said
    assert said.count("\n") == 1
    assert not out.exists()


def test_the_memory_that_texts_take_is_that_of_weights_cache_and_logits(loaded, monkeypatch):
    settings = BaseModelSettings(model="embedded:mini", dtype="float32", device="cpu")
    config = loaded.model.config
    drawn = loaded.model.generate(
        torch.ones(module.BATCH, 2, dtype=torch.long), max_new_tokens=7, min_new_tokens=7, return_dict_in_generate=True
    )
    cache = sum(t.nbytes for layer in drawn.past_key_values.layers for t in (layer.keys, layer.values))
    whole = sum(p.nbytes for p in loaded.model.parameters()) + cache + 2 * 4 * module.BATCH * config.vocab_size
    monkeypatch.setattr(module, "free_memory", lambda device: whole)
    module.refuse_too_large(settings, tokens=8)  # of the last token drawn nothing is read
    monkeypatch.setattr(module, "free_memory", lambda device: whole - 1)
    with pytest.raises(InvalidValue, match="--keep self takes"):
        module.refuse_too_large(settings, tokens=8)
    monkeypatch.setattr(module, "free_memory", lambda device: None)
    module.refuse_too_large(settings, tokens=10**9)
