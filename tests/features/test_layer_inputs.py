"""What a layer may read: tokens of examples, all tokens in one row, an axis of one in between, or what is sent to an expert."""

import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import models
from anchorlora import METHODS, Anchor, FeatureStore, measure, protect
from anchorlora.adapters import lora_layers
from anchorlora.features.layout import Layout, reading
from anchorlora.measurement import held_out_drift

TARGETS = ["q_proj", "shared", "up", "down"]


def adapted(model, targets=TARGETS):
    return get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=targets)).train()


def experts(count=4, targets=TARGETS):
    torch.manual_seed(3)
    return adapted(models.Experts(count), targets)


def padded():
    """Ids and mask of four examples, padded on the left."""
    ids, mask = models.tokens(4, 10), torch.ones(4, 10, dtype=torch.long)
    for i, n in enumerate((3, 10, 7, 1)):
        mask[i, : 10 - n] = 0
    return {"input_ids": ids, "attention_mask": mask}


def collected(model, *batches, **options):
    store = FeatureStore(**{"limit": 30, **options})
    with store.collect(model):
        for batch in batches:
            model(**batch)
    return store


def test_padding_of_a_row_of_all_tokens_is_told_by_the_mask_of_the_forward():
    model, seen = experts(targets=["q_proj", "shared"]), []
    lora_layers(model)["shared"].register_forward_pre_hook(lambda m, a: seen.append(a[0].detach().clone()))
    store = collected(model, padded(), held_out=2, limit=11, spread=False)
    rows = seen[0].view(4, 10, -1)
    mask = padded()["attention_mask"].bool()
    valid = [example[keep] for example, keep in zip(rows, mask, strict=True)]
    assert torch.equal(store.last.core["shared"], torch.cat(valid)[:11])
    assert torch.equal(store.last.held_out["shared"], valid[2][[0, -1]]), "of a later example"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("in_place", [True, False])
def test_layers_that_read_one_tensor_before_and_after_it_was_written_to_have_rows_of_their_own(mode, in_place):
    class Residual(nn.Sequential):
        def forward(self, x):
            x, first, second = x.clone(), self[0], self[1]
            x = x.add_(first(x)) if in_place else x + first(x)
            return second(x) + self[2](x)

    torch.manual_seed(0)
    model, seen = adapted(Residual(*(nn.Linear(8, 8) for _ in range(3))), ["0", "1", "2"]), {}
    for name, layer in lora_layers(model).items():
        layer.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].clone()}))
    store = FeatureStore(limit=8)
    with store.collect(model), mode():
        model(torch.randn(8, 8))
    assert store.stores == {"0": "0", "1": "1", "2": "1"}
    assert all(torch.equal(store.last.core[name], seen[name]) for name in ("0", "1"))


class Looped(nn.Module):
    """A block that each forward calls four times, as looped models and shared blocks do."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(64, 8), nn.Linear(8, 8)

    def forward(self, input_ids, **_):
        x = self.embed(input_ids)
        for _ in range(4):
            x = x + self.block(x)
        return x


@pytest.mark.parametrize("spread", [True, False])
def test_a_layer_that_is_called_again_gives_rows_of_all_its_calls(spread):
    torch.manual_seed(0)
    model, seen = adapted(Looped(), ["block"]), []
    lora_layers(model)["block"].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()[0]))
    batches = [{"input_ids": torch.arange(i, i + 6)[None]} for i in range(0, 54, 6)]
    store = collected(model, *batches, limit=12, held_out=4, spread=spread)
    for rows, of_each in ((store.last.core["block"], 3), (store.last.held_out["block"], 1)):
        of_calls = [torch.cat(seen[call::4]) for call in range(4)]
        assert [sum(bool((call == row).all(1).any()) for row in rows) for call in of_calls] == [of_each] * 4
    if not spread:
        again = FeatureStore(limit=12, held_out=4, spread=False)
        with again.collect(model):
            model(**batches[0])
            begun = again.begun()
        resumed = FeatureStore(limit=12, held_out=4, spread=False)
        with resumed.collect(model, begun):
            for batch in batches[1:]:
                model(**batch)
        assert torch.equal(resumed.last.core["block"], store.last.core["block"])


def test_an_axis_of_one_is_no_axis():
    class Wide(models.Experts):
        def forward(self, input_ids, attention_mask=None, **_):
            return self.head(self.shared(self.embed(input_ids)[:, None]))

    torch.manual_seed(3)
    model, seen = adapted(Wide(), ["shared"]), []
    lora_layers(model)["shared"].register_forward_pre_hook(lambda m, a: seen.append(a[0].detach().clone()))
    store = collected(model, padded())
    assert seen[0].shape == (4, 1, 10, 16)
    assert torch.equal(store.last.core["shared"], seen[0][:, 0][padded()["attention_mask"].bool()])


def test_a_packed_row_of_all_tokens_is_read_by_its_layout():
    model, layout = experts(targets=["q_proj", "shared"]), Layout(prefix=2, lengths=(3, 4))
    with reading(layout):
        store = collected(model, {"input_ids": models.tokens(1, 9)})
    assert len(store.last.core["shared"]) == len(store.last.core["q_proj"]) == 2 + 3 + 2 + 4


def test_experts_are_protected_like_other_layers():
    model = experts()
    trained = [p for p in model.parameters() if p.requires_grad]

    def learn(optimizer, seed, steps):
        for step in range(steps):
            ids = models.tokens(4, 12, seed=seed + step % 2)
            nn.functional.cross_entropy(model(input_ids=ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

    store = FeatureStore(limit=16, held_out=4)
    with store.collect(model):
        learn(torch.optim.AdamW(trained, lr=1e-2), 0, 6)
    assert set(store.stores) == set(lora_layers(model))
    anchor = Anchor.of(model, cores=store.cores(at_most=5))
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    with protect(optimizer, anchor, METHODS["sfor"].constraints), store.collect(model):
        learn(optimizer, 2, 20)
    drift = measure(anchor)
    assert min(layer.d_eff for layer in drift.layers.values()) > 1e-3
    assert drift.exact, f"rho {drift.rho:.1e}, and rounding explains {drift.bound:.1e}"
    assert store.count == 2


def test_rows_of_experts_are_not_taken_from_padded_batches():
    said = r"experts\.0\.up reads the tokens that the model sends to it, and which of them are padding .*\(one example each, or"
    with pytest.raises(ValueError, match=said):
        collected(experts(), padded())
    without = {**padded(), "attention_mask": torch.ones(4, 10)}
    assert len(collected(experts(), without).last.core["experts.1.down"]) > 0


def test_an_expert_that_reads_as_many_rows_as_there_are_tokens_may_have_them_in_another_order():
    with pytest.raises(ValueError, match=r"experts\.0\.up reads the tokens that the model sends to it"):
        collected(experts(count=1, targets=["up"]), padded())


def test_chosen_tokens_of_a_text_are_not_taken_from_experts():
    text = models.tokens(1, 12)
    with pytest.raises(ValueError, match=r"which of them are padding or chosen is not known; .* and no spread"):
        FeatureStore().read(experts(), [(text, torch.arange(12)[None] % 2 == 0)])
    store = FeatureStore(limit=5, spread=False)
    assert store.read(experts(), [(models.tokens(1, 12, seed=s), torch.ones(1, 12).bool()) for s in range(40)]) < 40


def test_experts_with_few_rows_are_named_in_one_error_even_those_that_read_nothing():
    ids = torch.tensor([[0, 4, 8, 12, 16, 1, 5]])  # five tokens of expert 0, two of expert 1, none of the others
    model = experts()
    store = collected(model, {"input_ids": ids})
    named = [f"{n} at experts.{i}.{part}" for i, n in ((1, 2), (2, 0), (3, 0)) for part in ("up", "down")]
    said = f"too few feature rows: {', '.join(named)}, but a core needs at least 4; collect rows from more tokens, lower at_least"
    with pytest.raises(ValueError, match=re.escape(said)):
        store.cores()
    with store.collect(model):  # the next task goes on with the same layers
        model(input_ids=models.tokens(4, 12))
    assert set(store.cores(at_least=2)) == set(lora_layers(model))
    with pytest.raises(ValueError, match=r"experts\.\d+\.up.*, and 10 others, but a core"):
        collected(experts(count=10), {"input_ids": torch.zeros(1, 9, dtype=torch.long)}).cores(at_least=5)


def test_rows_are_awaited_of_an_expert_that_was_not_chosen_yet():
    model, store = experts(), FeatureStore(limit=4, spread=False)
    with store.collect(model):
        model(input_ids=torch.tensor([[0, 4, 8, 12, 16, 1, 5, 9, 13, 2, 6, 10, 14]]))
        begun, stores = store.begun(), dict(store.stores)
        assert "experts.3.up" not in stores
        model(input_ids=torch.tensor([[3, 7, 11, 15, 19]]))
    assert len(store.last.core["experts.3.down"]) == 4
    again = FeatureStore(limit=4, spread=False, stores=stores)  # of a run that stopped between the two
    with again.collect(model, begun):
        model(input_ids=torch.tensor([[3, 7, 11, 15, 19]]))
    assert again.last.core.keys() == store.last.core.keys()
    assert all(torch.equal(again.last.core[name], rows) for name, rows in store.last.core.items())


def test_rows_that_are_only_counted_leave_the_same_held_out_rows_also_where_the_block_was_interrupted():
    model, parts = experts().train(), [models.tokens(2, 12, seed=seed) for seed in range(6)]
    held, counted, again = (FeatureStore(limit=40, held_out=8, spread=False, passed_over=i > 0) for i in range(3))
    begun: dict = {}
    for store in (held, counted):
        with store.collect(model):
            for i, ids in enumerate(parts):
                if i == 3:
                    begun = store.begun()
                model(input_ids=ids)
    again.stores = dict(counted.stores)
    with again.collect(model, begun):
        for ids in parts[3:]:
            model(input_ids=ids)
    cores = {name: rows for name, rows in begun.items() if name.startswith("core/")}
    assert cores
    assert all(rows.shape[1] == 0 for rows in cores.values())
    assert held.last.core
    assert held.last.held_out
    for store in (counted, again):
        assert not store.last.core
        assert store.last.held_out.keys() == held.last.held_out.keys()
        assert all(torch.equal(store.last.held_out[name], rows) for name, rows in held.last.held_out.items())
    with pytest.raises(ValueError, match="are not feature rows"), FeatureStore(limit=40, spread=False).collect(model, begun):
        pass
    with pytest.raises(ValueError, match="only counted are the first ones"), FeatureStore(passed_over=True).collect(model):
        pass


def test_layers_without_held_out_rows_do_not_count():
    model = experts()
    anchor = Anchor.of(model, cores=collected(model, {"input_ids": models.tokens(8, 12)}).cores(at_most=4))
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p) * p.requires_grad
    rows = {layer.name: torch.randn(3, layer.current.A.shape[1]) for layer in anchor.layers}
    some = dict(list(rows.items())[:2])
    assert held_out_drift(anchor, some)["total"] > 0
    assert held_out_drift(anchor, some) != held_out_drift(anchor, rows)


def test_a_mask_of_other_tokens_than_a_layer_reads_is_refused():
    class Longer(models.Experts):
        def forward(self, input_ids, attention_mask=None, **_):
            return self.head(self.q_proj(self.embed(input_ids)[:, 1:]))

    said = r"q_proj reads \(4, 9, 16\), but the attention mask is of \(4, 10\) \(examples, tokens\)"
    with pytest.raises(ValueError, match=said):
        collected(adapted(Longer(), ["q_proj"]), padded())


def test_an_encoder_decoder_model_is_refused_in_words():
    config = T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    model = adapted(T5ForConditionalGeneration(config), ["q"])
    with pytest.raises(ValueError, match="^encoder-decoder models are not supported: "), FeatureStore().collect(model):
        pass
