"""Autocast and lowered matmul precision around a loop reach neither penalties nor projections."""

from contextlib import contextmanager

import pytest
import torch

from anchorlora import EffectiveResponse, EffectiveSparsity, ProjectDisplacement, ProjectGradient, RoutingOverlap, protect
from anchorlora.devices import product_precision, set_product_precision, true_precision
from toys import anchor_of, optimizer_for, parameters, task_loss

PENALTIES = [RoutingOverlap(0.1), EffectiveSparsity(1e-3), EffectiveResponse(1.0), ProjectGradient("A"), ProjectDisplacement("A")]


@contextmanager
def bfloat16_products():
    """As `torch.set_float32_matmul_precision("medium")` makes them, on a CPU that has them."""
    before = product_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        set_product_precision(before)


@contextmanager
def as_it_is():
    yield


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def trained_under(lowered):
    """Factors after steps whose loss is never lowered, so that only what constraints compute can differ."""
    anchor = anchor_of(history=True, wide=8, sizes=((64, 48), (80, 64)))
    optimizer = optimizer_for(anchor, "adamw")
    with protect(optimizer, anchor, PENALTIES):
        for _ in range(5):
            task_loss(anchor).backward()
            with lowered():
                optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in parameters(anchor)]


@pytest.mark.parametrize("lowered", [autocast, bfloat16_products])
def test_constraints_compute_bitwise_the_same_whatever_the_loop_has_lowered(lowered):
    assert all(torch.equal(a, b) for a, b in zip(trained_under(lowered), trained_under(as_it_is), strict=True))


@pytest.mark.parametrize("lowered", [autocast, bfloat16_products])
def test_what_the_loop_has_lowered_is_lowered_again_behind_a_block_also_after_an_exception(lowered):
    rows = torch.randn(64, 64)
    exact = rows.double() @ rows.double()

    def error():
        return float((rows @ rows - exact).norm() / exact.norm())

    with lowered():
        outside, settings = error(), product_precision()
        with pytest.raises(KeyError), true_precision({"cpu"}):
            assert error() < 1e-6
            assert not torch.is_grad_enabled()
            raise KeyError
        assert error() == outside
        assert product_precision() == settings
        assert torch.is_grad_enabled()
