from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from anchorlora import Scores

triangles = st.integers(2, 6).flatmap(
    lambda n: st.tuples(*[st.lists(st.floats(0, 100), min_size=t, max_size=t) for t in range(1, n + 1)])
)


@given(triangles)
def test_scores_agree_with_the_written_sums(a):
    assert Scores.of(a).as_dict() == pytest.approx(oracle.scores(list(a)), abs=1e-9)


@given(triangles)
def test_the_identities_of_the_published_tables_hold(a):
    s, n = Scores.of(a).as_dict(), len(a)
    assert s["AA"] == pytest.approx(s["LA"] + (n - 1) / n * s["BWT"], abs=1e-9)
    assert s["FM"] >= -s["BWT"] - 1e-9


def test_one_task_has_no_transfer_and_no_forgetting():
    assert Scores.of([[80.0]]).as_dict() == {"AA": 80.0, "LA": 80.0, "BWT": None, "FM": None}


def test_forgetting_may_be_negative():
    assert Scores.of([[50], [60, 40]]).forgetting == -10


@pytest.mark.parametrize("rows", [[], [[1, 2]], [[50], [50]], [[101]], [[-0.5]], [[50], [50, 101]], [[float("nan")]]])
def test_what_is_no_triangle_of_percentages_is_refused(rows):
    with pytest.raises(ValueError, match="triangle"):
        Scores.of(rows)


def test_scores_cannot_be_changed_after_their_check_and_equal_triangles_are_equal():
    scores = Scores.of([[80.0]])
    with pytest.raises(FrozenInstanceError):
        scores.a = ((101.0,),)
    assert {scores: "one task"}[Scores.of([[80]])] == "one task"
