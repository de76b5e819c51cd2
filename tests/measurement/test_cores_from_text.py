"""Cores from text: against a dense decomposition of rows that plain PEFT's own forward gives, and in protected training."""

import hashlib
import json
import shutil
from dataclasses import fields
from itertools import accumulate

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import models
from anchorlora import AdapterStack, Anchor, Freeze, ProjectDisplacement, ProjectGradient, Retract, measure, protect
from anchorlora.adapters import attach
from anchorlora.config import base_model_of
from anchorlora.data import read_samples, token_ids
from anchorlora.features import FeatureStore, read_cores
from anchorlora.measurement import cores_from_data
from anchorlora.measurement.checkpoints import audit
from anchorlora.models import cores_from_text
from anchorlora.models.cores_from_text import CoreRule, spread_positions
from anchorlora.models.load import load_base_model
from audited import edit_config, edit_weights

EPS32 = torch.finfo(torch.float32).eps
ROWS = [{"text": f"the old fruit number {i} is a pear, {'very ' * (i % 5)}green and new {i * i}"} for i in range(40)]


def save_adapter(model_folder, folder, **changes):
    torch.manual_seed(5)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "lora_dropout": 0.4}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), LoraConfig(**settings | changes))
    model.save_pretrained(str(folder))
    return folder


SIZES = {field.name for field in fields(CoreRule)}


@pytest.fixture(scope="module")
def old(small_model, tmp_path_factory):
    return save_adapter(small_model, tmp_path_factory.mktemp("adapters") / "old")


def rows_read(model_folder, adapter, texts, *, max_tokens=512):
    """What each adapted layer reads, (tokens, d) in float64, by plain PEFT and hooks of the test."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), str(adapter)).eval()
    seen = {}
    for name, module in model.base_model.model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            module.register_forward_pre_hook(lambda m, args, name=name: seen.setdefault(name, []).append(args[0][0].double()))
    with torch.no_grad():
        for text in texts:
            model(input_ids=torch.tensor([tokenizer(text + tokenizer.eos_token).input_ids[:max_tokens]]))
    return {name: torch.cat(parts) for name, parts in seen.items()}


def dense(rows, *, energy, at_least, at_most):
    _, values, right = torch.linalg.svd(rows, full_matrices=False)
    shares = values.square().cumsum(0) / values.square().sum()
    star = int((shares < energy).sum()) + 1
    k = min(max(star, at_least), at_most)
    gap = float(values[k - 1] - values[k]) / float(values[0])
    return right[:k].T, star, float(shares[k - 1]), gap


@pytest.mark.parametrize("rule", [{}, {"rows": 60, "energy": 0.8, "at_least": 2, "at_most": 9}, {"max_tokens": 7}])
def test_cores_are_the_dense_decomposition_of_the_first_tokens(rule, small_model, old):
    found = cores_from_data(small_model, old, ROWS, rule=CoreRule(**rule))
    rule = {"rows": 128, "energy": 0.93, "at_least": 4, "at_most": 20, "max_tokens": 512} | rule
    count, longest = rule.pop("rows"), rule.pop("max_tokens")
    expected = rows_read(small_model, old, [row["text"] for row in ROWS], max_tokens=longest)
    assert set(found.cores) == set(expected)
    for layer, rows in expected.items():
        V, star, share, gap = dense(rows[:count], **rule)
        made = found.layers[layer]
        assert (made.core.k, made.k_star, made.rows) == (V.shape[1], star, count), layer
        assert made.retained_energy == pytest.approx(share, abs=1e-5)
        apart = made.core.basis.double() - V @ (V.T @ made.core.basis.double())
        assert float(apart.norm()) <= 100 * EPS32 / gap, layer


def test_dropout_of_the_adapter_is_off_and_nothing_is_drawn(small_model, old):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = cores_from_data(small_model, old, ROWS)
    torch.manual_seed(2)
    two = cores_from_data(small_model, old, ROWS)
    assert all(torch.equal(one.cores[layer].basis, two.cores[layer].basis) for layer in one.cores)
    torch.manual_seed(1)
    assert torch.equal(before, torch.get_rng_state())


def test_the_file_repeats_byte_for_byte_and_says_what_it_was_made_from(small_model, old, tmp_path):
    found = cores_from_data(small_model, old, ROWS, out=tmp_path / "a")
    cores_from_data(small_model, old, ROWS, out=tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}  # noqa: SIM118
        header = file.metadata()
    content = (tmp_path / "a").read_bytes()
    assert content.index(b'"layers"') < content.index(b'"origin"'), "sorted, where the library's order differs from run to run"
    origin = json.loads(header["origin"])
    assert origin == found.origin
    assert origin["adapter_sha256"] == hashlib.sha256((old / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert origin["model"]["name"] == str(small_model)
    assert origin["rule"]["energy"] == 0.93
    assert sum(layer["rows"] for layer in origin["layers"].values()) == 2 * 128, "two layers, one store each"
    back = read_cores(str(tmp_path / "a"))
    assert all(torch.equal(back[layer].basis, core.basis) for layer, core in found.cores.items())


def test_spread_rows_are_tokens_from_all_over_the_text(small_model, old):
    texts = [row["text"] for row in ROWS]
    every = rows_read(small_model, old, texts)
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    lengths = [len(tokenizer(text + tokenizer.eos_token).input_ids) for text in texts]
    places = spread_positions(lengths, 30)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    chosen = [starts[i] + at for i, kept in places.items() for at in kept]
    found = cores_from_data(small_model, old, ROWS, rule=CoreRule(rows=30, spread=True, energy=0.9))
    assert found.origin["examples"] == {"given": 40, "used": len(places)}
    for layer, rows in every.items():
        V, star, _, gap = dense(rows[chosen], energy=0.9, at_least=4, at_most=20)
        assert found.layers[layer].k_star == star
        apart = found.cores[layer].basis.double() - V @ (V.T @ found.cores[layer].basis.double())
        assert float(apart.norm()) <= 100 * EPS32 / gap


@pytest.mark.parametrize("spread", [False, True])
def test_the_rows_kept_are_those_of_whole_texts_of_which_fewer_tokens_are_read(spread, small_model, old):
    loaded = load_base_model(base_model_of("model", model=str(small_model), device="cpu"), adapter=old)
    adapted, samples = attach(loaded.model, old), read_samples(ROWS)
    texts = list(token_ids(samples, loaded.tokenizer, max_tokens=512))
    rule = CoreRule(rows=90, spread=spread)
    kept = spread_positions([len(ids) for ids in texts], 90) if spread else dict.fromkeys(range(len(texts)), slice(None))
    whole, tokens = FeatureStore(limit=90, spread=False), []
    masks = [torch.zeros(1, len(ids), dtype=torch.bool) for ids in texts]
    for i, mask in enumerate(masks):
        mask[0, kept.get(i, [])] = True
    whole.read(adapted, [(torch.tensor([ids]), mask) for ids, mask in zip(texts, masks, strict=True) if mask.any()])
    adapted.register_forward_pre_hook(lambda _, args, inputs: tokens.append(inputs["input_ids"].numel()), with_kwargs=True)
    made, used = cores_from_text._read(
        adapted, loaded.tokenizer, samples, rule, device=torch.device("cpu"), watch=lambda done, total: None
    )
    tried = 5 * cores_from_text.TRIED
    assert used == (len(kept) if spread else sum(n < 90 for n in accumulate(map(len, texts))) + 1)
    assert len(tokens) <= 2 + 2 + 1, "two texts one by one and together, then one row"
    assert sum(tokens) - tried <= (0.95 * sum(map(len, texts)) if spread else 90)
    for layer, rows in whole.last.core.items():
        assert float((made.last.core[layer] - rows).abs().max()) <= 50 * EPS32 * float(rows.abs().max()), layer


def test_spread_positions_take_one_token_of_each_equal_share():
    lengths = [5, 0, 12, 1, 30, 2]
    places = spread_positions(lengths, 10)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    tokens = [starts[i] + at for i, kept in places.items() for at in kept]
    assert [token * 10 // 50 for token in tokens] == list(range(10))
    assert all(0 <= at < lengths[i] for i, kept in places.items() for at in kept)
    assert spread_positions([2, 0, 1], 10) == {0: [0, 1], 2: [0]}, "all there are"
    assert spread_positions([], 10) == {}
    same_length = [at for kept in spread_positions([50] * 1280, 128).values() for at in kept]
    assert len(set(same_length)) > 40, "shares that are whole examples do not always hit the same place of one"


@pytest.mark.parametrize("spread", [False, True])
def test_protected_training_with_these_cores_is_exact(spread, small_model, old):
    kept = cores_from_data(small_model, old, ROWS, rule=CoreRule(spread=spread)).cores
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small_model), str(old), is_trainable=True)
    beside = AdapterStack.continuing(AutoModelForCausalLM.from_pretrained(small_model), old, rank=4)
    ways = [
        (model, Anchor.of(model, cores=kept), [ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")]),
        (beside.model, beside.anchor(cores=kept), [Retract("A"), ProjectGradient("A"), ProjectDisplacement("A")]),
    ]
    for learner, anchor, constraints in ways:
        optimizer = torch.optim.AdamW([p for p in learner.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
        learner.train()
        with protect(optimizer, anchor, constraints):
            for seed in range(6):
                ids = models.tokens(4, 16, vocab=250, seed=seed)
                learner(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        drift = measure(anchor)
        assert drift.d_eff > 0
        assert drift.rho <= max(1e-7, 3 * drift.rho_floor)


def test_the_tokenizer_beside_the_adapter_reads_the_text(small_model, old, tmp_path):
    """TRL saves it there, with a chat template that the base model may not have."""
    own = tmp_path / "own"
    shutil.copytree(old, own)
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
    tokenizer.save_pretrained(own)
    chats = [{"messages": [{"role": "user", "content": row["text"]}]} for row in ROWS]
    expected = cores_from_data(small_model, old, ROWS).cores
    found = cores_from_data(small_model, own, chats).cores
    assert all(torch.equal(found[layer].basis, expected[layer].basis) for layer in expected)
    (own / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="the tokenizer in .*own cannot be loaded: .*; without its files the model's own is used"):
        cores_from_data(small_model, own, chats)


def test_what_makes_no_core_is_refused_and_nothing_is_written(small_model, old, tmp_path):
    refused = [
        ({"data": [{"text": "a"}]}, r"the text has only \d tokens, but a core needs at least 4 feature rows; give more text"),
        (
            {"data": [{"text": "a" + "pear " * 40}], "rows": 40, "at_least": 20},
            "feature rows at .* span only .* directions, but a core",
        ),
        ({"energy": 0.0}, "energy is a fraction of the rows' energy, above 0 and at most 1, not 0.0"),
        ({"energy": float("nan")}, "energy is a fraction"),
        ({"at_least": 30}, "at_least 30 must not be above at_most 20"),
        ({"rows": 3}, "3 rows make no core of at least 4 directions; raise rows or lower at_least"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"device": "nowhere"}, "no device is called 'nowhere'; give cpu, cuda, cuda:0, xpu, mps or auto"),
        ({"device": "cuda:99"}, "the device cuda:99 cannot be used here: .*; give cpu or auto"),
        ({"adapter": tmp_path}, r"nor a saved adapter \(adapter_config.json\)"),
        ({"model": tmp_path / "no/model"}, "no model at .*no/model: it has no config.json"),
        ({"out": tmp_path / "no/folder"}, "there is no folder .*no for folder; make it first"),
    ]
    for changes, said in refused:
        asked = {"model": small_model, "adapter": old, "data": ROWS, "out": tmp_path / "cores"} | changes
        with pytest.raises(ValueError, match=said):
            rule = CoreRule(**{name: asked.pop(name) for name in SIZES & set(asked)})
            cores_from_data(**asked, rule=rule)
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_of_another_model_is_refused(small_model, tmp_path):
    models.qwen3(vocab=420, hidden_size=32).save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(small_model).save_pretrained(tmp_path / "other")
    save_adapter(tmp_path / "other", tmp_path / "adapter")
    with pytest.raises(ValueError, match="the adapter belongs to another model"):
        cores_from_data(small_model, tmp_path / "adapter", ROWS)


def test_examples_are_cut_at_what_the_model_can_read(tmp_path, small_model):
    """GPT-2 has a table of positions, which a longer input would leave."""
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    models.gpt2(vocab=len(tokenizer)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    save_adapter(tmp_path / "gpt2", tmp_path / "adapter", target_modules=["c_attn"], fan_in_fan_out=True)
    found = cores_from_data(tmp_path / "gpt2", tmp_path / "adapter", [{"text": "old pear " * 200}], rule=CoreRule(rows=500))
    assert {made.rows for made in found.layers.values()} == {128}


def test_an_audit_of_text_is_an_audit_of_the_cores_of_that_text(small_model, old, tmp_path):
    text = tmp_path / "old.jsonl"
    text.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    cores_from_data(small_model, old, text, out=tmp_path / "cores.safetensors")
    after = save_adapter(small_model, tmp_path / "after", init_lora_weights=True)
    by_text = audit(old, after, data=text, model=str(small_model)).as_dict()
    by_cores = audit(old, after, cores=tmp_path / "cores.safetensors").as_dict()
    assert by_text["overall"]["rho"] > 0
    assert by_text["layers"].keys() == by_cores["layers"].keys()
    for layer, reading in by_text["layers"].items():  # the file rounds cores to float32
        assert reading["rho"] == pytest.approx(by_cores["layers"][layer]["rho"], rel=1e-5)


def test_text_is_read_with_what_before_is_and_never_with_after(small_model, old, tmp_path):
    """The bare model has no adapter; of two adapters that are both active, one alone is another model."""
    text = tmp_path / "old.jsonl"
    text.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    after = shutil.copytree(old, tmp_path / "after")
    edit_config(after, init_lora_weights=True)
    edit_weights(after, lambda tensors: {name: 5 * tensor for name, tensor in tensors.items()})
    cores_from_data(small_model, data=text, targets=("q_proj", "v_proj"), out=tmp_path / "bare.safetensors")
    cores_from_data(small_model, after, text, out=tmp_path / "after.safetensors")
    bare, later = (audit(small_model, after, cores=tmp_path / f"{name}.safetensors") for name in ("bare", "after"))
    rho = audit(small_model, after, data=text).audited.overall.right.rho
    assert rho == pytest.approx(bare.audited.overall.right.rho, rel=1e-5)
    assert rho != pytest.approx(later.audited.overall.right.rho, rel=1e-3)
    for folder in (tmp_path / "two", tmp_path / "both"):
        for name in ("", "second"):
            shutil.copytree(old, folder / name)
    with pytest.raises(ValueError, match="two holds 2 adapters .default, second.; give one of them.*move the others out"):
        audit(tmp_path / "two", tmp_path / "both", data=text, model=str(small_model))
    with pytest.raises(ValueError, match="two holds 2 adapters"):
        cores_from_data(small_model, tmp_path / "two", text)
