"""Every block of Python and of shell in every page is executed by a test, or parsed, or named here with the reason why not."""

import re
import shlex
from pathlib import Path

import click
import pytest
import test_add_a_skill
import test_docs
import test_extend

from anchorlora.cli.app import app
from anchorlora.methods import METHODS
from method_pages import commands

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```$", flags=re.S | re.M)
SHELLS = ("bash", "sh", "console", "shell", "zsh", "fish")
DATA = ("text", "yaml", "json", "toml")  # what files hold and commands print

FROM_END_TO_END = {  # page -> what a test reads and runs in order
    "docs/protect.md": test_add_a_skill.PAGE,
    "docs/extend.md": test_extend.PAGE + "".join(test_extend.SECTIONS[name] for name in test_extend.SEAMS),
}
NOT_RUN = {  # how a line of shell begins -> why no test runs it
    "pip install ": "a package registry",
    'eval "$(_ANCHORLORA_COMPLETE=': "a setting of the reader's shell; tests/cli tests the completion",
    "_ANCHORLORA_COMPLETE=fish_source": "a setting of the reader's shell; tests/cli tests the completion",
    "torchrun ": "several processes with GPUs; the command inside is parsed",
    "accelerate launch ": "several processes with GPUs; the command inside is parsed",
    "make ": "long; the target is looked up",
    "python tools/": "reads runs of hours; the file is looked up",
    "for ": "runs of hours; the command inside is parsed",
    "F=": "a name for the lines after it",
}


def fences(page):
    """(language, text) of every block of a page."""
    return [(language, text) for _, language, text in FENCE.findall(page.read_text())]


def named(page):
    return page.relative_to(ROOT).as_posix()


SHELL = [
    (named(page), line.strip())
    for page in PAGES
    for language, text in fences(page)
    if language in SHELLS
    for line in text.replace("\\\n", " ").splitlines()
    if line.strip() and not line.lstrip().startswith("#")
] + [(f"methods/{method.name}.md", line) for method in METHODS.values() for line in commands(method).splitlines()]


def inner(line):
    """The commands of anchorlora in a line of shell, loops and launchers included."""
    starts = re.finditer(r"(?:^|(?<=do )|(?<=-m ))anchorlora ", line)
    return [re.split(r"; done|(?<!\\)\s#", line[found.end() :])[0] for found in starts]


INNER = sorted({(page, words) for page, line in SHELL for words in inner(line)})


def test_every_fence_is_closed_and_says_its_language():
    for page in PAGES:
        assert len(re.findall(r"^ *```", page.read_text(), flags=re.M)) == 2 * len(fences(page)), named(page)
        assert [text[:60] for language, text in fences(page) if language not in ("python", *SHELLS, *DATA)] == [], named(page)


def test_every_block_of_python_is_executed():
    one_by_one = {(page, code) for page, _, code in test_docs.PYTHON}
    for page in PAGES:
        for language, code in fences(page):
            if language != "python" or code in FROM_END_TO_END.get(named(page), ""):
                continue
            assert (page.name, code) in one_by_one, f"{named(page)}: no test executes the block that begins with {code[:60]!r}"


@pytest.mark.parametrize(("page", "words"), INNER, ids=[f"{page}-{i}" for i, (page, _) in enumerate(INNER)])
def test_every_command_and_option_exists(page, words):
    words = shlex.split(words, comments=True)
    group, context = app, click.Context(app, info_name="anchorlora", **app.context_settings)
    while isinstance(group, click.Group):
        name, words = words[0], words[1:]
        group = group.get_command(context, name)
    group.make_context(name, words, parent=context)


def test_every_other_line_of_shell_is_declared_with_a_reason():
    others = [(page, line) for page, line in SHELL if not line.startswith("anchorlora ")]
    assert [(page, line) for page, line in others if not line.startswith(tuple(NOT_RUN))] == []
    assert [start for start in NOT_RUN if not any(line.startswith(start) for _, line in others)] == [], "no page has it any more"


def test_tools_and_targets_that_lines_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for page, line in SHELL:
        for file in re.findall(r"\b((?:tools|benchmarks)/[\w/]+\.py)", line):
            assert (ROOT / file).is_file(), (page, line)
        if line.startswith("make "):
            assert line.split()[1] in targets, (page, line)
