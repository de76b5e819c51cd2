"""Metrics of free answers: against values of their papers, of other implementations, and of a slow one written here."""

import string
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorlora.data import Answer, Example, TextFiles, TextSource
from anchorlora.data.metrics import METRICS, metric_named, normalize, sari, with_literals, words_of
from anchorlora.errors import MissingExtra, UnknownName

SOURCE = "about 95 species are currently accepted ."
REFERENCES = ["about 95 species are currently known .", "about 95 species are now accepted .", "95 species are now accepted ."]
WORDS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=6)


def score(name, said, right, prompt=""):
    return metric_named(name).score(Answer(said, None, gold=right), Example(0, prompt, right))


def test_sari_is_what_the_metric_of_hugging_face_documents():
    """The example of `evaluate`'s page on SARI, as TRACE computes it."""
    found = sari(SOURCE.split(), ["about", "95", "you", "now", "get", "in", "."], [text.split() for text in REFERENCES])
    assert 100 * found == pytest.approx(26.953601953601954, abs=1e-12)


def ratio(part, whole):
    return Fraction(part) / whole if whole else Fraction(1)


def f1(precision, recall):
    return 2 * precision * recall / (precision + recall) if precision + recall else Fraction(0)


def slow_sari(source, answer, references):
    """SARI of Xu et al. 2016, one n-gram after the other, in fractions."""
    total = Fraction(0)
    for n in range(1, 5):
        lists = [[tuple(words[i : i + n]) for i in range(len(words) - n + 1)] for words in (source, answer, *references)]
        grams = sorted({gram for each in lists for gram in each})
        keep_p = keep_part = keep_all = kept = del_p = deleted = added = wanted = both = 0
        for gram in grams:
            had, said, *theirs = (each.count(gram) for each in lists)
            had, said, right = had * len(references), said * len(references), sum(theirs)
            if min(had, said):
                kept += 1
                keep_p += Fraction(min(had, said, right), min(had, said))
                keep_part += min(had, said, right)
            keep_all += min(had, right)
            if had > said:
                deleted += 1
                del_p += Fraction(max(0, had - said - right), had - said)
            added += bool(said and not had)
            wanted += bool(right and not had)
            both += bool(said and right and not had)
        total += f1(ratio(keep_p, kept), ratio(keep_part, keep_all)) + ratio(del_p, deleted)
        total += f1(ratio(both, added), ratio(both, wanted))
    return total / 12


@settings(max_examples=60, deadline=None)
@given(WORDS, WORDS, st.lists(WORDS, min_size=1, max_size=3))
def test_sari_agrees_with_a_slow_one(source, answer, references):
    assert sari(source, answer, references) == pytest.approx(float(slow_sari(source, answer, references)), abs=1e-12)


@pytest.mark.usefixtures("extra_metrics")
def test_sari_takes_the_prompt_as_its_source_and_rewards_a_change_that_is_wanted():
    assert score("sari", "The mill is old.", "The mill is old.", "The mill is ancient.") == 1.0
    copied = score("sari", "The mill is ancient.", "The mill is old.", "The mill is ancient.")
    assert 0 < copied < 0.7
    assert score("sari", "THE MILL is old .", "The mill is old.", "The mill is ancient.") == 1.0, "case and spacing do not count"


def test_numbers_match_verbatim_where_normalizing_would_make_them_equal():
    assert score("verbatim_match", " 1.5\n", "1.5") == 1.0
    assert score("verbatim_match", "15", "1.5") == score("verbatim_match", "-3", "3") == 0.0


def test_a_choice_is_its_first_letter():
    assert score("choice_match", "B\nbecause", "B\nsince it floats") == 1.0
    assert score("choice_match", "A", "B\nsince") == score("choice_match", "", "B") == 0.0


def test_placeholders_of_literals_are_what_they_stand_for():
    """As CodeXGLUE's and TRACE's scripts write them."""
    assert with_literals("a = <NUM_LIT:1> + <NUM_LIT>; b = <STR_LIT:x\ny><STR_LIT><CHAR_LIT:c>") == "a = 1 + 0; b = x\nyc"


@pytest.mark.usefixtures("extra_metrics")
@pytest.mark.parametrize("name", ["edit_similarity", "code_similarity"])
def test_edit_similarity_counts_insertions_and_deletions(name):
    assert score(name, "mall", "mill") == pytest.approx(1 - 2 / 8)


@pytest.mark.usefixtures("extra_metrics")
def test_bleu_and_rouge_are_fractions_of_their_libraries():
    assert score("bleu", "the old stone mill", "the old stone mill") == 1.0
    assert score("rouge_l", "the mill is old", "the old mill") == pytest.approx(4 / 7)


def test_every_metric_is_found_by_its_name_and_an_unknown_one_has_neighbors():
    assert {name: metric_named(name).name for name in METRICS} == {name: name for name in METRICS}
    with pytest.raises(UnknownName, match="no metric called 'rouge'; nearest: rouge_l"):
        metric_named("rouge")


def test_a_metric_without_its_library_is_refused_before_anything_is_trained(tmp_path):
    metric = replace(METRICS["code_similarity"], library=("no_such_module", "no-such-package"))
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 3)
    files = TextFiles({"code": TextSource(str(tmp_path / "a.jsonl"), metrics=(metric,))})
    with pytest.raises(MissingExtra, match=r"code_similarity is computed by no-such-package.*pip install 'anchorlora\[metrics\]'"):
        files.task("code")


@pytest.mark.parametrize(
    ("said", "right", "f1"),
    [
        ("北京市", "北京", 0.8),
        ("東京都", "東京", 0.8),
        ("แมว", "แม", 0.8),
        ("是。", "是", 1.0),
        ("「東京」です！", "東京です", 1.0),
        ("iPhone 15手机", "iphone 15手機", 0.75),
        ("서울 시", "서울", 2 / 3),  # Korean has spaces between words
        ("¿el río?", "el río", 1.0),
    ],
)
def test_token_f1_counts_characters_where_words_have_no_spaces(said, right, f1):
    assert score("token_f1", said, right) == pytest.approx(f1)
    assert score("token_f1", right, said) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("said", "right"), [("是。", "是"), ("はい！", "はい"), ("ＯＫ！", "ｏｋ"), ("«да»", "да"), ("«Да».", "да")]
)
def test_punctuation_of_any_script_decides_nothing(said, right):
    assert Answer(said, said, gold=right).correct


HAN = st.text(st.sampled_from("北京市是中国的首都，。年"), max_size=12)
ASCII = st.text(st.characters(min_codepoint=1, max_codepoint=127), max_size=30)


def mixed_segments(text):
    """MLQA's and DRCD's way, character by character: one of Han is a token, and what is between them is split at spaces."""
    found, latin = [], ""
    for char in text.lower():
        if "\u4e00" <= char <= "\u9fff":
            found += [*latin.split(), char]
            latin = ""
        elif not (char in string.punctuation or char in "，。"):
            latin += char
    return [*found, *latin.split()]


@given(*[st.lists(st.one_of(HAN, ASCII), max_size=4).map("".join)] * 2)
def test_token_f1_of_mixed_text_is_that_of_a_segmentation_written_here(said, right):
    a, b = Counter(mixed_segments(said)), Counter(mixed_segments(right))
    expected = 2 * (a & b).total() / (a.total() + b.total()) if a and b else float(a == b)
    assert score("token_f1", said, right) == pytest.approx(expected)


@given(ASCII)
def test_ascii_text_is_normalized_as_the_official_script_does(text):
    """So that no score of an official task moves."""
    official = " ".join("".join(char for char in text.lower() if char not in string.punctuation).split())
    assert normalize(text) == official
    assert words_of(text) == official.split()


@given(HAN, HAN)
def test_spaces_between_han_characters_change_no_token_f1(said, right):
    assert score("token_f1", " ".join(said), right) == score("token_f1", said, right)
