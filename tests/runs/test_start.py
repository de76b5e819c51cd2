"""A run that goes on from an adapter and from cores: what it keeps, and what it refuses."""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer

import small
from anchorlora import METHODS, run_sequence
from anchorlora.adapters import read_adapter
from anchorlora.continual.inputs import RunInputs
from anchorlora.data.sources import source_of
from anchorlora.errors import InvalidValue
from anchorlora.features import read_cores, write_cores
from anchorlora.features.files import read_tensors
from anchorlora.geometry import Subspace
from anchorlora.models.load import load_base_model, tokenizer_of
from anchorlora.store.artifact import artifact_in
from anchorlora.store.seal import sha256
from anchorlora.store.tensors import write_tensors


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


def test_a_run_from_an_adapter_with_its_own_tokenizer_is_read_with_it(begun, tmp_path):
    recipe, old, kept = begun
    old = shutil.copytree(old, tmp_path / "old")
    tokenizer = AutoTokenizer.from_pretrained(recipe.base_model.model)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    tokenizer.save_pretrained(old)
    going_on((recipe, old, kept), tmp_path, "seq-lora", cores=False)
    found = artifact_in(tmp_path / "run")
    assert tokenizer_of(found.base_model(), adapter=found.adapter).chat_template == tokenizer.chat_template
    assert AutoTokenizer.from_pretrained(found.adapter).padding_side == tokenizer.padding_side, "as trainers expect it"


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
    with pytest.raises(InvalidValue, match=r"sd-lora cannot continue from .*adapter"):
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


@pytest.mark.parametrize(("given", "order", "trained"), [(64, ("mood",), 0), (62, ("mood", "metal"), 1)])
def test_a_layer_all_of_whose_directions_are_protected_is_refused_as_full_before_training(given, order, trained, begun, tmp_path):
    some = {layer: Subspace(torch.eye(core.d)[:, :given]) for layer, core in read_cores(begun[2]).items()}
    write_cores(tmp_path / "some.safetensors", some)
    with pytest.raises(InvalidValue, match=r"q_proj is full: all 64 directions of its input are protected"):
        going_on(begun, tmp_path, "inc-lora-hard", order=order, old_cores=str(tmp_path / "some.safetensors"))
    assert len(list((tmp_path / "run").glob("state/[0-9]*"))) == trained


@pytest.fixture(scope="module")
def remembering(begun, tmp_path_factory):
    """A first task whose end remembers what answers depend on."""
    root = tmp_path_factory.mktemp("remembering")
    run_sequence(begun[0], METHODS["sensitive-core"], order=["fruit"], seed=1, out=root / "first")
    return root / "first/tasks/1-fruit/adapter", root / "first/state/1/remembered.safetensors"


@pytest.mark.parametrize("method", ["sensitive-core", "fold-16"])
def test_a_run_goes_on_from_a_memory_as_if_a_task_had_ended(method, begun, remembering, tmp_path):
    old, memory = remembering
    start = {"old_adapter": str(old), "old_memory": str(memory)}
    record = going_on(begun, tmp_path, method, adapter=False, cores=False, order=("mood", "metal"), **start)
    assert record.protocol["start"].keys() == {"old_adapter", "old_memory"}
    assert record.protocol["start"]["old_memory"] == sha256(memory)
    assert [drift.exact for drift in record.drift] == [True, True]
    cores = METHODS[method].provided_cores(read_tensors(memory))
    before, after = read_adapter(old), read_adapter(tmp_path / "run/tasks/1-mood/adapter")
    moved = {layer: dense(f) - dense(before[layer]) for layer, f in after.items()}
    inside = sum(float((moved[layer] @ cores[layer].core.basis.double()).norm()) ** 2 for layer in moved) ** 0.5
    assert inside <= max(1e-7, 3 * record.drift[0].rho_floor) * sum(float(m.norm()) ** 2 for m in moved.values()) ** 0.5


def test_a_memory_of_other_layers_or_of_another_kind_is_refused_before_anything_is_written(begun, remembering, tmp_path):
    known = read_tensors(remembering[1])
    layer = next(iter(read_cores(begun[2])))
    files = {
        "less": ({name: t for name, t in known.items() if layer not in name}, "less.safetensors: .* it belongs to another adapter"),
        "more": (known | {"sensitivity/inputs/elsewhere": torch.ones(2, 2)}, "which is not an adapted layer"),
        "none": ({}, "remembers nothing"),
    }
    for name, (tensors, said) in files.items():
        write_tensors(tmp_path / f"{name}.safetensors", tensors)
        with pytest.raises(InvalidValue, match=said):
            going_on(begun, tmp_path, "brake", cores=False, old_memory=str(tmp_path / f"{name}.safetensors"))
    with pytest.raises(InvalidValue, match=r"FisherAnchor needs what earlier tasks left, and .*remembered.safetensors leaves none"):
        going_on(begun, tmp_path, "ewc", cores=False, old_memory=str(remembering[1]))
    with pytest.raises(InvalidValue, match="sensitive-core makes its cores of old_memory; leave old_cores out"):
        going_on(begun, tmp_path, "sensitive-core", old_memory=str(remembering[1]))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_rehearsal_draws_on_the_text_that_a_run_goes_on_from(batching, begun, tmp_path):
    old = tmp_path / "old.jsonl"
    rows = [{"prompt": f"the fruit {i} is", "completion": " ripe and sweet"} for i in range(12)]
    old.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = begun[0].changed({"batching": batching})

    def run(method, **start):
        out = tmp_path / f"{method}-{bool(start)}"
        record = run_sequence(recipe.changed(start), METHODS[method], order=["mood"], seed=2, out=out)
        return record, read_adapter(out / "tasks/1-mood/adapter")

    (_, plain), (record, mixed), (_, distilled) = (
        run("seq-lora"),
        run("replay", old_text=str(old)),
        run("replay-kl", old_text=str(old)),
    )
    assert record.protocol["start"] == {"old_text": sha256(old)}
    layer = next(iter(plain))
    assert len({tuple(dense(factors[layer]).flatten()[:4].tolist()) for factors in (plain, mixed, distilled)}) == 3
    _, without = run("replay")
    assert torch.equal(without[layer].A, plain[layer].A), "without text there is nothing to rehearse in a first task"
    inputs = RunInputs.of(
        load_base_model(recipe.base_model), source_of(recipe.tasks), recipe.changed({"old_text": str(old)}), order=["mood"], seed=2
    )
    memory = inputs.data.memory(METHODS["replay"].rehearsal, 1)
    assert sorted(e.text for e in memory) == sorted(row["prompt"] for row in rows)
    assert all(e.remembered and e.learned for e in memory)
    assert not any(e.learned for e in inputs.data.memory(METHODS["replay-kl"].rehearsal, 1))
