import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anchorlora.tasks import Example, fingerprint, held_apart


def examples(labels, text="passage {}"):
    return [Example(i, text.format(i), label) for i, label in enumerate(labels)]


def test_the_holdout_is_the_lowest_tenth_of_each_label_by_a_hash_of_the_text():
    found = examples(["a"] * 40 + ["b"] * 20)
    kept, held = held_apart("t", found)

    def rank(e):
        return hashlib.sha256(f"anchorlora holdout 1|t|{e.sentence}".encode()).hexdigest()

    expected = [
        e for label, count in (("a", 4), ("b", 2)) for e in sorted((e for e in found if e.label == label), key=rank)[:count]
    ]
    assert held == sorted(expected, key=rank)
    assert kept == [e for e in found if e not in expected]


@given(st.permutations(range(60)))
def test_it_does_not_depend_on_the_order_of_the_file(order):
    found = examples(["a", "b", "c"] * 20)
    _, held = held_apart("t", found)
    _, again = held_apart("t", [found[i] for i in order])
    assert held == again


def test_sizes_are_those_of_the_study():
    sizes = [len(held_apart("t", examples([str(i % k) for i in range(n)]))[1]) for n, k in ((10_000, 14), (5_000, 5), (4_000, 4))]
    assert sizes[1:] == [500, 400]
    assert abs(sizes[0] - 1_000) <= 7  # 14 classes do not divide 10,000; each is rounded


def test_another_task_holds_out_others_and_white_space_does_not_matter():
    found = examples(["a"] * 100)
    spaced = examples(["a"] * 100, text="passage  \n{}")
    assert [e.index for e in held_apart("t", found)[1]] == [e.index for e in held_apart("t", spaced)[1]]
    assert [e.index for e in held_apart("t", found)[1]] != [e.index for e in held_apart("u", found)[1]]


def test_the_fingerprint_is_of_the_examples_held_out():
    held = held_apart("t", examples(["a"] * 40))[1]
    assert fingerprint({"t": held}) == fingerprint({"t": held[::-1]}) != fingerprint({"t": held[:-1]})


def test_too_few_examples_are_refused():
    with pytest.raises(ValueError, match="t has too few training examples to hold 10% of each label out"):
        held_apart("t", examples(["a", "b"]))
