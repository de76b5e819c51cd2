"""The laws of constraints under bitsandbytes' optimizers, whose moments are stored in 8 bits."""

import pytest
import torch

from anchorlora import Freeze, ProjectDisplacement, ProjectGradient, Retract, measure, protect
from toys import anchor_of, displacement, norm, on_core, parameters, train

optim = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").optim
EPS = torch.finfo(torch.float32).eps
NAMES = ["AdamW8bit", "Adam8bit", "Lion8bit"]


def optimizer_for(anchor, name):
    settings = {"Lion8bit": {"lr": 1e-3}}.get(name, {"lr": 1e-2})
    return getattr(optim, name)(parameters(anchor), weight_decay=0.1, min_8bit_size=16, **settings)


@pytest.mark.parametrize("name", NAMES)
def test_displacement_projection_keeps_the_move_off_the_core(name):
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, name)
    with protect(optimizer, anchor, [ProjectGradient("A"), ProjectDisplacement("A")]):
        train(anchor, optimizer, 50)
    assert optimizer.state[anchor.layers[0].factor("A")]["state1"].dtype == torch.uint8, "moments are in 8 bits"
    for layer in anchor.layers:
        assert norm(displacement(layer)) > 1e3 * EPS * norm(layer.factor("A")), f"{name} moved nothing"
        assert on_core(layer, displacement(layer)) <= 2 * EPS * norm(layer.factor("A"))


@pytest.mark.parametrize("name", NAMES)
def test_a_retracted_block_and_a_frozen_companion_count_as_exact(name):
    fresh, shared = anchor_of(fresh=True), anchor_of()
    kept = [layer.factor("B").detach().clone() for layer in shared.layers]
    for anchor, constraints in (
        (fresh, [Retract("A"), ProjectGradient("A"), ProjectDisplacement("A")]),
        (shared, [ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")]),
    ):
        optimizer = optimizer_for(anchor, name)
        with protect(optimizer, anchor, constraints):
            train(anchor, optimizer, 50)
        assert measure(anchor).d_eff > 1e-3
        assert measure(anchor).exact, f"rho {measure(anchor).rho:.1e}"
    assert all(torch.equal(layer.factor("B"), before) for layer, before in zip(shared.layers, kept, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_gradient_projection_alone_leaks(name):
    """The premise of projecting the move."""
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, name)
    with protect(optimizer, anchor, [ProjectGradient("A")]):
        train(anchor, optimizer, 50)
    layer = anchor.layers[0]
    assert on_core(layer, displacement(layer)) > 1e-3 * norm(displacement(layer))
