"""Rows of references, and the mark on scores that show no learning, against numbers worked out by hand."""

import math
from dataclasses import replace
from pathlib import Path

import made
import pytest

from anchorlora.errors import InvalidValue
from anchorlora.scores import Scores
from anchorlora.store.record import Labels, Record, read_record
from anchorlora_lab.report import writers
from anchorlora_lab.report.chapters import chapters_of
from anchorlora_lab.report.comparability import studies_of
from anchorlora_lab.report.records import Run, find_runs
from anchorlora_lab.report.tables.base_models import base_model_tables
from anchorlora_lab.report.tables.pairs import comparison_table, paired_table
from anchorlora_lab.report.tables.references import References
from anchorlora_lab.report.tables.scores import complete_table, deviation_table, order_table, seed_table

# of 640 tested examples a task: the label that is most frequent in training is right for 64, 128, 192 and 256 of them
TRAIN, TEST = (3, 5, 1, 1), {"dbpedia": 64, "amazon": 128, "yahoo": 192, "agnews": 256}
LABELS = {task: {f"l{i}": {"train": n, "test": right if i == 1 else (640 - right) // 3} for i, n in enumerate(TRAIN)}
          for task, right in TEST.items()}  # fmt: skip
MAJORITY = (10 + 20 + 30 + 40) / 4
LINE = MAJORITY + 2 * math.sqrt((10 * 90 + 20 * 80 + 30 * 70 + 40 * 60) / 640) / 4


def at(level, *, method="seq-lora", order="order1", seed=42, **changes) -> Record:
    """A run whose every accuracy is one level."""
    base = made.run(method, order=order, seed=seed, **({"labels": LABELS} | changes))
    triangle = [[float(level)] * len(row) for row in base.accuracy]
    return Record.model_validate(base.model_dump(by_alias=True) | {"accuracy": triangle, "scores": Scores.of(triangle).as_dict()})


def as_runs(*records):
    return [Run(Path(f"{i}"), r) for i, r in enumerate(records)]


def rows(table):
    return {row[0]: dict(zip([c.heading for c in table.columns], row, strict=True)) for row in table.rows}


def untrained(level, **changes):
    record = at(level, **changes)
    return record.model_copy(
        update={"protocol": record.protocol | {"training": record.protocol["training"] | {"learning_rate": 0.0}}}
    )


def test_the_rows_below_the_methods_are_guessing_the_majority_label_the_base_model_and_each_task_alone():
    first = [at(90, order=order) for order in ("order1", "order3")]  # dbpedia and yahoo come first in them
    single = [at(level, order=(task,)) for task, level in (("amazon", 60), ("agnews", 80))]
    runs, others = as_runs(*first), as_runs(*single, untrained(33))
    found = rows(complete_table(runs, others))
    assert list(found) == ["seq-lora", "chance", "majority label", "zero-shot", "single-task"]
    assert (found["chance"]["AA"], found["chance"]["LA"]) == (pytest.approx(25, abs=0.1), pytest.approx(25, abs=0.1))
    assert found["majority label"]["AA"] == MAJORITY
    assert found["zero-shot"]["AA"] == 33
    assert found["single-task"]["LA"] == (90 + 60 + 90 + 80) / 4
    assert {found[name][score] for name in list(found)[1:] for score in ("BWT", "FM")} == {None}
    assert "zero-shot" in rows(order_table(runs, others))
    table = complete_table(runs, others)
    assert table.marked == {}  # one method: the references are no rivals


def test_levels_that_are_not_known_for_every_task_have_no_row():
    assert list(rows(complete_table(as_runs(at(90, labels=None))))) == ["seq-lora"]
    some = {task: LABELS[task] for task in ("amazon", "yahoo")}
    assert list(rows(complete_table(as_runs(at(90, labels=some)), as_runs(at(1, order=("amazon",)))))) == ["seq-lora"]


def test_the_base_model_counts_only_if_it_is_the_same_and_was_tested_on_the_same_examples():
    first = as_runs(at(90))
    other = untrained(33)
    smaller = {task: {"train": 8, "test": 100} for task in made.TASKS}
    wrong = [
        other.model_copy(update={"base_model": other.base_model.model_copy(update={"sha256": "1" * 64})}),
        other.model_copy(update={"protocol": other.protocol | {"examples": smaller}}),
        other.model_copy(update={"data": {"TC/agnews/test.json": made.OFFICIAL.model_copy(update={"sha256": "b" * 64})}}),
    ]
    assert not References.of(first, as_runs(*wrong)).by_task["zero-shot"]
    few = {task: {"train": 8, "test": 640} for task in made.TASKS}  # how many it would have trained on says nothing
    right = other.model_copy(update={"protocol": other.protocol | {"examples": few}})
    assert References.of(first, as_runs(right)).by_task["zero-shot"]


def test_a_score_below_the_majority_label_and_two_standard_errors_is_marked_and_neither_ranked_nor_compared():
    assert round(LINE, 4) == 26.6536  # 25 + 2 sqrt(7000 / 640) / 4
    low, high, higher = (at(level, method=m) for level, m in ((26.65, "seq-lora"), (26.66, "ewc"), (40, "sfor")))
    table = complete_table(as_runs(low, high, higher))
    place = {row[0]: i for i, row in enumerate(table.rows)}
    assert table.unlearned == {(place["seq-lora"], name) for name in ("AA", "LA", "BWT", "FM")}
    assert "| 26.65† |" in " ".join(writers.markdown(table).split())
    assert r"26.65$^\dagger$" in writers.latex(table)
    assert f"{LINE:.2f} %" in table.note
    assert {i for i, _ in table.marked} == {place["ewc"], place["sfor"]}
    assert "†" not in writers.text(complete_table(as_runs(high, higher)))
    records = made.papers_own([at(level, order=o) for o in made.PLACES for level in (10,)])
    records = [r.model_copy(update={"labels": _sevenfold()}) for r in records]
    shown = rows(complete_table(as_runs(*records)))["seq-lora"]
    assert (shown["AA paper"], shown["AA Δ"], shown["FM Δ"]) == (79.68, None, None)


def _sevenfold():
    """The same shares of 7,600 examples."""
    from pydantic import TypeAdapter

    counts = {
        t: {k: {"train": n["train"], "test": round(n["test"] * 11.875)} for k, n in each.items()} for t, each in LABELS.items()
    }
    return TypeAdapter(Labels).validate_python(counts)


def test_forgetting_is_judged_by_what_was_learned_and_a_difference_by_both_methods():
    learned = at(50, method="projected-lora")
    triangle = [[60.0], [20.0, 60.0], [20.0, 20.0, 60.0], [20.0] * 4]  # learned, and lost
    lost = learned.model_copy(update={"accuracy": triangle, "scores": learned.scores.model_copy(update={"AA": 20.0, "LA": 50.0})})
    table = complete_table(as_runs(lost))
    assert {heading for _, heading in table.unlearned} == {"AA"}
    pairs = paired_table(as_runs(lost, at(50, method="sfor")))
    assert {heading for _, heading in pairs.unlearned} == {"AA"}
    assert {i for i, _ in pairs.unlearned} == {0, 1}


def test_other_tables_of_scores_have_the_mark():
    runs = as_runs(*(at(20, seed=seed, method=m) for seed in made.SEEDS for m in ("seq-lora", "sfor")))
    for table in (seed_table(runs), deviation_table(runs), order_table(runs)):
        assert "†" in writers.text(table), table.name
        assert table.note.count("†") == 1
    bigger = [
        r.record.model_copy(update={"base_model": r.record.base_model.model_copy(update={"name": "big", "sha256": "b" * 64})})
        for r in runs
    ]
    table = base_model_tables(studies_of([*runs, *as_runs(*bigger)]))[0]
    assert len(table.unlearned) == 4 * 3


def test_a_method_that_learned_nothing_on_one_base_model_is_left_out_of_their_agreement():
    levels = {"seq-lora": 50, "ewc": 55, "sfor": 20, "o-lora": 60, "o-lora-hard": 70}
    big = {"name": "big", "revision": None, "sha256": "b" * 64, "parameters": 1, "dtype": "float32"}
    small = [at(level, method=method) for method, level in levels.items()]
    large = [at(120 - level, method=method, base_model=big) for method, level in levels.items()]
    (table,) = [t for t in base_model_tables(studies_of(as_runs(*small, *large))) if t.name == "base-models-order"]
    assert [row[1:4] for row in table.rows] == [("AA", 4, -1.0), ("LA", 4, -1.0)]  # nothing was forgotten
    assert "Left out, as it shows no learning: AA of sfor on " in table.note
    assert "on big" not in table.note


def test_a_report_takes_the_rows_from_the_runs_beside_a_study(tmp_path):
    alone = [at(70, order=(t,)) for t in made.TASKS[1:]]
    root = made.save(tmp_path / "runs", at(90), untrained(33, seed=38), *alone)
    (chapter,) = chapters_of(studies_of(find_runs([root])))  # a run of one task is no chapter beside its sequence
    assert len(chapter.study.runs) == 1
    (main,) = chapter.main
    assert rows(main)["single-task"]["AA"] == (90 + 3 * 70) / 4
    assert rows(main)["zero-shot"]["AA"] == 33
    base = made.save(tmp_path / "base", untrained(33))
    assert [study.runs[0].trained for study in studies_of(find_runs([base]))] == [False]  # a study where nothing else is
    elsewhere = alone[0].model_copy(update={"protocol": {**alone[0].protocol, "rank": 99}})
    for others in (alone, [at(90), elsewhere]):  # and so are runs of one task, or at other settings
        found = {run.order for study in studies_of(as_runs(*others)) for run in study.runs}
        assert found == {tuple(record.order) for record in others}


def test_counts_above_records_without_their_own_are_read(tmp_path):
    import json

    made.save(tmp_path / "runs/grid", at(90, labels=None))
    (tmp_path / "runs/labels.json").write_text(json.dumps(LABELS))
    (run,) = find_runs([tmp_path / "runs"])
    assert References.of([run]).levels()["majority label"] == MAJORITY
    assert find_runs([tmp_path / "runs/grid"])[0].labels == {}  # above what was asked for, nothing is looked at
    (tmp_path / "runs/labels.json").write_text('{"a": {"b": 1}}')
    with pytest.raises(InvalidValue, match=r"labels\.json: a\.b.*count_labels"):
        find_runs([tmp_path / "runs"])


def test_a_record_without_counts_is_written_as_before_and_one_with_them_reads_the_same(tmp_path):
    without, counted = at(90, labels=None), at(90)
    assert '"labels"' not in without.as_json()
    (tmp_path / "record.json").write_text(counted.as_json())
    assert read_record(tmp_path / "record.json").labels == counted.labels
    assert replace(as_runs(without)[0], counted=counted.labels).labels == counted.labels


def test_comparisons_are_of_runs_at_the_same_order_and_seed_with_their_intervals_and_a_correction():
    grid = [
        run
        for run in as_runs(*made.grid(("sfor", "projected-lora")))
        if (run.method, run.seed, run.order[0]) != ("sfor", 42, "yahoo")
    ]
    table = comparison_table(grid)
    assert [row[:3] for row in table.rows] == [("sfor - projected-lora", score, 8) for score in ("AA", "LA", "FM")]
    there = {(run.method, run.order, run.seed): run.record.scores for run in grid}
    changes = [s.AA - there["projected-lora", place, seed].AA for (method, place, seed), s in there.items() if method == "sfor"]
    _, _, _, mean, told, p, adjusted = table.rows[0]
    low, high = map(float, told.split(" to "))
    assert mean == pytest.approx(sum(changes) / 8)
    assert min(changes) < low < mean < high < max(changes)
    assert p <= adjusted
    assert "3 comparisons" in table.note
    assert comparison_table(as_runs(at(90))) is None


def test_a_comparison_with_a_method_that_learned_nothing_is_marked():
    table = comparison_table(as_runs(at(20, method="projected-lora"), at(90, method="sfor")))
    assert writers.text(table).count("†") == 3 + 1


def test_too_few_pairs_have_neither_an_interval_over_runs_nor_a_p():
    alone = at(20, method="projected-lora"), at(90, method="sfor")
    table = comparison_table(as_runs(*alone))
    assert [column.heading for column in table.columns] == ["difference", "score", "pairs", "mean"]
    assert "takes six pairs" in table.note
    table = comparison_table(as_runs(*made.grid(("sfor", "projected-lora")), made.run("seq-lora")))
    assert table.rows[0][4]
    assert table.rows[0][5] <= table.rows[0][6]
    assert [row[2:3] + row[4:] for row in table.rows if row[0].endswith("seq-lora")] == [(1, None, None, None)] * 6


def test_selected_strengths_are_told_beside_the_strength_that_the_paper_prints_its_values_for():
    tuned = at(90, method="o-lora-bsr", order="order1")
    strength = {"tuned": {"EffectiveResponse.strength": 0.01}, "selection": "0" * 64}
    tuned = tuned.model_copy(update={"protocol": tuned.protocol | strength})
    told = "Selected on a holdout: o-lora-bsr at EffectiveResponse.strength 0.01 (the paper prints its values for 1)."
    for table in (complete_table(as_runs(tuned)), order_table(as_runs(tuned))):
        assert told in table.note
    same = tuned.model_copy(update={"protocol": tuned.protocol | {"tuned": {"EffectiveResponse.strength": 1.0}}})
    assert "paper prints" not in complete_table(as_runs(same)).note
    assert "Selected" not in complete_table(as_runs(at(90))).note
    by_hand = tuned.model_copy(update={"protocol": tuned.protocol | {"selection": None}})
    assert complete_table(as_runs(by_hand)).note.count("Not as in the catalog: o-lora-bsr at EffectiveResponse.strength 0.01") == 1
    assert "Selected" not in complete_table(as_runs(by_hand)).note
