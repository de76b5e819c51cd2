"""Intervals over runs and over test examples in the tables, against the answers that they are made of."""

import json
from random import Random

import made
import pytest

from anchorlora.reports.records import find_runs
from anchorlora.reports.tables import comparison_table, complete_table
from anchorlora.schemas.record import Record
from anchorlora.scores import Scores, mean_interval, paired_interval

TASKS, EXAMPLES = ("amazon", "agnews"), 60
RATES = {"projected-lora": 0.6, "sfor": 0.8}


def column(table, heading):
    at = [c.heading for c in table.columns].index(heading)
    return [row[at] for row in table.rows]


@pytest.fixture
def answered(tmp_path):
    """Two methods over two orders and three seeds, with predictions that their accuracies agree with."""
    for method, rate in RATES.items():
        for order in (TASKS, TASKS[::-1]):
            for seed in made.SEEDS:
                save(tmp_path, method, order, seed, rate)
    return tmp_path


def save(root, method, order, seed, rate):
    draw, triangle, lines = Random(f"{method} {order} {seed}"), [], {}
    for stage in (1, 2):
        right = {task: [draw.random() < rate for _ in range(EXAMPLES)] for task in order[:stage]}
        triangle.append([100 * sum(of) / EXAMPLES for of in right.values()])
        lines[stage] = [line(task, i, r) for task, of in right.items() for i, r in enumerate(of)]
    base = made.run(method, order=order, seed=seed).model_dump(by_alias=True)
    made.save(root, record := Record.model_validate(base | {"accuracy": triangle, "scores": Scores.of(triangle).as_dict()}))
    for stage, task in enumerate(order, 1):
        path = made.folder_of(root, record) / f"tasks/{stage}-{task}/predictions.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(lines[stage]))


def line(task, index, right):
    content = {"task": task, "index": index, "prompt_sha256": "", "text": "", "label": "yes" if right else "no", "gold": "yes"}
    return json.dumps(content) + "\n"


def test_scores_have_intervals_over_runs_and_over_examples(answered):
    runs = find_runs([answered])
    table = complete_table(runs)
    mine = [run for run in runs if run.method == "sfor"]
    low, high = mean_interval([run.record.scores.AA for run in mine])
    assert column(table, "AA 95 % runs")[1] == f"{low:.2f} to {high:.2f}"
    places = list(mine[0].answers["AA"])
    shares = [100 * sum(run.answers["AA"][place] for run in mine) / 6 for place in places]
    low, high = paired_interval([0.0] * len(places), shares, tasks=[task for task, _ in places])
    assert column(table, "AA 95 % examples")[1] == f"{low:.2f} to {high:.2f}"
    assert low < column(table, "AA")[1] < high


def test_answers_are_those_that_the_accuracies_are_made_of(answered):
    for run in find_runs([answered]):
        for name, expected in (("AA", run.record.scores.AA), ("LA", run.record.scores.LA)):
            assert 100 * sum(run.answers[name].values()) / (2 * EXAMPLES) == pytest.approx(expected)


def test_a_comparison_is_paired_example_by_example(answered):
    runs = find_runs([answered])
    table = comparison_table(runs)
    for name, told in zip(("AA", "LA"), column(table, "95 % examples"), strict=False):
        shares = {}
        for run in runs:
            for place, right in run.answers[name].items():
                shares.setdefault(run.method, {}).setdefault(place, []).append(100 * right)
        before, after = ([sum(of) / 6 for of in shares[m].values()] for m in ("projected-lora", "sfor"))
        low, high = paired_interval(before, after, tasks=[task for task, _ in shares["sfor"]])
        assert told == f"{low:+.2f} to {high:+.2f}"
    assert column(table, "95 % examples")[2] is None  # forgetting is of two stages
    assert "paired bootstrap" in table.note


def test_without_the_predictions_of_every_run_there_is_no_interval_over_examples(answered):
    next(answered.rglob("predictions.jsonl")).unlink()
    runs = find_runs([answered])
    incomplete = {run.method for run in runs if not run.answers}
    table = complete_table(runs)
    shown = dict(zip(column(table, "method"), column(table, "AA 95 % examples"), strict=True))
    assert {method for method, told in shown.items() if told is None} == incomplete
    headings = [c.heading for c in comparison_table(runs).columns]
    assert "95 % examples" not in headings
    assert "other examples are not covered" in comparison_table(runs).note


def test_scores_that_are_neither_right_nor_wrong_have_no_interval_over_examples(answered):
    for path in answered.rglob("predictions.jsonl"):
        first, *rest = path.read_text().splitlines(keepends=True)
        path.write_text(json.dumps(json.loads(first) | {"metrics": {"rouge_l": 0.5}}) + "\n" + "".join(rest))
    assert not any(run.answers for run in find_runs([answered]))
