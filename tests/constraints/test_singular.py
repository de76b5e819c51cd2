"""OPLoRA's law: both factors stay off the leading singular directions of the frozen weight, from the first task on, and the path is
that of the reparametrisation."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

import models
from anchorlora import (
    AdapterStack,
    Anchor,
    EffectiveSparsity,
    Freeze,
    ProjectDisplacement,
    ProjectSingular,
    Retract,
    Subspace,
    protect,
)
from anchorlora.config import BaseModelSettings
from anchorlora.constraints.singular import directions_of
from anchorlora.errors import InvalidType, InvalidValue, ProtectionLost
from anchorlora.measurement.check import on_singular, tiny_backbone
from anchorlora.models.load import load_base_model
from toys import OPTIMIZERS, norm, optimizer_for, task_loss, train

EPS = torch.finfo(torch.float32).eps
K = 5


@pytest.fixture
def adapted():
    return adapted_from()


def adapted_from(dtype=torch.float32, make=tiny_backbone, targets=("q_proj", "v_proj")):
    torch.manual_seed(3)
    base = make().to(dtype)
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), fan_in_fan_out=make is models.gpt2))


def dense(layer, k=K):
    """W, U_k, S_k, V_k by a full SVD in float64: nothing of the project."""
    W = layer.base_weight().double()
    U, S, right = torch.linalg.svd(W, full_matrices=False)
    return W, U[:, :k], S[:k], right[:k].T


def change(layer):
    return layer.current.scale * layer.factor("B").detach().double() @ layer.factor("A").detach().double()


class Reparametrised:
    """OPLoRA as its paper has it: free factors, and the layer computes with P_L B A P_R.  Dense, float64."""

    def __init__(self, anchor):
        self.parts = []
        for layer in anchor.layers:
            _, U, _, V = dense(layer)
            left, right = torch.eye(len(U)).double() - U @ U.T, torch.eye(len(V)).double() - V @ V.T
            free = {name: torch.nn.Parameter(layer.factor(name).detach().clone()) for name in ("A", "B")}
            self.parts.append((free, {"A": lambda f, P=right: f["A"] @ P, "B": lambda f, P=left: P @ f["B"]}, layer.current.scale))

    @property
    def layers(self):
        return [
            SimpleNamespace(factor=lambda name, free=free, off=off: off[name](free), current=SimpleNamespace(scale=scale))
            for free, off, scale in self.parts
        ]

    def parameters(self):
        return [free[name] for free, _, _ in self.parts for name in ("A", "B")]


def both_paths(name, steps=30):
    """The product B A of every layer as it is trained here, and as OPLoRA trains it."""
    anchor = Anchor.of(adapted_from(torch.float64))
    theirs = Reparametrised(anchor)
    make, settings = OPTIMIZERS[name]
    optimizer = make(theirs.parameters(), **settings)
    for _ in range(steps):
        task_loss(theirs).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer = optimizer_for(anchor, name)
    with protect(optimizer, anchor, [ProjectSingular(K)]):
        train(anchor, optimizer, steps)
    return [
        (ours.factor("B").detach() @ ours.factor("A").detach(), (their.factor("B") @ their.factor("A")).detach())
        for ours, their in zip(anchor.layers, theirs.layers, strict=True)
    ]


@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "adamw", "adamw-decay", "adagrad", "rmsprop"])
def test_the_path_is_that_of_the_reparametrisation(name):
    for ours, theirs in both_paths(name):
        assert norm(ours) > 1e-3
        assert norm(ours - theirs) < 1e-8 * norm(ours)


def test_an_optimizer_that_reads_the_size_of_a_factor_takes_another_path():
    """The limit that the docstring names; if this fails, say less there."""
    assert any(norm(ours - theirs) > 1e-6 * norm(ours) for ours, theirs in both_paths("adafactor"))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_leading_singular_triples_stay_under_every_optimizer(name, adapted):
    anchor = Anchor.of(adapted)
    optimizer = optimizer_for(anchor, name)
    with protect(optimizer, anchor, [ProjectSingular(K)]):
        train(anchor, optimizer, 40)
    for layer in anchor.layers:
        (W, U, S, V), dW = dense(layer), change(layer)
        A, B = layer.factor("A").detach().double(), layer.factor("B").detach().double()
        assert norm(dW) > 1e-4, f"{name} trained nothing"
        assert norm(A @ V) <= 2 * EPS * norm(A)
        assert norm(U.T @ B) <= 2 * EPS * norm(B)
        allowed = 2 * EPS * layer.current.scale * norm(A) * norm(B)
        assert norm((W + dW) @ V - U * S) <= allowed
        assert norm(U.T @ (W + dW) - (V * S).T) <= allowed


def test_without_it_the_triples_move(adapted):
    """So that the measure of `check` is not zero by itself."""
    anchor = Anchor.of(adapted)
    train(anchor, optimizer_for(anchor, "adamw"), 20)
    share, allowed = on_singular(anchor, K)
    assert share > 1e3 * allowed


def test_a_frozen_factor_is_left_alone(adapted):
    anchor = Anchor.of(adapted)
    optimizer = optimizer_for(anchor, "adamw-decay")
    with protect(optimizer, anchor, [ProjectSingular(K), Freeze("A")]):
        train(anchor, optimizer, 5)
    assert on_singular(anchor, K)[0] < 1e-7


def test_the_gradient_of_a_penalty_is_projected_too(adapted):
    anchor, seen = Anchor.of(adapted), []
    optimizer = optimizer_for(anchor, "adamw")

    def look(*_):
        for layer in anchor.layers:
            _, U, _, V = dense(layer)
            A, B = layer.factor("A").grad.double(), layer.factor("B").grad.double()
            seen.append((norm(A @ V), norm(U.T @ B), norm(A), norm(B)))

    with protect(optimizer, anchor, [ProjectSingular(K), EffectiveSparsity(1.0)]):
        hook = optimizer.register_step_pre_hook(look)  # after those of protect
        train(anchor, optimizer, 3)
        hook.remove()
    assert len(seen) == 3 * len(anchor.layers)
    assert all(on_a <= 1e-6 * a and on_b <= 1e-6 * b and b > 0 for on_a, on_b, a, b in seen)


def test_a_block_that_it_has_kept_goes_on_bitwise_as_it_is(adapted):
    anchor = Anchor.of(adapted)
    optimizer = optimizer_for(anchor, "adamw")
    with protect(optimizer, anchor, [ProjectSingular(K)]):
        train(anchor, optimizer, 5)
    again = Anchor.of(adapted)
    before = [layer.factor(name).detach().clone() for layer in again.layers for name in ("A", "B")]
    with protect(optimizer, again, [ProjectSingular(K)]):
        after = [layer.factor(name).detach().clone() for layer in again.layers for name in ("A", "B")]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        train(again, optimizer, 5)
    share, allowed = on_singular(again, K)
    assert share <= allowed


def test_gpt2_holds_its_weight_the_other_way_round():
    anchor = Anchor.of(adapted_from(make=models.gpt2, targets=["c_attn"]))
    layer = anchor.layers[0]
    assert layer.base_weight().shape == (192, 64)  # (d_out, d_in)
    off = directions_of(layer, K)
    assert (off["A"].d, off["B"].d) == (64, 192)
    optimizer = optimizer_for(anchor, "adamw")
    with protect(optimizer, anchor, [ProjectSingular(K)]):
        train(anchor, optimizer, 5)
    W, U, S, V = dense(layer)
    assert norm((W + change(layer)) @ V - U * S) < 1e-5 < norm(change(layer))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:bitsandbytes")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantized_weight_is_decomposed_as_the_layer_computes_with_it(kind, small_model):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = load_base_model(BaseModelSettings(model=str(small_model), quantized=kind)).model
    stack = AdapterStack(model, targets=("q_proj",), rank=4, alpha=8)
    stack.open(torch.Generator().manual_seed(1))
    anchor = stack.anchor()
    layer = anchor.layers[0]
    weight = layer.base_weight().double()
    computed = layer.whole.base(torch.eye(weight.shape[1])).detach().double().T
    assert norm(weight - computed) < (1e-5 if kind == "nf4" else 2e-2) * norm(weight)  # int8 rounds its inputs too
    optimizer = torch.optim.AdamW(stack.trainable(), lr=1e-2)
    with protect(optimizer, anchor, [ProjectSingular(K)]):  # reading the weight has not changed the layer, or this would say so
        train(anchor, optimizer, 3)
    share, allowed = on_singular(anchor, K)
    assert share <= allowed


def refused(model, constraints, **anchor):
    given = Anchor.of(model, **anchor)
    optimizer = optimizer_for(given, "sgd")
    with protect(optimizer, given, constraints):
        pass


def test_what_cannot_be_kept_is_refused_in_words(adapted):
    with pytest.raises(InvalidValue, match=r"v_proj is \(32, 64\), so 32 singular directions leave nothing to train; use fewer"):
        refused(adapted, [ProjectSingular(32)])
    cores = {layer.name: Subspace(torch.eye(64)[:, :3]) for layer in Anchor.of(adapted).layers}
    for both in ([ProjectSingular(K), ProjectDisplacement("A")], [ProjectDisplacement("A"), ProjectSingular(K)]):
        with pytest.raises(InvalidValue, match="the two projections do not commute: leave one of them out"):
            refused(adapted, [Retract("A"), *both], cores=cores)


def test_a_weight_of_too_low_a_rank_has_no_directions_to_keep(adapted):
    with torch.no_grad():
        Anchor.of(adapted).layers[0].whole.base.weight[2:] = 0
    with pytest.raises(InvalidValue, match=r"q_proj: .* rank 2 has no 5 leading singular directions"):
        refused(adapted, [ProjectSingular(K)])


def test_a_block_that_was_trained_without_it_is_refused(adapted):
    with torch.no_grad():
        Anchor.of(adapted).layers[0].factor("B").normal_()
    with pytest.raises(InvalidValue, match=r"trained without ProjectSingular, .* open a new block for it, as PerTask\(\) does"):
        refused(adapted, [ProjectSingular(K)])


def test_factors_without_a_layer_have_no_weight_and_half_precision_is_refused(adapted):
    import toys

    with pytest.raises(InvalidValue, match="the frozen weight of layer0 is not known"):
        ProjectSingular(K).begin_task(toys.anchor_of(fresh=True))
    with pytest.raises(InvalidType, match="exact protection needs float32 factors"):
        ProjectSingular(K).begin_task(Anchor.of(adapted.to(torch.bfloat16)))


@pytest.mark.parametrize("name", ["A", "B"])
def test_a_factor_that_another_program_writes_to_ends_the_block(name, adapted):
    anchor = Anchor.of(adapted)
    optimizer = optimizer_for(anchor, "adamw")
    said = r"\|A V_k\| at" if name == "A" else r"\|U_k\^T B\| at"
    with pytest.raises(ProtectionLost, match=said), protect(optimizer, anchor, [ProjectSingular(K)]):
        train(anchor, optimizer, 3)
        anchor.layers[1].factor(name).data += 1e-3
