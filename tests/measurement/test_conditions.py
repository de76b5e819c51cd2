"""The conditions of the rule against dense float64, and their verdicts at the edge of what rounding explains."""

import pytest
import torch

from anchorlora import Subspace
from anchorlora.geometry import Factors
from anchorlora.measurement.layers import Condition, FactorSquares
from anchorlora.measurement.recorder import StepMoves, together

EPS = torch.finfo(torch.float32).eps
ZERO = (2 * EPS) ** 2  # squared norm on V that counts as none, where |A| = 1 and its roundings on V are few


def drawn(seed, *, r=3, d_in=20, d_out=14, size=1.0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    A, B = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((r, d_in), (d_out, r)))
    return Factors(torch.nn.Parameter((size * A).to(dtype)), torch.nn.Parameter((size * B).to(dtype)), 4.0)


def square(x):
    return float((x**2).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.5, 2.0])  # B may have grown or shrunk since the start
def test_every_square_agrees_with_dense_float64(size, dtype):
    now, start = drawn(1, size=size, dtype=dtype), drawn(2, dtype=dtype)
    V = torch.linalg.qr(torch.randn(20, 5, dtype=torch.float64)).Q
    A, B, A0, B0 = (x.detach().double() for x in (now.A, now.B, start.A, start.B))
    unit = torch.finfo(dtype).eps / 2 / 3**0.5  # rms relative error of one rounding
    found = FactorSquares.of(now, start, Subspace(V))
    kept = {"state_on": square(A @ V), "state": square(A), "noise": unit**2 * 5 / 20 * square(A)}
    moved = {"moved_on": square((A - A0) @ V), "moved": square(A - A0), "chance": 5 / 20 * square(A - A0)}
    output = {"delta_b": square(B - B0), "output": square(max(B, B0, key=torch.linalg.norm)), "unknown": 0}
    assert vars(found) == pytest.approx({**moved, **kept, **output}, rel=1e-12, abs=0)
    alone = FactorSquares.of(now, None, Subspace(V))  # nobody saved the start
    nothing = dict.fromkeys(("moved_on", "moved", "chance", "delta_b"), 0.0)
    assert vars(alone) == pytest.approx({**nothing, **kept, "output": square(B), "unknown": 1}, rel=1e-12, abs=0)
    assert vars(found + alone) == pytest.approx(
        {name: vars(found)[name] + vars(alone)[name] for name in vars(found)}, rel=1e-12, abs=0
    )
    assert found + FactorSquares() == found


@pytest.mark.parametrize(
    ("squares", "condition", "expected"),
    [
        ({"state_on": ZERO}, "state", (2 * EPS, 2 * EPS, True)),
        ({"state_on": 1.1 * ZERO}, "state", (1.1**0.5 * 2 * EPS, 2 * EPS, False)),
        ({"state": 4.0, "state_on": 4.1 * ZERO}, "state", (1.025**0.5 * 2 * EPS, 2 * EPS, False)),
        ({"state_on": 9 * ZERO, "noise": ZERO}, "state", (6 * EPS, 6 * EPS, True)),
        ({"moved": 0.25, "moved_on": ZERO, "chance": 0.1}, "displacement", (4 * EPS, 4 * EPS, True)),
        ({"moved": 0.25, "moved_on": 4 * ZERO, "chance": 0.1}, "displacement", (8 * EPS, 4 * EPS, False)),
        ({}, "displacement", (None, None, True)),
        ({"delta_b": 0.0, "output": 4.0}, "delta_b", (0.0, 0.0, True)),
        ({"delta_b": 1e-30, "output": 4.0}, "delta_b", (5e-16, 0.0, False)),
        ({"delta_b": 0.0, "output": 0.0}, "delta_b", (None, 0.0, True)),
    ],
)
def test_a_condition_is_preserved_up_to_what_rounding_explains(squares, condition, expected):
    found = FactorSquares(**{"state": 1.0, **squares}).conditions()[condition]
    assert found.preserved is expected[2]
    assert (found.value, found.bound) == tuple(each if each is None else pytest.approx(each, rel=1e-12) for each in expected[:2])


@pytest.mark.parametrize(
    ("chance", "moved_on", "preserved"), [(100, 1, True), (99, 1, None), (99, 1.1, False), (1000, 0, True), (1, 0, None)]
)
def test_a_move_too_small_to_show_on_the_core_proves_nothing(chance, moved_on, preserved):
    """A zero is evidence where it lies 10 times below what an unaligned move reads; what lies above rounding is violated."""
    squares = FactorSquares(state=1.0, moved=400 * ZERO, moved_on=moved_on * ZERO, chance=chance * ZERO)
    assert squares.conditions()["displacement"].preserved is preserved


def test_where_the_start_of_a_block_is_unknown_only_its_state_is_judged():
    found = FactorSquares(state=1.0, output=1.0, unknown=1).conditions()
    assert found["displacement"] == found["delta_b"] == Condition(None, None, None)
    assert found["state"].preserved is True


def test_moves_of_a_step_are_those_since_its_begin_in_float64():
    X, V = torch.nn.Parameter(torch.randn(4, 12)), torch.linalg.qr(torch.randn(12, 3, dtype=torch.float64)).Q
    moves = StepMoves({"one": (lambda: X, Subspace(V)), "two": (lambda: 2 * X, Subspace(V[:, :1]))})
    for _ in range(2):
        moves.begin()
        before = X.detach().double()
        X.data.add_(1e-3 * torch.randn(4, 12))
        step = X.detach().double() - before
        expected = {"one": float((step @ V).norm()), "two": float((2 * step @ V[:, :1]).norm())}
        assert moves.inside() == pytest.approx(expected, rel=1e-12)
    assert together(moves.inside()) == pytest.approx(sum(each**2 for each in expected.values()) ** 0.5, rel=1e-12)
