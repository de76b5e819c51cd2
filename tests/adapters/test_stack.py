import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from torch import nn

import models
from anchorlora import Anchor, Subspace
from anchorlora.adapters import AdapterStack, lora_layers, read_adapter, write_adapter
from anchorlora.adapters.kinds import hold, without_empty
from anchorlora.errors import ProtectionLost

EPS = torch.finfo(torch.float32).eps


def blocks(model=None, **changes):
    settings = {"targets": ("q_proj", "v_proj"), "rank": 4, "alpha": 16, "dropout": 0.0} | changes
    return AdapterStack(model if model is not None else models.qwen3(), **settings)


def fill(b, seed=0):
    """Give the current block some content."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in b.trainable():
            p.copy_(torch.randn(p.shape, generator=draw) / 4)


def logits(model, ids=None):
    model.eval()
    with torch.no_grad():
        return model(input_ids=models.tokens() if ids is None else ids).logits


def stacked(tasks, **changes):
    b = blocks(**changes)
    for task in range(tasks):
        b.open(torch.Generator().manual_seed(task))
        fill(b, seed=task)
        b.fold()
    return b


@pytest.mark.parametrize("make", [models.qwen3, models.llama, models.mistral])
def test_any_causal_model_with_linear_targets_is_adapted(make):
    b = blocks(make())
    b.open(torch.Generator().manual_seed(0))
    assert len(b.trainable()) == 2 * 2 * 2  # layers x targets x factors
    assert {name.rsplit(".", 1)[-1] for name in lora_layers(b.model)} == {"q_proj", "v_proj"}


def test_missing_targets_name_the_layers_that_there_are():
    with pytest.raises(LookupError, match="no module called query; its linear layers are: down_proj, .*q_proj.*v_proj"):
        blocks(targets=("query",))


def test_a_fresh_block_changes_no_logit_and_starts_as_peft_starts():
    model = models.qwen3()
    before = logits(model)
    b = blocks(model)
    b.open(torch.Generator().manual_seed(0))
    assert torch.equal(logits(b.model), before)
    for layer in b.anchor().layers:
        bound = 1 / layer.current.A.shape[1] ** 0.5
        assert not layer.current.B.any()
        assert 0.9 * bound < float(layer.current.A.detach().abs().max()) <= bound


def test_the_same_generator_gives_the_same_block_and_touches_no_global_state():
    b = blocks()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    b.open(torch.Generator().manual_seed(1))
    first = [p.detach().clone() for p in b.trainable()]
    b.open(torch.Generator().manual_seed(1))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(x, y) for x, y in zip(first, b.trainable(), strict=True))


def test_folding_keeps_the_function_and_only_the_new_block_trains():
    b = blocks()
    b.open(torch.Generator().manual_seed(0))
    fill(b)
    before = logits(b.model)
    b.fold()
    assert torch.allclose(logits(b.model), before, atol=50 * EPS * float(before.abs().max()))
    b.open(torch.Generator().manual_seed(1))
    assert torch.allclose(logits(b.model), before, atol=50 * EPS * float(before.abs().max()))
    trains = {name for name, p in b.model.named_parameters() if p.requires_grad}
    assert trains
    assert all(".default." in name for name in trains)


def test_history_is_one_adapter_of_stacked_rank_whatever_the_task():
    b = stacked(5)
    b.open(torch.Generator().manual_seed(9))
    for layer in lora_layers(b.model).values():
        assert set(layer.active_adapters) == {"history", "default"}
        assert layer.lora_A["history"].weight.shape[0] == 5 * 4
        assert layer.scaling["history"] == layer.scaling["default"] == 4.0


@pytest.mark.parametrize("rslora", [False, True])
def test_stacked_history_computes_the_sum_of_its_blocks(rslora):
    model = models.qwen3()
    b = blocks(model, rslora=rslora)
    expected = {}
    for task in range(3):
        b.open(torch.Generator().manual_seed(task))
        fill(b, seed=task)
        for layer in b.anchor().layers:
            block = layer.current.scale * layer.current.B.detach().double() @ layer.current.A.detach().double()
            expected[layer.name] = expected.get(layer.name, 0) + block
        b.fold()
    assert b.scale == (16 / 2 if rslora else 4.0)
    for path, factors in b.factors().items():
        whole = factors.scale * factors.B.double() @ factors.A.double()
        assert torch.allclose(whole, expected[path], atol=1e-12)


def test_a_block_written_to_from_outside_during_a_task_is_noticed_at_the_fold():
    b = stacked(1)
    b.open(torch.Generator().manual_seed(1))
    with torch.no_grad():
        next(iter(lora_layers(b.model).values())).lora_A["history"].weight.add_(1e-6)
    with pytest.raises(ProtectionLost, match="frozen history at model.layers.0.self_attn.q_proj is not what"):
        b.fold()


def test_a_copy_that_is_made_while_a_layer_is_held_switches_adapters_as_peft_does():
    """As the average of weights that a loop keeps in a block: the block ends for the layer itself alone."""
    b = stacked(1)
    b.open(torch.Generator().manual_seed(2))
    layer = next(iter(lora_layers(b.model).values()))
    release = hold(layer, "default")
    other = copy.deepcopy(layer)
    for each in (layer, other):
        each.enable_adapters(False)
    assert (layer.disable_adapters, layer.active_adapters) == (False, ["history"])
    assert other.disable_adapters
    other.set_adapter("default")
    assert other.active_adapters == ["default"]
    release()


def test_training_leaves_the_history_bitwise_as_it_was():
    b = stacked(2)
    b.open(torch.Generator().manual_seed(2))
    kept = [layer.history.copy() for layer in b.anchor().layers]
    optimizer = torch.optim.AdamW(b.trainable(), lr=1e-2, weight_decay=0.1)
    b.model.train()
    for _ in range(5):
        b.model(input_ids=models.tokens(), labels=models.tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for layer, before in zip(b.anchor().layers, kept, strict=True):
        assert torch.equal(layer.history.A, before.A)
        assert torch.equal(layer.history.B, before.B)
        assert layer.current.B.any()


def test_no_dropout_acts_on_frozen_history_unless_it_is_asked_for():
    b = stacked(1, dropout=0.5)
    b.open(torch.Generator().manual_seed(1))  # B = 0: what differs between two passes can only be history's dropout
    b.model.train()
    with torch.no_grad():
        first, second = (b.model(input_ids=models.tokens()).logits for _ in range(2))
    assert torch.equal(first, second)


def test_shared_dropout_gives_history_and_current_one_mask():
    b = stacked(1, dropout=0.5, history_dropout="shared")
    b.open(torch.Generator().manual_seed(1))
    layer = next(iter(lora_layers(b.model).values()))
    x = torch.ones(1, 1000, 64)
    b.model.train()
    one, other = (layer.lora_dropout[name](x) for name in ("history", "default"))
    again = layer.lora_dropout["history"](x)
    assert torch.equal(one, other)
    assert not torch.equal(one, again)
    assert float((one == 0).float().mean()) == pytest.approx(0.5, abs=0.02)
    assert float(one.max()) == 2.0
    b.model.eval()
    assert torch.equal(layer.lora_dropout["history"](x), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_are_float32_over_a_half_precision_base(dtype):
    b = stacked(1, model=models.qwen3(dtype=dtype))
    b.open(torch.Generator().manual_seed(1))
    assert {p.dtype for name, p in b.model.named_parameters() if "lora_" in name} == {torch.float32}
    assert logits(b.model).dtype == dtype


def test_an_exported_adapter_is_ordinary_and_gives_the_same_logits_in_plain_peft(tmp_path):
    torch.manual_seed(0)
    base = models.qwen3()
    base.save_pretrained(tmp_path / "base")
    b = stacked(3, model=base)
    write_adapter(tmp_path / "adapter", b.factors(), base="some/base")
    expected = logits(b.model)
    loaded = PeftModel.from_pretrained(models.Qwen3ForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    config = loaded.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora) == (12, 48, False)
    assert torch.equal(logits(loaded), expected)


def test_a_saved_adapter_reads_back_bitwise_and_goes_on_as_history(tmp_path):
    b = stacked(2)
    saved = b.factors()
    write_adapter(tmp_path / "a", saved, base="x")
    read = read_adapter(tmp_path / "a")
    assert all(torch.equal(read[n].A, f.A) and torch.equal(read[n].B, f.B) and read[n].scale == f.scale for n, f in saved.items())
    again = blocks(models.qwen3())
    again.restore(read, as_history=True)
    again.open(torch.Generator().manual_seed(3))
    assert all(torch.equal(layer.history.A, saved[layer.name].A) for layer in again.anchor().layers)


def test_writing_an_adapter_twice_gives_the_same_bytes(tmp_path):
    b = stacked(1)
    for name in ("a", "b"):
        write_adapter(tmp_path / name, b.factors(), base="x")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_factors_of_other_layers_are_not_taken_over():
    b = blocks()
    wrong = {f"other.{name}": f for name, f in b.factors().items()}
    with pytest.raises(LookupError, match="saved factors and adapter do not fit: no saved factors for model.layers.0"):
        b.restore(wrong, as_history=True)


class TestScope:
    def adapter(self, **config):
        return get_peft_model(models.qwen3(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **config))

    def cores(self, model, width=64):
        basis = torch.linalg.qr(torch.randn(width, 3)).Q
        return {name: Subspace(basis) for name in lora_layers(model)}

    def test_sites_of_a_users_own_peft_model(self):
        model = self.adapter(lora_alpha=8, use_rslora=True)
        anchor = Anchor.of(model, cores=self.cores(model))
        assert [layer.name for layer in anchor.layers][:2] == ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]
        assert anchor.layers[0].current.scale == 8 / 2
        assert isinstance(anchor.layers[0].factor("A"), nn.Parameter)
        assert anchor.layers[0].factor("A") is next(iter(lora_layers(model).values())).lora_A["default"].weight

    def test_an_unknown_block_names_the_known_ones(self):
        with pytest.raises(LookupError, match="no LoRA adapter called 'task2'; it has: default"):
            Anchor.of(self.adapter(), adapter_name="task2")

    def test_a_model_without_lora_says_so(self):
        with pytest.raises(LookupError, match="it has: none"):
            Anchor.of(models.qwen3())

    def test_cores_of_other_layers_are_refused(self):
        model = self.adapter()
        cores = self.cores(model)
        cores["model.layers.9.self_attn.q_proj"] = cores.pop("model.layers.0.self_attn.q_proj")
        with pytest.raises(LookupError, match=r"no cores for model.layers.0.*; cores for model.layers.9.*not adapted"):
            Anchor.of(model, cores=cores)

    def test_cores_of_another_width_are_refused(self):
        model = self.adapter()
        with pytest.raises(ValueError, match="has width 32, but its A reads 64 inputs; these cores belong to another model"):
            Anchor.of(model, cores=self.cores(model, width=32))

    def test_dora_is_refused(self):
        with pytest.raises(TypeError, match="uses DoRA, whose update is not a product"):
            Anchor.of(self.adapter(use_dora=True))

    def test_adalora_is_refused(self):
        config = AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj", "v_proj"])
        with pytest.raises(TypeError, match="PEFT's SVDLinear is no product s B A; train a plain LoRA"):
            Anchor.of(get_peft_model(models.qwen3(), config))


@pytest.mark.filterwarnings("ignore:`lora_bias=True`")
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    names=st.lists(st.sampled_from(["plain", "dora", "bias"]), min_size=1, max_size=2, unique=True),
    learned=st.lists(st.booleans(), min_size=2, max_size=2),
    off=st.booleans(),
)
def test_leaving_out_empty_adapters_changes_no_output_and_no_gradient(seed, names, learned, off):
    torch.manual_seed(seed)
    kinds = {"plain": {}, "dora": {"use_dora": True}, "bias": {"lora_bias": True}}
    configs = {name: LoraConfig(r=2, target_modules=["q_proj", "down_proj"], **kinds[name]) for name in names}
    model = get_peft_model(models.llama(), configs[names[0]], adapter_name=names[0]).eval()
    for name in names[1:]:
        model.add_adapter(name, configs[name])
    model.base_model.set_adapter(names)
    for name, has_learned in zip(names, learned, strict=False):
        for path, parameter in model.named_parameters():
            if has_learned and f"lora_B.{name}" in path:
                nn.init.normal_(parameter)  # weights, and biases where there are any
    if off:
        model.base_model.disable_adapter_layers()
    ids, used = torch.randint(0, 64, (2, 7)), []
    for layer in lora_layers(model).values():
        layer.register_forward_hook(lambda module, args, out: used.append(not module.disable_adapters))

    def read():
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=embedded).logits
        return logits, torch.autograd.grad(logits.square().sum(), embedded)[0]

    states = [(layer.disable_adapters, layer.active_adapters) for layer in lora_layers(model).values()]
    expected = read()
    used.clear()
    with without_empty(model):
        found = read()
    nothing_is_added = off or (names == ["plain"] and not learned[0])
    assert any(used) != nothing_is_added
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [(layer.disable_adapters, layer.active_adapters) for layer in lora_layers(model).values()] == states
