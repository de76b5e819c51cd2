"""Joined cores: unchanged while they fit, cut by energy where they do not, so that a long chain of things still has room."""

import pytest
import torch

from anchorlora import Subspace
from anchorlora.errors import InvalidValue
from anchorlora.geometry import JoinedCore, joined_by_layer, joined_within


def core_of(rows, k):
    """The core of feature rows, as a store makes it, and the share of the energy on each of its directions."""
    _, values, right = torch.linalg.svd(rows, full_matrices=False)
    return Subspace(right[:k].T.contiguous()), (values**2 / (values**2).sum())[:k]


def skills(d, count, *, decay, seed=0, rows=400):
    """Feature rows of several skills: a spectrum that falls, half of whose directions all skills share."""
    draw, m = torch.Generator().manual_seed(seed), min(d, 96)
    common = torch.linalg.qr(torch.randn(d, m, generator=draw, dtype=torch.float64)).Q
    for _ in range(count):
        own = torch.linalg.qr(torch.randn(d, m, generator=draw, dtype=torch.float64)).Q
        scale = torch.arange(1, m + 1, dtype=torch.float64) ** -decay
        x = torch.randn(2, rows, m, generator=draw, dtype=torch.float64) * scale
        yield x[0] @ common.T + x[1] @ own.T


def test_what_fits_is_joined_bitwise_as_before():
    union, joined = {}, {}
    for i, rows in enumerate(skills(96, 4, decay=0.7)):
        core, shares = core_of(rows, 12)
        union = joined_by_layer(union, {"q": core})
        joined = joined_within(joined, {"q": JoinedCore(core, {f"skill {i}": shares})})
        assert torch.equal(joined["q"].core.basis, union["q"].basis)


@pytest.mark.parametrize("cut", [False, True])
def test_the_energy_that_is_printed_is_that_of_the_directions_themselves(cut):
    joined, moments = {}, {}
    for i, rows in enumerate(skills(96, 8 if cut else 3, decay=0.7)):
        core, shares = core_of(rows, 12)
        moments[f"skill {i}"] = core.basis * shares @ core.basis.T  # what is known of it
        joined = joined_within(joined, {"q": JoinedCore(core, {f"skill {i}": shares})})
    found = joined["q"]
    assert (found.core.k == found.limit) is cut
    Q = found.directions()
    for name, moment in moments.items():
        true = float((Q.T @ moment @ Q).trace())
        if cut:  # of directions that were cut earlier, nothing is known, so more may be held
            assert 0 < found.held(name) <= true + 1e-9
        else:
            assert found.held(name) == pytest.approx(true, abs=1e-9) == found.before_cuts(name)


@pytest.mark.parametrize("d", [576, pytest.param(1536, marks=pytest.mark.slow)])
def test_fifty_skills_on_the_widths_of_smollm2_leave_half_of_the_directions_to_the_fiftieth(d):
    joined = {}
    for i, rows in enumerate(skills(d, 50, decay=0.8, rows=128)):
        core, shares = core_of(rows, 64)
        joined = joined_within(joined, {"q": JoinedCore(core, {f"skill {i}": shares})}, asked=0.93)
        joined["q"].refuse_full("q")
    found = joined["q"]
    assert found.core.k <= d // 2
    assert len(found.energy) == 50
    kept = [found.held(name) / found.before_cuts(name) for name in found.energy]
    assert min(kept) > 0.5


def test_a_cut_keeps_the_directions_that_carry_the_energy():
    eye = torch.eye(8, dtype=torch.float64)
    strong = JoinedCore(Subspace(eye[:, :4]), {"old": torch.tensor([0.5, 0.3, 0.1, 0.01])})
    both = joined_within({"q": strong}, {"q": JoinedCore(Subspace(eye[:, 4:6]), {"new": torch.tensor([0.6, 0.1])})})["q"]
    kept = (both.core.basis.abs() > 0.5).any(dim=1)
    assert kept.tolist() == [True, True, False, False, True, True, False, False]
    assert both.held("old") == pytest.approx(0.8)
    assert both.before_cuts("old") == pytest.approx(0.91)


def test_layers_that_share_a_core_share_the_joined_one():
    eye = torch.eye(8)
    core = JoinedCore(Subspace(eye[:, :2]), {"news": torch.tensor([0.6, 0.3])})
    found = joined_within({}, {"q": core, "k": core})
    assert found["q"] is found["k"]


def test_a_layer_that_gave_up_too_much_is_full():
    eye = torch.eye(4, dtype=torch.float64)
    joined = {}
    for i in range(4):
        joined = joined_within(joined, {"q": JoinedCore(Subspace(eye[:, i : i + 1]), {f"s{i}": torch.tensor([0.9])})})
    with pytest.raises(InvalidValue, match=r"q is full: 2 of its 4 input directions are protected.*fold-64"):
        joined["q"].refuse_full("q")
