"""A run that is stopped anywhere and taken up again ends bitwise as one that was not."""

import random
import shutil

import pytest

from anchorlora import METHODS
from anchorlora.errors import Interrupted
from anchorlora.runs.directory import RunDirectory
from faults.runs import EPOCHS, LONG, STEPS, TASKS, assert_same, differing, run

STEP_POINTS = [{"task": t, "step": s} for t in range(1, TASKS + 1) for s in range(1, STEPS + 1)]
BATCH_POINTS = [{"task": t, "batch": b} for t in range(1, TASKS + 1) for b in range(1, t + 1)]
PHASES = [{"task": t, "phase": phase} for t in range(1, TASKS + 1) for phase in ("trained", "ended")]
TRACED = {"trace_points": 4}

# the long form
STOPS = 20
LONG_STEPS = [{"task": t, "step": s} for t in range(1, TASKS + 1) for s in range(1, EPOCHS * STEPS + 1)]
BOUNDARIES = [*PHASES, *({"task": t, "batch": b} for t in range(1, TASKS + 1) for b in range(1, 2 * t + 1))]


@pytest.fixture(scope="module", params=[TRACED], ids=[""])
def recipe(request, small_benchmark, small_model):
    import small

    return small.recipe(small_benchmark, small_model, **request.param)


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """method -> the folder of its uninterrupted run."""
    made = {}

    def of(method):
        if method not in made:
            made[method] = tmp_path_factory.mktemp("whole") / method
            run(recipe, made[method], method)
        return made[method]

    return of


def stop_at(point, recipe, out, method):
    with pytest.raises(Interrupted, match="the same command continues from there"):
        run(recipe, out, method, point=point)
    assert not (out / "record.json").exists()


def partly_filled(out, point, recipe):
    """Whether rows had been taken and more were wanted when the run was stopped."""
    taken = RunDirectory(out).checkpoint(point["task"]).read_progress(point["task"], pytest.fail).rows
    wanted = {"core": recipe.features.rows, "held_out": recipe.features.held_out_rows}
    return any(len(rows) < wanted[name.partition("/")[0]] for name, rows in taken.items())


@pytest.mark.drawn(4)
@pytest.mark.parametrize("method", METHODS)
def test_stopped_within_tasks_it_ends_the_same(method, recipe, whole, tmp_path):
    """Two points a method in the short suite, drawn by its name."""
    points = random.Random(method).sample([*STEP_POINTS[:-1], *BATCH_POINTS[:-1]], 2)
    points.sort(key=lambda p: (p["task"], "batch" in p, p.get("step", p.get("batch"))))
    for point in points:
        stop_at(point, recipe, tmp_path / "parts", method)
    run(recipe, tmp_path / "parts", method)
    assert_same(tmp_path / "parts", whole(method))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("point", PHASES, ids=str)
def test_stopped_at_a_boundary_it_ends_the_same(point, recipe, whole, tmp_path):
    """One method a moment, drawn by it."""
    method = random.Random(str(point)).choice(list(METHODS))
    stop_at(point, recipe, tmp_path / "parts", method)
    run(recipe, tmp_path / "parts", method)
    assert_same(tmp_path / "parts", whole(method))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [TRACED | LONG], indirect=True, ids=["long"])
@pytest.mark.parametrize("method", METHODS)
def test_stopped_at_twenty_drawn_steps_and_at_every_boundary_it_ends_the_same(method, recipe, whole, figure, tmp_path):
    """Each time from the beginning, so that every stop is the only one of its run."""
    steps, out, partly, wrong = random.Random(method).sample(LONG_STEPS, STOPS), tmp_path / "parts", 0, {}
    for point in [*steps, *BOUNDARIES]:
        stop_at(point, recipe, out, method)
        partly += "step" in point and partly_filled(out, point, recipe)
        run(recipe, out, method)
        wrong |= {str(point): different} if (different := differing(out, whole(method))) else {}
        shutil.rmtree(out)
    tried = len(steps) + len(BOUNDARIES)
    figure("resume", methods=1, steps=len(steps), boundaries=len(BOUNDARIES), partly=partly, equal=tried - len(wrong))
    assert not wrong, f"differ after resuming: {wrong}"
    assert partly, "no stop while rows were being taken"
