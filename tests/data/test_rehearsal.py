import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anchorlora import Rehearsal
from anchorlora.data import stratify


def test_the_memory_is_shared_equally_by_all_finished_tasks():
    assert [Rehearsal().quotas(t) for t in (1, 2, 3)] == [[500], [250, 250], [167, 167, 166]]


def test_five_percent_is_one_example_after_every_twentieth():
    due = [Rehearsal(500, 0.05).due(seen) for seen in range(61)]
    assert due == [seen // 20 for seen in range(61)]
    assert [Rehearsal().due(n) for n in (5_000, 10_000, 4_000)] == [250, 500, 200]  # the study's tasks 2 to 4


@given(st.lists(st.sampled_from("aaabbc"), min_size=1, max_size=80), st.integers(0, 5), st.data())
def test_every_beginning_holds_the_classes_in_proportion(labels, seed, data):
    order = stratify(labels, random.Random(seed))
    assert sorted(order) == list(range(len(labels)))
    size = data.draw(st.integers(1, len(labels)))
    for label in set(labels):
        wanted = size * labels.count(label) / len(labels)
        assert abs(sum(labels[i] == label for i in order[:size]) - wanted) <= 1 + 0.5 * len(set(labels))


def test_the_order_is_drawn_and_a_smaller_memory_is_the_beginning_of_a_larger_one():
    labels = list("abcd" * 50)
    assert stratify(labels, random.Random(1)) == stratify(labels, random.Random(1)) != stratify(labels, random.Random(2))
    assert [sum(labels[i] == c for i in stratify(labels, random.Random(1))[:40]) for c in "abcd"] == [10] * 4


def test_a_memory_of_nothing_is_refused():
    with pytest.raises(ValueError, match="a memory of 1 or more and a share in"):
        Rehearsal(0, 0.05)
