import json
import statistics

import made
import pytest

from anchorlora.reports.comparability import studies_of
from anchorlora.reports.records import find_runs
from anchorlora.reports.tables import base_model_tables, evaluation_table


def with_general(tmp_path, *facts):
    """Runs of several seeds, each with a eval.json."""
    cells = made.papers_own([made.cell("sfor", seed=seed) for seed in made.SEEDS[: len(facts)]])
    made.save(tmp_path, *cells)
    for made_cell, text in zip(cells, facts, strict=True):
        (made.folder_of(tmp_path, made_cell) / "eval.json").write_text(text)
    return find_runs([tmp_path])


def test_general_scores_are_means_beside_the_printed_ones(tmp_path):
    runs = with_general(tmp_path, *(made.general(after=after) for after in (74.0, 74.5, 75.5)))
    table = evaluation_table(runs)
    base, sfor = table.rows
    headings = [c.heading for c in table.columns]
    row = dict(zip(headings, sfor, strict=True))
    assert base[headings.index("score")] == pytest.approx(74.7)
    assert row["score"] == pytest.approx(74 + 2 / 3)
    assert row["sd"] == pytest.approx((((2 / 3) ** 2 + (1 / 6) ** 2 + (5 / 6) ** 2) / 2) ** 0.5)
    assert row["change"] == pytest.approx(74 + 2 / 3 - 74.7)
    assert row["change printed"] == -0.01
    assert "14,042 questions, 0 solved examples before each" in table.note


@pytest.mark.parametrize("other", [{"task": "hellaswag"}, {"limit": 20}, {"few_shot": 5}])
def test_another_task_or_another_way_to_ask_has_no_printed_values(other, tmp_path):
    table = evaluation_table(with_general(tmp_path, made.general(after=50.0, **other)))
    assert not any("printed" in c.heading for c in table.columns)


@pytest.mark.parametrize("odd", [{"task": "hellaswag"}, {"limit": 10}, {"metric": "acc_norm"}, {"n": 100}, {"few_shot": 5}])
def test_general_scores_of_two_kinds_do_not_mix(tmp_path, odd):
    runs = with_general(tmp_path, made.general(after=74.0), made.general(after=74.5, **odd))
    with pytest.raises(ValueError, match=f"eval.json and .*eval.json cannot stand in one table: {next(iter(odd))} "):
        evaluation_table(runs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not complete JSON"),
        (json.dumps({"schema": 2}), "schema: Input should be 1"),
        (made.general(after=float("nan")), "holds NaN"),
    ],
)
def test_a_general_file_that_is_none_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=f"eval.json: {message}.*run `anchorlora eval` again"):
        with_general(tmp_path, text)


def base_model(name):
    return {"name": name, "revision": None, "sha256": "0" * 64, "parameters": 1000, "dtype": "float32"}


def by_backbone(table):
    headings = [c.heading for c in table.columns]
    return {row[:2]: dict(zip(headings, row, strict=True)) for row in table.rows}


def test_backbones_are_compared_over_the_seeds_of_one_order(tmp_path):
    names = {"some/Mistral-7B-v0.3": 7_248_023_552, "Qwen/Qwen3-8B": 8_190_735_360, "tiny": 1000}
    cells = made.grid(("sfor", "o-lora"), ("order1",))
    made.save(tmp_path, *(r for name, size in names.items() for r in made.papers_own(cells, model=name, parameters=size)))
    made.save(tmp_path / "more", *made.papers_own(made.grid(("sfor",), ("order2",)), model="tiny", parameters=1000))
    means, deviations = base_model_tables(studies_of(find_runs([tmp_path])))
    rows, sds = by_backbone(means), by_backbone(deviations)
    assert len(rows) == len(sds) == 6
    mine = [made.cell("sfor", seed=seed).scores.AA for seed in made.SEEDS]
    assert rows["sfor", "tiny"]["AA"] == pytest.approx(statistics.mean(mine))
    assert sds["sfor", "tiny"]["AA sd"] == pytest.approx(statistics.stdev(mine))
    assert rows["sfor", "tiny"]["n"] == 3
    assert sds["sfor", "some/Mistral-7B-v0.3"]["AA sd printed"] == 0.38
    assert rows["sfor", "some/Mistral-7B-v0.3"]["BWT printed"] == -1.13
    assert rows["sfor", "Qwen/Qwen3-8B"]["AA printed"] == 80.41
    assert rows["sfor", "Qwen/Qwen3-8B"]["FM printed"] is None
    assert rows["sfor", "tiny"]["AA printed"] is None
    assert "in rows of its own base models (Qwen/Qwen3-8B, mistralai/Mistral-7B-v0.3)" in means.note
    marked = [mark for (_, j), mark in means.marked.items() if j == 3]
    assert sorted(marked) == ["best"] * 3 + ["second"] * 3  # two methods, ranked on each of three base models


def test_a_missing_seed_of_a_backbone_is_named_and_its_row_not_ranked(tmp_path):
    made.save(tmp_path, *made.grid(("sfor",), ("order1",), base_model=base_model("one")))
    made.save(tmp_path, *made.grid(("sfor",), ("order1",), (38, 42), base_model=base_model("two")))
    for table in base_model_tables(studies_of(find_runs([tmp_path]))):
        assert "Missing cells: sfor on two: seed 2026." in table.note
        assert table.partial == {1}


def test_backbones_under_other_protocols_are_refused(tmp_path):
    plan = made.protocol(made.TASKS, training={"epochs": 2, "window": 8})
    made.save(
        tmp_path, made.cell("sfor", base_model=base_model("one")), made.cell("sfor", base_model=base_model("two"), protocol=plan)
    )
    with pytest.raises(ValueError, match="protocol.training.epochs is 1 in .* 2 in"):
        base_model_tables(studies_of(find_runs([tmp_path])))
