"""`anchorlora methods`: every method, its definition, and what it preserves, or all about one.  Needs no torch."""

from __future__ import annotations

import re

import click

from anchorlora.cli.console import example, fitted, out, print_json, wrapped
from anchorlora.cli.options import methods_beginning
from anchorlora.cli.parsing import method_named
from anchorlora.methods import METHODS, Method
from anchorlora.methods.choice import HEADS, choice_rows, meaning

FIRST = sorted({type(c).__name__ for m in METHODS.values() for c in m.constraints if getattr(type(c), "first_task", 2) == 1})
EXPLANATION = f"""\
A method's definition is a sum. It begins with a plan, which says how LoRA adapters are trained:

- `Shared()`: one adapter for all tasks; `Shared(ratio=16.0)` trains B at 16 times the learning rate
- `PerTask()`: a new block for each task; `PerTask(orthogonal=True)` draws its A orthogonal to the A of all earlier blocks
- `GatedPerTask()`: a new block for each task, with one trained gate per block
- `FoldedPerTask()`: a new block for each task, folded into a history of constant rank
- `MergedPerTask()`: a new block for each task, merged with the earlier ones after training

Constraints follow. They act in the order listed, from the second task on ({", ".join(f"`{name}`" for name in FIRST[:-1])}, and
`{FIRST[-1]}` from the first; `Freeze` and `GradientStart` too, with `first_task=1`). The protected subspace V holds the
strongest feature directions of earlier tasks, or, with `SensitiveCore`, the directions that earlier answers depend on most.
`Rehearsal` mixes in remembered examples.

A definition is Python. Put `mine = ..` into a file that begins with `from anchorlora import *`, and run it with
`--method file.py:mine`. To change a number, use `--set RoutingOverlap.strength=0.05`.

A method preserves some of these conditions on V, whatever the optimizer:

- displacement: ΔA V = 0, A does not move on V
- state: A V = 0, A does not read V
- delta_b: ΔB = 0, B does not move, so the term ΔB A₀ V vanishes
- response: ΔW V = 0, the layer's effective change does not touch V; rho is zero up to float32 rounding

Or it preserves one condition on the k leading singular directions U_k and V_k of each frozen weight, from the first task on and
without any old data:

- singular: U_kᵀ ΔW = 0 and ΔW V_k = 0, the leading singular triples of the weight do not change

`anchorlora check METHOD` measures each of them.
"""


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
