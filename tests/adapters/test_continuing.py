"""A fresh block beside an adapter that was trained elsewhere, and both of them as one file."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

import models
from anchorlora import AdapterStack, Freeze, ProjectDisplacement, Retract, Subspace, measure, protect
from anchorlora.adapters import attach, detach, read_adapter
from anchorlora.adapters.whole import WholeWeights, put_whole
from anchorlora.geometry import Product
from anchorlora.measurement.adapters import layers

EPS = torch.finfo(torch.float32).eps


def base():
    torch.manual_seed(3)
    return models.qwen3()


def save_old(folder, **changes):
    """An adapter as PEFT alone makes and saves it; returns the logits of its model."""
    settings = {"r": 6, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | changes
    model = get_peft_model(base(), LoraConfig(**settings))
    model.save_pretrained(str(folder))
    return logits(model)


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=models.tokens()).logits


def learn(blocks, anchor, constraints, steps=5):
    optimizer = torch.optim.AdamW([p for p in blocks.model.parameters() if p.requires_grad], lr=1e-2)
    blocks.model.train()
    with protect(optimizer, anchor, constraints):
        for seed in range(steps):
            ids = models.tokens(seed=seed)
            blocks.model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def cores(blocks):
    return {s.name: Subspace(torch.linalg.qr(torch.randn(s.current.A.shape[1], 4)).Q) for s in blocks.anchor().layers}


def close(a, b):
    return float((a - b).abs().max()) <= 100 * EPS * float(a.abs().max())


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"r": 3, "lora_alpha": 5}, {"lora_dropout": 0.3}])
def test_a_new_block_changes_no_output_and_alone_trains(changes, tmp_path):
    before = save_old(tmp_path / "old", **changes)
    blocks = AdapterStack.continuing(base(), tmp_path / "old", rank=4)
    assert close(before, logits(blocks.model))
    trains = [name for name, p in blocks.model.named_parameters() if p.requires_grad]
    assert len(trains) == len(blocks.trainable()) == 2 * 2 * 2
    assert {p.dtype for p in blocks.trainable()} == {torch.float32}
    old = read_adapter(tmp_path / "old")
    assert all(torch.equal(layer.history.A, old[layer.name].A) for layer in blocks.anchor().layers)
    assert all(layer.current.scale == pytest.approx(old[layer.name].scale, rel=1e-12) for layer in blocks.anchor().layers)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"v_proj": 4}},
        {"alpha_pattern": {"v_proj": 5}},
        {"alpha_pattern": {"q_proj": 0}},  # a layer that does nothing
    ],
)
def test_an_adapter_of_several_ranks_or_scales_continues_as_one(changes, tmp_path):
    before = save_old(tmp_path / "old", **changes)
    blocks = AdapterStack.continuing(base(), tmp_path / "old", rank=4)
    assert close(before, logits(blocks.model))
    blocks.save(tmp_path / "both")
    assert close(before, logits(PeftModel.from_pretrained(base(), str(tmp_path / "both"))))
    if "rank_pattern" in changes:
        old, both = read_adapter(tmp_path / "old"), read_adapter(tmp_path / "both")
        assert all(both[layer].grown_from(f) is not None for layer, f in old.items()), "missing rows are zero, which is exact"


CHOSEN = {
    "an expression": {"target_modules": r"model\.layers\.[01]\.self_attn\.(q|v)_proj"},
    "an expression without some": {"target_modules": r".*_proj", "exclude_modules": r".*\.(mlp|0)\..*"},
    "names without some": {"target_modules": "all-linear", "exclude_modules": ["mlp.up_proj", "o_proj"]},
    "some layers": {"layers_to_transform": [1]},
    "one layer by pattern": {"layers_to_transform": 1, "layers_pattern": "layers"},
    "layers by expressions": {"layers_to_transform": [0, 1], "layers_pattern": ["h", "lay[a-z]+"]},
    "ranks by an expression": {"rank_pattern": {r".*\.1\..*": 2}, "alpha_pattern": {r"layers\.\d\.self_attn\.v_proj": 1}},
}


@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
def test_layers_that_peft_chose_by_expressions_and_numbers_are_those_that_go_on(chosen, tmp_path):
    before = save_old(tmp_path / "old", **chosen)
    assert torch.equal(logits(attach(base(), tmp_path / "old")), before)
    blocks = AdapterStack.continuing(base(), tmp_path / "old", rank=4)
    assert close(before, logits(blocks.model))
    anchor = blocks.anchor(cores=cores(blocks))
    learn(blocks, anchor, [Retract("A"), ProjectDisplacement("A")])
    assert measure(anchor).exact
    blocks.save(tmp_path / "both")
    assert close(logits(blocks.model), logits(PeftModel.from_pretrained(base(), str(tmp_path / "both"))))


WHOLE = {
    "a head": {"modules_to_save": ["lm_head"]},
    "a norm and an embedding": {"modules_to_save": ["model.norm", "embed_tokens"]},
    "new rows": {"trainable_token_indices": {"embed_tokens": [60, 61]}},
    "new rows in a list": {"trainable_token_indices": [3]},
    "rows of the head": {"trainable_token_indices": {"lm_head": [60]}},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", WHOLE.values(), ids=WHOLE)
def test_whole_weights_that_come_with_an_adapter_are_put_on_kept_and_saved_again(options, tied, tmp_path):
    def bare():
        torch.manual_seed(3)
        return models.qwen3(tie_word_embeddings=tied)

    model = get_peft_model(bare(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and "lora" not in name:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(4)))
    model.save_pretrained(str(tmp_path / "old"), save_embedding_layers=False)
    before = logits(PeftModel.from_pretrained(bare(), str(tmp_path / "old")))
    base = bare()
    own = logits(base)
    assert close(before, logits(attach(base, tmp_path / "old")))
    detach(base)
    assert torch.equal(logits(base), own), "nothing below was written to"
    blocks = AdapterStack.continuing(bare(), tmp_path / "old", rank=4)
    assert close(before, logits(blocks.model))
    anchor = blocks.anchor(cores=cores(blocks))
    learn(blocks, anchor, [Retract("A"), ProjectDisplacement("A")])
    assert measure(anchor).exact
    assert measure(anchor).unprotected == ()
    blocks.save(tmp_path / "both")
    assert close(logits(blocks.model), logits(PeftModel.from_pretrained(bare(), str(tmp_path / "both"))))
    with pytest.raises(ValueError, match="a whole weight beside the factors .* give a dict"):
        read_adapter(tmp_path / "both")


def test_a_tied_head_and_its_table_take_their_own_rows_alone():
    model, tokens = models.qwen3(tie_word_embeddings=True), {"embed_tokens": [3], "lm_head": [5]}
    start, row = model.lm_head.weight.detach().clone(), torch.ones(1, model.config.hidden_size)
    paths = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
    rows = {f"{paths[name]}.token_adapter.trainable_tokens_delta": (1 + i) * row for i, name in enumerate(tokens)}
    put_whole(model, WholeWeights(rows, {"trainable_token_indices": tokens}), where="adapter")
    for i, name in enumerate(tokens):
        expected = start.clone()
        expected[tokens[name]] = (1 + i) * row
        assert torch.equal(model.get_submodule(paths[name]).weight, expected)


def test_the_seed_decides_where_the_new_block_starts(tmp_path):
    save_old(tmp_path / "old")
    starts = [AdapterStack.continuing(base(), tmp_path / "old", rank=4, seed=seed).trainable()[0] for seed in (0, 0, 1)]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True, "lora_alpha": 3}])
def test_history_and_the_new_block_are_one_adapter_that_plain_peft_loads(changes, tmp_path):
    save_old(tmp_path / "old", **changes)
    blocks = AdapterStack.continuing(base(), tmp_path / "old", rank=5)
    learn(blocks, blocks.anchor(), [])
    blocks.save(tmp_path / "both", base="some/model")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["both", "old"]
    loaded = PeftModel.from_pretrained(base(), str(tmp_path / "both"))
    assert loaded.peft_config["default"].base_model_name_or_path == "some/model"
    assert close(logits(blocks.model), logits(loaded))
    old, both = read_adapter(tmp_path / "old"), read_adapter(tmp_path / "both")
    for layer, now in both.items():
        assert now.grown_from(old[layer]) is not None, "the old rows are bitwise the old adapter"


@pytest.mark.parametrize("copied", [False, True])
def test_a_model_that_peft_saves_in_halves_says_so_except_in_a_checkpoint(copied, tmp_path):
    save_old(tmp_path / "old")
    blocks = AdapterStack.continuing(base(), tmp_path / "old", rank=4)
    learn(blocks, blocks.anchor(cores=cores(blocks)), [Retract("A"), ProjectDisplacement("A")])
    model = copy.deepcopy(blocks.model) if copied else blocks.model
    with pytest.warns(UserWarning, match="writes the new block and its history apart.*; AdapterStack.save writes both"):
        model.save_pretrained(str(tmp_path / "halves"))
    assert not close(logits(model), logits(PeftModel.from_pretrained(base(), str(tmp_path / "halves"))))
    model.save_pretrained(str(tmp_path / "checkpoint-5"))
    merged = logits(model)
    assert close(merged, logits(model.merge_and_unload()))


def test_a_protected_new_block_leaves_the_core_alone_live_and_on_disk(tmp_path):
    save_old(tmp_path / "old", use_rslora=True)
    blocks = AdapterStack.continuing(base(), tmp_path / "old", rank=4)
    kept = cores(blocks)
    anchor = blocks.anchor(cores=kept)
    learn(blocks, anchor, [Retract("A"), ProjectDisplacement("A")])
    drift = measure(anchor)
    assert drift.d_eff > 0
    assert drift.rho <= max(1e-7, 3 * drift.rho_floor)
    blocks.save(tmp_path / "both")
    on_disk = layers(read_adapter(tmp_path / "old"), read_adapter(tmp_path / "both"), kept)
    for layer in on_disk:  # dense, float64: B_new A_new V, nothing else
        new = Product(layer.current.scale * layer.current.B.double(), layer.current.A.double())
        response = new.left @ new.right @ kept[layer.name].basis.double()
        assert float(response.norm()) <= 1e-6 * float((new.left @ new.right).norm())


def test_a_frozen_b_that_would_never_learn_beside_the_old_adapter_is_refused(tmp_path):
    save_old(tmp_path / "old")
    blocks = AdapterStack.continuing(base(), tmp_path / "old", rank=4)
    anchor = blocks.anchor()
    with pytest.raises(ValueError, match=r'B is zero at every layer and Freeze\("B"\) keeps it so: .* use Retract\("A"\)'):
        learn(blocks, anchor, [Freeze("B")])


def test_what_does_not_fit_is_refused(tmp_path):
    save_old(tmp_path / "old")
    with pytest.raises(ValueError, match=r"adapts \S+, which the model does not have; the adapter belongs to another model"):
        AdapterStack.continuing(models.gpt2(), tmp_path / "old", rank=4)
    with pytest.raises(ValueError, match=r"as \(64, 64\), but it is \(128, 64\); the adapter belongs to another model"):
        AdapterStack.continuing(models.qwen3(num_attention_heads=8), tmp_path / "old", rank=4)
    with pytest.raises(ValueError, match="adapter_config.json is missing"):
        AdapterStack.continuing(base(), tmp_path, rank=4)


def test_saving_refuses_a_folder_that_is_there_and_leaves_nothing_half_written(tmp_path, monkeypatch):
    save_old(tmp_path / "old")
    blocks = AdapterStack.continuing(base(), tmp_path / "old", rank=4)
    with pytest.raises(FileExistsError, match="exists already and is not overwritten"):
        blocks.save(tmp_path / "old")
    monkeypatch.setattr("anchorlora.store.tensors.save_file", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        blocks.save(tmp_path / "both")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
