"""Every run at a time on a device of its own: what each process is given, with as many devices as a test pretends."""

import os
import random
import sys

import pytest
import torch

from anchorlora.cli.app import main
from anchorlora.config import RunConfig
from anchorlora.recipes import mini
from anchorlora_lab.grid.scheduler import LocalEngine, Planned
from anchorlora_lab.grid.slots import Device, devices_for, freest, slots_for

VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR", "OMP_NUM_THREADS"),
)
# says what it was given when it begins and when it ends, and lasts until what its file asks for is so
CHILD = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
log = folder.parent / "log"
given = " ".join(f"{name}={os.environ[name]}" for name in sys.argv[2:] if name in os.environ)
def say(sign):
    with log.open("a") as file:
        file.write(f"{sign} {folder.name} {given}\\n")
def begun():
    return log.read_text().count("+")
def done(name):
    return (folder.parent / name / "record.json").exists()
say("+")
until, limit = (folder.parent / f"{folder.name}.until").read_text(), time.monotonic() + 60
while not eval(until) and time.monotonic() < limit:
    time.sleep(0.02)
say("-")
(folder / "record.json").write_text("{}")
"""


@pytest.fixture
def pretend(monkeypatch):
    """A machine with so many devices of a kind, and nothing in the environment that narrows them."""

    def made(count, kind="cuda", hip=None, **environment):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind) if count else None
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.version, "hip", hip)

    return made


def ran(root, until, *, slots, device="auto"):
    """What the children of runs that last until then said, in order: (sign, name, {variable: value})."""
    recipe = mini().changed({"device": device})
    planned = [
        Planned(root / f"run-{i}", RunConfig(method="sfor", order=("a", "b"), seed=i, recipe=recipe)) for i in range(len(until))
    ]
    for i, each in enumerate(until):
        (root / f"run-{i}.until").write_text(each)
    words = [sys.executable, "-S", "-c", CHILD]
    outcomes = LocalEngine(slots).run(planned, root=root, command=lambda folder, config: [*words, str(folder), *VARIABLES])
    assert {o.status for o in outcomes} == {"done"}, outcomes
    lines = [line.split() for line in (root / "log").read_text().splitlines()]
    return [(sign, name, dict(part.split("=", 1) for part in given)) for sign, name, *given in lines]


def together(count):
    """So many children that are there at the same time."""
    return [f"begun() >= {count}"] * count


def given(said, variable):
    """What each run's process found in a variable, in the order of their names."""
    return [found.get(variable) for sign, _, found in sorted(said, key=lambda line: line[1]) if sign == "+"]


def environments(device="auto"):
    """What each device puts into the environment of a process."""
    return [each.environment for each in devices_for(device)]


@pytest.mark.parametrize(
    ("count", "inherited", "devices"),
    [
        (4, {}, ["0", "1", "2", "3"]),
        (3, {"CUDA_VISIBLE_DEVICES": "2,3,5"}, ["2", "3", "5"]),
        (2, {"CUDA_VISIBLE_DEVICES": "3, 1"}, ["3", "1"]),
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c,GPU-45dc1a2b-03ff"}, ["GPU-8932f937-d72c", "GPU-45dc1a2b-03ff"]),
        (1, {"CUDA_VISIBLE_DEVICES": "MIG-3f1b,MIG-77aa"}, ["MIG-3f1b", "MIG-77aa"]),  # of several CUDA counts one
        (2, {"CUDA_VISIBLE_DEVICES": "0,1,7"}, ["0", "1"]),  # there is no seventh
        (1, {"CUDA_VISIBLE_DEVICES": "1,-1,0"}, ["1"]),  # the list ends where a number is negative
        (4, {"CUDA_VISIBLE_DEVICES": ""}, []),
        (0, {}, []),
    ],
    ids=str,
)
def test_devices_are_those_of_the_inherited_list_or_all(count, inherited, devices, pretend):
    pretend(count, **inherited)
    assert environments() == [{"CUDA_VISIBLE_DEVICES": name} for name in devices]


@pytest.mark.parametrize(
    ("inherited", "variable", "devices"),
    [
        ({}, "HIP_VISIBLE_DEVICES", ["0", "1"]),
        ({"HIP_VISIBLE_DEVICES": "4,6"}, "HIP_VISIBLE_DEVICES", ["4", "6"]),
        ({"ROCR_VISIBLE_DEVICES": "4,6"}, "HIP_VISIBLE_DEVICES", ["0", "1"]),  # HIP counts within what ROCr leaves
        ({"ROCR_VISIBLE_DEVICES": "2,4,6", "HIP_VISIBLE_DEVICES": "0,2"}, "HIP_VISIBLE_DEVICES", ["0", "2"]),
        ({"CUDA_VISIBLE_DEVICES": "4,6"}, "CUDA_VISIBLE_DEVICES", ["4", "6"]),  # which HIP reads too
        ({"CUDA_VISIBLE_DEVICES": "0,1,2", "HIP_VISIBLE_DEVICES": "1,2"}, "HIP_VISIBLE_DEVICES", ["1", "2"]),
    ],
    ids=str,
)
def test_on_rocm_the_list_that_counts_is_narrowed(inherited, variable, devices, pretend):
    pretend(2, hip="7.1", **inherited)
    assert environments() == [{variable: name} for name in devices]


def test_on_xpu_the_affinity_mask_is_narrowed_and_a_selector_that_counts_is_refused(pretend):
    pretend(2, "xpu", ZE_AFFINITY_MASK="1,3", ONEAPI_DEVICE_SELECTOR="level_zero:gpu")
    assert environments() == [{"ZE_AFFINITY_MASK": "1"}, {"ZE_AFFINITY_MASK": "3"}]
    pretend(2, "xpu", ONEAPI_DEVICE_SELECTOR="level_zero:2,3")
    with pytest.raises(ValueError, match="ONEAPI_DEVICE_SELECTOR=level_zero:2,3 .* give ZE_AFFINITY_MASK instead"):
        devices_for("auto")


@pytest.mark.parametrize("device", ["cpu", "cuda:2", "xpu"])
def test_no_device_is_given_to_who_asked_for_the_cpu_for_a_certain_one_or_for_one_that_is_not_there(device, pretend):
    pretend(4)
    assert environments(device) == []


@pytest.mark.parametrize(
    ("count", "kind", "inherited", "device", "slots"),
    [
        (4, "cuda", {}, "auto", 4),
        (4, "cuda", {}, "cuda", 4),
        (4, "cuda", {}, "cpu", os.cpu_count()),
        (4, "cuda", {}, "cuda:2", 1),
        (4, "cuda", {"CUDA_VISIBLE_DEVICES": ""}, "auto", os.cpu_count()),
        (1, "cuda", {"CUDA_VISIBLE_DEVICES": "MIG-3f1b,MIG-77aa"}, "auto", 2),
        (1, "mps", {}, "auto", 1),
        (0, "cuda", {}, "auto", os.cpu_count()),
    ],
    ids=str,
)
def test_there_are_as_many_slots_as_devices_or_cores(count, kind, inherited, device, slots, pretend):
    pretend(count, kind, **inherited)
    assert slots_for(device) == slots
    assert slots_for(device, 3) == 3


def test_a_device_that_the_fewest_runs_have_is_next():
    a, b, c = (Device("CUDA_VISIBLE_DEVICES", name) for name in "235")
    assert freest([a, b, c], []) == a
    assert freest([a, b, c], [a, c]) == b
    assert freest([a, b, c], [a, b, c, a, None]) == b
    assert freest([], [None]) is None


def test_each_process_sees_its_own_device_of_the_inherited_list(pretend, tmp_path):
    pretend(3, CUDA_VISIBLE_DEVICES="2,3,5")
    assert given(ran(tmp_path, together(3), slots=3), "CUDA_VISIBLE_DEVICES") == ["2", "3", "5"]


def test_what_else_narrows_devices_stays_as_it_was(pretend, tmp_path):
    pretend(2, hip="7.1", ROCR_VISIBLE_DEVICES="4,6")
    said = ran(tmp_path, together(2), slots=2)
    assert given(said, "HIP_VISIBLE_DEVICES") == ["0", "1"]
    assert given(said, "ROCR_VISIBLE_DEVICES") == ["4,6", "4,6"]


def test_a_run_on_the_cpu_is_given_no_device_and_on_mps_it_needs_none(pretend, tmp_path):
    for name, count, kind, device in (("a", 4, "cuda", "cpu"), ("b", 1, "mps", "auto")):
        pretend(count, kind)
        (tmp_path / name).mkdir()
        said = ran(tmp_path / name, ["True"], slots=1, device=device)
        assert {variable for _, _, found in said for variable in found} == {"OMP_NUM_THREADS"}


def test_two_children_are_never_on_one_device_while_another_is_free(pretend, tmp_path):
    pretend(3, CUDA_VISIBLE_DEVICES="2,3,5")
    draw = random.Random(0)
    said = ran(tmp_path, [f"time.sleep({draw.uniform(0, 0.3)}) is None" for _ in range(6)], slots=3)
    on = dict.fromkeys("235", 0)
    for sign, _, found in said:
        device = found["CUDA_VISIBLE_DEVICES"]
        on[device] += 1 if sign == "+" else -1
        assert max(on.values()) <= 1, said


def test_the_next_run_takes_the_device_of_the_one_that_ended(pretend, tmp_path):
    pretend(4)
    said = ran(tmp_path, ["done('run-6')"] * 2 + ["begun() >= 4", "done('run-6')", "True", "True", "True"], slots=4)
    assert given(said, "CUDA_VISIBLE_DEVICES") == ["0", "1", "2", "3", "2", "2", "2"]


def test_one_slot_takes_the_runs_in_their_order_and_always_the_first_device(pretend, tmp_path):
    pretend(3, CUDA_VISIBLE_DEVICES="2,3,5")
    said = ran(tmp_path, ["True"] * 2, slots=1)
    assert [(sign, name) for sign, name, _ in said] == [(sign, f"run-{i}") for i in range(2) for sign in "+-"]
    assert given(said, "CUDA_VISIBLE_DEVICES") == ["2", "2"]


def test_more_slots_than_devices_share_them_evenly(pretend, tmp_path):
    pretend(4)
    said = ran(tmp_path, together(8), slots=8)
    assert [sign for sign, *_ in said[:8]] == ["+"] * 8  # all at a time
    assert given(said, "CUDA_VISIBLE_DEVICES") == ["0", "1", "2", "3", "0", "1", "2", "3"]
    assert set(given(said, "OMP_NUM_THREADS")) == {str(max(1, os.cpu_count() // 8))}


COMMANDS = {
    "run": ["run", "mini", "--method", "sfor"],
    "grid": ["grid", "mini", "--methods", "sfor"],
    "trace": ["trace", "mini"],
    "select": ["select", "mini", "--method", "lwf"],
}


@pytest.mark.parametrize("command", ["grid", "trace", "select"])
@pytest.mark.parametrize(("device", "slots"), [("auto", 4), ("cpu", os.cpu_count())])
def test_the_commands_take_as_many_slots_as_their_recipe_has_devices(command, device, slots, pretend, monkeypatch, tmp_path):
    def running(engine, planned, **_):
        found.append(engine.slots)
        raise KeyboardInterrupt

    found = []
    pretend(4)
    monkeypatch.setattr(LocalEngine, "run", running)
    assert main([*COMMANDS[command], "--set", f"device={device}", "--out", str(tmp_path / "x")]) == 75
    assert found == [slots]


@pytest.mark.parametrize("command", ["grid", "trace", "select"])
def test_a_device_that_cannot_be_given_is_refused_before_anything_is_written(command, tmp_path, capsys):
    assert main([*COMMANDS[command], "--slots", "2", "--set", "device=nowhere", "--out", str(tmp_path / "x")]) == 2
    assert "no device is called 'nowhere'; give cpu, cuda, cuda:0, xpu, mps or auto" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["grid", "trace", "select"])
@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_several_processes_are_refused_in_one_sentence(command, variable, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(variable, "2")
    assert main([*COMMANDS[command], "--out", str(tmp_path / "x")]) == 2
    said = capsys.readouterr().err
    assert f"a launcher has started 2 processes ({variable}=2), but this command starts runs of its own" in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("environment", [{"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, {"WORLD_SIZE": "1", "RANK": "0"}], ids=str)
def test_an_allocation_of_several_tasks_and_a_launcher_of_one_process_are_fine(environment, monkeypatch, tmp_path, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([*COMMANDS["grid"], "--orders", "order1", "--seeds", "1", "--dry-run", "--out", str(tmp_path / "x")]) == 0
    assert "1 of 1 run is missing" in capsys.readouterr().out
