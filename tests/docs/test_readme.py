"""README.md answers a newcomer's questions, in step with what the program prints and with the page for a package index."""

import re
from pathlib import Path

from anchorlora.cli.app import app
from anchorlora_lab.frontier.bench import read_records
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
    assert {"train", "grid", "ask"} <= set(app.list_commands(None))
    rows = [line.split("|")[1:-1] for line in region("price").splitlines() if line.startswith("|")]
    names = ["before", "plain LoRA at its best learning rate", "**the command below**", "the same with `--method replay`"]
    assert [row[0].strip() for row in rows[2:]] in (names, names[:-1]), "the rival's row stands where all of its runs are done"
    assert [cell.strip() for cell in rows[0][-2:]] == ["CPU minutes", "peak memory, GB"]
    assert "](docs/figures/verdict.png)" in FIRST


def test_the_price_is_that_of_exactly_the_command_that_is_shown():
    (command,) = re.findall(r"^anchorlora train \S+ --data \S+ (.*) --out", FIRST, flags=re.M)
    records = [record for record in read_records(ROOT / "results/first-command") if record["variant"] == "command"]
    assert {record["options"] for record in records} == {command}


def test_the_page_for_a_package_index_has_the_same_first_lines_chooser_and_loop():
    package = (ROOT / "docs/package.md").read_text()
    assert in_step(package, README) == package, "make docs writes it anew"


def test_what_was_not_run_is_named():
    assert "mini_trainer's OSFT and TRL's SDFT were not run" in README


def test_the_picture_shows_an_unprotected_and_a_protected_method_on_a_light_card():
    drawn = (ROOT / "docs/figures/mini-stages.svg").read_text()
    assert "seq-lora (unprotected)" in drawn
    assert "(protected)" in drawn
    first = re.search(r'<g id="patch_1">\s*<path [^>]*style="([^"]*)"', drawn)[1]
    assert "fill: #ffffff" in first
