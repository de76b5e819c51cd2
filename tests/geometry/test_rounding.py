"""A merge in blocks of rows against one dense sum in float64: the weight bitwise, the norms to rounding."""

import pytest
import torch

import oracle
from anchorlora.geometry import Factors, Product, Subspace, merge_, rounding


def layer(update=1e-2, seed=0, dtype=torch.float32, k=5):
    """W (48, 32), a protected update since an earlier one, and the core that it does not touch."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    W = normal(48, 32).to(dtype).float()
    core = Subspace(torch.linalg.qr(normal(32, k)).Q)
    A, B, A0 = normal(4, 32), update * normal(48, 4), normal(4, 32)
    return W, Factors(torch.cat([A0, core.outside(A)]), torch.cat([B, B], dim=1), 2.0), Factors(A0, B, 2.0), core


def dense(f):
    return f.scale * f.B @ f.A


@pytest.mark.parametrize("entries", [1, 100, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_weight_and_every_norm_agree_with_a_dense_sum(dtype, entries, monkeypatch):
    monkeypatch.setattr(rounding, "ENTRIES", entries)
    W, now, before, core = layer()
    exact = W.double() + dense(now)
    expected = exact.to(dtype)
    found = merge_(W, now.product(), dtype, before=before.product(), core=core)
    assert torch.equal(W, expected.float())
    drift = oracle.drift([(expected.double() - (exact - dense(now)) - dense(before), core.basis)])
    assert found.update == pytest.approx(float(dense(now).norm()), rel=1e-12)
    assert found.error == pytest.approx(float((expected.double() - exact).norm()), rel=1e-9)
    assert found.moved == pytest.approx(float(drift["d_eff"]), rel=1e-12)
    assert found.on_core == pytest.approx(float(drift["d_old"]), rel=1e-9)


def test_rounding_to_bfloat16_breaks_a_protection_that_float32_keeps():
    """The premise of stating it: the smaller the update beside the weight, the more of it is rounding."""
    share = {}
    for dtype in (torch.float32, torch.bfloat16):
        for size in (1e-2, 1e-3):
            W, now, before, core = layer(size, dtype=torch.bfloat16)
            found = merge_(W, now.product(), dtype, before=before.product(), core=core)
            share[dtype, size] = found.on_core / found.moved, found.relative
    assert share[torch.float32, 1e-2][0] < 1e-5
    assert share[torch.bfloat16, 1e-2][0] > 1e-3
    assert share[torch.bfloat16, 1e-3][0] > 3 * share[torch.bfloat16, 1e-2][0]
    assert share[torch.bfloat16, 1e-3][1] > 3 * share[torch.bfloat16, 1e-2][1]


def test_without_a_protected_past_only_the_error_is_told():
    for given in ((), ("before",), ("core",)):
        W, now, before, core = layer()
        past = {"before": before.product(), "core": core}
        found = merge_(W, now.product(), torch.float32, **{name: past[name] for name in given})
        assert (found.moved, found.on_core) == (None, None)
        assert 0 < found.relative < 1e-4


def test_live_parameters_are_merged_as_their_values_are():
    (W, now, before, core), live = layer(), torch.nn.Parameter
    weight, kept = live(W.clone()), {"before": before.product(), "core": core}
    lives = [Product(live(product.left), live(product.right)) for product in (now.product(), before.product())]
    expected = merge_(W, now.product(), torch.bfloat16, **kept)
    assert merge_(weight, lives[0], torch.bfloat16, before=lives[1], core=core) == expected
    assert torch.equal(weight, W)
    assert weight.requires_grad


def test_an_update_of_nothing_into_what_the_type_holds_changes_nothing():
    W = torch.randn(6, 5).bfloat16().float()
    kept = W.clone()
    found = merge_(W, Product(torch.zeros(6, 1), torch.zeros(1, 5)), torch.bfloat16)
    assert torch.equal(W, kept)
    assert found.relative == 0.0


def test_a_weight_that_cannot_hold_the_type_is_refused():
    with pytest.raises(TypeError, match="cannot hold what is rounded to torch.float32"):
        merge_(torch.zeros(2, 2, dtype=torch.bfloat16), Product(torch.zeros(2, 1), torch.zeros(1, 2)), torch.float32)
