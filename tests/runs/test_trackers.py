"""A run in trackers: real event files of TensorBoard, read back; one that fails, and one that is not there."""

import json
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest

import small
from anchorlora import METHODS, run_sequence
from anchorlora.cli.app import main
from anchorlora.continual.callback import RunCallback
from anchorlora.errors import Interrupted
from anchorlora.runs.autosave import Stop
from anchorlora.runs.trackers import Trackers, tracked
from faults.runs import AskToStop
from golden import one_line
from records import VOLATILE

STEPS = 3  # of each of three tasks


@pytest.fixture
def tensorboard():
    return pytest.importorskip("tensorboard", reason="tensorboard is not installed")


def run(recipe, out, callbacks=(), order=small.ORDER[:2], **settings):
    return run_sequence(recipe, METHODS["o-lora-hard"], order=order, seed=42, out=out, callbacks=callbacks, **settings)


def followed(recipe, out, callbacks=(), names=("tensorboard",), **settings):
    said = []
    with tracked(names, out, say=said.append) as trackers:
        run(recipe, out, [*trackers, *callbacks], **settings)
    return said


def events(out):
    """Tag -> [(step, value)], as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(out / "trackers" / "tensorboard")).Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def logged(out):
    return [e for e in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if e["event"] == "step"]


def steady(out):
    return {k: v for k, v in json.loads((out / "record.json").read_text()).items() if k not in VOLATILE}


def assert_every_step_once(out):
    shown, steps = events(out), logged(out)
    assert len(steps) == 2 * STEPS
    for name in ("loss", "learning_rate", "grad_norm"):
        assert [step for step, _ in shown[f"train/{name}"]] == list(range(1, 2 * STEPS + 1)), name
        assert [value for _, value in shown[f"train/{name}"]] == pytest.approx([event[name] for event in steps])
    return shown


def test_tensorboard_has_every_step_and_every_task_and_the_record_is_the_same(tensorboard, small_recipe, tmp_path):
    assert followed(small_recipe, tmp_path / "a") == []
    run(small_recipe, tmp_path / "b")
    assert steady(tmp_path / "a") == steady(tmp_path / "b")
    shown, record = assert_every_step_once(tmp_path / "a"), json.loads((tmp_path / "a/record.json").read_text())
    penalties = [event["penalties"] for event in logged(tmp_path / "a")]
    assert [value for _, value in shown["penalty/overlap"]] == pytest.approx([p["overlap"] for p in penalties if "overlap" in p])
    assert [step for step, _ in shown["rho"]] == [6]
    assert [value for _, value in shown["rho"]] == pytest.approx([drift["rho"] for drift in record["drift"]])
    assert not [tag for tag in shown for other in shown if other.startswith(f"{tag}/")], "MLflow makes folders of them"
    for number, task in enumerate(small.ORDER[:2]):
        rows = range(number, 2)
        for name, triangle in {**record["metrics"], "accuracy": record["accuracy"], "invalid": record["invalid"]}.items():
            expected = {STEPS * (row + 1): triangle[row][number] for row in rows if triangle[row][number] is not None}
            assert dict(shown.get(f"{name}/{task}", [])) == pytest.approx(expected), name


@pytest.mark.parametrize(
    "point",
    [{"task": 2, "step": 2}, {"task": 2, "batch": 1}, pytest.param({"task": 1, "phase": "ended"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_run_that_goes_on_goes_on_at_its_step(tensorboard, point, small_recipe, tmp_path):
    stop = Stop()
    asking = AskToStop(stop, **point)
    with pytest.raises(Interrupted), asking.at_boundaries():
        followed(small_recipe, tmp_path / "a", [asking], stop=stop)
    followed(small_recipe, tmp_path / "a")
    shown = assert_every_step_once(tmp_path / "a")
    assert [step for step, _ in shown["rho"]] == [6]
    assert [step for step, _ in shown["accuracy/fruit"]] == [3, 6]
    counts = Counter(path.name.split(".")[0] for path in (tmp_path / "a/trackers/tensorboard").iterdir())
    assert counts == {"events": 2}


class Killed(RunCallback):
    def on_step_end(self, event):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 2 * STEPS - 1:
            raise KeyboardInterrupt


def test_steps_that_are_made_again_are_shown_once(tensorboard, small_recipe, tmp_path):
    """Killed in the second task with nothing saved in it: its first steps are made twice."""
    with pytest.raises(KeyboardInterrupt):
        followed(small_recipe, tmp_path / "a", [Killed()], save_every=0)
    assert [step for step, _ in events(tmp_path / "a")["train/loss"]] == [1, 2, 3, 4, 5]
    followed(small_recipe, tmp_path / "a", save_every=0)
    assert_every_step_once(tmp_path / "a")


def test_a_tracker_that_fails_is_left_out_with_one_warning(tensorboard, small_recipe, tmp_path, monkeypatch):
    from accelerate.tracking import TensorBoardTracker

    write, calls = TensorBoardTracker.log, []

    def full(self, values, step=None, **more):
        calls.append(step)
        if step == 4:
            raise OSError("no space left")
        write(self, values, step=step, **more)

    closed = []
    monkeypatch.setattr(TensorBoardTracker, "log", full)
    monkeypatch.setattr(TensorBoardTracker, "finish", lambda self: closed.append(self))
    said = followed(small_recipe, tmp_path / "a", order=small.ORDER[:2])
    assert said == ["tensorboard follows this run no longer (OSError: no space left); the run continues without it"]
    assert calls == [1, 2, 3, 3, 4]
    assert len(closed) == 1
    assert len(steady(tmp_path / "a")["accuracy"]) == 2


class Fake:
    """A tracker as Accelerate's of W&B is, which finds its run by a name."""

    requires_logging_directory = False
    made: ClassVar[list] = []

    def __init__(self, project, **given):
        self.project, self.given, self.told = project, given, []
        Fake.made.append(self)

    def start(self):
        self.id = self.given["id"] or "abc"
        link = Path(self.given["dir"]) / "latest-run"
        link.unlink(missing_ok=True)
        link.symlink_to("somewhere")

    @property
    def tracker(self):
        return self

    def log(self, values, step=None):
        self.told.append((step, values))

    def finish(self):
        self.told.append("finished")


def test_wandb_finds_its_run_again_and_its_links_do_not_stop_a_run_that_goes_on(small_recipe, tmp_path, monkeypatch):
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Fake)
    monkeypatch.setattr(Fake, "made", [])
    stop, one = Stop(), small.ORDER[:1]
    with pytest.raises(Interrupted):
        followed(small_recipe, tmp_path / "a", [AskToStop(stop, task=1, step=2)], names=("wandb",), order=one, stop=stop)
    followed(small_recipe, tmp_path / "a", names=("wandb",), order=one)
    first, second = Fake.made
    assert (first.project, first.given["name"], first.given["id"], first.given["resume"]) == ("anchorlora", "a", None, "allow")
    assert second.given["id"] == "abc"
    assert [told[0] for told in first.told[:-1]] == [1, 2]
    assert [told[0] for told in second.told[:-1]] == [3, 3]
    assert first.told[-1] == second.told[-1] == "finished"


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path):
    (tmp_path / "trackers").write_text("a file is in the way")
    said = []
    follower = Trackers(["tensorboard"], tmp_path, say=said.append)
    follower.on_task_begin(1, "news", 3, 0)
    follower.on_step_end({"step": 1, "loss": 1.0, "learning_rate": 1.0, "grad_norm": 1.0, "penalties": {}})
    follower.finish()
    assert len(said) == 1
    assert "the run continues without it" in said[0]


def test_what_begins_after_the_record_is_another_run_and_is_not_followed(tmp_path, monkeypatch):
    """The unprotected twin of `train --compare`."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Fake)
    monkeypatch.setattr(Fake, "made", [])
    follower = Trackers(["wandb"], tmp_path, say=pytest.fail)
    step = {"step": 1, "loss": 1.0, "learning_rate": 1.0, "grad_norm": 1.0, "penalties": {}}
    follower.on_task_begin(1, "news", 3, 0)
    follower.on_step_end(step)
    (tmp_path / "record.json").write_text("{}")
    follower.on_task_begin(1, "news", 3, 0)
    follower.on_step_end(step)
    assert [told[0] for told in Fake.made[0].told] == [1]


@pytest.mark.parametrize("command", [["run", "no-such-recipe"], ["train", "no-such-model", "--data", "none"]], ids=["run", "train"])
def test_a_missing_package_is_one_line_before_anything_is_loaded(command, tmp_path, capsys, monkeypatch):
    import accelerate.tracking

    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [])
    monkeypatch.setattr(accelerate.tracking, "get_available_trackers", list)
    assert main([*command, "--track", "mlflow", "--out", str(tmp_path / "out")]) == 2
    assert "--track mlflow needs a package that is not installed: pip install mlflow" in one_line(capsys)
    assert main([*command, "--track", "wandbb", "--out", str(tmp_path / "out")]) == 2
    assert "Accelerate has no tracker 'wandbb'; nearest: wandb" in one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_the_command_line_follows_a_run(tensorboard, small_benchmark, small_model, tmp_path):
    given = {"rank": 4, "alpha": 16, "max_tokens": 96, "max_new_tokens": 6, "threads": 1}
    sets = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    where = ["--model", str(small_model), "--data", str(small_benchmark), "--out", str(tmp_path / "r")]
    chosen = ["--method", "seq-lora", "--order", small.ORDER[0], "--track", "tensorboard"]
    assert main(["run", "standard-cl", *chosen, *sets, *where]) == 0
    assert [step for step, _ in events(tmp_path / "r")["train/loss"]] == list(range(1, len(logged(tmp_path / "r")) + 1))


def test_it_is_off_by_default():
    from anchorlora.cli.run import run as command
    from anchorlora.cli.train import train

    assert command.make_context("run", ["mini"]).params["track"] == ()
    assert train.make_context("train", ["model", "--data", "new", "--out", "out"]).params["track"] == ()
