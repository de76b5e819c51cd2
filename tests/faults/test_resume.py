"""A run that is stopped anywhere and taken up again ends bitwise as one that was not."""

import random

import pytest

from anchorlora import METHODS
from anchorlora.errors import Interrupted
from faults.runs import STEPS, TASKS, assert_same, run

STEP_POINTS = [{"task": t, "step": s} for t in range(1, TASKS + 1) for s in range(1, STEPS + 1)]
BATCH_POINTS = [{"task": t, "batch": b} for t in range(1, TASKS + 1) for b in range(1, t + 1)]
TRACED = {"trace_points": 4}


@pytest.fixture(scope="session")
def recipe(small_benchmark, small_model):
    import small

    return small.recipe(small_benchmark, small_model, **TRACED)


@pytest.fixture(scope="session")
def whole(recipe, tmp_path_factory):
    """method -> the folder of its uninterrupted run."""
    made = {}

    def of(method):
        if method not in made:
            made[method] = tmp_path_factory.mktemp("whole") / method
            run(recipe, made[method], method)
        return made[method]

    return of


def stopped_at(points, recipe, out, method):
    for point in points:
        with pytest.raises(Interrupted, match="the same command goes on from there"):
            run(recipe, out, method, point=point)
        assert not (out / "record.json").exists()
    run(recipe, out, method)


@pytest.mark.parametrize("method", METHODS)
def test_stopped_within_tasks_it_ends_the_same(method, recipe, whole, tmp_path):
    """Two points a method in the short suite, drawn by its name; `make faults` tries all."""
    points = random.Random(method).sample([*STEP_POINTS[:-1], *BATCH_POINTS[:-1]], 2)
    points.sort(key=lambda p: (p["task"], "batch" in p, p.get("step", p.get("batch"))))
    stopped_at(points, recipe, tmp_path / "parts", method)
    assert_same(tmp_path / "parts", whole(method))


@pytest.mark.slow
@pytest.mark.parametrize("point", [*STEP_POINTS, *BATCH_POINTS], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_stopped_at_every_single_point_it_ends_the_same(method, point, recipe, whole, tmp_path):
    stopped_at([point], recipe, tmp_path / "parts", method)
    assert_same(tmp_path / "parts", whole(method))
