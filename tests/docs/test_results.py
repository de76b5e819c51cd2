"""What docs/results.md prints is made of the records in results/, and of nothing else."""

import json
import statistics
import sys
from pathlib import Path

import pytest

from anchorlora import embedded
from anchorlora.reports.records import find_runs
from anchorlora.study.selection import FILE, read_selection

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    yield
    for name in ("fill_results", "collect", "count_labels"):
        sys.modules.pop(name, None)


def test_every_table_is_what_the_records_give(tools):
    import fill_results

    page = (ROOT / "docs/results.md").read_text()
    assert page.count("<!-- table ") == page.count("<!-- /table -->") > 10
    assert fill_results.filled(page) == page, "make docs writes it anew"


def test_no_table_sets_a_value_of_the_paper_beside_one_of_ours():
    assert "Δ" not in set((ROOT / "docs/results.md").read_text().split())


def levels(study):
    """Guessing and the best single answer, percent over all tasks, and how many tested examples have each label."""
    labels = json.loads((ROOT / "results" / study / "labels.json").read_text())
    labels = {task: {label: n["test"] for label, n in each.items()} for task, each in labels.items()}
    guessing = statistics.mean(100 / len(each) for each in labels.values())
    return guessing, statistics.mean(100 * max(each.values()) / sum(each.values()) for each in labels.values()), labels


def test_where_nothing_was_learned_no_run_is_above_the_single_best_answer():
    """What the page says of the grid, the selections and the fifteen tasks on mini-en."""
    guessing, constant, labels = levels("mini-en/grid")
    scores = [run.record.scores for run in find_runs([ROOT / "results/mini-en/grid"])]
    one_example = 100 / sum(sum(each.values()) for each in labels.values())
    assert (len(scores), guessing, constant) == (45, pytest.approx(15.54, abs=0.005), pytest.approx(20.94, abs=0.005))
    assert max(s.AA for s in scores) <= constant
    assert max(s.LA for s in scores) <= constant + 1.001 * one_example
    chosen = [read_selection(path) for path in (ROOT / "results/mini-en/select").rglob(FILE)]
    assert max(c.AA for selection in chosen for c in selection.candidates) <= guessing + 100 / 64  # answers a candidate
    _, constant, _ = levels("mini-en/long")
    assert all(max(run.record.scores.AA, run.record.scores.LA) < constant for run in find_runs([ROOT / "results/mini-en/long"]))


@pytest.mark.parametrize("study", ["mini/grid", "mini-en/five"])
def test_where_something_was_learned_every_run_is_above_it(study):
    _, constant, _ = levels(study)
    assert min(run.record.scores.LA for run in find_runs([ROOT / "results" / study])) > 2 * constant


def test_labels_are_those_of_the_examples_that_the_runs_were_tested_on(tools):
    import count_labels

    found = count_labels.count(embedded.folder("embedded:mini", "data"), ROOT / "results/mini/grid")
    assert found == json.loads((ROOT / "results/mini/grid/labels.json").read_text())
    for path in (ROOT / "results").rglob("labels.json"):
        counted = json.loads(path.read_text())
        sizes = {task: {part: sum(n[part] for n in each.values()) for part in ("train", "test")} for task, each in counted.items()}
        for run in find_runs([path.parent]):
            assert run.record.protocol["examples"] == sizes


def test_every_figure_shown_is_one_that_is_drawn_from_them(tools):
    import fill_results

    page = (ROOT / "docs/results.md").read_text()
    shown = {part.split(")")[0] for part in page.split("](figures/")[1:]}
    drawn = {f"{folder.replace('/', '-')}-{name}.png" for folder, names in fill_results.FIGURES.items() for name in names}
    assert shown == drawn


def test_records_traces_and_selections_are_collected_and_nothing_that_a_model_said(tools, tmp_path):
    from collect import collect

    source = tmp_path / "runs"
    for folder, names in {
        "grid/sfor/order1-42": ["record.json", "config.yaml", "trace.jsonl", "log.jsonl", "tasks/1-a/predictions.jsonl"],
        "grid/sfor/order2-42": ["config.yaml", "log.jsonl"],  # not finished
        "select/ewc": ["selection.json", "scale.json"],
    }.items():
        for name in names:
            (source / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (source / folder / name).write_text("x")
    assert collect(source, tmp_path / "kept") == 5
    found = {str(p.relative_to(tmp_path / "kept")) for p in (tmp_path / "kept").rglob("*") if p.is_file()}
    assert found == {f"grid/sfor/order1-42/{n}" for n in ("record.json", "config.yaml", "trace.jsonl")} | {
        "select/ewc/selection.json",
        "select/ewc/scale.json",
    }


def test_committed_results_hold_no_predictions_and_read_as_records():
    kept = {path.name for path in (ROOT / "results").rglob("*") if path.is_file() and path.parent.name != "keeping"}
    assert kept <= {"record.json", "config.yaml", "trace.jsonl", "selection.json", "scale.json", "eval.json", "labels.json"}
    assert len(find_runs([ROOT / "results"])) > 150
    for path in (ROOT / "results/keeping").iterdir():  # of benchmarks/keeping.py: numbers alone
        scores = json.loads(path.read_text())["scores"]
        assert all(isinstance(value, float) for metrics in scores.values() for values in metrics.values() for value in values), path


def test_collected_configurations_name_no_place_of_a_machine(tools):
    import collect

    config = "    data: /home/me/data/cl\n    model: ../models/tiny\n    model: Qwen/Qwen3-8B\n    data: embedded:mini\n"
    kept = "    data: cl\n    model: tiny\n    model: Qwen/Qwen3-8B\n    data: embedded:mini\n"
    assert collect.without_places(config) == kept
    for path in sorted((ROOT / "results").rglob("config.yaml")):
        assert collect.without_places(path.read_text()) == path.read_text(), path
