"""`anchorlora methods`: every method, its definition, and what it preserves, or all about one.  Needs no torch."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import click

from anchorlora.cli.console import example, fitted, out, print_json, wrap
from anchorlora.cli.options import methods_beginning
from anchorlora.cli.parsing import method_named
from anchorlora.methods import METHODS, Method
from anchorlora.methods.entry import EXAMPLES, NOTHING, ROWS

FIRST = sorted({type(c).__name__ for m in METHODS.values() for c in m.constraints if getattr(type(c), "first_task", 2) == 1})
EXPLANATION = (files("anchorlora.methods") / "explanation.md").read_text(encoding="utf-8")
EXPLANATION = EXPLANATION.format(first=", ".join(f"`{name}`" for name in FIRST[:-1]), last=FIRST[-1])
# means over all runs of the embedded benchmark, and over three on real text; tools/built_pages.py writes them
MEASURED = Path(str(files("anchorlora.methods") / "measured.json"))
_chosen = ((name, method.entry.choice) for name, method in METHODS.items() if method.entry.choice)
# name of a method -> when it is the one to take
CHOICES = dict(sorted(_chosen, key=lambda c: ((EXAMPLES, ROWS, NOTHING).index(c[1].have), c[1].rank)))
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")  # of Markdown, as the documentation has them
HEADS = ("you have, at the end of each task", "you want", "take", "AA", "LA", "FM", "stored", "real text")


@click.command(short_help="List every method and what it preserves.", epilog=example("anchorlora methods sfor"))
@click.argument("method", required=False, shell_complete=methods_beginning)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def methods(method: str | None, as_json: bool) -> None:
    """List every method, its definition, and the conditions it preserves, or tell all about METHOD.

    METHOD is a name or file.py:variable.
    """
    shown = {chosen.name: chosen} if method and (chosen := method_named(method)) else METHODS
    if as_json:
        print_json({name: _facts(shown_method) for name, shown_method in shown.items()})
    elif method:
        out.print("\n\n".join(wrap(paragraph) for paragraph in _describe(chosen)))
    else:
        for paragraph in EXPLANATION.split("\n\n"):
            out.print(_for_a_terminal(paragraph) + "\n")
        rows = [(listed.name, listed.definition, listed.preserves.words) for listed in METHODS.values()]
        out.print(fitted(["method", "definition", "preserves"], rows))
        out.print("\nWhich one\n")
        out.print(fitted(HEADS, choice_rows()))
        out.print("\n" + _for_a_terminal(meaning()))


def _facts(method: Method) -> dict[str, object]:
    return {"definition": method.definition, "family": method.plan.family, "preserves": vars(method.preserves)}


def _describe(method: Method) -> list[str]:
    """Paragraphs about one method."""
    entry = method.entry
    chosen = f"You have, at the end of each task: {entry.choice.have}. You want: {entry.choice.want}." if entry.choice else ""
    when = f"{chosen} {entry.when}".strip()
    paragraphs = [f"{method.name} = {method.definition}", entry.about, f"When to use it: {when}" if when else ""]
    return [
        LINK.sub(r"\1", paragraph)
        for paragraph in (*paragraphs, f"Preserves: {method.preserves.words}.", f"Needs of earlier tasks: {method.needs}.")
        if paragraph
    ]


def _for_a_terminal(paragraph: str) -> str:
    """The paragraph in lines of a terminal's width; the points of a list stay points."""
    points = paragraph.split("\n- ") if paragraph.startswith("- ") else []
    if points:
        return "\n".join(wrap(point.removeprefix("- "), before="- ", after="  ") for point in points)
    return wrap(" ".join(paragraph.split()))


def choice_rows() -> list[tuple[str, ...]]:
    """Return one row of cells per choice, under `HEADS`, with what was measured of its method."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    rows = []
    for method, choice in CHOICES.items():
        embedded, real = measured["methods"][method], measured["real"]["AA"][method]
        scores = [f"{embedded[name]:.1f}" for name in ("AA", "LA", "FM")]
        rows.append((choice.have, choice.want, method, *scores, str(embedded["stored_parameters"]), f"{real:.1f}"))
    return rows


def meaning() -> str:
    """Return what the numbers of the choices are."""
    facts = json.loads(MEASURED.read_text(encoding="utf-8"))
    runs, recipe, real = facts["runs"], facts["recipe"], facts["real"]
    plain = METHODS.baseline("shared").name
    score = real["AA"][plain]
    return f"""\
Means over {runs} runs of `{recipe}`, in percent: AA is the accuracy after all tasks, LA that of each task when it was learned,
FM what was forgotten; stored, parameters after four tasks. What reads examples or rows is exact on its core; the rest
promises nothing about old tasks. Real text: AA over {real["runs"]} runs of one order of five tasks, where {plain} has {score:.1f}.
These are two small models: measure your own."""
