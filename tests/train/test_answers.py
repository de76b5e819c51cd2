"""The verdict page's answers are those of the files, in the order of the held-out rows; texts are cut and escaped."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_train import verdict

import pages
from anchorlora.cli.app import main
from anchorlora.data import examples_of, read_samples
from anchorlora.pages.verdict import Evidence, advice, loss_curve, render, shortened
from anchorlora.train.folder import OF_SKILL, _prompt, answers_of
from skills import EXACT, FEW


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_answers_shown_are_the_first_held_out_ones_and_of_what_is_kept_the_first_that_changed(taught):
    found = verdict(taught)
    skill, kept = answers_of(taught, found)
    assert (skill.name, kept.name) == ("news", "reviews")
    held = read_samples(str(taught / "skill/after/probes/news.jsonl"))
    before = json.loads((taught / "skill/before/scores.json").read_text())
    after = json.loads((taught / "skill/after/scores.json").read_text())
    learned = lines(taught / "tasks/1-news/predictions.jsonl")
    assert len(skill.shown) == OF_SKILL
    assert (skill.examples, kept.examples) == (found["skill"]["n"], found["kept"][0]["n"])
    for answer, sample, was, now in zip(skill.shown, held, before["news"], learned, strict=False):
        (example,) = examples_of([sample])
        assert (answer.prompt, answer.right) == (example.sentence, example.label.strip())
        assert (answer.before, answer.after) == (was["text"], now["text"])
        assert answer.scores == (was["metrics"]["exact_match"], now["metrics"]["exact_match"])
    assert skill.changed == sum(
        was["text"].strip() != now["text"].strip() for was, now in zip(before["news"], learned, strict=True)
    )
    (one,), asked = kept.shown, read_samples(str(taught / "skill/before/probes/reviews.jsonl"))
    pairs = [(was["text"], now["text"]) for was, now in zip(before["reviews"], after["reviews"], strict=True)]
    other = [i for i, (was, now) in enumerate(pairs) if was.strip() != now.strip()]
    assert len(other) == kept.changed
    place = other[0] if other else 0
    assert (one.before, one.after, one.prompt) == (*pairs[place], next(examples_of([asked[place]])).sentence)


def test_a_message_that_begins_a_chat_has_a_prompt_in_words():
    chat = [
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Well?"},
    ]
    prompts = [_prompt(example) for example in examples_of(read_samples([{"messages": chat}]))]
    assert prompts == ["(the chat begins)", "assistant: Hello.\nuser: Hi"]


def test_page_and_terminal_show_them_with_the_loss_curve_and_the_next_commands(taught, data, capsys):
    page, found = (taught / "index.html").read_text(), verdict(taught)
    skill, kept = answers_of(taught, found)
    assert page.count('class="asked"') == OF_SKILL + 1
    assert f"{skill.changed} of {skill.examples} answers changed." in page
    assert f"{kept.changed} of {kept.examples} answers changed." in page
    steps = [event for event in lines(taught / "log.jsonl") if event["event"] == "step"]
    points = page.partition('points="')[2].partition('"')[0].split()
    assert len(points) == len(steps)
    quarter = [step["loss"] for step in steps[: len(steps) // 4]]
    assert f"the mean is {sum(quarter) / len(quarter):.3f} in their first quarter" in page
    assert f"anchorlora ask {taught}" in page
    assert f"anchorlora train embedded:mini --after {taught} --data next.jsonl" in page
    command = ["train", "embedded:mini", "--data", data["news"], "--keep", data["reviews"], "--compare", "--out", str(taught)]
    capsys.readouterr()
    assert main([*command, *FEW, *EXACT]) == 0
    shown = capsys.readouterr().out
    assert shown.count("- asked: ") == 2
    assert all(f"  after:  {answer.after}" in shown for answer in skill.shown[:2] if answer.after)


def test_the_page_speaks_plain_words(taught):
    page = (taught / "index.html").read_text()
    inner = ("nats", "turned right", "turned wrong", "PerTask", "Retract", "inc-lora-hard", "exact_match", "layer input", "energy")
    for shown in (pages.text(page), "\n".join(verdict(taught)["sentences"])):
        assert [term for term in inner if term in shown] == []
    assert "PerTask" in page, "in a title, for who wants the term"


HOSTILE = "<script>alert(1)</script>\u202e</dd>"


def test_texts_of_answers_are_escaped_and_cut(taught):
    answer = SimpleNamespace(prompt=HOSTILE, before=HOSTILE, after="x" * 5000, right=HOSTILE, scores=(0.0, 0.5))
    part = SimpleNamespace(name=HOSTILE, shown=(answer,), examples=1, changed=1)
    page = render(verdict(taught), Evidence(answers=(part,)))
    assert "script" not in {tag for tag, _ in pages.elements(page)}
    assert "\u202e" not in page
    assert "x" * 299 + "…" in page
    assert "x" * 300 not in page
    assert "50 % like it" in page
    assert "A percentage says" in page
    answer.scores = (0.0, 1.0)
    assert "A percentage says" not in render(verdict(taught), Evidence(answers=(part,)))


@given(st.text(st.characters(exclude_characters="…"), max_size=400), st.integers(2, 100), st.booleans())
def test_a_shortened_text_is_the_text_or_its_ends_around_one_ellipsis(text, most, middle):
    cut = shortened(text, most, middle=middle)
    whole = text.strip()
    assert len(cut) <= most
    if len(whole) <= most:
        assert cut == whole
    else:
        head, _, tail = cut.rpartition("…") if middle else (cut[:-1], cut[-1], "")
        assert whole.startswith(head)
        assert whole.endswith(tail)


@given(st.lists(st.floats(0, 10) | st.just(float("nan")), max_size=1000))
def test_a_curve_stays_in_its_box_and_has_few_points(losses):
    curve = loss_curve(list(enumerate(losses, 1)))
    if curve is None:
        assert sum(loss == loss for loss in losses) < 2
        return
    points = [tuple(map(float, point.split(","))) for point in curve["line"].split()]
    assert 2 <= len(points) <= 200
    assert all(0 <= x <= 600 and 0 <= y <= 150 for x, y in points)
    assert points == sorted(points, key=lambda point: point[0])


def judged(state, verdict, before=10.0, rows_needed=None, **more):
    return {"state": state, "verdict": verdict, "metric": {"before": before}, "rows_needed": rows_needed, **more}


LEARNED = judged("good", "learned")


@pytest.mark.parametrize(
    ("skill", "kept", "words"),
    [
        (LEARNED, [], []),
        (judged("even", "not learned"), [], ["--epochs 4 (it was 2)", "--learning-rate 0.0004 (it was 0.0002)"]),
        (judged("even", "learned a little"), [], ["--epochs 4"]),
        (
            judged("even", "learned a little"),
            [judged("good", "kept", name="self", source="self")],
            ["--learning-rate 0.0004 (it was 0.0002; it may keep less)"],
        ),
        (judged("bad", "not learned"), [], ["--learning-rate 5e-05"]),
        (judged("even", "not learned", before=100.0), [], ["nothing to learn"]),
        (judged("even", "cannot tell (n = 3)", rows_needed=90), [], ["about 90, with --test FILE."]),
        (judged("even", "cannot tell (n = 3)", rows_needed=260), [], ["about 260, with --test FILE --set test_limit=260."]),
        (
            judged("good", "learned"),
            [judged("bad", "worse", name="old", source="old.jsonl")],
            ["--scale 0.5", "--learning-rate 0.0001"],
        ),
        (judged("good", "learned"), [judged("bad", "worse", name="self", source="self")], ["--keep FILE"]),
        (
            judged("good", "learned"),
            [judged("even", "cannot tell", rows_needed=72, name="self", source="self")],
            ["--self-texts N"],
        ),
        (
            judged("good", "learned"),
            [
                judged("even", "cannot tell", rows_needed=20, name="self", source="self"),
                judged("even", "cannot tell", rows_needed=72, name="old", source="old.jsonl"),
                judged("even", "cannot tell", rows_needed=72, name="first", source="runs/first"),
                judged("even", "cannot tell", rows_needed=201, name="many", source="many.jsonl"),
            ],
            [
                "self: keep more of it (--self-texts 62)",
                "old: keep more of it (360 rows in its",
                "first: allow a larger drop, --margin",
                "many: allow a larger drop, --margin POINTS; no more than 200",
            ],
        ),
    ],
)
def test_advice_is_given_only_where_something_went_wrong_and_names_options_that_exist(skill, kept, words):
    from anchorlora.cli.export import export
    from anchorlora.cli.train import train

    found = {"name": "new", "adapter": "runs/new/adapter", "skill": skill, "kept": kept}
    if len(kept) > 1:
        rows = {"self": ("kept", 40, 13), "old": ("kept", 30, 6), "first": ("measured", 20, 20), "many": ("kept", 900, 180)}
        found["rows"] = [{"name": name, "use": use, "read": read, "held_out": held} for name, (use, read, held) in rows.items()]
    sentences = list(advice(found, Evidence(epochs=2, learning_rate=2e-4, test_limit=200)))
    assert bool(sentences) is bool(words)
    assert all(word in " ".join(sentences) for word in words)
    known = {option for command in (train, export) for parameter in command.params for option in parameter.opts}
    assert {word.strip(".,();") for word in " ".join(sentences).split() if word.startswith("--")} <= known
