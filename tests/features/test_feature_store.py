import random
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import models
from anchorlora import FeatureStore
from anchorlora.adapters import AdapterStack, lora_layers
from anchorlora.errors import NotFinite
from anchorlora.features.store import computing_device
from anchorlora.processes import Processes

Q0, V0, Q1, V1 = (f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qv")


@pytest.fixture
def model():
    blocks = AdapterStack(models.qwen3(), targets=("q_proj", "v_proj"), rank=2, alpha=4, dropout=0.1)
    blocks.open(torch.Generator().manual_seed(0))
    return blocks.model


class Inputs:
    """Every input of the first layer's q_proj, recorded beside the store."""

    def __init__(self, model):
        self.seen = []
        lora_layers(model)[Q0].register_forward_pre_hook(lambda m, a: self.seen.append(a[0].detach().clone()))


def left_padded(lengths, seed=0):
    ids = models.tokens(len(lengths), max(lengths), seed=seed)
    mask = torch.zeros_like(ids)
    for i, n in enumerate(lengths):
        mask[i, -n:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def test_rows_are_the_first_valid_inputs_in_encounter_order(model):
    recorded = Inputs(model)
    store = FeatureStore(limit=20, spread=False)
    batches = [left_padded([5, 3]), left_padded([7, 4], seed=1), left_padded([6, 6], seed=2)]
    model.train()
    with store.collect(model):
        for batch in batches:
            model(**batch)
    valid = [x[i][b["attention_mask"][i].bool()] for x, b in zip(recorded.seen, batches, strict=True) for i in range(2)]
    assert torch.equal(store.last.core[Q0], torch.cat(valid)[:20])


@pytest.mark.parametrize("seed", range(4))
def test_spread_rows_are_a_uniform_sample_of_all_tokens_and_held_out_ones_are_of_other_examples(model, seed):
    draws = random.Random(seed)
    limit, held_out, count = draws.choice([3, 17, 1000]), draws.choice([0, 5]), draws.randint(8, 12)
    batches = [left_padded([draws.randint(1, 12) for _ in range(draws.randint(1, 3))], seed=i) for i in range(count)]
    recorded, store = Inputs(model), FeatureStore(limit=limit, held_out=held_out)
    model.train()
    with store.collect(model):
        for batch in batches:
            model(**batch)
    pairs = [(x, b["attention_mask"].bool()) for x, b in zip(recorded.seen, batches, strict=True)]
    examples = [x[i][mask[i]] for x, mask in pairs for i in range(len(mask))]
    apart = examples[3::4] if held_out else []
    rest = [e for i, e in enumerate(examples) if not (held_out and i % 4 == 3)]
    for kind, size, stream in (("core", limit, rest), ("held_out", held_out, apart)):
        generator = torch.Generator().manual_seed(0)
        drawn = torch.cat([torch.rand(len(e), generator=generator, dtype=torch.float64) for e in stream or [torch.zeros(0, 8)]])
        smallest = sorted(range(len(drawn)), key=lambda i: drawn[i].item())[:size]
        kept = getattr(store.last, kind)
        if smallest:
            assert torch.equal(kept[Q0], torch.cat(stream)[sorted(smallest)])
            assert len(kept[Q1]) == len(kept[Q0])
        else:
            assert Q0 not in kept


def test_first_rows_alone_go_on_from_an_interrupted_block_or_come_from_several_processes(model):
    several = {"begun": {f"core/{Q0}": torch.ones(1, 2)}}, {"processes": Processes(rank=0, count=2)}
    for given in several:
        with pytest.raises(ValueError, match=r"are the first ones: give FeatureStore\(\.\., spread=False\)"):
            FeatureStore().collect(model, **given).__enter__()


def test_modules_that_read_the_same_tensor_share_a_store(model):
    store = FeatureStore(limit=8)
    model.train()
    with store.collect(model):
        model(input_ids=models.tokens())
    assert store.stores == {Q0: Q0, V0: Q0, Q1: Q1, V1: Q1}
    assert set(store.last.core) == {Q0, Q1}
    cores = store.cores(at_least=2)
    assert cores[Q0] is cores[V0]
    assert cores[Q0] is not cores[Q1]


def test_held_out_rows_come_from_later_examples_than_the_core_and_from_different_ones(model):
    recorded = Inputs(model)
    store = FeatureStore(limit=9, held_out=10, spread=False)
    model.train()
    with store.collect(model):
        for seed in range(3):
            model(**left_padded([6, 6], seed=seed))
    inputs = torch.cat([x for x in recorded.seen])  # (6 examples, 6 tokens, d)
    assert torch.equal(store.last.core[Q0], torch.cat([inputs[0], inputs[1, :3]]))
    spread = [0, 2, 3, 5]  # four of six tokens, both ends included
    expected = torch.cat([inputs[2, spread], inputs[3, spread], inputs[4, [0, 5]]])
    assert torch.equal(store.last.held_out[Q0], expected)


def test_evaluation_forwards_are_not_collected(model):
    store = FeatureStore(limit=8)
    with store.collect(model):
        model.eval()
        model(input_ids=models.tokens(seed=1))
        model.train()
        model(input_ids=models.tokens(seed=2))
        expected = store.stores.copy()
    assert expected
    assert len(store.last.core[Q0]) == 8


def test_text_that_the_model_writes_is_collected_as_the_refusal_says(model):
    store = FeatureStore(limit=8)
    with store.collect(model):
        written = model.generate(models.tokens(), max_new_tokens=2, pad_token_id=0)
    with pytest.raises(ValueError, match=r"call the model once more on the ids that it returned"):
        store.cores()
    with store.collect(model):
        model(input_ids=written)
    assert len(store.last.core[Q0]) == 8


def test_nothing_is_left_on_the_model_once_the_quota_is_full_or_the_block_ends(model):
    def hooks():
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())

    before = hooks()
    store = FeatureStore(limit=4, held_out=2, spread=False)
    model.train()
    with store.collect(model):
        assert hooks() > before
        model(input_ids=models.tokens())
        assert hooks() == before, "a full store costs nothing"
    with store.collect(model):
        assert hooks() > before, "a new task has a quota of its own"
    assert hooks() == before


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_recomputed_for_activation_checkpointing_is_not_counted_again(reentrant):
    blocks = AdapterStack(models.qwen3(), targets=("q_proj", "v_proj"), rank=2, alpha=4)
    blocks.open(torch.Generator().manual_seed(0))
    model = blocks.model
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.train()
    calls = []
    lora_layers(model)[Q0].register_forward_pre_hook(lambda m, a: calls.append(1))
    store = FeatureStore(limit=500)
    with store.collect(model):
        for seed in range(2):
            ids = models.tokens(2, 6, seed=seed)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert len(calls) == 4, "each forward ran twice"
    assert len(store.last.core[Q0]) == 2 * 2 * 6


def test_rows_are_float32_on_cpu_and_need_no_gradient():
    blocks = AdapterStack(models.qwen3(dtype=torch.bfloat16), targets=("q_proj", "v_proj"), rank=2, alpha=4)
    store = FeatureStore(limit=8)
    blocks.model.train()
    with store.collect(blocks.model):
        blocks.model(input_ids=models.tokens())
    rows = store.last.core[Q0]
    assert (rows.dtype, rows.device.type, rows.requires_grad) == (torch.float32, "cpu", False)


def test_cores_are_made_of_the_rows_of_all_tasks_so_far(model):
    store = FeatureStore(limit=10)
    model.train()
    parts = []
    for seed in range(2):
        with store.collect(model):
            model(input_ids=models.tokens(seed=seed))
        parts.append(store.last.core[Q1])
    both = torch.cat(parts)
    made = store.decompose(energy=0.93, at_least=4, at_most=20, wide=64)
    expected = torch.linalg.svd(both.double(), full_matrices=False).Vh[: made[Q1].core.k].T
    assert made[Q1].rows == 20
    assert float((made[V1].core.basis.double().T @ expected).svd().S.min()) > 1 - 1e-7  # stored in float32
    assert 4 <= made[Q1].core.k <= 20
    assert made[Q1].wide.k == 20
    assert torch.equal(made[Q1].wide.basis[:, : made[Q1].core.k], made[Q1].core.basis)


def test_bounds_and_energy_decide_k():
    store = FeatureStore(stores={"layer": "layer"})
    flat = torch.linalg.qr(torch.randn(60, 40))[0].T[:40]  # forty directions of equal energy
    store.restore_task({"core/layer": flat})
    made = store.decompose(energy=0.5, at_least=4, at_most=30, wide=64)["layer"]
    assert (made.core.k, made.k_star) == (20, 20)
    assert made.retained_energy == pytest.approx(0.5, abs=1e-5)
    assert store.decompose(energy=0.5, at_least=4, at_most=10, wide=10)["layer"].core.k == 10
    assert store.decompose(energy=0.01, at_least=4, at_most=10, wide=10)["layer"].core.k == 4


def test_fewer_rows_than_a_core_needs_are_refused_with_the_layer(model):
    store = FeatureStore(limit=3)
    model.train()
    with store.collect(model):
        model(input_ids=models.tokens())
    with pytest.raises(ValueError, match=f"too few feature rows: 3 at {Q0}, 3 at {Q1}, but a core needs at least 4"):
        store.cores()
    empty = FeatureStore()
    with empty.collect(model):
        pass
    with pytest.raises(ValueError, match="no feature rows were collected"):
        empty.cores()


def test_rows_of_zeros_are_refused_with_the_layer(model):
    store = FeatureStore(limit=8)
    model.train()
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if name.endswith("layers.1.input_layernorm.weight")).zero_()
    with store.collect(model):
        model(input_ids=models.tokens())
    with pytest.raises(ValueError, match=f"{Q1}: feature rows are all zero"):
        store.cores()


def test_rows_that_are_not_finite_stop_the_run(model):
    store = FeatureStore(limit=8)
    model.train()
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = float("nan")
    with pytest.raises(NotFinite, match="feature rows at model.layers.0"), store.collect(model):
        model(input_ids=torch.zeros(2, 12, dtype=torch.long))


def test_a_mask_that_is_no_token_mask_is_refused(model):
    model.train()
    with pytest.raises(ValueError, match="attention mask of shape"), FeatureStore().collect(model):
        model(input_ids=models.tokens(), attention_mask=torch.ones(8, 1, 12, 12))


class OfBatches(nn.Module):
    """A user's module around a PEFT model, which takes a batch as one argument."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(**batch)


class WithLabels(OfBatches):
    def forward(self, input_ids, labels, attention_mask):
        return self.model(input_ids=input_ids, labels=labels, attention_mask=attention_mask)


@pytest.mark.parametrize("kind", [OfBatches, WithLabels])
def test_padding_is_skipped_whatever_arguments_a_wrapper_takes(model, kind):
    batch = left_padded([12, 5, 7])
    wrapped, direct, through = kind(model).train(), FeatureStore(limit=100), FeatureStore(limit=100)
    with direct.collect(model):
        model(**batch)
    with through.collect(wrapped):
        wrapped(batch) if kind is OfBatches else wrapped(batch["input_ids"], batch["input_ids"] * 0, batch["attention_mask"])
    assert len(direct.last.core[Q0]) == 24
    assert torch.equal(direct.last.core[Q0], through.last.core[Q0])


class Narrow(nn.Module):
    """Two adapted layers, which torch compiles in a second."""

    def __init__(self):
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, input_ids):
        return self.second(self.first(self.embed(input_ids)).relu())


def in_part(model, backend):
    model.base_model.model.second.compile(backend=backend)
    return model


def forward_alone(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own tracing reads it
@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("how", [torch.compile, in_part, forward_alone])
def test_a_model_that_was_compiled_before_the_block_is_read_as_one_that_was_not(how, inner):
    """Also in batches of a shape that it was compiled for; afterwards, it is as compiled as before."""
    model = get_peft_model(Narrow(), LoraConfig(r=2, target_modules=["first", "second"]))
    traces: list[str] = []

    def backend(graph, inputs):
        traces.extend(str(node.stack_trace) for node in graph.graph.nodes)
        return graph.forward

    torch.compiler.reset()
    store, plain, batches = FeatureStore(limit=100), FeatureStore(limit=100), (models.tokens(2, 12), models.tokens(3, 7))
    with plain.collect(model.train()):
        for ids in batches:
            model(input_ids=ids)
    compiled = how(model, backend=backend)
    for _ in range(2):
        compiled(input_ids=batches[0])
    seen = len(traces)
    with store.collect(model if inner else compiled):
        for ids in batches:
            compiled(input_ids=ids)
    compiled(input_ids=batches[0])
    assert all(torch.equal(rows, store.last.core[name]) for name, rows in plain.last.core.items())
    assert {name: len(rows) for name, rows in store.last.core.items()} == {"first": 45, "second": 45}
    assert seen, "the model is compiled"
    assert len(traces) == seen, "once"


def test_an_adapted_embedding_reads_numbers_of_tokens_which_are_no_rows():
    model, store = get_peft_model(Narrow(), LoraConfig(r=2, target_modules=["embed", "first"])).train(), FeatureStore(limit=100)
    for _ in range(2):
        with store.collect(model):
            model(input_ids=models.tokens(2, 12))
    assert {name: core.d for name, core in store.cores().items()} == {"first": 16}


def test_a_model_without_lora_layers_is_refused():
    with pytest.raises(LookupError, match="no LoRA layer"), FeatureStore().collect(nn.Linear(3, 3)):
        pass


def test_inputs_that_are_no_tokens_are_refused_with_the_layer():
    shape = (2, 3, 4, 64)
    blocks = AdapterStack(models.qwen3(), targets=("q_proj",), rank=2, alpha=4)
    blocks.open(torch.Generator().manual_seed(0))
    alone = nn.Sequential(lora_layers(blocks.model)[Q1]).train()
    said = re.escape(f"(examples, tokens, d_in) or (tokens, d_in), but 0 reads {shape}; leave this layer out")
    with pytest.raises(ValueError, match=said), FeatureStore().collect(alone):
        alone(torch.randn(shape))


def test_rows_of_another_shape_are_refused_with_the_layer():
    store = FeatureStore(stores={"layer": "layer"})
    store.restore_task({"core/layer": torch.randn(64)})
    with pytest.raises(ValueError, match=r"layer: feature rows have shape \(n, d\), not \(64,\)"):
        store.cores()


def test_decompositions_run_where_the_model_is_if_it_has_float64_there(model):
    store = FeatureStore(limit=8)
    model.train()
    with store.collect(model):
        model(input_ids=models.tokens())
    assert store.device == torch.device("cpu")
    for device, where in (("cuda:1", "cuda:1"), ("mps", "cpu"), ("meta", "cpu")):
        assert computing_device(torch.device(device)) == torch.device(where)
    elsewhere = FeatureStore(stores=dict(store.stores), device="mps")  # which this machine has not
    elsewhere.restore_task(store.tensors())
    assert torch.equal(elsewhere.cores()[Q0].basis, store.cores()[Q0].basis)


def test_saved_rows_come_back_bitwise(model):
    store = FeatureStore(limit=8, held_out=2)
    model.train()
    with store.collect(model):
        model(input_ids=models.tokens())
    again = FeatureStore(limit=8, held_out=2, stores=dict(store.stores))
    again.restore_task(store.tensors())
    for layer, core in store.cores().items():
        assert torch.equal(again.cores()[layer].basis, core.basis)
    assert torch.equal(again.held_out_rows(tasks=1)[V0], store.held_out_rows(tasks=1)[V0])


def test_reading_text_takes_the_chosen_tokens_without_dropout_and_leaves_the_model_as_it_was(model):
    recorded = Inputs(model)
    hooks = {name: len(layer._forward_pre_hooks) for name, layer in lora_layers(model).items()}
    texts = [(models.tokens(1, 9, seed=seed), torch.arange(9)[None] % 2 == 0) for seed in range(4)]
    for training in (True, False):
        model.train(training)
        recorded.seen.clear()
        store = FeatureStore(limit=12, spread=False)
        assert store.read(model, texts) == 3, "five tokens a text: the third one fills the quota"
        assert model.training is training
        assert torch.equal(store.last.core[Q0], torch.cat([x[0, ::2] for x in recorded.seen])[:12])
        model.eval()
        with torch.no_grad():
            second = model(input_ids=texts[0][0], output_hidden_states=True).hidden_states[1]
        normed = model.base_model.model.model.layers[1].input_layernorm(second)
        assert torch.equal(store.last.core[Q1][:5], normed[0, ::2].detach()), "no dropout of the first layer's block"
    assert {name: len(layer._forward_pre_hooks) for name, layer in lora_layers(model).items()} == hooks


def test_reading_that_fails_leaves_no_hook_and_no_rows(model):
    store = FeatureStore()
    hooks = {name: len(layer._forward_pre_hooks) for name, layer in lora_layers(model).items()}
    with pytest.raises(IndexError):
        store.read(model.train(), [(torch.full((1, 3), 10_000), torch.ones(1, 3, dtype=torch.bool))])
    assert model.training
    assert store.count == 0
    assert {name: len(layer._forward_pre_hooks) for name, layer in lora_layers(model).items()} == hooks
