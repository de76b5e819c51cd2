import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anchorlora.data import Example, Sample, TextFiles, TextSource, fingerprint, held_apart
from anchorlora.data.holdout import RowHashes, text_hash
from anchorlora.train.kept import hold_out


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


CHATS = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3), min_size=4, max_size=40)


def conversation(said):
    messages = [{"role": "system", "content": "be brief"}]
    for word in said:
        messages += [{"role": "user", "content": word}, {"role": "assistant", "content": word.upper()}]
    return Sample("", tuple(messages))


def prompts_with_answers(pairs):
    return [Sample("", f"{prompt} {answer}", given=len(prompt)) for prompt, answer in pairs]


def sides(samples, count):
    rows = RowHashes("t")
    for sample in samples:
        rows.add(sample)
    held = rows.held_out(count)
    return [s for i, s in enumerate(samples) if i in held], [s for i, s in enumerate(samples) if i not in held]


@given(st.lists(st.tuples(st.sampled_from(["a", "b ", "b", "c", "d"]), st.sampled_from("xyz")), min_size=2, max_size=40), st.data())
def test_equal_prompts_and_equal_texts_are_held_out_together(pairs, data):
    samples = prompts_with_answers(pairs)
    held, kept = sides(samples, data.draw(st.integers(1, max(1, len(samples) // 5))))
    assert held
    assert kept
    if len({prompt.strip() for prompt, _ in pairs}) > 1:
        for form in (lambda s: s.content[: s.given].strip(), lambda s: " ".join(s.content.split())):
            assert not {form(s) for s in held} & {form(s) for s in kept}


@given(CHATS)
def test_a_conversation_and_its_continuations_are_held_out_together(chats):
    samples = [conversation(said) for said in chats]
    held, kept = sides(samples, max(1, len(samples) // 10))
    assert held
    assert kept
    if len({said[0] for said in chats}) > 1:
        assert not {s.content[1]["content"] for s in held} & {s.content[1]["content"] for s in kept}


@given(
    st.lists(st.text(min_size=1), min_size=2, max_size=60, unique_by=lambda text: " ".join(text.split())), st.sampled_from([5, 10])
)
def test_without_duplicates_the_rows_with_the_smallest_hashes_are_held_out(texts, share):
    samples = [Sample("", text) for text in texts]
    rows = RowHashes("t")
    for sample in samples:
        rows.add(sample)
    count = max(1, len(samples) // share)
    assert rows.together == 0
    assert rows.held_out(count) == set(sorted(range(len(samples)), key=lambda i: text_hash("t", samples[i]))[:count])


def test_a_file_whose_rows_repeat_is_tested_on_none_that_it_trains_on(tmp_path):
    rows = [{"prompt": f"{i % 30} + 1 =", "completion": f" {i % 30 + 1}{'!' * (i // 30)}"} for i in range(90)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = TextFiles({"sums": TextSource(str(tmp_path / "sums.jsonl"))})
    train, test = ({e.sentence for e in files.examples("sums", split)} for split in ("train", "test"))
    assert len(train) == 27
    assert len(test) == 3
    assert not train & test


def test_what_is_kept_is_measured_on_rows_unlike_those_that_are_protected():
    samples = prompts_with_answers([(str(i % 20), f"{i}") for i in range(60)])
    protected, probes = hold_out("old", samples)
    assert len(probes) == 12
    assert not {s.content[: s.given] for s in protected} & {row["prompt"] for row in probes}


def test_what_is_held_out_of_a_kept_file_does_not_depend_on_its_folder():
    samples = prompts_with_answers([(str(i), f"{i}") for i in range(60)])
    assert hold_out("old.jsonl", samples)[1] == hold_out("/data/of/others/old.jsonl", samples)[1]


def test_copies_of_one_row_are_parted_all_the_same():
    held, kept = sides([conversation("a")] * 20, 2)
    assert (len(held), len(kept)) == (2, 18)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=30), st.data())
def test_what_cannot_be_measured_is_never_held_out_nor_what_goes_with_it(texts, data):
    rows = RowHashes("t")
    for text in texts:
        rows.add(Sample("", text))
    unfit = data.draw(st.frozensets(st.integers(0, len(texts) - 1)))
    held = rows.held_out(max(1, len(texts) // 5), unfit=unfit)
    assert not held & unfit
    if len(set(texts)) > 1:
        assert not {texts[i] for i in held} & {texts[i] for i in unfit}
        assert bool(held) is bool(set(texts) - {texts[i] for i in unfit})
    assert rows.repeated == len(texts) - len(set(texts))


WORDS = st.sampled_from(["a", "b ", " a", "c d", "c  d"])


@given(
    st.lists(st.tuples(WORDS, WORDS), max_size=5),
    st.lists(st.tuples(WORDS, WORDS), max_size=5),
    st.sampled_from(["pair", "chat", "text"]),
)
def test_rows_of_a_test_file_that_are_trained_on_are_those_that_a_holdout_would_not_part(tested, learned, form):
    def row(asked, said):
        if form == "chat":
            return Sample("r", ({"role": "user", "content": asked}, {"role": "assistant", "content": said}))
        return Sample("r", asked + said, given=len(asked) if form == "pair" else 0)

    def together(one, other):
        both = RowHashes("t")
        both.add(row(*one))
        both.add(row(*other))
        return both.together == 1

    known = RowHashes("t")
    for each in learned:
        known.add(row(*each))
    shared = sum(any(together(each, other) for other in learned) for each in tested)
    assert known.shared_with(row(*each) for each in tested) == shared
