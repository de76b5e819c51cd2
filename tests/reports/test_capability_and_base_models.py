import hashlib
import json
import statistics

import made
import pytest

from anchorlora_lab.report.comparability import studies_of
from anchorlora_lab.report.records import find_runs
from anchorlora_lab.report.tables.answers import evaluation_table
from anchorlora_lab.report.tables.base_models import base_model_tables


def evaluated(tmp_path, *facts):
    """Runs of several seeds, each with an eval.json."""
    cells = made.papers_own([made.run("sfor", seed=seed) for seed in made.SEEDS[: len(facts)]])
    made.save(tmp_path, *cells)
    for record, text in zip(cells, facts, strict=True):
        (made.folder_of(tmp_path, record) / "eval.json").write_text(text)
    return find_runs([tmp_path])


def test_capability_scores_are_means_beside_the_papers(tmp_path):
    runs = evaluated(tmp_path, *(made.evaluation(after=after) for after in (74.0, 74.5, 75.5)))
    table = evaluation_table(runs)
    base, sfor = table.rows
    headings = [c.heading for c in table.columns]
    row = dict(zip(headings, sfor, strict=True))
    assert base[headings.index("score")] == pytest.approx(74.7)
    assert row["score"] == pytest.approx(74 + 2 / 3)
    assert row["sd"] == pytest.approx((((2 / 3) ** 2 + (1 / 6) ** 2 + (5 / 6) ** 2) / 2) ** 0.5)
    assert row["change"] == pytest.approx(74 + 2 / 3 - 74.7)
    assert row["change paper"] == -0.01
    assert "14,042 questions, 0-shot" in table.note


@pytest.mark.parametrize("other", [{"task": "hellaswag"}, {"limit": 20}, {"num_fewshot": 5}, {"apply_chat_template": True}])
def test_another_task_or_another_way_to_ask_has_no_values_of_the_paper(other, tmp_path):
    table = evaluation_table(evaluated(tmp_path, made.evaluation(after=50.0, **other)))
    assert not any("paper" in c.heading for c in table.columns)


@pytest.mark.parametrize(
    "odd",
    [
        *({"task": "hellaswag"}, {"limit": 10}, {"metric": "acc_norm"}, {"n": 100}),
        *({"num_fewshot": 5}, {"apply_chat_template": True}, {"files": {"mmlu": "ab"}}),
    ],
)
def test_evaluations_of_two_kinds_do_not_mix(tmp_path, odd):
    runs = evaluated(tmp_path, made.evaluation(after=74.0), made.evaluation(after=74.5, **odd))
    with pytest.raises(
        ValueError, match=f"eval.json and .*eval.json cannot share a table: {next(iter(odd)).replace('num_fewshot', 'shots')} "
    ):
        evaluation_table(runs)


def test_files_of_schema_2_share_a_table_with_those_of_schema_3(tmp_path):
    runs = evaluated(tmp_path, made.evaluation_2(after=74.0), made.evaluation(after=74.5))
    assert evaluation_table(runs).rows[1][2] == pytest.approx(74.25)
    (task,) = runs[0].evaluation.tasks
    assert (task.task, task.metric, task.num_fewshot, task.change_stderr, task.flips) == ("mmlu", "acc", 0, None, None)
    assert task.parts["mmlu_anatomy"].after == 61.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not complete JSON"),
        (json.dumps({"schema": 1}), "schema: Input should be 3"),
        (made.evaluation(after=float("nan")), "holds NaN"),
    ],
)
def test_a_file_that_is_no_eval_json_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=f"eval.json: {message}.*run `anchorlora eval` again"):
        evaluated(tmp_path, text)


def base_model(name):
    digest = hashlib.sha256(name.encode()).hexdigest()
    return {"name": name, "revision": None, "sha256": digest, "parameters": 1000, "dtype": "float32"}


def by_base_model(table):
    headings = [c.heading for c in table.columns]
    return {row[:2]: dict(zip(headings, row, strict=True)) for row in table.rows}


def test_base_models_are_compared_over_the_seeds_of_one_order(tmp_path):
    names = {"some/Mistral-7B-v0.3": 7_248_023_552, "Qwen/Qwen3-8B": 8_190_735_360, "tiny": 1000}
    cells = made.grid(("sfor", "o-lora"), ("order1",))
    made.save(tmp_path, *(r for name, size in names.items() for r in made.papers_own(cells, model=name, parameters=size)))
    made.save(tmp_path / "more", *made.papers_own(made.grid(("sfor",), ("order2",)), model="tiny", parameters=1000))
    means, deviations = base_model_tables(studies_of(find_runs([tmp_path])))  # two methods have no order to compare
    rows, sds = by_base_model(means), by_base_model(deviations)
    assert len(rows) == len(sds) == 6
    mine = [made.run("sfor", seed=seed).scores.AA for seed in made.SEEDS]
    assert rows["sfor", "tiny"]["AA"] == pytest.approx(statistics.mean(mine))
    assert sds["sfor", "tiny"]["AA sd"] == pytest.approx(statistics.stdev(mine))
    assert rows["sfor", "tiny"]["n"] == 3
    assert sds["sfor", "some/Mistral-7B-v0.3"]["AA sd paper"] == 0.38
    assert rows["sfor", "some/Mistral-7B-v0.3"]["BWT paper"] == -1.13
    assert rows["sfor", "Qwen/Qwen3-8B"]["AA paper"] == 80.41
    assert rows["sfor", "Qwen/Qwen3-8B"]["FM paper"] is None
    assert rows["sfor", "tiny"]["AA paper"] is None
    assert "in rows of its own base models (Qwen/Qwen3-8B, mistralai/Mistral-7B-v0.3)" in means.note
    marked = [mark for (_, j), mark in means.marked.items() if j == 3]
    assert sorted(marked) == ["best"] * 3 + ["second"] * 3  # two methods, ranked on each of three base models


def test_a_missing_seed_of_a_base_model_is_named_and_its_row_not_ranked(tmp_path):
    made.save(tmp_path, *made.grid(("sfor",), ("order1",), base_model=base_model("one")))
    made.save(tmp_path, *made.grid(("sfor",), ("order1",), (38, 42), base_model=base_model("two")))
    for table in base_model_tables(studies_of(find_runs([tmp_path]))):
        assert "Missing runs: sfor on two: seed 2026." in table.note
        assert table.partial == {1}


def test_one_base_model_in_two_folders_is_one_and_two_of_one_folder_name_are_two(tmp_path):
    there, moved = base_model("/scratch/models/one"), base_model("/scratch/models/one") | {"name": "../copies/one"}
    other = base_model("/other/models/one")
    made.save(tmp_path / "a", made.run("sfor", seed=38, base_model=there), made.run("sfor", seed=42, base_model=moved))
    (study,) = studies_of(find_runs([tmp_path / "a"]))
    assert len(study.runs) == 2
    assert study.title.endswith(" on one")
    made.save(tmp_path / "b", made.run("sfor", seed=38, base_model=other))
    studies = studies_of(find_runs([tmp_path]))
    assert sorted(len(study.runs) for study in studies) == [1, 2]
    means, _ = base_model_tables(studies)
    labels = {row[1] for row in means.rows}
    assert len(labels) == 2
    assert "/other/models/one" in labels, "whole paths, as the last parts are alike"


def test_base_models_under_other_protocols_are_refused(tmp_path):
    plan = made.protocol(made.TASKS, training={"epochs": 2, "window": 8})
    made.save(
        tmp_path, made.run("sfor", base_model=base_model("one")), made.run("sfor", base_model=base_model("two"), protocol=plan)
    )
    with pytest.raises(ValueError, match="protocol.training.epochs is 1 in .* 2 in"):
        base_model_tables(studies_of(find_runs([tmp_path])))
