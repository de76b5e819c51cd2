"""README.md answers a newcomer's questions, in step with what the program prints and with the page for a package index."""

import re
from pathlib import Path

from anchorlora.cli.app import app
from anchorlora.train.judge import Change, Comparison, Harm, Judged, Margin
from anchorlora.train.verdict import Energy, Kept, Protection, Twin, Verdict, sentences
from built_pages import in_step

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FIRST = README[: README.index("## ")]


def region(name):
    return re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", README, flags=re.S)[1]


def test_it_is_a_screen_and_a_half():
    assert len(README.splitlines()) <= 145


def test_the_first_screen_says_for_whom_it_is_what_it_costs_and_which_command_to_take():
    readers = re.findall(r"^- \*\*You .+?\*\*.*?\[`(?:anchorlora )?(\w+)`\]", FIRST, flags=re.M)
    assert readers == ["train", "protect", "grid"]
    assert {"train", "grid"} <= set(app.list_commands(None))
    assert "<!-- price -->\nMeasured" in FIRST
    assert "](docs/figures/mini-stages.svg)" in FIRST


def test_the_scores_are_explained_before_they_are_shown():
    before = README[: README.index("<!-- scores -->")]
    assert [score for score in ("AA", "LA", "BWT", "FM") if not re.search(rf"\b{score}(, forgetting,)? is ", before)] == []


def test_the_page_for_a_package_index_has_the_same_first_lines_chooser_and_loop():
    package = (ROOT / "docs/package.md").read_text()
    assert in_step(package, README) == package, "make docs writes it anew"
    above = FIRST[: FIRST.index("![")]
    assert package.startswith(re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", above).replace("**", ""))


def test_the_verdict_is_in_the_words_that_train_prints():
    """Numbers differ between machines by an answer; the sentences do not."""
    loss = Change("loss", 1.0, 0.5, -0.5, (-0.6, -0.4))
    news, old = (Comparison(9, Change(name, 10.0, 20.0, 10.0, (5.0, 15.0)), loss, None) for name in ("exact_match", "token_f1"))
    energy = Energy(asked=0.93, mean=0.95, least=0.9, layer="q", below=2, layers=4, at_most=64, directions=64.0)
    none = dict.fromkeys(("cut", "skipped", "long", "unknown"), 0) | {"split": {}}
    rows = {"name": "abilities", "source": "abilities.jsonl", "use": "kept", "held_out": 9, "repeated": 4, "together": 4} | none
    within = {"verdict": "kept within 5 points", "state": "good", "margin": Margin(), "possible": Harm(1.0, 0.0)}
    capacity = {"used": 9, "width": 9, "skills": 0, "limit": 9}
    directions = {"rho": 1e-8, "tolerance": 1e-7, "chance": 0.1, "exact": True, "capacity": capacity}
    found = Verdict(
        name="news",
        model="base",
        skill=Judged(**vars(news), verdict="learned", state="good"),
        kept=[Kept(**vars(old), **within, name="abilities", source="abilities.jsonl", energy=energy)],
        margin=Margin(),
        rows=[rows],
        protection=Protection(method="m", definition="M()", **directions),
        unprotected=Twin(news, {"abilities": old}),
        adapter="a",
        rank=4,
        serve="serve",
        train_seconds=1.0,
    )
    quoted = [line.removeprefix("> - ") for line in region("verdict").splitlines()]
    without = [[re.sub(r"[-+]?\d[\d.]*(e-\d+)?", "#", line) for line in lines] for lines in (quoted, sentences(found))]
    assert without[0] == without[1]


def test_what_was_not_run_has_no_numbers():
    assert "mini_trainer" in README
    assert not re.search(r"mini_trainer|OSFT|SDFT", region("instead"))


def test_the_picture_shows_an_unprotected_and_a_protected_method_on_a_light_card():
    drawn = (ROOT / "docs/figures/mini-stages.svg").read_text()
    assert "seq-lora (unprotected)" in drawn
    assert "(protected)" in drawn
    first = re.search(r'<g id="patch_1">\s*<path [^>]*style="([^"]*)"', drawn)[1]
    assert "fill: #ffffff" in first
