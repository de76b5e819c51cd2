import pytest
from hypothesis import given
from hypothesis import strategies as st

from anchorlora.data import ExactMatch, Example, invalid_share, normalize, percents, read_answer
from anchorlora.data.metrics import score_answer

LABELS = ("very negative", "Science or Technology", "Society & Culture", "World")


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("World", "World"),
        ("  world.\n", "World"),
        ("SOCIETY  CULTURE", "Society & Culture"),
        ("very   Negative!", "very negative"),
        ("very", None),
        ("World of sports", None),
        ("", None),
        ("the world", None),
    ],
)
def test_normalized_exact_match_as_officially(text, label):
    assert read_answer(text, gold="World", labels=LABELS).label == label


@pytest.mark.parametrize("label", LABELS)
def test_every_label_means_itself(label):
    answer = read_answer(label, gold=label, labels=LABELS)
    assert answer.label == label
    assert answer.correct


def test_a_gold_that_is_no_label_is_never_answered_right():
    """MNLI's official test file has rows labeled "-": an empty answer equals it once punctuation is gone."""
    answer = read_answer("", gold="-", labels=("neutral", "entailment"))
    assert not answer.correct
    assert answer.label is None


@pytest.mark.parametrize("text", ["-1", "1", " 1\n", "0"])
def test_of_labels_that_are_equal_once_normalized_the_answer_is_the_one_that_it_writes(text):
    assert read_answer(text, gold="-1", labels=("-1", "0", "1")).label == text.strip()


@given(st.text())
def test_normalizing_twice_is_normalizing_once(text):
    assert normalize(normalize(text)) == normalize(text)


def test_shares_are_percent():
    answers = [read_answer(t, gold="World", labels=LABELS) for t in ("World", "nonsense", "very negative", "world!")]
    assert percents([score_answer(a, Example(0, "", "World"), (ExactMatch(),)) for a in answers]) == {"exact_match": 50.0}
    assert invalid_share(answers) == 25.0
