"""A page for each method, methods/NAME.md of the site, and the links to them in docs/methods.md, the table of all methods.

A page is made of the catalog (what it is, when to take it, definition, promise), of the docstrings of its parts (equations) and of
the committed records (scores, cost).
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

from tabulate import tabulate

from anchorlora.cli.methods import EXPLANATION, meaning
from anchorlora.methods import METHODS, Method
from anchorlora.train.request import FROM_TEXT
from anchorlora_lab.report.records import Run
from anchorlora_lab.report.tables.scores import interval_over_runs
from results_own import choices_table, relative_times, runs_in

ROOT = Path(__file__).parents[1]
GRIDS = ("mini/grid", "beyond/grid", "beyond/ranks", "beyond/neighbors")  # of results/
COSTS = ("mini/cost", "beyond/cost")  # a later folder counts where both have a method
SCORES = ("AA", "LA", "BWT", "FM")
BESIDE = ("seq-lora", "fold-16")  # rows that every page has: nothing protected, and one of our own
BY_MODULE = {"FoldedPerTask", "MergedPerTask", "AnswerSensitivity", "GradientStart"}  # parts whose equation heads their file


def equation(part: Any) -> tuple[str, str]:
    """What a part does, the first paragraph of its docstring, and its equation, the block after it; "" where there is none."""
    paragraphs = inspect.cleandoc(type(part).__doc__ or "").split("\n\n")
    said = " ".join(paragraphs[0].split())
    if type(part).__name__ in BY_MODULE:
        paragraphs = inspect.cleandoc(sys.modules[type(part).__module__].__doc__ or "").split("\n\n")
    block = next((each for each in paragraphs[1:] if each.startswith("    ")), "")
    return said, dedent(block).rstrip()


def commands(method: Method) -> str:
    """How to run it; `train` where it protects something that text or weights can show."""
    lines, name = [], method.name
    remembers = [prefix for part in method.constraints if (prefix := getattr(part, "reads", ""))]
    if "core" in method.requires | ({"core"} if method.preserves.singular else set()) or remembers:
        overlaps = any(type(part).__name__ == "RoutingOverlap" for part in method.constraints)  # with an earlier block
        old = " --adapter adapters/old" if overlaps or method.plan.family == "shared" else ""
        same = " --same-size" if method.plan.family == "shared" else ""
        keep = "" if method.preserves.singular else " --keep old.jsonl"
        if all(prefix in FROM_TEXT for prefix in remembers):
            lines.append(f"anchorlora train MODEL{old} --data new.jsonl{keep}{same} --method {name} --out runs/new")
    lines.append(f"anchorlora run mini --method {name} --order order1 --seed 42 --out runs/{name}")
    return "\n".join([*lines, f"anchorlora check {name}"])


def measured(method: Method, runs: Mapping[str, Sequence[Run]]) -> str:
    """Its scores beside those of `BESIDE`, with intervals over runs."""
    if method.name not in runs:
        return "This method was not run on every order and seed of `mini`, so this page gives no score.\n"
    rows = []
    for name in dict.fromkeys((method.name, *BESIDE)):
        cells = []
        for score in SCORES:
            values = [getattr(run.record.scores, score) for run in runs[name]]
            low, high = interval_over_runs(runs[name], name=score)
            cells.append(f"{sum(values) / len(values):.1f} ({low:.1f} to {high:.1f})")
        rows.append((f"**`{name}`**" if name == method.name else f"[`{name}`]({name}.md)", *cells))
    table = tabulate(rows, ("", *SCORES), tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * len(SCORES)))
    count, (ran,) = len(runs[method.name]), {run.record.method.definition for run in runs[method.name]}
    settings = (
        ""
        if ran == method.definition
        else f"\nIt was run as `{ran}`, with a strength that was selected on a holdout of the training data.\n"
    )
    return f"""\
{table}
{settings}
Means over {count} runs of [`mini`](../study.md#the-embedded-benchmark) (three orders, three seeds), with 95 % intervals over runs.
[The scores](../study.md#the-scores) explains AA, LA, BWT, and FM.
[Results on mini](../lab/results-mini.md) and [Our own methods](../lab/own-methods.md) test the differences between methods.
"""


def cost(method: Method, runs: Mapping[str, Sequence[Run]], times: Mapping[str, float]) -> str:
    """What it stores and how long its steps take."""
    rows = [("needed from earlier tasks", method.needs)]
    if method.name in runs:
        found = runs[method.name][0].record.cost
        rows += [
            ("parameters trained in a task", f"{found.trained_parameters:,}"),
            ("parameters stored after four tasks", f"{found.stored_parameters:,}"),
            ("stored about earlier tasks, besides the adapter", f"{found.history_bytes / 1000:,.1f} kB"),
        ]
    if method.name in times and method.name != BESIDE[0]:
        rows.append((f"training time relative to `{BESIDE[0]}`", f"{times[method.name]:.2f}"))
    return tabulate(rows, ("cost", "on `mini`"), tablefmt="github", disable_numparse=True)


def keeps(method: Method) -> str:
    """What it promises, in the words of the table of methods."""
    words = dict(re.findall(r"^- (\w+): (.+)$", EXPLANATION, flags=re.M))
    kept = [name for name in words if getattr(method.preserves, name)]
    if not kept:
        return "It guarantees nothing exactly. Even so, every run measures how much of its change lies on protected directions.\n"
    lines = "\n".join(f"- {name}: {words[name]}" for name in kept)
    return f"Whatever the optimizer, on the protected subspace V:\n\n{lines}\n"


def formatted(code: str) -> str:
    """A line of Python as the formatter of the project breaks it."""
    command = [sys.executable, "-m", "ruff", "format", "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def page(method: Method, runs: Mapping[str, Sequence[Run]], times: Mapping[str, float]) -> str:
    """The page of a method."""
    entry = method.entry
    chosen = f"You have, at the end of each task: {entry.choice.have}. You want: {entry.choice.want}." if entry.choice else ""
    what, when = entry.about, f"{chosen} {entry.when}".strip()
    parts, shown = [], set()
    for part, phrase in zip(method.parts, method.definition.split(" + "), strict=True):
        said, block = equation(part)
        fence = f"\n\n```text\n{block}\n```" if block and block not in shown else ""
        shown.add(block)
        parts.append(f"**`{phrase}`** {said}{fence}")
    sections = [
        f"# {method.name}",
        what,
        f"**When to use it.** {when}" if when else "",
        "## Measured",
        measured(method, runs).rstrip(),
        cost(method, runs, times),
        "## What it keeps",
        keeps(method).rstrip(),
        "## Definition",
        f"```python\nfrom anchorlora import *\n\n{formatted(f'mine = {method.definition}')}```",
        *parts,
        "[The rule](../rule.md) explains the symbols. [The reference](../api/constraints.md) has every part with an example.",
        "## Use it",
        f"```bash\n{commands(method)}\n```",
        "[All methods](../methods.md)",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def methods_page() -> str:
    """Return the page docs/methods.md."""
    return f"# Methods\n\n## Which one\n\n{choices_table()}\n\n{meaning()}\n\n## All methods\n\n{EXPLANATION}\n{methods_table()}"


def methods_table() -> str:
    """Return a Markdown table of all methods: name, definition, and what is preserved."""
    rows = [(f"`{method.name}`", f"`{method.definition}`", method.preserves.words) for method in METHODS.values()]
    return tabulate(rows, ("method", "definition", "preserves"), tablefmt="github", disable_numparse=True) + "\n"


def linked(table: str) -> str:
    """The table of all methods with a link from every name to its page."""
    return re.sub(r"\| `([\w-]+)`( *) \|", lambda m: f"| [`{m[1]}`](methods/{m[1]}.md){m[2]} |" if m[1] in METHODS else m[0], table)


@cache
def pages() -> dict[str, str]:
    """The page of every method, by its path in docs/."""
    found, times = runs_in(*GRIDS), relative_times(*COSTS)
    most = max(map(len, found.values()))  # else a mean would be over other orders and seeds
    runs = {name: list(known.values()) for name, known in found.items() if len(known) == most}
    return {f"methods/{name}.md": page(method, runs, times) for name, method in METHODS.items()}
