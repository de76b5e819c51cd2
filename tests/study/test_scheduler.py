"""Many runs in one folder: each once, failures apart, several runners at a time.  Most processes here are stand-ins for a run."""

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from rich.console import Console

import records
import small
from anchorlora.cli.app import main
from anchorlora.config import RunConfig
from anchorlora.constraints import ActiveConstraint
from anchorlora.errors import InvalidValue
from anchorlora.methods import Shared
from anchorlora.recipes import mini, standard_cl
from anchorlora.runs.directory import RunDirectory
from anchorlora_lab.cli.progress import bar_over
from anchorlora_lab.grid.plan import GridAxes, plan, rows, slug, starts
from anchorlora_lab.grid.scheduler import LocalEngine, Planned
from golden import one_line

RECORD = "pathlib.Path(folder, 'record.json').write_text('{}')"


def stand_in(script):
    """A command whose program gets its folder, and the folder's name."""
    body = "import sys, pathlib, time, os\nfolder = sys.argv[1]\nname = pathlib.Path(folder).name\n" + textwrap.dedent(script)
    return lambda folder, config: [sys.executable, "-S", "-c", body, str(folder)]


def missing_runs(root, count=5):
    return [Planned(root / f"run-{i}", RunConfig(method="sfor", order=("a", "b"), seed=i, recipe=mini())) for i in range(count)]


def test_every_missing_run_starts_once_and_no_more_than_the_slots_at_a_time(tmp_path):
    log = tmp_path / "log"
    script = f"""
    with open({str(log)!r}, 'a') as f: f.write(f'+{{name}}\\n')
    time.sleep(0.3)
    {RECORD}
    with open({str(log)!r}, 'a') as f: f.write(f'-{{name}}\\n')
    """
    root = tmp_path / "grid"
    planned = missing_runs(root)
    (root / "run-2").mkdir(parents=True)
    (root / "run-2/record.json").write_text("{}")
    outcomes = LocalEngine(2).run(planned, root=root, command=stand_in(script))
    assert sorted(o.planned.folder.name for o in outcomes) == ["run-0", "run-1", "run-3", "run-4"]
    assert {o.status for o in outcomes} == {"done"}
    events = log.read_text().split()
    assert sorted(e for e in events if e[0] == "+") == ["+run-0", "+run-1", "+run-3", "+run-4"]
    running = [sum(1 if e[0] == "+" else -1 for e in events[: i + 1]) for i in range(len(events))]
    assert max(running) == 2
    assert LocalEngine(2).run(planned, root=root, command=stand_in("raise SystemExit(9)")) == []


def test_a_list_has_the_command_of_each_missing_run_and_starts_nothing(tmp_path, capsys):
    """As `xargs` would start them: each line by a shell of its own."""
    root = tmp_path / "my grid"
    words = ["grid", "mini", "--methods", "sfor", "--orders", "order1", "--seeds", "1,2,3", "--save-every", "7", "--out", str(root)]
    (root / ".runs").mkdir(parents=True)
    (root / ".runs/sfor-order1-3.failed").write_text("exit status 1: no room\n")
    assert main([*words, "--list"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    folders = [root / f"sfor/order1-{seed}" for seed in (1, 2)]
    for line, folder in zip(lines, folders, strict=True):
        asked = shlex.split(line)
        assert asked[:5] == [sys.executable, "-m", "anchorlora", "run", str(folder / "config.yaml")]
        assert asked[asked.index("--out") + 1] == str(folder)
        assert asked[asked.index("--save-every") + 1] == "7"
    assert "left out: sfor/order1-3  failed: exit status 1: no room" in said.err
    split = subprocess.run(["sh", "-c", f"printf '%s\\n' {lines[0]}"], capture_output=True, text=True, check=True).stdout
    assert split.splitlines() == shlex.split(lines[0])
    assert main([*shlex.split(lines[0])[3:], "--dry-run"]) == 0
    capsys.readouterr()
    (folders[0] / "record.json").write_text(records.record().as_json())
    assert main([*words, "--list", "--retry-failed"]) == 0
    asked = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [each[4] for each in asked] == [str(root / f"sfor/order1-{seed}/config.yaml") for seed in (2, 3)]


def test_a_run_that_fails_stops_no_other_and_says_why_and_is_tried_again(tmp_path):
    script = f"""
    if name == 'run-1':
        print('error: the disk is full')
        sys.exit(2)
    {RECORD}
    """
    outcomes = LocalEngine(2).run(missing_runs(tmp_path), root=tmp_path, command=stand_in(script))
    assert {o.planned.folder.name: o.status for o in outcomes} == {f"run-{i}": "failed" if i == 1 else "done" for i in range(5)}
    (failed,) = [o for o in outcomes if o.status == "failed"]
    assert failed.error == "exit status 2: the disk is full"
    again = LocalEngine(2).run(missing_runs(tmp_path), root=tmp_path, command=stand_in(RECORD))
    assert [(o.planned.folder.name, o.status) for o in again] == [("run-1", "done")]


def test_two_runners_on_one_folder_never_start_the_same_run(tmp_path):
    script = f"""
    with open({str(tmp_path / "log")!r}, 'a') as f: f.write(name + '\\n')
    time.sleep(0.1)
    {RECORD}
    """
    root, found = tmp_path / "grid", []
    planned = missing_runs(root, 8)
    runners = [
        threading.Thread(target=lambda: found.extend(LocalEngine(2).run(planned, root=root, command=stand_in(script))))
        for _ in range(2)
    ]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    assert sorted((tmp_path / "log").read_text().split()) == [f"run-{i}" for i in range(8)]
    assert {o.status for o in found} <= {"done", "elsewhere"}


@pytest.mark.slow
def test_a_run_stays_taken_while_its_process_lives_even_when_the_runner_is_killed(tmp_path):
    script = """
    sys.path[:0] = os.environ['PYTHONPATH'].split(os.pathsep)
    from anchorlora.store.lock import Lease
    lease = Lease(pathlib.Path(folder, '.lease'))
    lease.take()
    pathlib.Path(folder, 'pid').write_text(str(os.getpid()))
    time.sleep(60)
    """
    program = f"""
    import sys, pathlib
    sys.path.insert(0, {os.path.dirname(__file__)!r})
    from test_scheduler import missing_runs, stand_in
    from anchorlora_lab.grid.scheduler import LocalEngine
    LocalEngine(1).run(missing_runs(pathlib.Path({str(tmp_path)!r}), 1), root=pathlib.Path({str(tmp_path)!r}),
              command=stand_in({textwrap.dedent(script)!r}))
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    runner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], env=env)
    pid = tmp_path / "run-0/pid"
    waited = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < waited:
        time.sleep(0.05)
    runner.kill()
    runner.wait()
    try:
        (outcome,) = LocalEngine(1).run(missing_runs(tmp_path, 1), root=tmp_path, command=stand_in(RECORD))
        assert outcome.status == "elsewhere"
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    time.sleep(0.2)
    (outcome,) = LocalEngine(1).run(missing_runs(tmp_path, 1), root=tmp_path, command=stand_in(RECORD))
    assert outcome.status == "done"


def test_an_interruption_ends_the_processes(tmp_path):
    def stop(outcome):
        raise KeyboardInterrupt

    script = f"""
    if name == 'run-0':
        {RECORD}
        sys.exit()
    time.sleep(60)
    """
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        LocalEngine(2).run(missing_runs(tmp_path, 2), root=tmp_path, watch=stop, command=stand_in(script))
    assert time.monotonic() - began < 30
    (outcome,) = LocalEngine(2).run(missing_runs(tmp_path, 2), root=tmp_path, command=stand_in(RECORD))
    assert (outcome.planned.folder.name, outcome.status) == ("run-1", "done")


def test_a_folder_of_another_configuration_fails_by_itself_and_is_not_touched(tmp_path):
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1/thesis.tex").write_text("years of work")
    outcomes = LocalEngine(1).run(missing_runs(tmp_path, 2), root=tmp_path, command=stand_in(RECORD))
    assert [o.status for o in outcomes] == ["done", "failed"]
    assert "is not empty and is not a run directory" in outcomes[1].error
    assert [p.name for p in (tmp_path / "run-1").iterdir()] == ["thesis.tex"]


def test_a_grid_is_methods_by_orders_by_seeds_by_backbones_a_folder_each(tmp_path):
    axes = GridAxes(["seq-lora", "ewc"], {"order1": ("a", "b"), "order2": ("b", "a")}, [38, 42], ["x/qwen", "y/mistral"])
    planned = plan(standard_cl(), axes, tmp_path, settings={"ewc": {"FisherAnchor.strength": 5.0}})
    assert len(planned) == len({p.folder for p in planned}) == 16
    places = {str(p.folder.relative_to(tmp_path)): p.config for p in planned}
    config = places["qwen/ewc/order2-38"]
    assert (config.recipe.base_model.model, config.order, config.seed, config.settings) == (
        "x/qwen",
        ("b", "a"),
        38,
        {"FisherAnchor.strength": 5.0},
    )
    assert places["mistral/seq-lora/order1-42"].settings == {}
    assert [p.config.seed for p in planned] == [38] * 8 + [42] * 8


@pytest.mark.parametrize("name", ["a/b/../c d", "idea.py:mine", "..", "x" * 300, "ü"])
def test_a_folder_name_stays_a_plain_name(name):
    assert slug(name) not in ("", ".", "..")
    assert not set(slug(name)) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert len(slug(name)) <= 80


def test_the_time_left_is_known_although_runs_take_longer_than_a_progress_bar_usually_looks_back():
    now = [0.0]
    bar = bar_over(Console(), clock=lambda: now[0])
    task = bar.add_task("runs", total=10)
    for _ in range(3):
        now[0] += 100
        bar.advance(task)
    assert bar.tasks[0].time_remaining == 700


@pytest.fixture
def recipe_file(tmp_path, small_benchmark, small_model):
    """A recipe with orders of the small benchmark."""
    content = {
        "extends": "standard-cl",
        "name": "small",
        "tasks": {"data": str(small_benchmark), "orders": {"order1": list(small.ORDER), "order2": list(small.ORDER[::-1])}},
        "base_model": {"model": str(small_model), "threads": 1},
        "adapter": {"rank": 4, "alpha": 16},
        "training": {"learning_rate": 5e-3, "micro_batch": 8, "max_tokens": 96},
        "evaluation": {"max_new_tokens": 6},
    }
    path = tmp_path / "small.yaml"
    path.write_text(json.dumps(content))
    return str(path)


def test_the_command_runs_what_is_missing_and_reports_what_failed(recipe_file, small_benchmark, tmp_path, capsys):
    idea = tmp_path / "idea.py"
    idea.write_text("from anchorlora import *\nwrong = Method('wrong', Shared(), (RoutingOverlap(0.5),))\n")
    asked = [
        "grid",
        recipe_file,
        "--methods",
        f"sfor,{idea}:wrong",
        "--orders",
        "order2",
        "--seeds",
        "1",
        "--out",
        str(tmp_path / "g"),
    ]
    assert main([*asked, "--dry-run"]) == 0
    assert "2 of 2 runs are missing" in capsys.readouterr().out
    assert not (tmp_path / "g").exists()
    assert main([*asked, "--slots", "2"]) == 1
    said = capsys.readouterr()
    assert "1 of 2 runs is finished" in said.out
    assert (
        "1 of 2 runs failed (idea.py-wrong/order2-1); the first one: exit status 2: RoutingOverlap needs the frozen rows"
        in said.err
    )
    assert "; the same command begins them again" in said.err
    finished = tmp_path / "g/sfor/order2-1/record.json"
    record = json.loads(finished.read_text())
    assert (record["order"], record["seed"]) == (list(small.ORDER[::-1]), 1)
    done = [word.replace(f",{idea}:wrong", "") for word in asked]
    assert main(done) == 0
    assert f"1 of 1 run is finished in {tmp_path}/g; none was missing\n" in capsys.readouterr().out
    for more in ([], ["--dry-run"], ["--list"]):
        assert main([*done, "--set", "learning_rate=0.01", *more]) == 2, "a finished run of other settings is not this one"
        assert "belongs to another configuration (recipe.training.learning_rate: " in capsys.readouterr().err
    whole = finished.read_text()
    for more in ([], ["--dry-run"], ["--list"]):
        finished.write_text(whole.replace('"seed": 1', '"seed": 3'))
        assert main([*done, *more]) == 2, "a damaged record is no finished run"
        assert f"{finished} is not what was written" in one_line(capsys)
    finished.write_text(whole)
    rows = small_benchmark / "SC/mood/train.json"
    before = rows.read_text()
    rows.write_text(json.dumps(json.loads(before)[::-1]))
    try:
        assert main(done) == 0, "none is missing"
        capsys.readouterr()
        assert main([*done[:-3], "1,2", *done[-2:]]) == 2
    finally:
        rows.write_text(before)
    message = f"{rows} is not what {tmp_path}/g/sfor/order2-1 was trained on, so new runs could share no table with it; put it back"
    assert message in one_line(capsys)


@pytest.mark.parametrize(
    "asked", [["grid", "--methods", "sfor", "--orders", "order1"], ["trace", "--methods", "sfor"], ["select", "--method", "n-lora"]]
)
def test_every_process_is_told_how_to_carry_the_run_out(asked, recipe_file, tmp_path, monkeypatch):
    told = []

    def running(engine, planned, *, command, **_):
        told.extend(command(each.folder, each.config) for each in planned)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalEngine, "run", running)
    command, *rest = asked
    conduct = ["--save-every", "7", "--check-every", "3", "--allow-inexact"]
    assert main([command, recipe_file, *rest, "--out", str(tmp_path / "x"), *conduct]) == 75
    assert told
    for words in told:
        assert words[1:4] == ["-m", "anchorlora", "run"]
        assert words[-5:] == conduct


def test_a_first_task_whose_state_was_deleted_is_named(tmp_path):
    start = RunDirectory(tmp_path / "start-1")
    start.task(1, "fruit").path.mkdir(parents=True)
    with pytest.raises(InvalidValue, match="start-1/state/1 was deleted.*delete .*start-1 to train it again"):
        RunDirectory(tmp_path / "sfor-1").take_over(start, 1, "fruit")
    assert not (tmp_path / "sfor-1").exists()


class Idle:
    first_task, requires = 2, ()

    def begin_task(self, anchor):
        return ActiveConstraint()

    def end_task(self, anchor):
        return {}


class Keeping(Idle):
    def end_task(self, anchor):
        return {layer.name: layer.rows("A") for layer in anchor.layers}


def test_a_constraint_of_ones_own_is_traced_where_it_keeps_nothing_of_the_first_task(tmp_path):
    begun = starts(mini(), small.ORDER, [1], tmp_path)
    (row,) = rows(mini(), {"mine": Shared() + Idle()}, small.ORDER, begun, tmp_path)
    assert row.start == begun[1].folder
    with pytest.raises(InvalidValue, match="Keeping acts in it or keeps something of it"):
        rows(mini(), {"mine": Shared() + Keeping()}, small.ORDER, begun, tmp_path)


@pytest.mark.slow
def test_all_rows_of_a_trace_start_from_one_first_task_and_tracing_changes_nothing(recipe_file, tmp_path, capsys):
    out = tmp_path / "t"
    asked = [
        "trace",
        recipe_file,
        "--methods",
        "sfor,o-lora-hard",
        "--seeds",
        "1",
        "--points",
        "3",
        "--slots",
        "2",
        "--out",
        str(out),
    ]
    assert main(asked) == 0
    assert "2 of 2 traces are finished" in capsys.readouterr().out
    records = {m: json.loads((out / f"{m}-1/record.json").read_text()) for m in ("sfor", "o-lora-hard")}
    assert len({r["protocol"]["task1_state"] for r in records.values()}) == 1
    first = [
        (out / place / "tasks/1-fruit/adapter/adapter_model.safetensors").read_bytes()
        for place in ("start-1", "sfor-1", "o-lora-hard-1")
    ]
    assert len(set(first)) == 1
    for name, record in records.items():
        points = [json.loads(line) for line in (out / f"{name}-1/trace.jsonl").read_text().splitlines()]
        assert [(p["task"], p["step"]) for p in points] == [(2, 0), (2, 2), (2, 3)]
        assert {key: points[-1][key] for key in ("d_eff", "d_old", "rho")} == {
            key: record["drift"][0][key] for key in ("d_eff", "d_old", "rho")
        }
    assert (
        main(["run", recipe_file, "--method", "sfor", "--order", "fruit,mood", "--seed", "1", "--out", str(tmp_path / "plain")])
        == 0
    )
    after = "tasks/2-mood/adapter/adapter_model.safetensors"
    assert (tmp_path / "plain" / after).read_bytes() == (out / "sfor-1" / after).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grid", "mini", "--methods", "sfro"], "no method called 'sfro'; nearest: sfor"),
        (["grid", "mini", "--methods", "sfor", "--orders", "order9"], "has no order 'order9'; nearest: order"),
        (["grid", "mini", "--methods", "sfor", "--orders", "nope"], "no task called 'nope' in "),
        (["trace", "mini", "--order", "news,nope"], "no task called 'nope' in "),
        (["grid", "standard-cl", "--methods", "sfor"], "this recipe names no data"),
        (["grid", "mini", "--methods", "sfor", "--seeds", "a"], "--seeds takes whole numbers separated by commas, not 'a'"),
        (
            ["grid", "mini", "--methods", "sfor", "--set", "FisherAnchor.strength=1"],
            "no method of this grid has a part called 'FisherAnchor'",
        ),
        (["grid", "mini", "--methods", "sfor", "--models", "a/final,b/final"], "x/final/sfor/order1-38 (recipe.base_model.model"),
        (["trace", "mini", "--methods", "ewc"], "ewc cannot start from a first task that all rows share: FisherAnchor acts in it"),
        (["trace", "mini", "--methods", "n-lora"], "n-lora cannot start from a first task that all rows share: EffectiveSparsity"),
        (["trace", "mini", "--methods", "sd-lora"], "sd-lora cannot start from a first task that all rows share: GatedPerTask"),
        (["trace", "mini", "--methods", "lora-plus"], "lora-plus cannot start from a first task that all rows share: Shared acts"),
        (["trace", "mini", "--methods", "lora-fa"], "lora-fa cannot start from a first task that all rows share: Freeze acts"),
        (["select", "mini", "--method", "sfor"], "sfor has nothing to choose; tunable methods: ewc, lwf"),
        (["select", "mini", "--method", "ewc", "--order", "news"], "FisherAnchor.strength is scaled by gradients of a second task"),
        (["select", "mini", "--method", "lfw"], "no method called 'lfw'; nearest: lwf"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_written(arguments, message, tmp_path, capsys):
    assert main([*arguments, "--out", str(tmp_path / "x")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "x").exists()
