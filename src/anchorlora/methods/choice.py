"""Which method to take, by what is there at the end of each task and by what is wanted, with what was measured.  Needs no torch.

`measured.json` holds means over all runs of the embedded benchmark, and over three runs on real text; tools/built_pages.py writes
it from results/.
"""

from __future__ import annotations

import json
from pathlib import Path

from anchorlora.methods import METHODS
from anchorlora.methods.entry import EXAMPLES, NOTHING, ROWS

MEASURED = Path(__file__).with_name("measured.json")
_chosen = ((name, method.entry.choice) for name, method in METHODS.items() if method.entry.choice)
# name of a method -> when it is the one to take
CHOICES = dict(sorted(_chosen, key=lambda c: ((EXAMPLES, ROWS, NOTHING).index(c[1].have), c[1].rank)))
HEADS = ("you have, at the end of each task", "you want", "take", "AA", "LA", "FM", "stored", "real text")


def choice_rows() -> list[tuple[str, ...]]:
    """Return one row of cells per choice, under `HEADS`, with what was measured of its method."""
    measured = json.loads(MEASURED.read_text())
    rows = []
    for method, choice in CHOICES.items():
        embedded, real = measured["methods"][method], measured["real"]["AA"][method]
        scores = [f"{embedded[name]:.1f}" for name in ("AA", "LA", "FM")]
        rows.append((choice.have, choice.want, method, *scores, str(embedded["stored_parameters"]), f"{real:.1f}"))
    return rows


def meaning() -> str:
    """Return what the numbers of the choices are."""
    facts = json.loads(MEASURED.read_text())
    runs, recipe, real = facts["runs"], facts["recipe"], facts["real"]
    plain = METHODS.baseline("shared").name
    score = real["AA"][plain]
    return f"""\
Means over {runs} runs of `{recipe}`, in percent: AA is the accuracy after all tasks, LA that of each task when it was learned,
FM what was forgotten; stored, parameters after four tasks. What reads examples or rows is exact on its core; the rest
promises nothing about old tasks. Real text: AA over {real["runs"]} runs of one order of five tasks, where {plain} has {score:.1f}.
These are two small models: measure your own."""
