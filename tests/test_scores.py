import random
from dataclasses import FrozenInstanceError
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anchorlora import Scores
from anchorlora.scores import Paired
from anchorlora_lab.report.paired_tests import mean_interval, paired_tests

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


def test_a_paired_test_is_that_of_all_sign_flips_written_out():
    changes = [2.0, 1.0, 0.5, 3.0, -0.5, 1.5, 0.25]
    (found,) = paired_tests([dict(enumerate(changes))])
    sums = [abs(sum(s * c for s, c in zip(signs, changes, strict=True))) for signs in product((1, -1), repeat=7)]
    p = sum(value >= sum(changes) - 1e-12 for value in sums) / 2**7
    assert (found.n, found.p, found.adjusted) == (7, p, p)
    assert found.mean == pytest.approx(sum(changes) / 7)


@given(st.lists(st.floats(-5, 5).map(lambda v: round(v, 3)), min_size=6, max_size=9, unique=True), st.floats(-5, 5))
@settings(max_examples=40, deadline=None)
def test_an_interval_holds_what_the_test_does_not_reject(changes, shift):
    (found,) = paired_tests([dict(enumerate(changes))])
    (moved,) = paired_tests([dict(enumerate([c - shift for c in changes]))])
    low, high = found.interval
    if min(abs(shift - low), abs(shift - high)) > 1e-6:
        assert (moved.p > 0.05 + 1e-9) >= (low < shift < high)
        assert (moved.p <= 0.05) >= (not low <= shift <= high)


def test_intervals_cover_the_mean_as_often_as_they_say():
    draw = random.Random(1)
    found = [paired_tests([{i: 1 + draw.gauss(0, 2) for i in range(7)}])[0].interval for _ in range(400)]
    assert 0.92 < sum(low <= 1 <= high for low, high in found) / 400 < 0.99


def test_a_correction_is_no_weaker_than_one_test_and_no_stronger_than_holms():
    draw = random.Random(2)
    comparisons = [{i: mean + draw.gauss(0, 1) for i in range(9)} for mean in (3, 2, 1, 0, 0, 0)]
    tests = paired_tests(comparisons)
    ranked = sorted(tests, key=lambda test: test.p)
    holm, least = [], 0.0
    for place, test in enumerate(ranked):
        least = max(least, min(1.0, (len(ranked) - place) * test.p))
        holm.append(least)
    assert all(test.p <= test.adjusted for test in tests)
    assert all(test.adjusted <= bound + 0.02 for test, bound in zip(ranked, holm, strict=True))
    assert tests[0].adjusted == pytest.approx(2 / 512)
    assert paired_tests([*comparisons, comparisons[0]])[0].adjusted == tests[0].adjusted  # a repeated comparison costs nothing


def test_false_findings_among_many_comparisons_are_rare():
    draw, wrong = random.Random(3), 0
    for _ in range(150):
        tests = paired_tests([{i: draw.gauss(0, 1) for i in range(8)} for _ in range(10)])
        wrong += min(test.adjusted for test in tests) <= 0.05
    assert wrong <= 15


def test_few_pairs_have_no_interval_many_are_drawn_and_none_are_refused():
    assert paired_tests([dict(enumerate([1.0] * 5))])[0].interval is None
    (many,) = paired_tests([{i: 1.0 + (i % 3) for i in range(40)}])
    assert many.interval[0] < many.mean < many.interval[1]
    assert many.p == 1 / 4096
    with pytest.raises(ValueError, match="no pairs"):
        paired_tests([{}])


def test_with_tasks_examples_are_drawn_within_each_and_every_task_counts_alike():
    draw = random.Random(4)
    tasks = ["many"] * 400 + ["few"] * 100
    before = [0.0] * 500
    after = [float(draw.random() < (0.9 if task == "many" else 0.3)) for task in tasks]
    low, high = Paired(before, after, tasks).interval()
    shares = [sum(a for a, t in zip(after, tasks, strict=True) if t == task) / tasks.count(task) for task in ("many", "few")]
    middle = sum(shares) / 2
    error = (shares[0] * (1 - shares[0]) / 400 + shares[1] * (1 - shares[1]) / 100) ** 0.5 / 2
    assert (low, high) == pytest.approx((middle - 1.96 * error, middle + 1.96 * error), abs=0.006)
    far, spread = Paired(before, after, tasks).interval(level=1 - 1e-5), Paired(before, after, tasks).interval(level=0.95)
    assert far[1] - far[0] > 2 * (spread[1] - spread[0]), "2,000 draws do not reach so far"
    long = Paired(before * 11, after * 11, tasks * 11).interval()  # beyond 5,000, the normal limit
    assert long == pytest.approx((middle - 1.96 * error / 11**0.5, middle + 1.96 * error / 11**0.5), abs=1e-3)


@pytest.mark.parametrize("seed", [2, 217])  # rounding alone would put the end at -1.8e-15 and at 4.4e-16
def test_an_interval_that_ends_at_zero_ends_at_zero_whatever_rounding_does(seed):
    draw = random.Random(seed)
    before = [100 * draw.choice([0, 1, 2]) / 3 for _ in range(24)]
    after = [min(100.0, value + 100 * draw.choice([-1, 0, 0, 1, 1]) / 3) for value in before]
    low, _ = Paired(before, after, [task for task in "abc" for _ in range(8)]).interval()
    assert (low, f"{low:+.2f}") == (0.0, "+0.00")


def test_so_does_an_interval_over_runs():
    low, _ = paired_tests([dict(enumerate([0.3 - 0.1 - 0.2, 1.0, 2.0, 3.0, 0.1 + 0.2 - 0.3, 2.0]))])[0].interval
    assert (low, f"{low:+.2f}") == (0.0, "+0.00")


def test_an_interval_of_a_mean_is_that_of_the_test_against_zero():
    values = [70.0, 71.5, 69.0, 74.0, 72.5, 70.5, 71.0]
    assert mean_interval(values) == paired_tests([dict(enumerate(values))])[0].interval
    assert mean_interval(values[:5]) is None
    assert mean_interval([]) is None
