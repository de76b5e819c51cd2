"""Tables of every metric, of invalid predictions where tasks have labels or none, of forward transfer, and of flips."""

import json
import math
from dataclasses import replace

import made
import pytest

from anchorlora.errors import InvalidValue
from anchorlora_lab.report import writers
from anchorlora_lab.report.page import write_report
from anchorlora_lab.report.records import find_runs
from anchorlora_lab.report.tables.answers import (
    Flips,
    flips_table,
    forward_table,
    forward_transfer,
    invalid_by_seed,
    invalid_table,
    metric_tables,
)

ORDER = ("chat", "mood")  # without labels, with labels
ACCURACY = [[50.0], [40.0, 80.0]]
INVALID = [[None], [None, 5.0]]
METRICS = {
    "token_f1": [[50.0], [40.0, None]],
    "exact_match": [[30.0], [20.0, 80.0]],
    "loss": [[2.0], [2.5, 0.5]],
}
SCORES = {"AA": 60.0, "LA": 65.0, "BWT": -10.0, "FM": 10.0}


def two(method="sfor", *, seed=42, **changes):
    own = {"accuracy": ACCURACY, "invalid": INVALID, "metrics": METRICS, "scores": SCORES, "protocol": made.protocol(ORDER)}
    return made.run(method, order=ORDER, seed=seed, **own | changes)


def single(task, accuracy, method="sfor", *, seed=42, **changes):
    scores = {"AA": accuracy, "LA": accuracy, "BWT": None, "FM": None}
    own = {"accuracy": [[accuracy]], "invalid": [[None]], "scores": scores, "protocol": made.protocol([task], **changes)}
    return made.run(method, order=[task], seed=seed, **own)


def rows_of(table):
    headings = [column.heading for column in table.columns]
    return {row[0]: dict(zip(headings, row, strict=True)) for row in table.rows}


def saved(tmp_path, *records):
    return find_runs([made.save(tmp_path, *records)])


def test_a_task_without_labels_has_a_dash_for_invalid_predictions_and_counts_for_none(tmp_path):
    runs = saved(tmp_path, two())
    row = rows_of(invalid_table(runs))["sfor"]
    assert row == {"method": "sfor", "runs": "1 of 1", "chat": None, "mood": 5.0, "all tasks": 5.0, "worst": 5.0}
    assert invalid_by_seed(runs).rows[0][3:] == (None, 5.0, 5.0)
    assert writers.text(invalid_table(runs)).splitlines()[4].split() == ["sfor", "1", "of", "1", "-", "5.00", "5.00", "5.00"]


def test_where_no_task_has_labels_the_page_does_not_speak_of_them(tmp_path):
    none = [[None], [None, None]]
    (chapter,) = write_report(saved(tmp_path, two(invalid=none)), tmp_path / "out").chapters
    assert "Invalid predictions" not in [section.title for section in chapter.sections]


def test_every_metric_has_a_table_over_the_tasks_that_have_it(tmp_path):
    tables = {table.name: rows_of(table)["sfor"] for table in metric_tables(saved(tmp_path, two()))}
    assert list(tables) == ["metric-token_f1", "metric-exact_match", "metric-loss", "metric-perplexity"]
    assert {k: v for k, v in tables["metric-token_f1"].items() if k != "runs"} == {
        "method": "sfor",
        "chat": 40.0,
        "mean": 40.0,
        "change": -10.0,
    }
    assert tables["metric-exact_match"]["mean"] == 50.0
    assert tables["metric-loss"]["change"] == 0.5


def test_perplexity_is_the_exponential_of_the_loss_and_stored_nowhere(tmp_path):
    (run,) = saved(tmp_path, two())
    assert "perplexity" not in run.record.metrics
    row = rows_of(metric_tables([run])[-1])["sfor"]
    assert (row["chat"], row["mood"]) == (math.exp(2.5), math.exp(0.5))
    assert row["change"] == pytest.approx(math.exp(2.5) - math.exp(2.0))


def test_a_metric_that_is_the_accuracy_of_every_task_has_no_table_of_its_own(tmp_path):
    assert metric_tables(saved(tmp_path, two(metrics={"exact_match": ACCURACY}))) == []
    assert metric_tables(saved(tmp_path / "old", two(metrics=None))) == []


def test_forward_transfer_is_what_a_task_gains_over_learning_it_alone(tmp_path):
    runs = saved(tmp_path, two(), single("chat", 48.0), single("mood", 83.0), single("mood", 10.0, seed=38))
    row = rows_of(forward_table([run for run in runs if len(run.order) == 2], [run for run in runs if len(run.order) == 1]))["sfor"]
    assert row["FWT"] == pytest.approx(((50 - 48) + (80 - 83)) / 2)
    assert row["runs"] == "1 of 1"


def forward(tmp_path, *alone):
    runs = saved(tmp_path, two(), *alone)
    return forward_table([run for run in runs if len(run.order) == 2], [run for run in runs if len(run.order) == 1])


def test_what_records_say_of_other_tasks_does_not_matter(tmp_path):
    """As `run` writes it: metrics and cut passages of a run's own tasks alone."""
    facts = {"metric": {"chat": ["token_f1"], "mood": ["exact_match"]}, "passages_cut": {"chat": 1, "mood": 0}}
    runs = saved(
        tmp_path,
        two(protocol=made.protocol(ORDER, **facts)),
        single("chat", 48.0, metric={"chat": ["token_f1"]}, passages_cut={"chat": 1}),
        single("mood", 83.0, metric="exact match", passages_cut={"mood": 0}),
    )
    (whole,) = (run for run in runs if len(run.order) == 2)
    assert forward_transfer(whole, [run for run in runs if len(run.order) == 1], of="sfor") == -0.5


def test_methods_without_single_task_runs_are_compared_with_the_plain_ones(tmp_path):
    plain = [single("chat", 48.0, "seq-lora"), single("mood", 83.0, "seq-lora")]
    assert rows_of(forward(tmp_path, *plain))["sfor"]["FWT"] == -0.5
    assert rows_of(forward(tmp_path / "own", *plain, single("chat", 50.0), single("mood", 80.0)))["sfor"]["FWT"] == 0.0


def test_the_runs_of_a_method_are_compared_with_single_task_runs_of_one_method_alone(tmp_path):
    plain = [single(task, level, "seq-lora", seed=seed) for task, level in (("chat", 48.0), ("mood", 83.0)) for seed in (38, 42)]
    own = [single("chat", 50.0), single("mood", 80.0)]
    assert rows_of(forward(tmp_path, two(seed=38), *plain, *own))["sfor"]["FWT"] == -0.5


def test_single_task_runs_of_another_setting_or_of_too_few_tasks_give_no_forward_transfer(tmp_path):
    assert forward(tmp_path / "few", single("chat", 48.0)) is None
    other = single("mood", 83.0, adapter={"rank": 16})
    assert forward(tmp_path / "other", single("chat", 48.0), other) is None
    other_data = single("mood", 83.0, examples={"mood": {"train": 5, "test": 640}})
    assert forward(tmp_path / "data", single("chat", 48.0), other_data) is None
    other_metric = single("mood", 83.0, metric={"mood": ["token_f1"]})
    assert forward(tmp_path / "metric", single("chat", 48.0), other_metric) is None
    assert forward(tmp_path / "seed", single("chat", 48.0), single("mood", 83.0, seed=38)) is None


def predict(run, number, task, *answers, metric="exact_match"):
    """answers: task, right answers, and which were given."""
    lines = [
        {"task": name, "index": i, "prompt_sha256": "0" * 64, "text": said, "label": said, "gold": gold, "metrics": {metric: score}}
        for name, pairs in answers
        for i, (gold, said, score) in enumerate(pairs)
    ]
    path = run.folder / f"tasks/{number}-{task}/predictions.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def judged(golds, marks):
    return [(gold, gold if mark else "?", float(mark)) for gold, mark in zip(golds, marks, strict=True)]


GOLDS = "ab" * 5
THEN, END = (1, 1, 1, 1, 1, 1, 0, 0, 0, 0), (1, 1, 0, 0, 0, 0, 1, 0, 0, 0)


@pytest.mark.parametrize("labeled", [True, False])
def test_flips_are_counted_by_example_and_guessing_is_taken_off_where_there_are_labels(tmp_path, labeled):
    (run,) = saved(tmp_path, two(invalid=[[1.0 if labeled else None], [None, None]]))
    assert flips_table([replace(run)]) is None, "predictions are not beside the record"
    predict(run, 1, "chat", ("chat", judged(GOLDS, THEN)))
    predict(run, 2, "mood", ("chat", judged(GOLDS, END)), ("mood", judged("ab", (1, 1))))
    row = rows_of(flips_table([run]))["sfor"]
    assert (row["answers"], row["right to wrong"], row["wrong to right"]) == (10, 4, 1)
    guessed = (1 - 0.6) * (1 - 0.3) / (2 - 1) if labeled else 0
    assert row["forgetting"] == pytest.approx(100 * (0.4 - guessed))
    assert row["transfer"] == pytest.approx(100 * max(0.1 - guessed, 0))


def test_answers_that_are_more_or_less_right_do_not_flip(tmp_path):
    (run,) = saved(tmp_path, two())
    predict(run, 1, "chat", ("chat", [("a b", "a", 0.5)]), metric="token_f1")
    predict(run, 2, "mood", ("chat", [("a b", "b", 0.5)]), metric="token_f1")
    assert flips_table([run]) is None


def test_a_line_that_is_no_prediction_is_named(tmp_path):
    (run,) = saved(tmp_path, two())
    predict(run, 1, "chat", ("chat", judged("a", [1])))
    predict(run, 2, "mood", ("chat", judged("a", [1])))
    (run.folder / "tasks/1-chat/predictions.jsonl").write_text('{"task": 3}\n')
    with pytest.raises(InvalidValue, match=r"predictions.jsonl, line 1: .*call the run again"):
        flips_table([run])


def test_guessing_explains_flips_that_nothing_was_forgotten_in():
    """A model that guesses among 4 labels before and after: a quarter right, 3 in 16 lost, all of it chance."""
    flips = Flips(examples=16, lost=3, gained=3, before=4, labels=4)
    assert flips.adjusted(flips.lost) == pytest.approx(0)
    assert Flips(16, 3, 3, 4, None).adjusted(3) == 100 * 3 / 16
    assert Flips(16, 3, 3, 4, 1).adjusted(3) is None


def test_a_report_has_the_tables_and_their_words(tmp_path):
    runs = saved(tmp_path / "runs", two(), single("chat", 48.0), single("mood", 83.0))
    report = write_report(runs, tmp_path / "out")
    page = report.page.read_text()
    for words in ("average performance (AP)", "forgetting rate (F.Ra)", "Forward transfer", "Perplexity by task", "2401.08295"):
        assert words in page
    written = {path.name for path in (tmp_path / "out/tables").iterdir()}
    assert any(name.endswith("forward-transfer.csv") for name in written)
    assert any(name.endswith("metric-perplexity.tex") for name in written)
