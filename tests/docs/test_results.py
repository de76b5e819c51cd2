"""What docs/results.md prints is made of the records in results/, and of nothing else."""

import sys
from pathlib import Path

import pytest

from anchorlora.reports.records import find_runs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    yield
    for name in ("fill_results", "collect"):
        sys.modules.pop(name, None)


def test_every_table_is_what_the_records_give(tools):
    import fill_results

    page = (ROOT / "docs/results.md").read_text()
    assert page.count("<!-- table ") == page.count("<!-- /table -->") > 10
    assert fill_results.filled(page) == page, "make docs writes it anew"


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
    kept = {path.name for path in (ROOT / "results").rglob("*") if path.is_file()}
    assert kept <= {"record.json", "config.yaml", "trace.jsonl", "selection.json", "scale.json", "general.json", "README.md"}
    assert len(find_runs([ROOT / "results"])) > 150


def test_collected_configurations_name_no_place_of_a_machine(tools):
    import collect

    config = "    data: /home/me/data/cl\n    model: ../models/tiny\n    model: Qwen/Qwen3-8B\n    data: embedded:mini\n"
    kept = "    data: cl\n    model: tiny\n    model: Qwen/Qwen3-8B\n    data: embedded:mini\n"
    assert collect.without_places(config) == kept
    for path in sorted((ROOT / "results").rglob("config.yaml")):
        assert collect.without_places(path.read_text()) == path.read_text(), path
