"""Measured text of pages.  In a page of docs/, a marker `<!-- NAME WORDS -->` becomes what `REGIONS[NAME](*WORDS)` makes of the
records in results/ when the site is built.

README.md and docs/package.md are read where nothing is built: there `<!-- NAME -->` .. `<!-- /NAME -->` hold the text, and
`python tools/built_pages.py` (`make docs`) writes it, with src/anchorlora/methods/measured.json and docs/figures/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tabulate import tabulate

import method_pages
import results
import results_keeping
import results_own
import results_tables
from anchorlora.cli.methods import methods_page
from anchorlora.config import Recipe
from anchorlora.data.forms import table_of_forms
from anchorlora.methods.choice import MEASURED
from anchorlora.recipes import standard_cl
from anchorlora.train.request import default_recipe
from anchorlora_lab.frontier.bench import read_records
from anchorlora_lab.frontier.picture import picture
from anchorlora_lab.frontier.tables import frontier_tables
from anchorlora_lab.report import writers
from anchorlora_lab.report.figures.style import as_bytes
from anchorlora_lab.report.records import find_runs
from anchorlora_lab.report.tables.scores import complete_table

ROOT = Path(__file__).parents[1]
README, PACKAGE, FIGURE = ROOT / "README.md", ROOT / "docs/package.md", ROOT / "docs/figures/mini-stages.svg"
FRONTIER, CHOOSING = ROOT / "results/frontier", ("labels", "card")


def frontier_in_words() -> str:
    """What plain LoRA and our own methods keep where they learn as much, on the skills that chose the settings."""
    table, *_ = frontier_tables(read_records(FRONTIER / "smollm2"), choosing=CHOOSING)
    rows, clusters = {row[0].removesuffix(" †"): row for row in table.rows}, table.rows[0][3]
    names = {
        "plain": "plain LoRA, scaled,",
        "own-10": "with 10 % own text in the mix",
        "sensitive-core": "`sensitive-core`",
        "fold-16": "`fold-16`",
    }
    said = "; ".join(f"{called} {rows[name][4]:.0f} and {rows[name][6]:+.1f}" for name, called in names.items() if name in rows)
    return (
        "on SmolLM2-135M-Instruct, all linear layers, each at the setting that by other examples learns as much as plain LoRA at "
        "its best (own text: learns most). New skill, in %, and the change of old abilities, in points "
        f"({clusters} pairs of a skill and a seed): {said}. Own text keeps more at other settings; one seed cannot tell."
    )


def table_of_fields() -> str:
    """Every field of a recipe: the comment of its line in config.py, and its value for `train` and in `standard-cl`."""
    source = (ROOT / "src/anchorlora/config.py").read_text(encoding="utf-8")
    meaning = dict(re.findall(r"^    (\w+): [^\n]*?  # ([^\n]+)$", source, flags=re.M))
    rows = [
        [
            f"`{name}`",
            meaning[name].replace("None", "none").replace("<", "&lt;"),
            *(shown(getattr(getattr(recipe, part), name)) for recipe in (default_recipe(), standard_cl())),
        ]
        for part in Recipe.model_fields
        if part != "name"
        for name in type(getattr(standard_cl(), part)).model_fields
    ]
    return tabulate(rows, ["field", "meaning", "`train`", "`standard-cl`"], tablefmt="github", disable_numparse=True)


def shown(value: object) -> str:
    """A value of a field as `--set` takes it."""
    if isinstance(value, dict):
        return ", ".join(value)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


REGIONS: dict[str, Callable[..., str]] = {
    "forms": table_of_forms,
    "frontier-in-words": frontier_in_words,
    "fields": table_of_fields,
    "frontier": lambda model: "\n".join(map(writers.markdown, frontier_tables(read_records(FRONTIER / model), choosing=CHOOSING))),
    **results_own.TABLES,
    **results_tables.REGIONS,
    **results_keeping.REGIONS,
}
MARKER = re.compile(r"<!-- ([\w-]+)((?: (?!-->)\S+)*) -->")


@cache
def region(name: str, words: str = "") -> str:
    """The text that a marker stands for."""
    return REGIONS[name](*words.split()).rstrip("\n")


def built(text: str, page: str) -> str:
    """The text of a page of docs/ with the measured text in place of each marker, and links to methods."""

    def made(match: re.Match[str]) -> str:
        name, words = match[1], match[2].strip()
        return results_tables.linked(region(name, words), words, page) if name in REGIONS else match[0]

    return MARKER.sub(made, method_pages.linked(text) if page == "methods.md" else text)


@cache
def page(name: str) -> str:
    """A page of docs/ as the site has it; `name` is its path in docs/."""
    if name.startswith("methods/"):
        return method_pages.pages()[name]
    return built((ROOT / "docs" / name).read_text(encoding="utf-8"), name)


def fill(text: str, name: str, content: str) -> str:
    """The text with other content between `<!-- name -->` and `<!-- /name -->`."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    filled, count = re.subn(pattern, lambda m: f"{m[1]}{content.rstrip()}\n{m[2]}", text, flags=re.S)
    if count != 1:
        raise SystemExit(f"there are no markers for {name}")
    return filled


def filled(text: str) -> str:
    """README.md or docs/package.md with every region made again from the records."""
    for name in re.findall(r"^<!-- /([\w-]+) -->$", text, flags=re.M):
        text = fill(text, name, region(name)) if name in REGIONS else text
    return text


def in_step(package: str, readme: str) -> str:
    """The page for a package index, where links lead nowhere, with the chooser and the loop of README.md."""
    (chooser,) = re.findall(r"^\| you have \| command.*?\n\n", readme, flags=re.S | re.M)
    loop = re.search(r"```python\n.*?```\n", readme, flags=re.S)
    if loop is None:
        raise SystemExit("README.md has no Python")
    return fill(fill(package, "chooser", chooser), "loop", loop[0])


def measured_here(readme: str) -> str:
    """README.md with what `make run` and `make demo` measured in this checkout, where they did; the figure of stages is copied."""
    run, demo = ROOT / "runs/mini", ROOT / "runs/demo/skill/verdict.json"
    if run.is_dir():
        _, table, *_ = writers.markdown(complete_table(find_runs([run]))).split("\n\n")  # title, table, notes
        rows = [line for line in table.splitlines() if line.split("|")[2].strip() != "-"]  # the picture has the majority label
        readme = fill(readme, "scores", "\n".join(rows))
        (drawn,) = (run / "report/figures").glob("*stages.svg")
        FIGURE.write_bytes(drawn.read_bytes())
    if demo.is_file():
        sentences = json.loads(demo.read_text())["sentences"]
        readme = fill(readme, "verdict", "\n".join(f"> - {sentence}" for sentence in sentences))
    return readme


if __name__ == "__main__":
    results.unpack_all()
    MEASURED.write_text(results_own.measured())
    README.write_text(filled(measured_here(README.read_text())))
    PACKAGE.write_text(in_step(filled(PACKAGE.read_text()), README.read_text()))
    (ROOT / "docs/methods.md").write_text(methods_page())
    results_tables.draw()
    results_keeping.draw()
    for folder in (path for path in sorted(FRONTIER.iterdir()) if path.is_dir()):
        drawn = as_bytes(picture(read_records(folder)), ("svg",))["svg"]
        (ROOT / f"docs/figures/frontier-{folder.name}.svg").write_bytes(drawn)
