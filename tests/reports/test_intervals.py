"""Intervals over runs and over test examples in the tables, against the answers that they are made of."""

import json
from random import Random
from statistics import correlation

import made
import pytest

from anchorlora.scores import Paired, Scores
from anchorlora.store.record import Record
from anchorlora_lab.report.comparability import studies_of
from anchorlora_lab.report.paired_tests import mean_interval
from anchorlora_lab.report.records import find_runs
from anchorlora_lab.report.tables.base_models import base_model_tables
from anchorlora_lab.report.tables.pairs import comparison_table
from anchorlora_lab.report.tables.scores import complete_table

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


def save(root, method, order, seed, rate, **changes):
    draw, triangle, lines = Random(f"{method} {order} {seed}"), [], {}
    for stage in (1, 2):
        right = {task: [draw.random() < rate for _ in range(EXAMPLES)] for task in order[:stage]}
        triangle.append([100 * sum(of) / EXAMPLES for of in right.values()])
        lines[stage] = [line(task, i, r) for task, of in right.items() for i, r in enumerate(of)]
    base = made.run(method, order=order, seed=seed, **changes).model_dump(by_alias=True)
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
    low, high = Paired([0.0] * len(places), shares, [task for task, _ in places]).interval()
    assert column(table, "AA 95 % examples")[1] == f"{low:.2f} to {high:.2f}"
    assert low < column(table, "AA")[1] < high


def test_answers_are_those_that_the_accuracies_are_made_of(answered):
    for run in find_runs([answered]):
        for name, expected in (("AA", run.record.scores.AA), ("LA", run.record.scores.LA)):
            assert 100 * sum(run.answers[name].values()) / (2 * EXAMPLES) == pytest.approx(expected)


def test_backward_transfer_has_an_interval_that_is_made_of_answers_lost_and_gained(answered):
    runs = find_runs([answered])
    mine = [run for run in runs if run.method == "sfor"]
    low, high = map(float, column(complete_table(runs), "BWT 95 % examples")[1].split(" to "))
    lost, draw, means = {}, Random(2), []
    for run in mine:
        for place, right in run.answers["LA"].items():
            lost.setdefault(place, []).append(100 * (run.answers["AA"][place] - right))
    assert sum(map(sum, lost.values())) / len(lost) * 2 / 6 == pytest.approx(column(complete_table(runs), "BWT")[1])
    for _ in range(2000):  # BWT is of the first of two tasks, and the other half of the runs has another first task
        drawn = [(task, draw.randrange(EXAMPLES)) for task in TASKS for _ in range(EXAMPLES)]
        means.append(2 * sum(sum(lost[place]) for place in drawn) / 6 / len(drawn))
    means.sort()
    assert (low, high) == pytest.approx((means[50], means[-51]), abs=0.06 * (high - low))


def test_a_comparison_of_too_few_pairs_has_backward_transfer_with_its_interval_too(answered):
    few = [run for run in find_runs([answered]) if run.order == TASKS]
    table = comparison_table(few)
    assert column(table, "score") == ["AA", "LA", "BWT", "FM"]
    means = dict(zip(column(table, "score"), column(table, "mean"), strict=True))
    assert means["BWT"] == pytest.approx(-means["FM"])  # two tasks: what was lost since is what was lost from the best
    told = dict(zip(column(table, "score"), column(table, "95 % examples"), strict=True))
    low, high = map(float, told["BWT"].split(" to "))
    assert low < means["BWT"] < high
    assert told["FM"] is None


def test_a_comparison_is_paired_example_by_example(answered):
    runs = find_runs([answered])
    table = comparison_table(runs)
    for name, told in zip(("AA", "LA"), column(table, "95 % examples"), strict=False):
        shares = {}
        for run in runs:
            for place, right in run.answers[name].items():
                shares.setdefault(run.method, {}).setdefault(place, []).append(100 * right)
        before, after = ([sum(of) / 6 for of in shares[m].values()] for m in ("projected-lora", "sfor"))
        low, high = Paired(before, after, [task for task, _ in shares["sfor"]]).interval()
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


FAR_APART = {"seq-lora": 0.1, "projected-lora": 0.4, "sfor": 0.7, "o-lora": 0.95}
CLOSE = {"seq-lora": 0.5, "projected-lora": 0.55, "sfor": 0.6, "o-lora": 0.6}


def on_two(root, one, other):
    """The same methods on two base models, with a share of right answers for each: the table of whether they agree."""
    for name, rates in (("one", one), ("two", other)):
        facts = {"name": name, "revision": None, "sha256": name * 21 + "a", "parameters": 1000, "dtype": "float32"}
        for method, rate in rates.items():
            for seed in made.SEEDS:
                save(root / name, method, TASKS, seed, rate, base_model=facts)
    return find_runs([root])


def agreement(runs):
    return [table for table in base_model_tables(studies_of(runs)) if table.name == "base-models-order"]


@pytest.mark.parametrize(
    ("other", "ends", "told"),
    [(FAR_APART, 1.0, "6 of 6"), (dict(zip(FAR_APART, [0.95, 0.7, 0.4, 0.1], strict=True)), -1.0, "0 of 6")],
)
def test_two_base_models_put_methods_in_one_order_or_in_the_opposite_one(tmp_path, other, ends, told):
    (table,) = agreement(on_two(tmp_path, FAR_APART, other))
    assert column(table, "score") == ["AA", "LA", "BWT", "FM"]
    assert column(table, "base models")[0] == "one, two"
    assert column(table, "Spearman")[:2] == [ends, ends]
    assert column(table, "95 % examples")[:2] == [f"{ends:+.2f} to {ends:+.2f}"] * 2
    assert [each is None for each in column(table, "95 % examples")[2:]] == [False, True], (
        "FM would take the answers after every task"
    )
    assert column(table, "one way, of pairs told apart")[:2] == [told, told]


def test_the_interval_of_the_order_is_that_of_a_bootstrap_written_anew(tmp_path):
    runs = on_two(tmp_path, CLOSE, CLOSE | {"seq-lora": 0.6, "o-lora": 0.5})
    (table,) = agreement(runs)
    names, draw, found = list(CLOSE), Random(1), []
    right = {}
    for run in runs:
        for place, was in run.answers["AA"].items():
            right.setdefault((run.record.base_model.name, run.method), {}).setdefault(place, []).append(was)
    for _ in range(1000):
        drawn = [(task, draw.randrange(EXAMPLES)) for task in TASKS for _ in range(EXAMPLES)]
        ranks = []
        for model in ("one", "two"):
            means = [sum(sum(right[model, name][place]) for place in drawn) for name in names]
            ranks.append([sum(a > b for b in means) + sum(a == b for b in means) / 2 for a in means])
        if all(len(set(each)) > 1 for each in ranks):
            found.append(correlation(*ranks))
    found.sort()
    low, high = map(float, column(table, "95 % examples")[0].split(" to "))
    assert low == pytest.approx(found[25], abs=0.1)
    assert high == pytest.approx(found[-26], abs=0.1)


def test_without_predictions_base_models_have_a_correlation_and_no_interval(tmp_path):
    runs = on_two(tmp_path, FAR_APART, FAR_APART)
    next((tmp_path / "two").rglob("predictions.jsonl")).unlink()
    (table,) = agreement(find_runs([tmp_path]))
    assert column(table, "Spearman")[0] == 1.0
    assert set(column(table, "95 % examples")) == {None}
    few = [run for run in runs if run.method != "sfor"]
    assert not agreement(few), "three methods have no order to speak of"
