"""README.md answers a newcomer's questions, in step with what the program prints and with the page for a package index."""

import json
import re
from pathlib import Path

from anchorlora import METHODS
from anchorlora.cli.app import app
from anchorlora.cli.methods import CHOICES, MEASURED
from anchorlora.methods.entry import NOTHING
from anchorlora_lab.frontier.bench import read_records
from anchorlora_lab.report.records import find_runs
from built_pages import REGIONS, filled, in_step
from results_own import measured, per_task

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
    names = [
        "before",
        "plain LoRA at 0.0005, PEFT with Trainer",
        "the same by `train --method inc-lora`",
        "**the command below**",
        "the same with `--method replay`",
        "the same with `--method replay-kl`, one own text for each chat",
    ]
    assert [row[0].strip() for row in rows[2:]] == names
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
    assert "mini_trainer's OSFT was not run" in README


def test_the_picture_shows_an_unprotected_and_a_protected_method_on_a_light_card():
    drawn = (ROOT / "docs/figures/mini-stages.svg").read_text()
    assert "seq-lora (unprotected)" in drawn
    assert "(protected)" in drawn
    first = re.search(r'<g id="patch_1">\s*<path [^>]*style="([^"]*)"', drawn)[1]
    assert "fill: #ffffff" in first


def test_the_tables_of_the_start_pages_are_made_from_the_records():
    for name in ("README.md", "docs/package.md"):
        page = (ROOT / name).read_text()
        assert filled(page) == page, "make docs writes it anew"


def test_every_region_stands_on_a_page():
    pages = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    assert [name for name in REGIONS if not re.search(rf"<!-- {name} ", pages)] == []


def test_the_means_that_the_program_shows_are_those_of_the_records():
    assert MEASURED.read_text() == measured(), "make docs writes it anew"
    exact = {name for name in CHOICES if METHODS[name].preserves.response}
    assert exact == {name for name, choice in CHOICES.items() if choice.have != NOTHING}


def test_accuracies_by_task_are_of_the_task_that_heads_the_column():
    """Two orders have the tasks in other places."""
    head, _, *rows = per_task().splitlines()
    tasks = [cell.strip() for cell in head.strip("|").split("|")][2:]
    row = next(cells for line in rows if (cells := [c.strip() for c in line.strip("|").split("|")])[0] == "seq-lora")
    records = [json.loads(path.read_text()) for path in (ROOT / "results/real/grid/seq-lora").glob("*/record.json")]
    assert len({tuple(record["order"]) for record in records}) > 1
    for task, cell in zip(tasks, row[2:], strict=True):
        places = [(record["accuracy"], record["order"].index(task)) for record in records]
        learned = sum(accuracy[i][i] for accuracy, i in places) / len(places)
        end = sum(accuracy[-1][i] for accuracy, i in places) / len(places)
        assert cell == f"{learned:.0f} -> {end:.0f}"


def test_the_definition_it_shows_is_that_of_fold_16():
    page = (ROOT / "docs/lab/own-methods.md").read_text()
    shown = page.split("```text\nfold-16 = ")[1].split("```")[0]
    names: dict = {}
    exec("from anchorlora import *", names)
    assert eval(" ".join(shown.split()), names) == METHODS["fold-16"]


def test_every_run_of_an_exact_method_kept_its_core_to_rounding_fold_included():
    runs = [run for run in find_runs([ROOT / "results/beyond/grid"]) if METHODS[run.record.method.name].preserves.response]
    assert len({run.record.method.name for run in runs}) >= 4
    for run in runs:
        for drift in run.record.drift:
            assert drift.rho <= max(1e-7, 3 * drift.rho_floor), (run.record.method.name, run.order, run.seed)
