"""Choosing a strength on a holdout: what may be opened, how ties end, what a manifest binds."""

import json
from pathlib import Path

import pytest
import torch

import records
import small
from anchorlora import METHODS, run_sequence
from anchorlora.cli.app import main
from anchorlora.config import RunConfig
from anchorlora.continual.sequence import TaskSequence
from anchorlora.recipes import mini
from anchorlora.runs.run import load_inputs
from anchorlora.store.selection import FILE, read_selection
from anchorlora_lab.grid.scheduler import Planned
from anchorlora_lab.grid.selection import REFERENCE, TUNABLE, candidate_runs, choose, factor, measure_gradients

EWC = TUNABLE["ewc"]


def written(selection, out):
    (out / FILE).write_text(selection.as_json())
    return out / FILE


def test_every_tunable_number_is_one_that_its_method_has_with_four_candidates_each():
    for name, tunable in TUNABLE.items():
        for value in tunable.candidates:
            assert f"{value!r}" in METHODS[name].changed({tunable.parameter: value}).definition
        assert len(tunable.candidates) == 4


def finished(root, scores):
    """Candidate runs of EWC with the given AA; None: not finished."""
    planned = candidate_runs(mini(), "ewc", EWC, list(scores), ("a", "b"), 42, root)
    for each, aa in zip(planned, scores.values(), strict=True):
        if aa is not None:
            each.folder.mkdir(parents=True)
            base = records.record("seq-lora", name="ewc")
            facts = {
                "scores": base.scores.model_copy(update={"AA": aa}),
                "protocol": {"holdout_sha256": "0" * 64, "tuned": each.config.settings, "selection": None},
            }
            (each.folder / "record.json").write_text(base.model_copy(update=facts).as_json())
    return planned


def test_the_best_is_selected_and_within_a_tenth_of_a_point_the_smallest(tmp_path):
    clear = choose(finished(tmp_path / "a", {1.0: 70.0, 10.0: 74.0, 100.0: 71.0}), EWC, [], None, {})
    assert clear.selected == 10.0
    tied = choose(finished(tmp_path / "b", {1.0: 70.0, 10.0: 73.95, 100.0: 74.0}), EWC, [], None, {})
    assert tied.selected == 10.0
    exactly = choose(finished(tmp_path / "two of 2,000", {1.0: 64.1, 10.0: 64.2}), EWC, [], None, {})
    assert (exactly.selected, 64.2 - 0.1 <= 64.1) == (1.0, False), "a tenth, which float64 makes a little less"
    apart = choose(finished(tmp_path / "c", {1.0: 70.0, 10.0: 73.85, 100.0: 74.0}), EWC, [], None, {})
    assert apart.selected == 100.0
    assert (clear.end, apart.end) == ("", "largest")
    first = choose(finished(tmp_path / "d", {1.0: 75.0, 10.0: 74.0}), EWC, [], None, {})
    alone = choose(finished(tmp_path / "e", {1.0: 75.0}), EWC, [], None, {})
    assert (first.end, alone.end) == ("smallest", "")


def test_a_candidate_that_failed_is_recorded_as_failed_and_never_selected(tmp_path):
    planned = finished(tmp_path, {1.0: 70.0, 10.0: None})
    manifest = choose(planned, EWC, [1.0, 10.0], None, {planned[1].folder: "exit status 3: the loss is nan"})
    assert manifest.selected == 1.0
    assert manifest.candidates[1].model_dump() == {
        "value": 10.0,
        "AA": None,
        "accuracy": None,
        "error": "exit status 3: the loss is nan",
    }
    with pytest.raises(ValueError, match="no candidate finished; the first one: not run"):
        choose(finished(tmp_path / "none", {1.0: None}), EWC, [], None, {})


def test_a_manifest_reads_back_and_one_that_names_an_undeclared_value_is_refused(tmp_path):
    manifest = choose(finished(tmp_path / "runs", {1.0: 70.0, 10.0: 74.0}), EWC, [1.0, 10.0], {"factor": 1.0}, {})
    path = written(manifest, tmp_path)
    assert read_selection(tmp_path) == read_selection(path) == manifest
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "selected": 7.0}))
    with pytest.raises(ValueError, match="the selected value 7 is none of the declared candidates 1, 10"):
        read_selection(path)
    with pytest.raises(ValueError, match="there is no selection at"):
        read_selection(tmp_path / "nowhere.json")


def test_a_run_on_the_holdout_opens_no_test_file(small_recipe, small_benchmark, tmp_path, monkeypatch):
    opened, read = [], Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened.append(self.name) or read(self, *a, **k))
    recipe = small_recipe.changed({"tested_on": "holdout"})
    record = run_sequence(recipe, METHODS["seq-lora"], order=small.ORDER[:2], seed=1, out=tmp_path / "r")
    assert "train.json" in opened
    assert not {"test.json", "dev.json"} & set(opened)
    assert not any("test.json" in name for name in record.data)
    assert record.protocol["examples"] == {"fruit": {"train": 22, "test": 2}, "mood": {"train": 21, "test": 3}}
    assert len(record.protocol["holdout_sha256"]) == 64


@pytest.fixture
def manifest(tmp_path):
    runs = finished(tmp_path / "runs", {1.0: 70.0, 10.0: 74.0})
    return written(choose(runs, EWC, [1.0, 10.0], None, {}), tmp_path)


def asked(model, data, out, *more):
    order = ",".join(small.ORDER[:2])
    return ["run", "standard-cl", "--order", order, "--model", str(model), "--data", str(data), "--out", str(out), *more]


def test_a_run_takes_the_selected_value_records_it_and_refuses_another(manifest, small_model, small_benchmark, tmp_path, capsys):
    fast = ["--set", "rank=4", "--set", "max_new_tokens=4", "--set", "micro_batch=8", "--set", "threads=1"]
    run = asked(small_model, small_benchmark, tmp_path / "r", "--method", "ewc", *fast)
    assert main([*run, "--selection", str(manifest), "--set", "FisherAnchor.strength=5"]) == 2
    assert "FisherAnchor.strength was selected on the holdout as 10, so 5 is refused" in capsys.readouterr().err
    assert main([*run, "--selection", str(manifest)]) == 0
    record = json.loads((tmp_path / "r/record.json").read_text())
    assert record["method"]["parts"] == ["Shared()", "FisherAnchor(10.0, 500)"]
    assert record["protocol"]["tuned"] == {"FisherAnchor.strength": 10.0}
    assert record["protocol"]["selection"] == read_selection(manifest).sha256
    capsys.readouterr()
    again = ["run", str(tmp_path / "r/config.yaml"), "--out", str(tmp_path / "s"), "--set", "FisherAnchor.strength=5"]
    assert main(again) == 2
    assert "was selected on the holdout as 10" in capsys.readouterr().err
    assert main([*run, "--out", str(tmp_path / "r")]) == 2  # without the manifest it is another configuration
    assert "belongs to another configuration" in capsys.readouterr().err


def test_a_manifest_of_another_method_is_refused(manifest, small_model, small_benchmark, tmp_path, capsys):
    run = asked(small_model, small_benchmark, tmp_path / "r", "--method", "lwf", "--selection", str(manifest))
    assert main(run) == 2
    assert "was made for ewc, not for lwf" in capsys.readouterr().err


def test_one_selection_a_method_is_all_that_a_grid_can_follow(manifest, tmp_path, capsys):
    (tmp_path / "other.json").write_text(manifest.read_text().replace('"selected": 10.0', '"selected": 1.0'))
    grid = ["grid", "mini", "--methods", "ewc", "--out", str(tmp_path / "grid"), "--dry-run"]
    assert main([*grid, "--selection", str(manifest), "--selection", str(tmp_path / "other.json")]) == 2
    assert "several selections were given for ewc" in capsys.readouterr().err


def test_strengths_are_scaled_by_one_power_of_ten():
    steep, high = REFERENCE | {"example_gradient": 5.5e-3}, REFERENCE | {"step_gradient": 90 * 3.6e-4}
    assert factor("fisher", REFERENCE, learning_rate=1e-4) == factor("sparsity", REFERENCE, learning_rate=1e-4) == 1.0
    assert factor("fisher", steep, learning_rate=1e-3) == pytest.approx(0.01)
    assert factor("sparsity", high, learning_rate=1.0) == pytest.approx(100.0)


@pytest.mark.parametrize(("window", "steps"), [(8, [range(8), range(8, 16)]), (40, [range(21)])])
def test_the_measured_gradients_are_those_of_single_examples_steps_and_the_written_penalty(small_recipe, window, steps):
    """After the first task, on the second one's examples, also if they are fewer than a window: every gradient, written out."""
    recipe = small_recipe.changed({"tested_on": "holdout", "window": window})
    config = RunConfig(method="seq-lora", order=small.ORDER[:2], seed=1, recipe=recipe)
    sequence = TaskSequence(load_inputs(config), METHODS["seq-lora"])
    found = measure_gradients(sequence)
    anchor = sequence.blocks.anchor()
    factors = [layer.factor(name) for layer in anchor.layers for name in ("A", "B")]
    singles = [torch.autograd.grad(loss, factors) for loss in sequence.inputs.losses("mood")(80)]
    assert len(singles) == 21
    everything = torch.cat([g.flatten() for single in singles for g in single]).double()
    assert found["example_gradient"] == pytest.approx(float(everything.square().mean().sqrt()), rel=1e-5)
    means = [sum(singles[n][i] for n in step) / len(step) for step in steps for i in range(1, len(factors), 2)]
    on_b = torch.cat([mean.flatten() for mean in means]).double()
    assert found["step_gradient"] == pytest.approx(float(on_b.square().mean().sqrt()), rel=1e-5)
    penalty = [4.0 * torch.sign(s.factor("B") @ s.factor("A")) @ s.factor("A").T for s in anchor.layers]
    written = torch.cat([g.flatten() for g in penalty]).double()
    assert found["sparsity_gradient"] == pytest.approx(float(written.detach().square().mean().sqrt()), rel=1e-5)


def test_the_command_chooses_among_values_of_ones_own_and_says_when_the_best_is_at_an_end(tmp_path, capsys):
    request = ["select", "mini", "--method", "ewc", "--out", str(tmp_path)]
    for wrong in ("a,b", "nan,1", "", "-1,1", "inf"):
        assert main([*request, f"--values={wrong}"]) == 2
        assert f"--values {wrong}: give numbers greater than 0, such as 0.1,1,10" in capsys.readouterr().err
    order = tuple(mini().tasks.orders["order1"])
    recorded = finished(tmp_path / "runs", {1.0: 70.0, 10.0: 74.0})
    made = choose(recorded, EWC, [1.0, 10.0], None, {}).model_copy(update={"order": list(order)})
    written(made, tmp_path)
    assert main([*request, "--values", "10,1,10"]) == 0
    said = capsys.readouterr().out
    assert "FisherAnchor.strength 10  AA on the holdout 74.00  selected" in said
    assert "10 is the largest candidate; a larger value may do better (--values)" in said
    assert main([*request, "--values", "1,10,100"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "holds the selection of another request" in said
    assert "candidates that have finished are not run again" in said


def test_planned_candidates_are_runs_on_the_holdout(tmp_path):
    planned = candidate_runs(mini(), "ewc", EWC, [5.0, 50.0], ("a", "b"), 42, tmp_path)
    assert all(isinstance(p, Planned) and p.config.recipe.tasks.tested_on == "holdout" for p in planned)
    assert [p.config.settings for p in planned] == [{"FisherAnchor.strength": 5.0}, {"FisherAnchor.strength": 50.0}]


@pytest.mark.slow
def test_the_command_tries_all_candidates_and_writes_the_manifest(small_model, small_benchmark, tmp_path, capsys):
    out = tmp_path / "s"
    request = [
        "select",
        "standard-cl",
        "--method",
        "n-lora",
        "--order",
        ",".join(small.ORDER[:2]),
        "--out",
        str(out),
        "--slots",
        "2",
    ]
    request += ["--model", str(small_model), "--data", str(small_benchmark), "--set", "max_new_tokens=4", "--set", "threads=1"]
    assert main(request) == 0
    manifest = read_selection(out)
    assert [c.value for c in manifest.candidates] == [pytest.approx(v * manifest.scale["factor"]) for v in manifest.declared]
    assert f"EffectiveSparsity.strength {manifest.selected:g}" in capsys.readouterr().out
    before = (out / "selection.json").read_bytes()
    assert main(request) == 0
    assert (out / "selection.json").read_bytes() == before
