"""Full weights without LoRA, the linear case: the laws, against dense float64, and what is refused."""

import copy
import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from anchorlora import (
    Anchor,
    Freeze,
    ProjectDisplacement,
    ProjectGradient,
    ProjectStep,
    ProtectionCallback,
    Subspace,
    measure,
    protect,
)
from anchorlora.adapters import WeightAnchor
from anchorlora.constraints import Retract
from anchorlora.errors import InvalidType, InvalidValue, ProtectionLost, UnknownName
from toys import OPTIMIZERS

EPS = torch.finfo(torch.float32).eps
SIZES = ((24, 16), (16, 28))


def model_of(sizes=SIZES, *, seed=0, dtype=torch.float32, bias=False):
    torch.manual_seed(seed)
    layers = [layer for d_in, d_out in sizes for layer in (nn.Linear(d_in, d_out, bias=bias), nn.Tanh())]
    return nn.Sequential(*layers).to(dtype)


def cores_of(model, k=5, seed=1):
    draw = torch.Generator().manual_seed(seed)
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    made = {}
    for name, module in linear.items():
        basis = torch.randn(module.in_features, min(k, module.in_features - 1), generator=draw, dtype=torch.float64)
        made[name] = Subspace(torch.linalg.qr(basis).Q.float())
    return made


def steps(model, optimizer, count, seed=2):
    """Regression on inputs whose coordinates have very unlike scale, as real features have."""
    draw = torch.Generator().manual_seed(seed)
    first, last = model[0].in_features, model[-2].out_features
    x = torch.randn(64, first, generator=draw) * torch.logspace(-0.7, 0.3, first)
    y = torch.randn(64, last, generator=draw)
    for _ in range(count):
        (model(x.to(model[0].weight)) - y.to(model[0].weight)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(model, name):
    make, options = OPTIMIZERS[name]
    if make is None:
        pytest.skip(f"this torch has no {name}; 2.9 has")
    return make([p for p in model.parameters() if p.requires_grad], **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=3, deadline=None)
@given(
    widths=st.lists(st.integers(3, 30), min_size=2, max_size=4),
    k=st.integers(1, 8),
    seed=st.integers(0, 2**31),
    projected=st.booleans(),
)
def test_a_weight_moves_and_its_answer_on_the_core_stays(name, widths, k, seed, projected):
    """W V = W_0 V up to one rounding of W, whatever the optimizer makes of the gradient."""
    model = model_of(tuple(pairwise(widths)), seed=seed)
    cores = cores_of(model, k, seed=seed)
    start = {path: model.get_submodule(path).weight.detach().double() for path in cores}
    anchor, optimizer = WeightAnchor.of(model, cores=cores), optimizer_of(model, name)
    with protect(optimizer, anchor, [ProjectGradient("W")] * projected + [ProjectDisplacement("W")]):
        steps(model, optimizer, 30, seed=seed)
    drift = measure(anchor)
    for path, core in cores.items():
        W, V = model.get_submodule(path).weight.detach().double(), core.basis.double()
        assert float(((W - start[path]) @ V).norm()) <= 2 * EPS * float(W.norm())
        assert float((W - start[path]).norm()) == pytest.approx(drift.layers[path].d_eff, rel=1e-9, abs=1e-12)
    assert drift.exact
    assert drift.d_eff > 1e3 * EPS * max(float(W.norm()) for W in start.values()), f"{name} moved nothing"


@pytest.mark.parametrize("name", ["adamw-decay", "adamw-fused", "adafactor"])
def test_the_same_run_without_projection_leaks(name):
    model = model_of()
    anchor, optimizer = WeightAnchor.of(model, cores=cores_of(model)), optimizer_of(model, name)
    left_open = r'W may move on protected directions at .*; add ProjectDisplacement\("W"\)$'
    with pytest.warns(UserWarning, match=left_open), protect(optimizer, anchor, [ProjectGradient("W")]):
        steps(model, optimizer, 30)
    assert measure(anchor).rho > 1e4 * measure(anchor).rho_floor


@pytest.mark.parametrize(
    ("name", "part"), [("sgd", ProjectGradient), ("adamw-decay", ProjectStep), ("adamw-decay", ProjectDisplacement)]
)
def test_a_part_that_is_enough_for_full_weights_is_not_warned_of(name, part, recwarn):
    model = model_of()
    anchor, optimizer = WeightAnchor.of(model, cores=cores_of(model)), optimizer_of(model, name)
    with protect(optimizer, anchor, [part("W")]):
        steps(model, optimizer, 30)
    assert not recwarn.list
    assert measure(anchor).rho < 1e-4  # of roundings


def test_a_callback_without_constraints_projects_full_weights():
    model = model_of()
    anchor, optimizer = WeightAnchor.of(model, cores=cores_of(model)), optimizer_of(model, "adamw")
    callback = ProtectionCallback(anchor=anchor)
    callback.begin(model, optimizer)
    steps(model, optimizer, 3)
    callback.end()
    assert measure(anchor).exact


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), k=st.integers(1, 12))
def test_a_projected_weight_is_the_dense_projection_rounded_once(seed, k):
    model = model_of(((20, 14),), seed=seed)
    cores = cores_of(model, k, seed=seed)
    free = copy.deepcopy(model)
    start, V = model[0].weight.detach().double(), cores["0"].basis.double()
    anchor, optimizer = WeightAnchor.of(model, cores=cores), optimizer_of(model, "adamw")
    with protect(optimizer, anchor, [ProjectDisplacement("W")]):
        steps(model, optimizer, 1, seed=seed)
    steps(free, optimizer_of(free, "adamw"), 1, seed=seed)
    move = free[0].weight.detach().double() - start
    assert torch.allclose(model[0].weight.detach().double(), start + move - move @ V @ V.T, atol=2 * EPS, rtol=0)


def test_in_float64_it_is_exact_to_float64_and_repeats_bitwise():
    ends = []
    for _ in range(2):
        model = model_of(dtype=torch.float64)
        cores = {path: Subspace(core.basis.double()) for path, core in cores_of(model).items()}
        cores = {path: Subspace(torch.linalg.qr(core.basis).Q) for path, core in cores.items()}
        anchor, optimizer = WeightAnchor.of(model, cores=cores), optimizer_of(model, "adamw")
        with protect(optimizer, anchor, [ProjectDisplacement("W")]):
            steps(model, optimizer, 20)
        layer = anchor.layers[0]
        moved = layer.factor("W").detach() - layer.start_factor("W")
        assert float((moved @ layer.core.basis).norm()) < 1e-13
        ends.append(layer.factor("W").detach().clone())
    assert torch.equal(*ends)


class Masters(torch.optim.Optimizer):
    """An optimizer that keeps weights of its own and writes them over the model's at every step."""

    def __init__(self, parameters, lr=1e-2):
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["master"] = p.detach().clone()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["master"].sub_(group["lr"] * p.grad.sign())
                p.copy_(self.state[p]["master"])


def test_what_the_model_computes_with_is_protected_though_an_optimizer_keeps_weights_of_its_own():
    model = model_of()
    anchor, optimizer = WeightAnchor.of(model, cores=cores_of(model)), Masters(list(model.parameters()))
    with protect(optimizer, anchor, [ProjectDisplacement("W")]):
        steps(model, optimizer, 20)
    assert measure(anchor).exact
    assert measure(anchor).d_eff > 0.01


class Modes(torch.optim.SGD):
    """An optimizer that serves other weights than it trains."""

    def train(self):
        pass

    def eval(self):
        pass


@pytest.mark.parametrize(
    ("change", "cores", "error", "words"),
    [
        (
            lambda m: m.to(torch.bfloat16),
            None,
            InvalidType,
            "needs a float32 weight, but that of 0 is torch.bfloat16, and a master",
        ),
        (lambda m: m[0].weight.requires_grad_(False), None, InvalidValue, "the weight of 0 does not train"),
        (
            lambda m: setattr(m[2], "weight", m[0].weight),
            None,
            InvalidValue,
            "is shared with another layer, whose answers would move",
        ),
        (None, {}, UnknownName, "no cores are given"),
        (None, {"9": torch.eye(24)[:, :2]}, UnknownName, "the model has no layer 9"),
        (None, {"1": torch.eye(24)[:, :2]}, InvalidType, "1 is a Tanh, not a linear layer"),
        (None, {"0": torch.eye(7)[:, :2]}, InvalidValue, "the core of 0 has width 7, but its weight reads 24 inputs"),
    ],
)
def test_what_cannot_be_guaranteed_is_refused_when_the_anchor_is_made(change, cores, error, words):
    model = model_of(((24, 24), (24, 24)))
    given = cores_of(model) if cores is None else cores
    if change:
        change(model)
    with pytest.raises(error, match=words):
        WeightAnchor.of(model, cores=given)


def test_an_optimizer_that_serves_other_weights_is_refused():
    model = model_of()
    anchor = WeightAnchor.of(model, cores=cores_of(model))
    with (
        pytest.raises(InvalidType, match="has a mode of its own for serving"),
        protect(Modes(model.parameters(), lr=0.1), anchor, [ProjectDisplacement("W")]),
    ):
        pass


@pytest.mark.parametrize("name", ["0.bias", "2.weight"])
def test_what_trains_beside_is_refused_unless_it_is_named(name):
    model = model_of(bias=True)
    for path, p in model.named_parameters():
        p.requires_grad_(path in ("0.weight", name))
    anchor = WeightAnchor.of(model, cores={"0": cores_of(model)["0"]})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with (
        pytest.raises(InvalidValue, match=f"{name} trains beside the protected layers"),
        protect(optimizer, anchor, [ProjectDisplacement("W")]),
    ):
        pass
    how = {"also_training": [name.partition(".")[0]]}
    with pytest.warns(UserWarning, match="nothing keeps"), protect(optimizer, anchor, [ProjectDisplacement("W")], **how):
        steps(model, optimizer, 3)
    assert name.partition(".")[0] in measure(anchor).unprotected


def test_a_weight_that_is_replaced_or_written_to_stops_the_training():
    for write in (
        lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
        lambda m: m[0].weight.data.add_(0.1),
    ):
        model = model_of()
        anchor, optimizer = WeightAnchor.of(model, cores=cores_of(model)), optimizer_of(model, "adamw")
        with pytest.raises(ProtectionLost), protect(optimizer, anchor, [ProjectDisplacement("W")]):
            steps(model, optimizer, 3)
            write(model)


def test_constraints_on_lora_factors_name_what_a_full_weight_has():
    model = model_of()
    anchor, optimizer = WeightAnchor.of(model, cores=cores_of(model)), optimizer_of(model, "adamw")
    for constraint in (ProjectDisplacement("A"), Retract("A"), Freeze("B")):
        with pytest.raises(UnknownName, match='a full weight is one factor, "W"'), protect(optimizer, anchor, [constraint]):
            pass


def test_a_layer_with_an_adapter_is_not_a_full_weight():
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(model_of(), LoraConfig(target_modules=["0"]))
    with pytest.raises(InvalidType, match=r"0 has an adapter, .* use Anchor.of"):
        WeightAnchor.of(model, cores={"0": torch.eye(24)[:, :2]})
    assert Anchor.of(model).layers[0].names == ("A", "B")
