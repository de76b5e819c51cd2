import hashlib

import pytest

import models
from anchorlora.tasks import Encoder, Example, Task
from anchorlora.tasks.prompts import longest

TASK = Task("TC", "toys", "Choose one.\n", ("red ball", "blue", "a very long label"))
PASSAGES = ["A ball lay in the grass.\n", "Nothing was blue. " * 30 + "\n", "\nAnswer: blue, it said {braces}\n"]


@pytest.fixture(scope="module")
def tokenizer():
    return models.tokenizer([TASK.prompt(p) + label for p in PASSAGES for label in TASK.labels])


def test_the_prompt_has_the_official_form_to_the_byte():
    expected = "Task:TC\nDataset:toys\nChoose one.\nOption: red ball, blue, a very long label \nHere {it} is\n\nAnswer:"
    assert TASK.prompt("Here {it} is\n") == expected


def test_a_group_without_instruction_has_no_options_either():
    """As officially for COPA."""
    assert Task("COPA", "COPA", "", ("A", "B")).prompt("Which?") == "Task:COPA\nDataset:COPA\nWhich?\nAnswer:"


@pytest.mark.parametrize("bos", [False, True])
def test_prompt_and_label_are_tokenized_apart_and_the_answer_ends(bos):
    tokenizer = models.tokenizer([TASK.prompt(p) for p in PASSAGES], bos=bos)
    (one,) = Encoder(tokenizer, max_tokens=200).encode(TASK, [Example(0, PASSAGES[0], "red ball")])
    assert list(one.prompt) == tokenizer(TASK.prompt(PASSAGES[0])).input_ids
    assert list(one.answer) == [*tokenizer("red ball", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    assert (one.prompt[0] == 2) is bos
    assert one.prompt[-1] != tokenizer.eos_token_id
    assert one.prompt_sha256 == hashlib.sha256(TASK.prompt(PASSAGES[0]).encode()).hexdigest()


@pytest.mark.parametrize("max_tokens", range(70, 140, 7))
def test_only_the_passage_is_cut_and_as_little_of_it_as_possible(tokenizer, max_tokens):
    encoder = Encoder(tokenizer, max_tokens=max_tokens)
    for passage in PASSAGES:
        (one,) = encoder.encode(TASK, [Example(0, passage, "blue")])
        assert one.text.startswith(TASK.head())
        assert one.text.endswith("\nAnswer:")
        kept = one.text[len(TASK.head()) : -len("\nAnswer:")]
        assert passage.startswith(kept)
        room = max_tokens - max(len(tokenizer(label).input_ids) + 1 for label in TASK.labels)
        assert len(one.prompt) <= room
        assert one.cut is (kept != passage)
        if one.cut:
            longer = len(tokenizer(TASK.prompt(passage[: len(kept) + 1])).input_ids)
            assert longer > room


def test_the_label_has_no_influence_on_the_cut(tokenizer):
    encoder = Encoder(tokenizer, max_tokens=90)
    prompts = {encoder.encode(TASK, [Example(0, PASSAGES[1], label)])[0].prompt for label in TASK.labels}
    assert len(prompts) == 1


def test_a_limit_that_leaves_no_room_for_the_passage_is_refused(tokenizer):
    with pytest.raises(ValueError, match="the prompt of toys takes .* tokens without its passage.*raise max_tokens"):
        Encoder(tokenizer, max_tokens=20).encode(TASK, [])


def test_a_tokenizer_without_an_end_is_refused(tokenizer):
    class Endless:
        eos_token_id = None

    with pytest.raises(ValueError, match="no end-of-sequence token"):
        Encoder(Endless(), max_tokens=100)


@pytest.mark.parametrize("limit", range(12))
def test_bisection_finds_the_largest_that_fits(limit):
    assert longest(10, lambda n: n <= limit) == min(limit, 10)
