"""Measured text of pages.  In a page of docs/, a marker `<!-- NAME WORDS -->` becomes what `REGIONS[NAME](*WORDS)` makes of the
records in results/ when the site is built.

README.md and docs/package.md are read where nothing is built: there `<!-- NAME -->` .. `<!-- /NAME -->` hold the text, and
`python tools/built_pages.py` (`make docs`) writes it, with src/anchorlora/methods/measured.json and docs/figures/.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

from tabulate import tabulate

import method_pages
import results
import results_keeping
import results_own
import results_tables
from anchorlora.cli.methods import MEASURED
from anchorlora.config import Recipe
from anchorlora.data.forms import FORMS
from anchorlora.recipes import standard_cl
from anchorlora.train.request import default_recipe
from anchorlora_lab.frontier.bench import read_records
from anchorlora_lab.frontier.tables import (
    PLAIN,
    Cluster,
    Difference,
    Point,
    difference,
    frontier_tables,
    picture,
    points_of,
    spanned,
)
from anchorlora_lab.report import writers
from anchorlora_lab.report.figures.style import as_bytes

ROOT = Path(__file__).parents[1]
README, PACKAGE, FIGURE = ROOT / "README.md", ROOT / "docs/package.md", ROOT / "docs/figures/mini-stages.svg"
FRONTIER, CHOOSING = ROOT / "results/frontier", ("labels", "card")
FOLD, RATE = "fold-16", 5e-4  # what other rows stand beside, and its rate
At = tuple[str, float, int, float]  # row, rate, epoch, scale


def frontier_in_words() -> str:
    """What plain LoRA, its one-line rivals and fold-16 learn and keep after two epochs at one rate: no setting is chosen."""
    plain, scaled, own, kl = ("plain", RATE, 2, 1), ("plain", RATE, 2, 0.7), ("own-10", RATE, 2, 1), ("kl-own", RATE, 2, 1)
    called = {
        plain: "plain LoRA",
        scaled: "the same, its update scaled by 0.7",
        own: "10 % own text in the mix",
        kl: "KL to the model before, on own text",
        (FOLD, RATE, 2, 1): "`fold-16`, the default with a penalty of 100, started from 64 examples",
    }
    shared, members, less = beside_fold("smollm2", plain, scaled, own, kl)
    lines = [
        [
            *(words, f"{fmean(p.learned for p in members[at]):.0f}", f"{fmean(p.kept for p in members[at]):+.1f}"),
            spanned(less[at].kept, less[at].kept_interval) if at in less else "",
        ]
        for at, words in called.items()
    ]
    heads = ["SmolLM2-135M-Instruct", "new skill, %", "change of old abilities, points", "`fold-16` keeps more by"]
    grid = tabulate(lines, heads, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * 3))
    gemma = {at: beside_fold("gemma3", at) for at in (own, kl)}
    spans = " and ".join(spanned(each[at].kept, each[at].kept_interval).replace("+", "") for at, (_, _, each) in gemma.items())
    pairs = " and ".join(str(len(known)) for known, *_ in gemma.values())
    return (
        f"{grid}\n\nRank 16, {RATE:g}, two epochs, {len(shared)} pairs of a skill and a seed, intervals over pairs and examples. "
        "Own text in the mix, and KL on it, learn as much and [are not shown to keep less](docs/lab/frontier.md) than `fold-16`. "
        f"On Gemma 3 270M, a base model, `fold-16` keeps {spans} points more than own text and KL ({pairs} pairs)."
    )


def frontier(model: str) -> str:
    """The frontier's tables, what each row costs apart: a page has room for a dozen columns."""
    parts = []
    for table in frontier_tables(read_records(FRONTIER / model), choosing=CHOOSING):
        cut = next(i for i, column in enumerate(table.columns) if column.heading.startswith("KL"))
        rows = [(row[:cut], (row[0], *row[cut:])) for row in table.rows]
        scores = replace(table, columns=table.columns[:cut], rows=tuple(first for first, _ in rows))
        costs = replace(table, columns=(table.columns[0], *table.columns[cut:]), rows=tuple(last for _, last in rows), note="")
        parts += [writers.markdown(scores), writers.markdown(costs).partition("\n\n")[2]]
    return "\n".join(parts)


def beside_fold(model: str, *rows: At, last: bool = False) -> tuple[list[Cluster], dict[At, list[Point]], dict[At, Difference]]:
    """Rows and fold-16, each at one setting, on what they share; and what fold-16 has more after as many epochs, or after two."""
    fold = {at: (FOLD, RATE, 2 if last else at[2], 1) for at in rows}
    by: dict[At, dict[Cluster, Point]] = {at: {} for at in sorted({*rows, *fold.values()}, key=lambda at: (at[0] == FOLD, at))}
    for p in points_of(read_records(FRONTIER / model)):
        if (at := (p.row, *p.setting)) in by:
            by[at][p.cluster] = p
    shared = sorted(set.intersection(*map(set, by.values())))
    members = {at: [points[cluster] for cluster in shared] for at, points in by.items()}
    return shared, members, {at: difference(list(zip(members[fold[at]], members[at], strict=True))) for at in rows}


def table_beside_fold(model: str, *rows: At, last: bool = False) -> str:
    """The table of `beside_fold`; two pairs of a skill and a seed have no interval."""
    shared, members, less = beside_fold(model, *rows, last=last)
    heads = ["row", "rate", "epochs", "scale", "new", "kept", "KL own", "CPU s", "fold-16 learns more by", "fold-16 keeps more by"]
    table = []
    for at, points in members.items():
        means = fmean(p.learned for p in points), fmean(p.kept for p in points), fmean(p.kl["chats"] for p in points)
        numbers = "{:g} {} {:g} {:.1f} {:+.1f} {:.3f} {:.0f}".format(*at[1:], *means, fmean(p.seconds for p in points)).split()
        spans = [(less[at].learned, less[at].learned_interval), (less[at].kept, less[at].kept_interval)] if at in less else []
        more = [spanned(*span) if len(shared) > 2 else f"{span[0]:+.1f}" for span in spans]
        table.append([at[0], *numbers, *(more or ["", ""])])
    grid = tabulate(table, heads, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * 9))
    named = ", ".join(f"{skill} {seed}" for skill, seed in shared)
    told = "points with 95 % intervals over clusters and examples" if len(shared) > 2 else "points, too few pairs for an interval"
    return f"{grid}\n\nSkills and seeds: {named}. All examples of each; {told}.\n"


def at_one_rate(*rivals: str) -> list[At]:
    """Rivals at fold-16's rate, after each epoch, and scaled after the last: no setting is chosen."""
    return [(name, RATE, epoch, scale) for name in rivals for epoch, scale in ((1, 1), (2, 0.7), (2, 1))]


def frontier_beside_rivals(model: str, *rivals: str) -> str:
    """Rivals beside fold-16 at one rate."""
    return table_beside_fold(model, *at_one_rate(*rivals))


def frontier_beside_rates(model: str) -> str:
    """Plain LoRA at every rate, whole and scaled by 0.7, beside fold-16 after two epochs."""
    points = points_of(read_records(FRONTIER / model))
    rows = {(p.row, *p.setting) for p in points if p.row == PLAIN and p.setting[2] in (1, 0.7)}
    return table_beside_fold(model, *rows, last=True)


def frontier_of_two(model: str) -> str:
    """Every row beside fold-16 after two epochs on the skills that choose, one seed, at its rate or, without it, at all."""
    there: dict[At, set[Cluster]] = {}
    for p in points_of(read_records(FRONTIER / model)):
        if p.setting[1:] == (2, 1) and p.cluster in (two := {(skill, 42) for skill in CHOOSING}) and p.row != FOLD:
            there.setdefault((p.row, *p.setting), set()).add(p.cluster)
    whole = [at for at, clusters in there.items() if clusters == two]
    return table_beside_fold(model, *(at for at in whole if at[1] == RATE or (at[0], RATE, 2, 1) not in whole))


def table_of_forms() -> str:
    """The forms of rows: their columns, and what is learned."""
    lines = ["| columns | what is learned |", "|---|---|"]
    for form in FORMS:
        further = f"; also {', '.join(f'`{name}`' for name in form.optional)}" if form.optional else ""
        lines.append(f"| {', '.join(f'`{name}`' for name in form.columns)}{further} | {form.about} |")
    return "\n".join(lines)


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
    "frontier-rivals": frontier_beside_rivals,
    "frontier-rates": frontier_beside_rates,
    "frontier-of-two": frontier_of_two,
    "fields": table_of_fields,
    "frontier": frontier,
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
    """The page for a package index, where links lead nowhere, with the first lines, the chooser and the loop of README.md."""
    above = readme[: readme.index("```bash")]
    (chooser,) = re.findall(r"^\| you have \| command.*?\n\n", readme, flags=re.S | re.M)
    (loop,) = re.findall(r"^```python\nfrom anchorlora.*?```\n", readme, flags=re.S | re.M)
    below = package[package.index("```bash") :]
    return fill(fill(re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", above) + below, "chooser", chooser), "loop", loop)


def drawn_here() -> None:
    """Copy the figure of stages that `make run` drew in this checkout, where it did."""
    for drawn in (ROOT / "runs/mini/report/figures").glob("*stages.svg"):
        FIGURE.write_bytes(drawn.read_bytes())


if __name__ == "__main__":
    results.unpack_all()
    MEASURED.write_text(results_own.measured())
    drawn_here()
    README.write_text(filled(README.read_text()))
    PACKAGE.write_text(in_step(filled(PACKAGE.read_text()), README.read_text()))
    (ROOT / "docs/methods.md").write_text(method_pages.methods_page())
    results_tables.draw()
    results_keeping.draw()
    for drawn in (ROOT / "docs/figures").glob("frontier-*.svg"):
        model = drawn.stem.removeprefix("frontier-")
        drawn.write_bytes(as_bytes(picture(read_records(FRONTIER / model)), ("svg",))["svg"])
