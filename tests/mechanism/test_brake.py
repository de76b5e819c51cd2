"""The controls of benchmarks/mechanism.py do to Adam's moments what they say."""

from pathlib import Path

import pytest
import torch

from anchorlora import RoutingOverlap, protect
from anchorlora.errors import InvalidValue
from toys import anchor_of, parameters, train


@pytest.fixture
def controls(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks import mechanism

    return mechanism


def moves(*constraints, steps=20):
    """How A of each layer moves in some steps of AdamW on the toy's task."""
    anchor = anchor_of(history=True)
    optimizer = torch.optim.AdamW(parameters(anchor), lr=1e-3, weight_decay=0.0)
    with protect(optimizer, anchor, constraints):
        train(anchor, optimizer, steps)
    return [layer.factor("A").detach() - layer.start_factor("A") for layer in anchor.layers]


def test_without_a_penalty_both_controls_are_plain_adam(controls):
    plain = moves()
    for control in (controls.SecondMomentOverlap(0.0), controls.RescaledOverlap(0.0)):
        for mine, theirs in zip(moves(control), plain, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-7)


def test_a_penalty_in_the_second_moment_alone_slows_every_coordinate_and_pushes_none(controls):
    plain, slowed = moves(steps=1), moves(controls.SecondMomentOverlap(0.5), steps=1)
    pushed = moves(RoutingOverlap(0.5), steps=1)
    for g, v, p in zip(plain, slowed, pushed, strict=True):
        assert torch.equal(g.sign(), v.sign())
        assert not torch.equal(g.sign(), p.sign())
        assert bool((v.abs() < g.abs() + 1e-9).float().mean() > 0.5)


def test_where_the_task_has_no_gradient_only_the_penalty_itself_moves_the_factor(controls):
    def moved(constraint):
        anchor = anchor_of(history=True)
        optimizer = torch.optim.AdamW(parameters(anchor), lr=1e-3, weight_decay=0.0)
        with protect(optimizer, anchor, [constraint]):
            for p in parameters(anchor):
                p.grad = torch.zeros_like(p)
            optimizer.step()
        return [float((layer.factor("A").detach() - layer.start_factor("A")).norm()) for layer in anchor.layers]

    assert min(moved(RoutingOverlap(0.5))) > 1e-4
    assert max(moved(controls.SecondMomentOverlap(0.5))) == max(moved(controls.RescaledOverlap(0.5))) == 0.0


def test_the_rescaled_gradient_of_the_penalty_is_as_long_as_the_task_s(controls):
    g, p = torch.randn(4, 9), 100 * torch.randn(4, 9)
    scaled = controls.as_long_as(g, p)
    assert float(scaled.norm()) == pytest.approx(float(g.norm()), rel=1e-5)
    assert torch.allclose(scaled / scaled.norm(), p / p.norm(), atol=1e-6)
    assert not controls.as_long_as(g, torch.zeros_like(g)).any()


def test_a_task_that_was_interrupted_is_refused(controls):
    anchor = anchor_of(history=True)
    again = protect(torch.optim.AdamW(parameters(anchor)), anchor, [controls.second_moment.constraints[0]], step=3)
    with pytest.raises(InvalidValue, match="start the run again"), again:
        pass
