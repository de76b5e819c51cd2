"""A run that goes on from an adapter and from cores: what it keeps, and what it refuses."""

import pytest
import torch

import small
from anchorlora import METHODS, run_sequence
from anchorlora.adapters import read_adapter
from anchorlora.errors import InvalidValue
from anchorlora.features import read_cores, write_cores
from anchorlora.geometry import Subspace


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """An adapter and cores of another run's first task."""
    root = tmp_path_factory.mktemp("begun")
    benchmark = small.write_benchmark(root / "data")
    recipe = small.recipe(benchmark, small.write_model(root / "model", benchmark))
    run_sequence(recipe, METHODS["seq-lora"], order=["fruit"], seed=1, out=root / "first")
    task = root / "first/tasks/1-fruit"
    return recipe, task / "adapter", task / "cores.safetensors"


def dense(factors):
    return factors.scale * factors.B.double() @ factors.A.double()


def going_on(begun, tmp_path, method, *, adapter=True, cores=True, order=("mood",), **changes):
    recipe, old, kept = begun
    start = ({"old_adapter": str(old)} if adapter else {}) | ({"old_cores": str(kept)} if cores else {})
    return run_sequence(recipe.changed(start | changes), METHODS[method], order=order, seed=2, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("method", "adapter"), [("sfor", True), ("inc-lora-hard", True), ("inc-lora-hard", False), ("o-lora-hard", True)]
)
def test_the_first_task_keeps_the_cores_that_were_given(method, adapter, begun, tmp_path):
    record = going_on(begun, tmp_path, method, adapter=adapter)
    assert record.drift[0].exact
    assert record.drift[0].d_eff > 1e-3
    assert set(record.protocol["start"]) == {"old_cores", *(["old_adapter"] if adapter else [])}
    before = read_adapter(begun[1]) if adapter else {}
    after, cores = read_adapter(tmp_path / "run/tasks/1-mood/adapter"), read_cores(begun[2])
    for layer, f in after.items():  # dense, from the files alone
        change = dense(f) - (dense(before[layer]) if adapter else 0)
        V = cores[layer].basis.double()
        assert torch.linalg.norm(change @ V) <= 1e-6 * torch.linalg.norm(change)


def test_without_protection_the_given_cores_are_measured_and_not_kept(begun, tmp_path):
    record = going_on(begun, tmp_path, "inc-lora")
    assert not record.drift[0].exact
    assert record.drift[0].rho > 100 * record.drift[0].bound


def test_what_was_given_stays_protected_in_every_later_task(begun, tmp_path):
    record = going_on(begun, tmp_path, "inc-lora-hard", order=("mood", "metal"))
    after = read_adapter(tmp_path / "run/tasks/2-metal/adapter")
    first, cores = read_adapter(tmp_path / "run/tasks/1-mood/adapter"), read_cores(begun[2])
    assert all(drift.exact for drift in record.drift)
    for layer, f in after.items():
        change = dense(f) - dense(first[layer])
        V = cores[layer].basis.double()
        assert torch.linalg.norm(change @ V) <= 1e-6 * torch.linalg.norm(change)


def test_a_shared_adapter_is_trained_further_and_a_stopped_run_goes_on_bitwise(begun, tmp_path):
    going_on(begun, tmp_path, "sfor", order=("mood", "metal"))
    recipe, old, kept = begun
    both = recipe.changed({"old_adapter": str(old), "old_cores": str(kept)})
    whole = read_adapter(tmp_path / "run/tasks/2-metal/adapter")
    (tmp_path / "run/record.json").unlink()
    for name in ("state/2", "tasks/2-metal", "state/recorded.json"):
        place = tmp_path / "run" / name
        if place.is_dir():
            for file in sorted(place.rglob("*"), reverse=True):
                file.unlink() if file.is_file() else file.rmdir()
            place.rmdir()
        else:
            place.unlink(missing_ok=True)
    run_sequence(both, METHODS["sfor"], order=("mood", "metal"), seed=2, out=tmp_path / "run")
    again = read_adapter(tmp_path / "run/tasks/2-metal/adapter")
    assert all(torch.equal(f.A, again[layer].A) and torch.equal(f.B, again[layer].B) for layer, f in whole.items())


def test_what_a_method_cannot_go_on_from_is_refused(begun, tmp_path):
    with pytest.raises(InvalidValue, match=r"sd-lora cannot go on from .*adapter"):
        going_on(begun, tmp_path, "sd-lora")
    with pytest.raises(InvalidValue, match="rank"):
        going_on(begun, tmp_path, "sfor", rank=2, alpha=8)
    for method, reader in (("ewc", "FisherAnchor"), ("fold-16", "SensitiveCore"), ("brake", "KroneckerBrake")):
        with pytest.raises(
            InvalidValue, match=f"{reader} needs what earlier tasks left, and an adapter or a file of cores leaves none"
        ):
            going_on(begun, tmp_path, method)
    layer = next(iter(read_cores(begun[2])))
    write_cores(tmp_path / "one.safetensors", {layer: Subspace(torch.eye(read_cores(begun[2])[layer].d)[:, :2])})
    with pytest.raises(InvalidValue, match=r"one.safetensors has no core for "):
        going_on(begun, tmp_path, "sfor", old_cores=str(tmp_path / "one.safetensors"))
    assert not (tmp_path / "run/record.json").exists()
