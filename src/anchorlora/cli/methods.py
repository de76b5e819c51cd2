"""`anchorlora methods`: every method, its definition, and what it preserves.  Needs no torch."""

from __future__ import annotations

import click

from anchorlora.cli.console import fitted, out, print_json, wrapped
from anchorlora.methods import METHODS, Method
from anchorlora.methods.choice import HEADS, choice_rows, choices_table, meaning

EXPLANATION = """\
A method trains LoRA adapters: one for all tasks (`Shared()`), or a new block per task (`PerTask()`), which may have trained gates
(`GatedPerTask()`), be folded into a history of constant rank (`FoldedPerTask()`) or be merged after training (`MergedPerTask()`).
Constraints act in the order listed, from the second task on (`EffectiveSparsity`, `InputStart` and `ProjectSingular` from the
first, `Freeze` and `GradientStart` where `first_task=1` says so). `Shared(ratio=16.0)` trains B at 16 times the learning rate.
`PerTask(orthogonal=True)` draws each block's A orthogonal to those of all earlier blocks.
`SensitiveCore` chooses V: the directions that earlier answers depend on most, instead of the strongest feature directions.
`Rehearsal` mixes in remembered examples. `--set RoutingOverlap.strength=0.05` changes a number. A definition is Python: put
`mine = ..` into a file that begins with `from anchorlora import *`, and `--method file.py:mine` runs it.

A method preserves some of these conditions on the protected subspace V, whatever the optimizer:

- displacement: ΔA V = 0, A does not move on V
- state: A V = 0, A does not read V
- delta_b: ΔB = 0, B does not move, so the term ΔB A₀ V vanishes
- response: ΔW V = 0, the layer's effective change does not touch V; rho is zero up to float32 rounding

or, from the first task on and without any old data, one on the k leading singular directions U_k and V_k of each frozen weight:

- singular: U_kᵀ ΔW = 0 and ΔW V_k = 0, the leading singular triples of the weight stay as they are

`anchorlora check METHOD` measures each of them.
"""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def methods(as_json: bool) -> None:
    """List every method, its definition, and the conditions it preserves."""
    if as_json:
        print_json({name: _facts(method) for name, method in METHODS.items()})
    else:
        for paragraph in EXPLANATION.split("\n\n"):
            out.print(_for_a_terminal(paragraph) + "\n")
        out.print(fitted(["method", "definition", "preserves"], _rows()))
        out.print("\nWhich one\n")
        out.print(fitted(HEADS, choice_rows()))
        out.print("\n" + _for_a_terminal(meaning()))


def _facts(method: Method) -> dict[str, object]:
    return {"definition": method.definition, "family": method.plan.family, "preserves": vars(method.preserves)}


def _rows() -> list[tuple[str, str, str]]:
    return [(method.name, method.definition, method.preserves.words) for method in METHODS.values()]


def _for_a_terminal(paragraph: str) -> str:
    """The paragraph in lines of a terminal's width; the points of a list stay points."""
    points = paragraph.split("\n- ") if paragraph.startswith("- ") else []
    if points:
        return "\n".join(wrapped(point.removeprefix("- "), before="- ", after="  ") for point in points)
    return wrapped(" ".join(paragraph.split()))


def methods_page() -> str:
    """Return the page docs/methods.md."""
    return f"# Methods\n\n{EXPLANATION}\n{methods_table()}\n## Which one\n\n{choices_table()}\n\n{meaning()}\n"


def methods_table() -> str:
    """Return a Markdown table of all methods: name, definition, and what is preserved."""
    rows = [(f"`{name}`", f"`{definition}`", preserved) for name, definition, preserved in _rows()]
    head = ("method", "definition", "preserves")
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(3)]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in [head, *rows]]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines) + "\n"
