"""`anchorlora methods`: every method, its definition, and what it preserves, or all about one.  Needs no torch."""

from __future__ import annotations

import re
from importlib.resources import files

import click

from anchorlora.cli.console import example, fitted, out, print_json, wrapped
from anchorlora.cli.options import methods_beginning
from anchorlora.cli.parsing import method_named
from anchorlora.methods import METHODS, Method
from anchorlora.methods.choice import HEADS, choice_rows, meaning

FIRST = sorted({type(c).__name__ for m in METHODS.values() for c in m.constraints if getattr(type(c), "first_task", 2) == 1})
EXPLANATION = (files("anchorlora.methods") / "explanation.md").read_text(encoding="utf-8")
EXPLANATION = EXPLANATION.format(first=", ".join(f"`{name}`" for name in FIRST[:-1]), last=FIRST[-1])


@click.command(short_help="List every method and what it preserves.", epilog=example("anchorlora methods sfor"))
@click.argument("method", required=False, shell_complete=methods_beginning)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def methods(method: str | None, as_json: bool) -> None:
    """List every method, its definition, and the conditions it preserves, or tell all about METHOD.

    METHOD is a name or file.py:variable.
    """
    shown = {found.name: found} if method and (found := method_named(method)) else METHODS
    if as_json:
        print_json({name: _facts(each) for name, each in shown.items()})
    elif method:
        out.print("\n\n".join(wrapped(paragraph) for paragraph in _told(found)))
    else:
        for paragraph in EXPLANATION.split("\n\n"):
            out.print(_for_a_terminal(paragraph) + "\n")
        out.print(fitted(["method", "definition", "preserves"], _rows()))
        out.print("\nWhich one\n")
        out.print(fitted(HEADS, choice_rows()))
        out.print("\n" + _for_a_terminal(meaning()))


def _facts(method: Method) -> dict[str, object]:
    return {"definition": method.definition, "family": method.plan.family, "preserves": vars(method.preserves)}


def _told(method: Method) -> list[str]:
    """What there is to say of one method, in paragraphs."""
    entry = method.entry
    chosen = f"You have, at the end of each task: {entry.choice.have}. You want: {entry.choice.want}." if entry.choice else ""
    when = re.sub(r"\[(`[^`]*`)\]\([^)]*\)", r"\1", f"{chosen} {entry.when}".strip())
    said = [f"{method.name} = {method.definition}", entry.about, f"When to use it: {when}" if when else ""]
    return [each for each in (*said, f"Preserves: {method.preserves.words}.", f"Needs of earlier tasks: {method.needs}.") if each]


def _rows() -> list[tuple[str, str, str]]:
    return [(method.name, method.definition, method.preserves.words) for method in METHODS.values()]


def _for_a_terminal(paragraph: str) -> str:
    """The paragraph in lines of a terminal's width; the points of a list stay points."""
    points = paragraph.split("\n- ") if paragraph.startswith("- ") else []
    if points:
        return "\n".join(wrapped(point.removeprefix("- "), before="- ", after="  ") for point in points)
    return wrapped(" ".join(paragraph.split()))
