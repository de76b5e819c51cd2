"""The verdict's law: worse, kept and learned are said only where intervals show them; else that nothing can be told, and why."""

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anchorlora.pages.verdict import render
from anchorlora.store.files import write_text
from anchorlora.store.json import read_file
from anchorlora.train.budget import rise
from anchorlora.train.judge import DEFAULT_MARGIN, FEWEST, Comparison, Margin, judge_kept, judge_learned
from anchorlora.train.sentences import sentences
from anchorlora.train.verdict import Kept, Protection, Twin, Verdict

SHARES = st.floats(0, 1)
LOSSES = st.floats(0, 8)


def scores(answers, losses, name="exact_match"):
    return [{"metrics": {name: float(a), "loss": float(loss)}} for a, loss in zip(answers, losses, strict=True)]


def kept(before, after, margin=DEFAULT_MARGIN, **how):
    return judge_kept(Comparison.of(scores(*before, **how), scores(*after, **how)), margin)


def learned(before, after, margin=DEFAULT_MARGIN, **how):
    return judge_learned(Comparison.of(scores(*before, **how), scores(*after, **how)), margin)


@given(
    chats=st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0]), LOSSES, LOSSES), min_size=1, max_size=12),
    turns=st.integers(2, 4),
)
def test_turns_that_repeat_one_another_say_no_more_than_one_of_them(chats, turns):
    alone = [scores([chat[side] for chat in chats], [chat[2 + side] for chat in chats]) for side in (0, 1)]
    together = [[one | {"row": i} for i, one in enumerate(side) for _ in range(turns)] for side in alone]
    one, several = Comparison.of(*alone), Comparison.of(*together)
    assert (several.n, several.flips) == (one.n, one.flips)
    for name in ("metric", "loss"):
        for values in zip(*(getattr(found, name).interval for found in (one, several)), strict=True):
            assert values[0] == pytest.approx(values[1], abs=1e-9)


@given(st.lists(st.lists(st.tuples(LOSSES, LOSSES), min_size=1, max_size=4), min_size=2, max_size=6))
def test_the_mean_over_chats_of_any_length_is_that_of_all_answers(chats):
    sides = [
        [one | {"row": i} for i, chat in enumerate(chats) for one in scores([0] * len(chat), [turn[side] for turn in chat])]
        for side in (0, 1)
    ]
    found = Comparison.of(*sides)
    assert found.n == len(chats)
    for value, side in ((found.loss.before, 0), (found.loss.after, 1)):
        assert value == pytest.approx(sum(turn[side] for chat in chats for turn in chat) / sum(map(len, chats)), abs=1e-9)


@pytest.mark.parametrize("n", [6, 8])
def test_worse_is_seldom_said_where_nothing_changed(n):
    draw, worse = random.Random(n), 0
    for _ in range(500):
        was, now = ([0.5 + draw.gauss(0, 0.1) for _ in range(n)] for _ in range(2))
        rise = [2 + draw.gauss(0, 0.2) for _ in range(n)]
        worse += kept((was, [2.0] * n), (now, rise), name="token_accuracy").verdict == "worse"
    assert worse <= 0.07 * 500, "two intervals of 95 % have one end each"


def test_a_budgets_bound_lies_below_the_mean_rise_as_seldom_as_it_says():
    draw, below, rows = random.Random(3), 0, [str(i) for i in range(12)]
    for _ in range(800):
        after = [2.05 + draw.gauss(0, 0.2) for _ in rows]
        below += rise([2.0] * 12, after, rows, half=0)["most"] < 0.05
    assert below <= 0.07 * 800, "one end of an interval of 90 %"


def test_a_loss_that_is_no_number_is_within_no_budget():
    losses = [math.nan, *[0.5] * 11]
    assert not rise([0.5] * 12, losses, [str(i) for i in range(12)], half=0)["most"] <= 1


def test_answers_to_one_prompt_and_copies_of_one_text_say_no_more_than_one_of_them():
    draw = random.Random(4)
    answers = [[float(draw.random() < 0.8) for _ in range(20)] for _ in range(2)]
    losses = [[draw.random() for _ in range(20)] for _ in range(2)]
    for of in (
        lambda i, copy: {"prompt_sha256": f"prompt {i}", "text": "so", "gold": f"answer {copy}"},
        lambda i, copy: {"prompt_sha256": "of the beginning alone", "text": "", "gold": f"text {i}"},
        lambda i, copy: {"prompt_sha256": f"prompt {copy}", "text": "so", "row": i},
    ):
        sides = [[row | of(i, 0) for i, row in enumerate(scores(*side))] for side in zip(answers, losses, strict=True)]
        copied = [
            [row | of(i, copy) for i, row in enumerate(scores(*side)) for copy in range(4)]
            for side in zip(answers, losses, strict=True)
        ]
        one, several = Comparison.of(*sides), Comparison.of(*copied)
        assert (several.n, several.flips) == (one.n, one.flips) == (20, one.flips)
        assert several.loss.interval == pytest.approx(one.loss.interval)


def asked(*prompts, row):
    return [{"prompt_sha256": prompt, "text": "so", "row": row} for prompt in prompts]


@pytest.mark.parametrize(
    ("chats", "n"),
    [
        (lambda i, copy: asked(f"{i}", f"{i} second", row=f"{i} {copy}"), 10),  # another last answer
        (lambda i, copy: asked(f"{i}", f"{i} second", f"{i} third {copy}", row=f"{i} {copy}"), 10),  # threads of one tree
        (lambda i, copy: asked(*(f"{i} {turn}" for turn in range(copy + 2)), row=f"{i} {copy}"), 10),  # as a chat grows
        (lambda i, copy: asked("hello", f"{i} {copy}", row=f"{i} {copy}"), 40),
        (lambda i, copy: asked("hello", f"{i} {copy}", f"{i} {copy} third", row=f"{i} {copy}"), 40),
        (lambda i, copy: asked(f"system, {i} {copy}", row=f"{i} {copy}"), 40),
    ],
)
def test_chats_count_once_where_more_than_half_of_what_is_asked_is_the_same_and_a_greeting_is_no_half(chats, n):
    rows = [row for i in range(10) for copy in range(4) for row in chats(i, copy)]
    side = [score | row for score, row in zip(scores([1.0] * len(rows), [0.5] * len(rows)), rows, strict=True)]
    assert Comparison.of(side, side).n == n


@pytest.mark.parametrize("prompts", [1, 5])
def test_answers_to_a_few_fixed_prompts_count_one_by_one(prompts):
    side = [row | {"prompt_sha256": f"prompt {i % prompts}", "text": "so"} for i, row in enumerate(scores([1.0] * 40, [0.5] * 40))]
    assert Comparison.of(side, side).n == 40


def test_a_score_that_few_rows_lose_whole_is_seldom_called_kept():
    """F1 of answers of a word or two: 5 % of the rows lose all of it, and the margin is 5 points."""
    draw, held = random.Random(5), 0
    for _ in range(200):
        was = [1.0] * 70 + [0.5] * 2
        now = [0.0 if draw.random() < 0.0507 else value for value in was]
        held += kept((was, [0.5] * 72), (now, [0.5] * 72), name="token_f1").state == "good"
    assert held <= 0.05 * 200
    few = kept(([1.0] * 71 + [0.5], [0.5] * 72), ([0.0] + [1.0] * 70 + [0.5], [0.5] * 72), name="token_f1")
    exact = kept(([1.0] * 72, [0.5] * 72), ([0.0] + [1.0] * 71, [0.5] * 72))
    assert few.possible.points == pytest.approx(exact.possible.points)
    assert few.rows_needed == exact.rows_needed


def test_answers_that_got_lost_are_worse_though_the_loss_is_equal():
    found = kept(([1] * 40, [0.5] * 40), ([0, 1] * 20, [0.5] * 40))
    assert (found.verdict, found.state) == ("worse", "bad")
    assert (found.metric.before, found.metric.after) == (100, 50)


def test_a_loss_that_rose_is_worse_though_answers_are_equal():
    found = kept(([1] * 40, [0.5] * 40), ([1] * 40, [0.7 + 0.01 * (i % 3) for i in range(40)]))
    assert (found.verdict, found.state) == ("worse", "bad")


def test_a_harm_that_is_shown_to_be_within_the_margin_is_kept_and_named():
    found = kept(([0.4] * 40, [2.5] * 40), ([0.4] * 40, [2.507] * 40), name="token_accuracy")
    assert (found.verdict, found.state, found.reason) == ("kept within 5 points", "good", "but a little worse")


@pytest.mark.parametrize("n", [100, 200])
def test_a_loss_that_moved_by_rounding_is_not_worse(n):
    found = kept(([1] * n, [0.5] * n), ([1] * n, [0.5 + 1e-7] * n))
    assert (found.verdict, found.state) == ("kept within 5 points", "good")


def test_a_loss_that_is_no_number_is_worse():
    assert kept(([1] * 40, [0.5] * 40), ([1] * 40, [0.5] * 39 + [math.nan])).verdict == "worse"


def test_three_rows_are_too_few_to_tell_whatever_they_show():
    worse = kept(([0.3, 0.25, 0.2], [4.4, 4.5, 4.4]), ([0.1, 0.2, 0.19], [4.39, 6.0, 5.0]), name="token_accuracy")
    alike = kept(([1, 1, 1], [0.5] * 3), ([1, 1, 1], [0.5] * 3))
    for found in (worse, alike):
        assert (found.verdict, found.state) == ("cannot tell (n = 3)", "even")
        assert found.rows_needed > 3
    assert alike.possible.points == pytest.approx(100 * (1 - 0.025 ** (1 / 3)))
    assert alike.reason == ("a drop of up to 71 points is possible, and 5 are allowed; about 72 held-out rows would tell")


@pytest.mark.parametrize(("n", "told"), [(71, "cannot tell (n = 71)"), (72, "kept within 5 points")])
def test_no_answer_lost_of_n_excludes_a_drop_only_where_n_is_large_enough(n, told):
    assert kept(([1] * n, [0.5] * n), ([1] * n, [0.5] * n)).verdict == told


def test_a_share_of_tokens_is_kept_only_with_the_fewest_rows_that_are_printed():
    def found(n):
        return kept(([0.4] * n, [2.0] * n), ([0.4] * n, [2.0] * n), name="token_accuracy")

    assert found(FEWEST).verdict == "kept within 5 points"
    few = found(FEWEST - 1)
    assert few.verdict == f"cannot tell (n = {FEWEST - 1})"
    assert f"fewer than {FEWEST} held-out rows" in few.reason


@pytest.mark.parametrize("right", [0, 5])
def test_what_was_hardly_right_before_is_not_called_kept(right):
    """No answer can be lost where none was right: the answers of another model would look the same."""
    before = [1] * right + [0] * (100 - right)
    found = kept((before, [0.5] * 100), (before, [0.5] * 100))
    assert (found.verdict, found.state, found.rows_needed) == ("cannot tell (n = 100)", "even", None)
    assert found.reason == f"only {right:.1f} % was right before, and no drop by more than 5 points could be seen"
    assert kept((before, [0.5] * 100), (before, [0.7] * 100)).verdict == "worse"


def test_a_wider_margin_is_printed_and_allows_more():
    before, after = ([1] * 50, [0.5] * 50), ([1] * 50, [0.5] * 50)
    assert kept(before, after).verdict == "cannot tell (n = 50)"
    found = kept(before, after, Margin(points=10))
    assert found.verdict == "kept within 10 points"
    assert found.margin == Margin(10, 0.05)
    many = ([1] * 900, [0.5] * 900)
    assert kept(many, many, Margin(points=1)).verdict == "kept within 1 point"
    assert "a drop of up to 37 points is possible, and 1 is allowed" in kept(*[([1] * 8, [0.5] * 8)] * 2, Margin(points=1)).reason


@given(st.lists(st.tuples(SHARES, SHARES, LOSSES, LOSSES), min_size=1, max_size=120), st.sampled_from([1.0, 5.0, 30.0]))
def test_kept_and_worse_are_said_only_where_intervals_show_them(rows, points):
    a, b, was, now = zip(*rows, strict=True)
    found = kept((a, was), (b, now), Margin(points=points), name="token_f1")
    low, high = found.metric.interval
    rose = found.loss.interval
    if found.state == "good":
        assert len(rows) >= FEWEST
        assert low >= -points
        assert rose[1] <= 0.05
        assert found.verdict.startswith("kept within")
    elif found.state == "bad":
        assert len(rows) >= 6
        assert high < 0 or rose[0] > 0
    else:
        assert found.verdict == f"cannot tell (n = {len(rows)})"
        assert found.rows_needed is None if found.metric.before <= points else found.rows_needed > len(rows)


@given(st.integers(1, 60), st.data())
def test_more_rows_alike_never_take_back_what_was_kept(n, data):
    lost = data.draw(st.integers(0, n))
    after = [0] * lost + [1] * (n - lost)
    few, many = (kept(([1] * n * k, [0.5] * n * k), (after * k, [0.5] * n * k)) for k in (1, 8))
    if few.state == "good":
        assert many.state == "good"
    assert many.possible.points <= few.possible.points + 1


def test_learned_needs_a_lower_loss_and_better_answers():
    n = 40
    found = learned(([0] * n, [2.0] * n), ([1] * n, [0.1] * n))
    assert (found.verdict, found.state) == ("learned", "good")
    assert learned(([0] * n, [2.0] * n), ([0] * n, [2.5] * n)).verdict == "not learned"
    assert learned(([0] * n, [2.0] * n), ([0] * n, [2.5] * n)).state == "bad"
    many = 100
    same = learned(([0] * many, [2.0] * many), ([0] * many, [1.0] * many))
    assert (same.verdict, same.state, same.reason) == ("not learned", "even", "the loss fell, but answers are not better")
    knew = learned(([1] * many, [2.0] * many), ([1] * many, [1.0] * many))
    assert (knew.verdict, knew.reason) == ("not learned", "the answers were right before")


def test_few_right_answers_are_learned_a_little():
    n = 100
    found = learned(([0] * n, [2.0] * n), ([0] * 95 + [1] * 5, [1.5] * n))
    assert (found.verdict, found.state, found.reason) == ("learned a little", "even", "5 % of answers right")
    tokens = learned(([0.30] * n, [2.0] * n), ([0.33] * n, [1.9] * n), name="token_accuracy")
    assert (tokens.verdict, tokens.reason) == ("learned a little", "33 % of tokens right")
    assert learned(([0.30] * n, [2.0] * n), ([0.40] * n, [1.5] * n), name="token_accuracy").verdict == "learned"


def test_better_answers_with_a_higher_loss_are_learned_a_little():
    found = learned(([0] * 40, [2.0] * 40), ([1] * 40, [2.5] * 40))
    assert (found.verdict, found.reason) == ("learned a little", "answers are better, but no lower loss is shown")


def test_too_few_rows_cannot_tell_what_was_learned():
    found = learned(([0] * 3, [2.0] * 3), ([1] * 3, [0.1] * 3))
    assert (found.verdict, found.state) == ("cannot tell (n = 3)", "even")
    for n, interval in ((5, "too few examples for an interval"), (6, "95 % interval -1.900 to -1.900")):
        few = whole(([1] * 40, [0.5] * 40), ([1] * 40, [0.5] * 40), skill=learned(([0] * n, [2.0] * n), ([1] * n, [0.1] * n)))
        assert f"(change -1.900, {interval}) on {n} held-out examples" in sentences(few)[0]
        assert ("<td>-1.900 to -1.900</td>" in render(few.as_dict())) is (n == 6)
    found = learned(([0, 1] * 4, [2.0] * 8), ([0, 1] * 4, [1.5] * 8))
    assert found.verdict == "cannot tell (n = 8)"
    assert found.reason.startswith("the loss fell, and answers may be up to 37 points better")


def whole(before, after, **changes):
    skill = learned(([0] * 40, [2.0] * 40), ([1] * 40, [0.1] * 40))
    old = Kept(**vars(kept(before, after)), name="old", title="old", source="old.jsonl")
    protection = Protection(method="m", definition="M()", rho=None, tolerance=None, chance=None, exact=False)
    how = {"adapter": "a", "rank": 4, "serve": "serve", "train_seconds": 1.0, "margin": Margin(), "protection": protection}
    return Verdict(name="new", model="base", **{"title": "new", **how, "skill": skill, "kept": [old], **changes})


@pytest.mark.parametrize("n", [3, 40, 100])
def test_the_page_is_green_only_where_kept_was_shown(n):
    found = whole(([1] * n, [0.5] * n), ([1] * n, [0.5] * n))
    page = render(replace(found, sentences=sentences(found)).as_dict())
    assert "trained</span> on it in 1 second." in page
    assert ('card good">to be kept: old' in page) is (n == 100)
    assert "5 points of answers or 0.05 of loss" in page
    if n == 3:
        assert "cannot tell (n = 3)" in page
        assert "a drop of up to 71 points is possible" in page
        assert "a drop of up to 71 points is possible" in "\n".join(sentences(found))


@given(st.lists(st.tuples(SHARES, SHARES, LOSSES, LOSSES), min_size=1, max_size=30), st.booleans(), st.sampled_from(["", "Übung"]))
def test_a_verdict_is_written_again_as_it_was_read(tmp_path_factory, rows, exact, title):
    file, shares = tmp_path_factory.mktemp("verdict") / "verdict.json", list(zip(*rows, strict=True))
    answers = [[float(share > 0.5) if exact else share for share in side] for side in shares[:2]]
    found = whole((answers[0], shares[2]), (answers[1], shares[3]), title=title)
    same = Comparison.of(*[scores([1], [2.0])] * 2)
    found = replace(found, unprotected=Twin(same, {"old": same}))
    write_text(file, json.dumps(found.as_dict()))
    again = read_file(file, Verdict, remedy="none")
    assert json.dumps(again.as_dict()) == json.dumps(found.as_dict())
    assert sentences(again) == sentences(found)


NONE = dict.fromkeys(("repeated", "together", "cut", "skipped", "long", "unknown"), 0) | {"characters": "", "split": {}}


@pytest.mark.parametrize(
    ("use", "counts", "said"),
    [
        ("learned", {}, []),
        (
            "learned",
            {"together": 3},
            ["3 rows repeat the text, prompt or beginning of another, and are held out or trained on together"],
        ),
        (
            "kept",
            {"together": 3, "repeated": 2},
            ["3 rows repeat the text, prompt or beginning of another (2 its whole text), and"],
        ),
        (
            "kept",
            {"together": 49},
            ["49 rows repeat the text, prompt or beginning of another; all go together, so what is held out is not apart from"],
        ),
        ("tested", {"repeated": 2}, ["2 of 50 rows of the test file repeat another"]),
        (
            "tested",
            {"also_learned": 3},
            ["3 of 50 rows of the test file have the text, prompt or beginning of a row that is trained on"],
        ),
        ("tested", {"also_learned": 0}, []),
        (
            "kept",
            {"also_learned": 2},
            ["2 of 9 held-out rows have the text, prompt or beginning of a row that is trained on, so they"],
        ),
        ("kept", {"skipped": 4}, ["4 rows have no answer, and are not measured"]),
        ("learned", {"skipped": 1}, ["1 row has no answer, and is left out"]),
        ("measured", {"long": 5}, ["5 rows have an answer that takes --max-length alone, and are not measured"]),
        ("learned", {"empty": 2}, ["2 rows have an empty answer, and the model is taught to say nothing there; take them out if"]),
        ("kept", {"empty": 2}, ["2 rows have an empty answer"]),
        ("tested", {"longest": 300, "generated": 128}, ["the longest answer takes 300 tokens, and 128 are generated, so longer"]),
        ("kept", {"more": True}, ["only the first 50 rows are read"]),
        (
            "learned",
            {"unknown": 7, "characters": "ж🦊"},
            ["7 rows have prompts with characters that the tokenizer does not know ('ж🦊')"],
        ),
        (
            "learned",
            {"together": 1, "empty": 1, "unknown": 1, "characters": "ж", "split": {"word": 1}},
            [
                "1 row repeats the text, prompt or beginning of another, and is held out or trained on together with it",
                "1 row has an empty answer, and",
                "1 row has a prompt with characters",
                "1 of 50 rows is served other tokens",
            ],
        ),
        (
            "kept",
            {"held_out": 1, "also_learned": 1, "cut": 1, "long": 1, "longest": 300, "generated": 1},
            [
                "1 of 1 held-out row has the text, prompt or beginning of a row that is trained on, so it is not held out; take",
                "1 row is longer than --max-length; protected and measured is what fits",
                "1 row has an answer that takes --max-length alone, and is not measured",
                "the longest answer takes 300 tokens, and 1 is generated, so",
            ],
        ),
        ("tested", {"read": 2, "repeated": 1}, ["1 of 2 rows of the test file repeats another"]),
        (
            "learned",
            {"split": {"blank": 8}},
            ["8 of 50 rows are served other tokens than are trained on: the prompt ends in a blank that belongs to the"],
        ),
    ],
)
def test_rows_are_spoken_of_only_where_something_befell_them_and_the_page_has_all(use, counts, said):
    found = whole(([1] * 40, [0.5] * 40), ([1] * 40, [0.5] * 40))
    silent = sentences(found)
    rows = [{"name": "new", "source": "new.jsonl", "use": use, "read": 50, "held_out": 9, **NONE, **counts}]
    found = replace(found, rows=rows)
    spoken = [sentence for sentence in sentences(found) if sentence not in silent]
    assert len(spoken) == len(said)
    assert all(f"new: {part}" in each for part, each in zip(said, spoken, strict=True))
    page = render(replace(found, sentences=spoken).as_dict())
    for number in [rows[0]["read"], *counts.values(), *counts.get("split", {}).values()]:
        assert str(number) in page or number is True or isinstance(number, dict)
    for name, cell in (("also_learned", f"{rows[0]['held_out']}, {{}} trained on, too"), ("empty", "0, {} with an empty one")):
        assert (f"<td>{cell.format(counts.get(name))}</td>" in page) is bool(counts.get(name))
    assert ("Every number is over examples that nothing was trained on" in page) is not bool(counts.get("also_learned"))
    assert "Rows of text" in page


def test_a_verdict_on_an_adapter_that_did_not_move_says_so():
    still = Protection(method="m", definition="M()", rho=None, tolerance=None, chance=None, exact=True)
    found = whole(([1] * 40, [0.5] * 40), ([1] * 40, [0.5] * 40), protection=still)
    assert "protection: the adapter changes nothing, and so nothing that is protected" in sentences(found)
    page = render(found.as_dict())
    assert "The adapter changes nothing." in page
    assert "Of the change of all layers" not in page


@pytest.mark.parametrize("memory", [None, {"directions": 8.0, "energy": 0.68}])
def test_the_page_says_how_many_directions_were_protected_and_what_they_hold(memory):
    how = {"method": "m", "definition": "M()", "rho": 0.0, "tolerance": 1e-7, "chance": 0.1, "exact": True, "memory": memory}
    how["penalty"] = 100.0 if memory else None
    page = render(whole(([1] * 40, [0.5] * 40), ([1] * 40, [0.5] * 40), protection=Protection(**how)).as_dict())
    held = "8 directions of each trained layer,\nwhich hold 68 % of what the kept answers depend on"
    assert (held in page) is ("slows every other change by how much the kept answers depend on it" in page) is bool(memory)
    assert "directions protected at a layer" not in page, "a table of nothing"
