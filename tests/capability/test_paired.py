"""A task before and after, from the values of its questions: paired errors, flips, and which metrics are fractions."""

import math
import statistics

import pytest

from anchorlora_lab.suites.evaluation import TaskScores
from anchorlora_lab.suites.paired import task_change


def measured(metrics, values, n=4):
    """Metric -> score; task -> metric -> value of each question."""
    scores = {name: {"score": score, "stderr": 0.1} for name, score in metrics.items()}
    return TaskScores.model_validate({"n": n, "cut": 0, "num_fewshot": 0, "metrics": scores, "values": values})


def of(**values):
    """One task whose scores are the means of its values."""
    return measured({name: statistics.fmean(each) for name, each in values.items()}, {"quiz": values})


def test_the_error_of_a_change_is_that_of_the_differences_and_smaller_than_that_of_two_samples():
    old, new = [1.0] * 60 + [0.0] * 40, [1.0] * 55 + [0.0] * 45
    found = task_change("quiz", of(acc=old), of(acc=new))
    differences = [b - a for a, b in zip(old, new, strict=True)]
    assert found.change == pytest.approx(-5)
    assert found.change_stderr == pytest.approx(100 * statistics.stdev(differences) / math.sqrt(100))
    two_samples = 100 * math.hypot(statistics.stdev(old), statistics.stdev(new)) / math.sqrt(100)
    assert found.change_stderr < two_samples / 3
    assert (found.flips.right_to_wrong, found.flips.wrong_to_right) == (5, 0)
    assert found.interval[1] < 0
    assert not found.uncertain


@pytest.mark.parametrize("weighted", ["by size", "equally"])
def test_the_tasks_of_a_group_weigh_as_in_its_score(weighted):
    old = {"a": [1.0, 1.0, 0.0, 0.0, 1.0, 0.0], "b": [1.0, 0.0]}
    new = {"a": [0.0, 1.0, 0.0, 1.0, 0.0, 0.0], "b": [0.0, 0.0]}
    weights = {"a": 6 / 8, "b": 2 / 8} if weighted == "by size" else {"a": 0.5, "b": 0.5}

    def group(values):
        score = sum(weights[name] * statistics.fmean(each) for name, each in values.items())
        return measured({"acc": score}, {name: {"acc": each} for name, each in values.items()})

    found = task_change("group", group(old), group(new))
    of_each = {
        name: statistics.variance([b - a for a, b in zip(old[name], new[name], strict=True)]) / len(old[name]) for name in old
    }
    assert found.change_stderr == pytest.approx(100 * math.sqrt(sum(weights[name] ** 2 * v for name, v in of_each.items())))
    assert (found.flips.right_to_wrong, found.flips.wrong_to_right) == (3, 1)


@pytest.mark.parametrize(
    ("values", "score"),
    [
        ({"quiz": {}}, 0.5),  # the metric has no value of a question, as a score over all instructions
        ({"quiz": {"acc": [1.0, 0.0]}}, 0.9),  # the score is no mean of the values, as a median
        ({"quiz": {"acc": [1.0]}}, 1.0),
        ({"quiz": {"acc": [1.0, 0.0]}, "other": {"acc": [1.0]}}, 0.75),  # a task with a single question
    ],
)
def test_where_scores_are_no_means_of_pairs_the_change_has_no_error(values, score):
    found = task_change("quiz", measured({"acc": score}, values), measured({"acc": score}, values))
    assert (found.change, found.change_stderr, found.interval) == (0, None, None)


def test_other_questions_after_than_before_are_no_pairs():
    found = task_change("quiz", of(acc=[1.0, 0.0]), of(acc=[1.0, 0.0, 1.0]))
    assert (found.change_stderr, found.flips) == (None, None)


def test_a_metric_between_right_and_wrong_has_an_error_but_no_flips():
    found = task_change("quiz", of(f1=[0.5, 1.0]), of(f1=[0.25, 0.0]))
    assert found.change_stderr == pytest.approx(100 * statistics.stdev([-0.25, -1.0]) / math.sqrt(2))
    assert found.flips is None


def test_every_fraction_is_recorded_and_one_whose_name_says_so_comes_first():
    names = {
        "bleu_max": [30.0, 2.0],
        "bleu_diff": [-0.5, 0.2],
        "rouge1": [0.5, 0.1],
        "bleu_acc": [1.0, 0.0],
        "acc_norm": [1.0, 1.0],
    }
    found = task_change("quiz", of(**names), of(**names))
    assert found.metric == "bleu_acc"
    assert list(found.metrics) == ["rouge1", "bleu_acc", "acc_norm"]
    assert task_change("quiz", of(rouge1=[0.5, 0.1]), of(rouge1=[0.5, 0.1])).metric == "rouge1"
    assert task_change(
        "quiz", of(pass_at_1=[1.0], prompt_level_strict_acc=[1.0]), of(pass_at_1=[1.0], prompt_level_strict_acc=[1.0])
    ).metric == ("prompt_level_strict_acc")


def test_a_metric_that_leaves_the_fractions_before_or_after_is_none():
    with pytest.raises(ValueError, match=r"the task quiz cannot be scored in percent: .* \(exact\); choose another task"):
        task_change("quiz", of(exact=[0.0, 0.0]), of(exact=[100.0, 0.0]))
    with pytest.raises(ValueError, match="cannot be scored in percent"):
        task_change("quiz", of(exact=[1.5, -0.5]), of(exact=[0.0, 0.0]))
