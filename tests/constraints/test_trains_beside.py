"""What people train beside LoRA: a linear layer or an embedding with a core keeps its answers; what nothing protects is named."""

import warnings

import pytest
import torch
from transformers import Trainer, TrainingArguments

from anchorlora import Anchor, ProtectionCallback, Subspace, measure, protect
from anchorlora.errors import InvalidType, InvalidValue, ProtectionLost
from guards.layers import SFOR, adapted, directions

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Model with `tie_word_embeddings=True`")
OLD = torch.arange(20)  # the tokens of old text; the model knows 48
HEAD = Subspace(torch.linalg.qr(torch.randn(32, 5, generator=torch.Generator().manual_seed(8))).Q)
WHOLE = {"lm_head": HEAD, "model.embed_tokens": OLD}


def train(model, anchor, *, do=None, tokens=48, **how):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    with protect(optimizer, anchor, SFOR, **how):
        for step in range(8):
            ids = torch.randint(tokens, (8, 10), generator=torch.Generator().manual_seed(step))
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if do and step == 7:
                do()


def inner(model):
    return model.base_model.model


@torch.no_grad()
def weights(model):
    """What the embedding and the head compute with, whatever wraps them."""
    embeddings = inner(model).model.embed_tokens(torch.arange(48))
    return embeddings.clone(), inner(model).lm_head(torch.eye(32)).T.double()


def test_a_head_and_an_embedding_train_and_keep_their_answers_on_what_is_old():
    model = adapted(modules_to_save=["lm_head", "embed_tokens"])
    rows, W = weights(model)
    anchor = Anchor.of(model, cores=directions(model) | WHOLE)
    train(model, anchor)
    now, W_now = weights(model)
    assert torch.equal(now[OLD], rows[OLD]), "under AdamW with decay, which moves every row"
    assert bool((now[20:] != rows[20:]).any(1).all())
    moved = W_now - W
    assert float((moved @ HEAD.basis.double()).norm()) <= 1e-6 * float(W.norm()) < float(moved.norm())
    drift = measure(anchor)
    assert drift.exact
    assert not drift.unprotected
    assert {"lm_head", "model.embed_tokens"} < set(drift.layers)
    assert drift.layers["lm_head"].d_eff == pytest.approx(float(moved.norm()), rel=1e-5)
    assert drift.layers["model.embed_tokens"].d_eff == pytest.approx(float((now - rows).double().norm()), rel=1e-5)
    assert drift.layers["model.embed_tokens"].d_old == 0
    again = measure(anchor, {"model.embed_tokens": torch.arange(21)}).layers["model.embed_tokens"]
    assert again.d_old == pytest.approx(float((now - rows)[20].double().norm()), rel=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_new_rows_of_an_embedding_train_and_move_no_old_token(tied):
    model = adapted(trainable_token_indices=[40, 41], tied=tied)
    rows, W = weights(model)
    anchor = Anchor.of(model, cores=directions(model) | {"model.embed_tokens": OLD})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(model, anchor)
    now, W_now = weights(model)
    others = torch.tensor([token for token in range(48) if token not in (40, 41)])
    assert torch.equal(now[others], rows[others])
    assert torch.equal(W_now[others], W[others]), "no logit of another token moves"
    assert not torch.equal(now[40:42], rows[40:42])
    drift = measure(anchor)
    assert drift.exact
    assert drift.unprotected == (("lm_head",) if tied else ()), "a tied head gives the new tokens logits after old text too"
    assert [str(each.message) for each in told if "lm_head" in str(each.message)] == [
        "nothing keeps what trains beside the protected layers: lm_head"
    ] * tied


def test_what_trains_without_a_core_is_named_by_protect_by_measure_and_by_the_callback(tmp_path):
    told = r"nothing keeps what trains beside the protected layers: \S*norm\S*, \S*lm_head\S*"
    model = adapted(modules_to_save=["lm_head", "model.norm"])
    anchor = Anchor.of(model, cores=directions(model))
    with pytest.raises(InvalidValue, match=r"norm.* and 1 more parameter train beside .*also_training"):
        train(model, anchor)
    with pytest.warns(UserWarning, match=told):
        train(model, anchor, also_training=["lm_head", "norm"])
    assert [any(name in path for path in measure(anchor).unprotected) for name in ("lm_head", "norm")] == [True, True]
    model = adapted(modules_to_save=["lm_head", "model.norm"])
    callback = ProtectionCallback(SFOR, cores=directions(model), also_training=["lm_head", "norm"])
    rows = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 16
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "use_cpu": True}
    trainer = Trainer(model, TrainingArguments(str(tmp_path), max_steps=2, **quiet), train_dataset=rows, callbacks=[callback])
    with pytest.warns(UserWarning, match=told):
        trainer.train()


def test_a_part_may_be_protected_and_another_be_named():
    model = adapted(modules_to_save=["lm_head", "model.norm"])
    anchor = Anchor.of(model, cores=directions(model) | {"lm_head": HEAD})
    with pytest.warns(UserWarning, match="norm"):
        train(model, anchor, also_training=["norm"])
    assert all("norm" in path for path in measure(anchor).unprotected)
    assert measure(anchor).rho <= measure(anchor).bound


@pytest.mark.parametrize(
    ("options", "cores", "error", "said"),
    [
        ({"modules_to_save": ["lm_head"]}, {"lm_head": OLD}, InvalidValue, "the core of lm_head: a basis has shape"),
        ({"modules_to_save": ["embed_tokens"]}, {"model.embed_tokens": HEAD}, InvalidType, "give the numbers of its tokens"),
        ({"modules_to_save": ["embed_tokens"]}, {"model.embed_tokens": torch.tensor([48])}, InvalidValue, "each below 48"),
        ({"modules_to_save": ["model.norm"]}, {"model.norm": HEAD}, InvalidType, "not a linear layer or an embedding"),
        ({"trainable_token_indices": [3]}, {"model.embed_tokens": OLD}, InvalidValue, "row of token 3 .* is to train and to stay"),
        ({}, {"lm_head": HEAD}, LookupError, "cores for lm_head and 0 others, which are not adapted"),
    ],
)
def test_a_core_that_cannot_be_kept_is_refused(options, cores, error, said):
    model = adapted(**options)
    with pytest.raises(error, match=said):
        Anchor.of(model, cores=directions(model) | cores)


def test_a_write_to_a_protected_row_stops_the_training():
    model = adapted(modules_to_save=["embed_tokens"])
    anchor = Anchor.of(model, cores=directions(model) | {"model.embed_tokens": OLD})

    def write():
        with torch.no_grad():
            inner(model).model.embed_tokens.weight[0] += 1e-6

    with pytest.raises(ProtectionLost, match=r"dW V\| at model.embed_tokens"):
        train(model, anchor, do=write)


def test_a_loop_that_looks_sees_what_trains_beside_too():
    model = adapted(modules_to_save=["lm_head"])
    anchor = Anchor.of(model, cores=directions(model) | {"lm_head": HEAD})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with protect(optimizer, anchor, SFOR) as held:
        held.look()
        W = anchor.beside.layers[0].factor("W")
        W.data += 0.1
        with pytest.raises(ProtectionLost, match=r"by step 0: \|dW V\| at lm_head"):
            held.look()
        W.data -= 0.1
    assert held.beside is None
