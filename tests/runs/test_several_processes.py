"""One run over two processes, connected by gloo, against the same run by one process."""

import json
import os
from itertools import chain
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

import forked
import together
from anchorlora import METHODS, run_sequence
from anchorlora.cli.app import main
from anchorlora.processes import Processes
from anchorlora.store.record import read_record
from together import ORDER, recipe_of

FLOAT32, BFLOAT16 = 2.0**-23, 2.0**-8
QUICK = ["o-lora-bsr:sharded-packed"]
LONG = [f"{method}:{mode}" for method in METHODS for mode in ("", "sharded", "packed", "sharded-packed")]
LONG += ["sfor:sharded-checkpointing", "o-lora-hard:sharded-packed-checkpointing"]
STOPPED, QUANTIZED = "o-lora-hard:stopped", [f"{method}:sharded-quantized" for method in ("sfor", "sensitive-core", "fold-16")]
CASES = [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in dict.fromkeys([*QUICK, *LONG])]


@pytest.fixture(scope="session")
def folder(request, tmp_path_factory):
    """The folder of all runs that the chosen tests read, by one process and by two; started once."""
    mine = [item for item in request.session.items if item.path == Path(__file__) and "folder" in item.fixturenames]
    cases = [item.callspec.params["case"] for item in mine if hasattr(item, "callspec")]
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "several-processes"
    with FileLock(f"{place}.lock"):
        if not (place / "done").exists():
            place.mkdir()
            launch(place, list(dict.fromkeys(cases)))
            (place / "done").touch()
    return place


def launch(place, cases):
    forked.pair(together.main, place, cases, folder=place)
    together.main(place, cases)


def files(run, pattern):
    return {f"{path.parent.parent.name}/{path.name}": load_file(path) for path in sorted(run.glob(f"tasks/*/{pattern}"))}


def steps(run):
    events = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == "step"]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_come_to_what_one_comes_to(case, folder):
    alone, both = folder / "1" / case, folder / "2" / case
    for one, two in zip(steps(alone), steps(both), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=100 * FLOAT32)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=100 * FLOAT32)
        # a divergence near zero is the difference of logits near 10
        assert two["penalties"] == pytest.approx(one["penalties"], rel=1e-3, abs=100 * FLOAT32)
    one, two = files(alone, "adapter/*.safetensors"), files(both, "adapter/*.safetensors")
    for name, tensor in [(file, key) for file in one for key in one[file]]:
        # AdamW divides by the gradient's size: where that is rounding alone, a step of the learning rate may turn around
        assert (two[name][tensor] - one[name][tensor]).norm() <= 1e-3 * one[name][tensor].norm()
    first, second = (read_record(run / "record.json") for run in (alone, both))
    assert second.accuracy == first.accuracy
    assert second.cost.trained_parameters == first.cost.trained_parameters
    assert second.cost.history_bytes == first.cost.history_bytes
    for ours, theirs in zip(second.drift, first.drift, strict=True):
        assert ours.d_eff == pytest.approx(theirs.d_eff, rel=1e-4)
        assert ours.exact == theirs.exact
    assert second.protocol["processes"] == 2
    assert second.protocol["sharded"] == ("sharded" in case)
    assert "processes" not in first.protocol


@pytest.mark.parametrize("case", [pytest.param(QUICK[0], id="rows")])
def test_feature_rows_are_those_that_one_process_keeps_in_its_order(case, folder):
    one, two = (load_file(folder / count / case / "state" / "1" / "rows.safetensors") for count in "12")
    assert one.keys() == two.keys()
    assert one
    for name in one:
        assert one[name].shape == two[name].shape
        assert (one[name] - two[name]).abs().max() <= 100 * FLOAT32 * one[name].abs().max()


@pytest.mark.parametrize("case", [STOPPED])
def test_a_signal_to_one_process_stops_all_and_the_run_goes_on_bitwise(case, folder):
    whole, stopped = folder / "2" / case, folder / "2" / f"{case}-twice"
    for pattern in ("adapter/*.safetensors", "cores.safetensors"):
        one, two = files(whole, pattern), files(stopped, pattern)
        assert one.keys() == two.keys()
        assert one
        for name, tensors in one.items():
            assert all(torch.equal(tensors[key], two[name][key]) for key in tensors)
    assert read_record(whole / "record.json").scores == read_record(stopped / "record.json").scores


@pytest.mark.slow
@pytest.mark.parametrize("case", QUANTIZED)
def test_a_split_quantized_model_protects_as_a_whole_one(case, folder):
    pytest.importorskip("bitsandbytes")
    record = read_record(folder / "2" / case / "record.json")
    assert record.protocol["sharded"]
    assert record.protocol["base_model"]["quantized"] == "nf4"
    assert record.drift[0].rho <= max(1e-7, 3 * record.drift[0].rho_floor)
    alone = read_record(folder / "1" / case / "record.json")
    assert record.drift[0].d_eff == pytest.approx(alone.drift[0].d_eff, rel=BFLOAT16)  # the model computes in it


def test_a_run_of_two_processes_is_not_continued_by_one(tmp_path, monkeypatch, capsys):
    recipe = recipe_of("").changed({"train_limit": 8, "test_limit": 2})
    run_sequence(recipe, METHODS["sfor"], order=ORDER[:1], seed=42, out=tmp_path / "run")
    (tmp_path / "run" / "record.json").unlink()
    provenance = tmp_path / "run" / "state" / "provenance.json"
    text = provenance.read_text()
    assert "processes" not in text
    monkeypatch.setattr("anchorlora.runs.provenance.launched", lambda: 2)
    with pytest.raises(ValueError, match="processes 1 then and 2 now.*--allow-inexact"):
        run_sequence(recipe, METHODS["sfor"], order=ORDER[:1], seed=42, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"}, "choose DDP or FSDP2"),
        ({"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}, "add --fsdp_version 2 to `accelerate launch`"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "start the run with torchrun or accelerate launch"),
        ({"WORLD_SIZE": "2", "DEVICE": "cuda:0"}, "2 processes cannot all use cuda:0; leave the number out"),
    ],
    ids=lambda value: "",
)
def test_what_a_run_cannot_join_is_refused_in_one_sentence(environment, said, monkeypatch, tmp_path, capsys):
    device = environment.pop("DEVICE", "cpu")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = ["run", "mini", "--method", "sfor", "--set", f"device={device}", "--out", str(tmp_path / "x")]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("items", [0, 1, 2, 7, 8])
def test_shares_are_neighbors_and_all_of_it(items):
    shares = [Processes(rank=rank, count=3).share(items) for rank in range(3)]
    assert list(chain(*shares)) == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
