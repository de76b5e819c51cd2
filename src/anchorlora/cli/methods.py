"""`anchorlora methods`: every method, its definition, and what it keeps.  Needs no torch."""

from __future__ import annotations

import click

from anchorlora.cli.console import print_json
from anchorlora.methods import CLAIMS, METHODS, Method

EXPLANATION = """\
Each method trains LoRA blocks (one `Shared()` adapter; a fresh block `PerTask()`; the same with trained gates, `GatedPerTask()`)
under constraints that act in the order listed, from the second task on (`EffectiveSparsity` from the first). `Rehearsal` mixes
remembered examples in. `--set RoutingOverlap.strength=0.05` changes a number. A definition is Python: `mine = ..` in a file that
begins with `from anchorlora import *` is the method `--method file.py:mine`. What a method keeps, for any optimizer, on the
protected core V:

- displacement: dA V = 0, the block's move does not touch the core
- state: A V = 0, the block itself does not touch the core
- companion: dB = 0, the output basis does not move
- response: dW V = 0, the layer's effective change does not touch the core; rho is zero up to float32 storage

`anchorlora check METHOD` tries each of them.
"""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def methods(as_json: bool) -> None:
    """List every method, its definition, and the condition it keeps."""
    if as_json:
        print_json({name: _facts(method) for name, method in METHODS.items()})
    else:
        print(methods_page(), end="")


def _facts(method: Method) -> dict[str, object]:
    return {"definition": method.definition, "family": method.blocks.family, "keeps": vars(CLAIMS[method.name])}


def methods_page() -> str:
    """The page docs/methods.md: Markdown that also reads well in a terminal."""
    return "# Methods\n\n" + EXPLANATION + "\n" + methods_table()


def methods_table() -> str:
    """Name, definition and what is kept, one row a method."""
    rows = [(f"`{m.name}`", f"`{m.definition}`", CLAIMS[m.name].condition()) for m in METHODS.values()]
    head = ("method", "definition", "keeps")
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(3)]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in [head, *rows]]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines) + "\n"
