"""The documents are true: their Python runs, their commands parse, their links lead somewhere, their table is the program's."""

import re
import shlex
import sys
from pathlib import Path

import click
import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import house
import models
from anchorlora import embedded
from anchorlora.cli.app import COMMANDS, FAILED, INTERRUPTED, STOPPED, WRONG, app
from method_pages import methods_page

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/lab").glob("*.md"))]
FOLLOWED = {"protect.md": "## With TRL", "extend.md": "# Extend"}  # from this heading on, run in order in tests of their own


def blocks(page, language):
    text = page.read_text().partition(FOLLOWED.get(page.name, "\0"))[0]
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


PYTHON = [(page.name, i, code) for page in PAGES for i, code in enumerate(blocks(page, "python"))]
CHOOSERS = [  # a command in the last cell of a table's row
    (page.name, line) for page in PAGES for line in re.findall(r"\| `(anchorlora [a-z]+ [^`|]+)` \|$", page.read_text(), flags=re.M)
]


def train(model, optimizer, task, steps=25):
    model.train()
    for step in range(steps):
        ids = models.tokens(4, 16, vocab=32, seed=step % 3) + task
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate(model, task):
    with torch.no_grad():
        for step in range(25):
            model(input_ids=models.tokens(4, 16, vocab=32, seed=step % 3) + task)


def teach(folder):
    """Leave an adapter of a chat model, as `anchorlora train` does."""
    place = embedded.folder("embedded:mini", "base_model")
    base, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    tokenizer.chat_template = (ROOT / "tools/mini/chat_template.jinja").read_text()
    base.save_pretrained(folder / "base")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), LoraConfig(target_modules="all-linear"))
    adapted.save_pretrained(folder / "runs/new/adapter")
    tokenizer.save_pretrained(folder / "runs/new/adapter")


@pytest.fixture
def users_objects():
    """What a reader has already: a PEFT model, an optimizer, a loop."""
    model = get_peft_model(models.qwen3(), LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1)

    def losses(count):
        for step in range(count):
            ids = models.tokens(1, 16, vocab=32, seed=step)
            yield model(input_ids=ids, labels=ids).loss

    theirs = {"train": train, "evaluate": evaluate, "losses": losses, "old_task": 0, "new_task": 32}
    return {"model": model, "optimizer": optimizer, **theirs}


@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")  # PEFT 0.18 leaves one on a model that it unloads
@pytest.mark.parametrize(("page", "number", "code"), PYTHON, ids=[f"{p}-{i}" for p, i, _ in PYTHON])
def test_python_blocks_run(page, number, code, users_objects, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if "runs/new/adapter" in code:
        teach(tmp_path)
    exec(compile(code, f"{page}, block {number}", "exec"), users_objects)
    if "anchor" in users_objects and "protect(" in code:
        from anchorlora import measure

        assert measure(users_objects["anchor"]).exact, "what the reader is told to do protects"


@pytest.mark.parametrize(("page", "line"), CHOOSERS, ids=[f"{p}-{i}" for i, (p, _) in enumerate(CHOOSERS)])
def test_commands_of_choosers_parse(page, line):
    words = shlex.split(line, comments=True)[1:]
    group, context = app, click.Context(app, info_name="anchorlora", **app.context_settings)
    while isinstance(group, click.Group):
        name, words = words[0], words[1:]
        group = group.get_command(context, name)
    group.make_context(name, words, parent=context)


def anchors(page):
    """The anchors of a page, as GitHub and the site make them of its headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line).lower() for line in re.findall(r"^#+ (.+)$", text, flags=re.M)]
    return [re.sub(r"[^\w\- ]", "", line).strip().replace(" ", "-") for line in words] + re.findall(r' id="([^"]+)"', text)


def test_links_lead_somewhere():
    for page in [*PAGES, *ROOT.glob("[A-Z]*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target, anchor in re.findall(r"\]\(((?!https?:|mailto:)[^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
            led = page.parent / target if target else page
            assert led.exists(), (page.name, target)
            if anchor and led.suffix == ".md":
                assert anchors(led).count(anchor) == 1, (page.name, target, anchor)


def test_the_documents_of_users_are_few_and_short():
    pages = house.documents()
    assert len(pages) <= 15
    assert sum(len(page.read_text().split()) for page in pages) <= 30_000


def test_each_thread_that_is_met_is_shown_by_a_test_that_exists():
    text = (ROOT / "docs/lab/methods-elsewhere.md").read_text()
    section = text.partition("## What threads in public ask for")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| ")][1:]
    threads = [thread for _, named, *_ in rows for thread in named.split(", ")]
    assert len(set(threads)) == len(threads) == int(re.search(r"(\d+) threads", section)[1])
    for asked, _, met, shown in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", shown)
        assert bool(tests) == (met != "no"), asked
        for file, test in tests:
            assert f"def {test}(" in (ROOT / file).read_text(), test


def test_the_text_for_a_package_index_has_no_relative_links():
    text = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["readme"]
    assert re.findall(r"\]\((?!https://)[^)]*\)", (ROOT / text).read_text()) == []


def test_the_oldest_versions_are_the_lower_bounds_and_there_are_no_upper_ones():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (tested,) = (Requirement(line).extras for line in extras["test"] if line.startswith("anchorlora["))
    lines = [*project["dependencies"], *(line for name in (*tested, "test") for line in extras[name])]
    stated = [each for each in map(Requirement, lines) if each.name != "anchorlora"]
    lines = [line for line in (ROOT / "constraints-oldest.txt").read_text().splitlines() if not line.startswith("#")]
    oldest = {each.name: str(each.specifier) for each in map(Requirement, lines)}
    assert set(oldest) == {each.name for each in stated}
    for each in stated:
        bound, installed = (Version(re.sub("[>=]", "", str(found))) for found in (each.specifier, oldest[each.name]))
        assert str(each.specifier).startswith(">=")
        assert bound == installed
    promised = {"transformers": "5.6", "accelerate": "1.11", "peft": "0.18.1", "torch": "2.7"}
    assert all(Version(oldest[name].removeprefix("==")) <= Version(least) for name, least in promised.items())
    assert project["requires-python"] == ">=3.10"


def test_the_table_of_methods_is_the_one_the_program_prints():
    assert (ROOT / "docs/methods.md").read_text() == methods_page(), "make docs writes it anew"


def test_every_file_that_the_documents_name_in_the_source_exists():
    for page in PAGES:
        for name in re.findall(r"`((?:(?:src|tests|tools|benchmarks)/[\w/.-]+)|[a-z]+/[\w/]+\.py)`", page.read_text()):
            candidates = [ROOT / folder / name for folder in ("", "src/anchorlora", "src/anchorlora_lab")]
            assert any(path.exists() for path in candidates), (page.name, name)


def test_the_architecture_has_every_package_in_the_order_of_the_arrows():
    from test_layering import ALLOWED, LAB

    named = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", (ROOT / "docs/lab/architecture.md").read_text(), flags=re.M)
    assert named == [*ALLOWED, "cli", *LAB, "cli"]


def cells_of(name):
    """The rows of a table of docs/supported.md that tools/fill_tables.py writes."""
    table = (ROOT / "docs/supported.md").read_text().partition(f"<!-- {name} -->\n")[2].partition("<!-- /")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_the_table_of_loops_has_a_row_for_every_case_that_the_tests_prove():
    from loops.cases import ROWS

    printed = [
        (loop, parallelism, optimizer, re.match(r"\w+", outcome)[0])
        for loops, parallelism, optimizers, outcome in cells_of("loops")
        for loop in loops.split("; ")
        for optimizer in optimizers.split(", ")
    ]
    assert sorted(printed) == sorted((row.loop, row.parallelism, row.optimizer, row.outcome) for row in ROWS)


def test_the_table_of_architectures_has_a_row_for_every_case_that_the_tests_prove():
    from architectures.cases import CASES

    rows = cells_of("architectures")
    printed = {
        tuple(re.fullmatch(r"(.+) \(`(\w+)`\)", model).groups()): cells for models, *cells in rows for model in models.split("; ")
    }
    assert sorted(printed) == sorted({(case.of.name, case.of.model_type) for case in CASES})
    refused = {(case.of.name, case.of.model_type) for case in CASES if case.of.refused}
    assert {model for model, cells in printed.items() if cells == ["refused", "refused", "-"]} == refused
    for attention, all_linear, rho in (cells for model, cells in printed.items() if model not in refused):
        assert set(attention.split()) <= set(all_linear.split())
        assert float(rho) < 1e-6, "protected"


REFERENCE = (ROOT / "docs/reference.md").read_text()
ROWS = dict(re.findall(r"^\| `anchorlora (\w+(?: (?:import|verify))?) ([^`]*)`", REFERENCE, flags=re.M))


def command_of(words):
    found = app.get_command(app.make_context("anchorlora", [words.split()[0]]), words.split()[0])
    for word in words.split()[1:]:
        found = found.commands[word]
    return found


@pytest.mark.parametrize("words", ROWS)
def test_the_reference_has_every_option_of_a_command_and_no_other(words):
    options = [option for option in command_of(words).params if isinstance(option, click.Option)]
    known = {name for option in options for name in (*option.opts, *option.secondary_opts) if name.startswith("--")}
    row = set(re.findall(r"--[a-z][a-z-]*", ROWS[words]))
    assert row <= known
    missing = {option.opts[0] for option in options if not re.search(rf"{option.opts[0]}(?![a-z-])", REFERENCE)}
    assert missing == set()


def test_the_reference_has_a_row_for_every_command_and_every_exit_status():
    assert {words.split()[0] for words in ROWS} == set(COMMANDS)
    table = REFERENCE.partition("## Exit statuses")[2].partition("\n## ")[0]
    assert [int(status) for status in re.findall(r"^\| (\d+) ", table, flags=re.M)] == [0, FAILED, WRONG, STOPPED, INTERRUPTED]
