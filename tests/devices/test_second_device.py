"""Work on a second device, with float64 and without: nothing is misplaced, and what comes of it is the CPU's, bit for bit.

The device is that of tests/second_device.py, in a process of its own.
"""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from torch.utils import backend_registration

if not hasattr(backend_registration, "_DummyBackendModule"):
    pytest.skip("this torch does not take a device that is written in Python; 2.9 does", allow_module_level=True)

import forked
import second_device
from anchorlora import METHODS, EffectiveResponse, KroneckerBrake, RoutingOverlap
from anchorlora.adapters import read_adapter
from anchorlora.store.record import read_record
from devices.on_device import CPU, KINDS, NARROW, WHOLE, work, work_there
from faults.runs import differing

RUNS = [f"run:{name}" for name in METHODS]
LOOPS = ["loop:sfor", "loop:hard", "trainer:sfor", "trainer:hard"]
AFTER = [*LOOPS, "copies", "discipline", "weights", "commands", "back"]
SHORT = ["run:o-lora-hard", "loop:sfor", "copies", "discipline", "weights"]  # in one process
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, small_benchmark, small_model):
    made = tmp_path_factory.mktemp("devices")
    shutil.copytree(small_benchmark, made / "data")
    shutil.copytree(small_model, made / "model")
    return made


@pytest.fixture(scope="module")
def done(folder):
    """What jobs on a device returned, by job; those of the CPU likewise.  What was done once is not done again."""
    found = {kind: {} for kind in (CPU, *KINDS)}

    def of(kind, *jobs):
        missing = [job for job in jobs if job not in found[kind]]
        if missing:
            found[kind] |= work(folder, CPU, missing) if kind == CPU else elsewhere(folder, kind, missing)
        for job in jobs:
            assert "failed" not in found[kind][job], found[kind][job]["failed"]
        return [found[kind][job]["found"] for job in jobs]

    return of


def elsewhere(folder, kind, jobs):
    # a backward pass in this process, of any test, fixes the devices that autograd knows; launches are counted without one
    fresh = not all(job.startswith("launches:") for job in jobs)
    process = forked.fork(work_there, folder, kind, jobs, said=folder / f"{kind}.txt", fresh=fresh)
    process.join()
    assert process.exitcode == 0, (folder / f"{kind}.txt").read_text()[-3000:]
    return json.loads((folder / f"{kind}.json").read_text())


def assert_same_run(folder, kind, method):
    """All files are the CPU's, but the one that says what the run was computed with."""
    ours, cpus = folder / kind / method, folder / CPU / method
    assert differing(ours, cpus) == ["state/provenance.json"]
    record = read_record(ours / "record.json")
    assert (record.host["device"], record.host["gpu"]) == (second_device.NAME, second_device.MAKER)
    assert record.cost.peak_memory_bytes == second_device.BYTES


def assert_close_run(folder, kind, method):
    """The same factors up to what rounding becomes in six steps."""
    for ours in sorted((folder / kind / method / "tasks").glob("*/adapter")):
        cpus = read_adapter(folder / CPU / method / "tasks" / ours.parent.name / "adapter")
        for layer, found in read_adapter(ours).items():
            torch.testing.assert_close((found.B @ found.A), cpus[layer].B @ cpus[layer].A, rtol=1e-4, atol=1e-6)


def assert_kept(found):
    """rho of the copies on the CPU is rounding, and `measure` says so too."""
    assert found["d_eff"] > 1e-2
    assert found["dense"] <= found["bound"]
    assert found["rho"] <= found["bound"]


@pytest.mark.slow
def test_without_float64_a_run_that_is_stopped_twice_is_bitwise_the_one_on_the_cpu(done, folder):
    done(CPU, "run:o-lora-hard")
    done(NARROW, *SHORT)
    assert_same_run(folder, NARROW, "o-lora-hard")


@pytest.mark.slow
def test_without_float64_a_loop_keeps_its_promise_and_ends_bitwise_as_on_the_cpu(done):
    (cpus,), (_, found, *_) = done(CPU, "loop:sfor"), done(NARROW, *SHORT)
    assert_kept(found)
    assert found == cpus


@pytest.mark.slow
def test_without_float64_an_audit_of_weights_is_the_cpus(done):
    assert done(NARROW, *SHORT)[-1] == done(CPU, "weights")[0]


@pytest.mark.slow
def test_without_float64_a_protected_step_passes_the_cpu_and_what_is_misplaced_raises(done):
    _, _, copies, said, _ = done(NARROW, *SHORT)
    assert copies > 0
    mixed = {"mixed", "mixed in place"}
    widened = {"float64", "float64 made", "float64 summed", "float64 brought", "float64 on its way", "float64 written"}
    assert {name for name, error in said.items() if error} == mixed | widened
    assert all("expected all tensors to be on the same device" in said[name] for name in mixed)
    assert all("float64" in said[name] for name in widened)


@pytest.mark.slow
@each_kind
def test_every_method_is_what_it_is_on_the_cpu(kind, done, folder):
    done(CPU, *RUNS)
    done(kind, *RUNS)
    for method, made in METHODS.items():
        if kind == WHOLE and any(isinstance(c, RoutingOverlap | EffectiveResponse | KroneckerBrake) for c in made.constraints):
            assert_close_run(folder, kind, method)  # layers of one shape are one batch there, which rounds otherwise
        else:
            assert_same_run(folder, kind, method)


@pytest.mark.slow
@each_kind
def test_exports_cores_measures_and_audits_are_the_cpus(kind, done, folder):
    done(CPU, "run:sfor")
    assert done(kind, *AFTER)[AFTER.index("commands")] == done(CPU, "commands")[0]
    ours, cpus = (
        {p.relative_to(folder / each): p.read_bytes() for p in (folder / each).glob("made/**/*.safetensors")}
        for each in (kind, CPU)
    )
    assert len(cpus) == 4
    assert ours == cpus


@pytest.mark.slow
@each_kind
@pytest.mark.parametrize("job", LOOPS)
def test_protection_is_kept_in_loops_and_trainers(job, kind, done):
    done(CPU, "run:sfor")
    found = done(kind, *AFTER)[AFTER.index(job)]
    assert_kept(found)
    assert found == done(CPU, job)[0]


HARD = ("sfor", "o-lora-hard", "o-lora-bsr-strong", "fold-16")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("method", HARD)
def test_hard_protection_adds_at_most_sixty_launches_to_a_step_on_72_layers(method, done):
    (counts,) = done(WHOLE, f"launches:{method}")
    assert counts["left"] < 1e-5
    assert 0 < counts["protected"] - counts["bare"] <= 60


def test_a_step_waits_for_the_device_twice_and_a_scored_row_as_often_whatever_it_holds(done):
    """For the loss with the norm of its gradient, and for that of what constraints have made of it; for hits, and for losses."""
    (found,) = done(WHOLE, "synchronizations")
    assert found == {"step": 2, "row": [2, 2]}


@pytest.mark.slow
def test_with_float64_no_protected_step_passes_the_cpu(done):
    done(CPU, "run:sfor")
    found = dict(zip(AFTER, done(WHOLE, *AFTER), strict=True))
    assert found["copies"] == 0
    assert {name for name, error in found["discipline"].items() if error} == {"mixed", "mixed in place"}


@pytest.mark.slow
def test_a_process_may_run_on_a_device_and_then_on_the_cpu(done):
    done(CPU, "run:sfor")
    assert done(WHOLE, *AFTER)[AFTER.index("back")] == "cpu"


@pytest.mark.slow
def test_a_run_goes_on_on_another_device_only_when_it_is_allowed_and_then_says_so(done, folder):
    done(CPU, "stopped")
    _, (error, (said,)) = done(NARROW, "stopped", f"gone_on:{CPU}")
    assert f"device cpu then and {second_device.MAKER} now" in error
    assert "--allow-inexact" in error
    assert said.startswith(f"device cpu then and {second_device.MAKER} now")
    (progress,) = (folder / f"stopped-{NARROW}/state/2-begun").glob("step-*/tensors.safetensors")
    with safe_open(progress, framework="pt") as file:
        assert {name for name in file.keys() if name.startswith("dropout/")} == {"dropout/cpu", f"dropout/{second_device.NAME}"}  # noqa: SIM118
    ((error, (said,)),) = done(CPU, f"gone_on:{NARROW}")
    assert f"device {second_device.MAKER} then and cpu now" in error
    assert said.startswith(f"device {second_device.MAKER} then and cpu now")
