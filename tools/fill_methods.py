"""Write docs/methods.md, the table of all methods, and docs/methods/, a page for each.

A page is made of the catalog (definition, promise), of the docstrings of its parts (equations) and of the committed records
(scores, cost). `ABOUT` has what no code says: what a method is, and when to take it. `make docs` calls this.
"""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

from tabulate import tabulate

from anchorlora.cli.methods import EXPLANATION, methods_page
from anchorlora.methods import METHODS, Method
from anchorlora.methods.choice import CHOICES
from anchorlora.reports.records import Run, find_runs
from anchorlora.reports.tables.energy import relative_times
from anchorlora.reports.tables.scores import interval_over_runs
from anchorlora.skills.request import FROM_TEXT

ROOT = Path(__file__).parents[1]
TABLE, PAGES = ROOT / "docs/methods.md", ROOT / "docs/methods"
GRIDS = ("mini/grid", "beyond/grid", "beyond/neighbors")  # of results/
COSTS = ("mini/cost", "beyond/cost")  # a later folder counts where both have a method
SCORES = ("AA", "LA", "BWT", "FM")
BESIDE = ("seq-lora", "fold-16")  # rows that every page has: nothing protected, and one of our own
BY_MODULE = {"FoldedPerTask", "MergedPerTask", "AnswerSensitivity", "GradientStart"}  # parts whose equation heads their file

ABOUT: dict[str, tuple[str, str]] = {  # name -> (what it is, when to take it)
    "seq-lora": (
        "One LoRA adapter, trained on one task after another. Nothing is protected.",
        "Use it as the baseline: it shows what you lose without protection.",
    ),
    "replay": (
        "`seq-lora` that stores some examples of earlier tasks and mixes them into the training of each later one.",
        "Use it if you may store old examples and train on them again in every later task.",
    ),
    "ewc": (
        "Elastic weight consolidation: a penalty pulls every entry of the factors back to its earlier value, harder if "
        "old answers depend on it more.",
        "Use it if you need one shared adapter, may not keep old examples, and can live with soft protection. Choose its strength "
        "with `anchorlora select`: published values do not transfer.",
    ),
    "lwf": (
        "Learning without forgetting: on the new task's own examples, answers are kept close to those of the earlier model.",
        "Use it if you have nothing left of earlier tasks and can afford a second forward pass for every example.",
    ),
    "projected-lora": (
        "The gradient of A is projected off the protected subspace. The optimizer may then turn it back.",
        "Use it to see that a projected gradient is not enough under AdamW. To protect, use [`sfor`](sfor.md).",
    ),
    "projected-lora-wrp": (
        "A does not move on the protected subspace, but B trains. From a trained adapter, the term ΔB A₀ V remains.",
        "Use it to see that term alone. To protect, use [`sfor`](sfor.md), or [`rank-split`](rank-split.md) if B must train.",
    ),
    "projected-lora-freeze-b": (
        "B is frozen, and the gradient of A is projected. The part that AdamW turns back toward the protected subspace remains.",
        "Use it to see that part alone. To protect, use [`sfor`](sfor.md).",
    ),
    "sfor": (
        "The paper's exact method for one shared adapter: B is frozen, and A moves only off the protected subspace.",
        "It is the method of `anchorlora train --same-size`. It learns less than methods that add a new block.",
    ),
    "inc-lora": (
        "A new LoRA block for each task; earlier blocks are frozen and summed. Nothing is protected.",
        "Use it as the baseline for methods with a block for each task.",
    ),
    "inc-lora-hard": (
        "A new block that neither reads the protected subspace nor moves on it. Its output there stays zero "
        "while both factors train.",
        "The default of `anchorlora train`: exact, with any old adapter or none. The adapter grows with every task.",
    ),
    "oplora": (
        "Both factors stay off the leading singular directions of the frozen weight, so the strongest part of what "
        "the base model computes does not change.",
        "It keeps little of a task that does not use those directions.",
    ),
    "lora-plus": (
        "LoRA+: one shared adapter whose B trains at a higher learning rate than A. Nothing is protected.",
        "Use it as a control: it shows what changes if B moves more.",
    ),
    "lora-fa": (
        "LoRA-FA: A stays at its random start, and only B trains. Freezing A does not protect: "
        "B changes the response to what A reads.",
        "Use it as a control. To protect with a frozen A, use [`lora-fa-retract`](lora-fa-retract.md).",
    ),
    "lora-fa-retract": (
        "A new block whose A is moved off the protected subspace once and then frozen. It is exact, and only B trains.",
        "Use it if optimizer memory is short. Otherwise use [`inc-lora-hard`](inc-lora-hard.md), which trains A, too.",
    ),
    "inf-lora": (
        "InfLoRA: A of a new block is set to the leading inputs of the new task, off the protected subspace, "
        "and frozen. Only B trains.",
        "Use it if optimizer memory is short and you can afford one pass over some new examples before training.",
    ),
    "orthogonal-adaptation": (
        "The A of each block is random, frozen, and orthogonal to the A of all earlier blocks. No features of old data are used.",
        "Use it to compare orthogonal adapters with protected features. Orthogonal blocks still change old answers.",
    ),
    "keep-lora": (
        "KeepLoRA: A of a new block is set to the leading directions of the task's first gradient, off the protected subspace "
        "and off the leading input directions of the frozen weight, and frozen; B trains. After Luo et al. (arXiv 2601.19659) "
        "and its official code. What differs: the protected subspace is chosen anew after each task and limited in size, the "
        "gradient is that of some examples, and rows of A are shorter. Besides what is promised below, a block reads nothing of"
        " those directions of the weight.",
        "If optimizer memory is short, and one pass with gradients over some new examples before training is affordable.",
    ),
    "lora-null": (
        "After LoRA-Null (Tang et al., arXiv 2503.02659): A of a new block starts at the directions that the inputs of earlier "
        "tasks use least, and trains. What differs: B starts at zero and the weight stays whole, and the inputs are those of "
        "earlier tasks, not of general text. With A frozen, LoRA-Null is [`lora-fa-retract`](lora-fa-retract.md), up to which "
        "rows outside the strongest directions A has.",
        "To see what the start alone is worth: a start is no constraint. To protect, take "
        "[`lora-fa-retract`](lora-fa-retract.md), or [`inc-lora-hard`](inc-lora-hard.md) if A must train.",
    ),
    "snapshot": (
        "Snapshot interpolation: after each task but the first, the mean of the weights before and after it, as in WiSE-FT "
        "(Wortsman et al., arXiv 2109.01903). What differs: WiSE-FT averages once, with the base model. So does "
        "[`anchorlora train`](../train.md), where what the base model can do is the past.",
        "As a cheap baseline: it needs nothing but the block, and any method must beat it.",
    ),
    "ties": (
        "TIES merging (Yadav et al., arXiv 2306.01708): after each task but the first, its change and that of all earlier tasks"
        " are trimmed to their largest entries, a sign is elected for each entry, and those that have it are averaged. What "
        "differs: the block was trained on top of the merged ones, they count as one change, and the result is cut to the rank "
        "of the stacked blocks.",
        "As a cheap baseline of merging after training.",
    ),
    "dare": (
        "DARE (Yu et al., arXiv 2311.03099): after each task but the first, entries of its change are dropped at random, the "
        "others scaled up, and the result is added. What differs: the block was trained on top of the earlier ones, and the sum"
        " is cut to the rank of the stacked blocks, as PEFT does.",
        "As a cheap baseline of merging after training.",
    ),
    "n-lora": (
        "A new block for each task, with a penalty on the size of every entry of its update, so that blocks collide less.",
        "Use it for comparison. Its strength depends on the model: choose it with `anchorlora select`.",
    ),
    "sd-lora": (
        "SD-LoRA: a new block for each task. The directions of earlier blocks are frozen, and one gate for each of them "
        "keeps training.",
        "Use it for comparison. Gates change old blocks, so nothing is exact.",
    ),
    "sd-lora-per-layer": (
        "`sd-lora` with finished blocks normalized layer by layer instead of over the network.",
        "Use it for comparison with [`sd-lora`](sd-lora.md).",
    ),
    "o-lora": (
        "O-LoRA: a new block for each task, with a penalty on the overlap of its A with the A of earlier blocks.",
        "Use it for comparison: it needs only the blocks of old tasks. To protect, use [`o-lora-hard`](o-lora-hard.md).",
    ),
    "o-lora-retract": (
        "`o-lora` whose new block starts off the protected subspace. Training may lead it back.",
        "Use it to see what the start alone contributes. It is one step from `o-lora` to [`o-lora-hard`](o-lora-hard.md).",
    ),
    "o-lora-retract-gradient": (
        "`o-lora-retract` with the gradient projected as well. The optimizer may still turn it back.",
        "Use it to see what the gradient contributes. It is one step from `o-lora` to [`o-lora-hard`](o-lora-hard.md).",
    ),
    "o-lora-hard": (
        "The paper's exact method with a block for each task: `o-lora` that neither reads the protected subspace nor moves on it.",
        "Use it in studies of O-LoRA. If you do not have the earlier blocks, [`inc-lora-hard`](inc-lora-hard.md) is the same "
        "method without O-LoRA's penalty.",
    ),
    "o-lora-effective": (
        "`o-lora` with a penalty on the layer's effective change on a wider basis of earlier features.",
        "Use it to see what the penalty does without an exact core.",
    ),
    "o-lora-bsr": (
        "The paper's combination: [`o-lora-hard`](o-lora-hard.md), exact on the core, and a penalty on a wider basis around it.",
        "Use it to repeat the paper. On the embedded benchmark, at the selected strength, it scores the same as `o-lora-hard`.",
    ),
    "o-lora-bsr-strong": (
        "`o-lora-bsr` at a strength that makes the penalty's gradient as large as that of the task.",
        "Use it to see what the paper's penalty does once it is strong enough to matter.",
    ),
    "brake": (
        "A new block, with a penalty on how much the update is predicted to change earlier answers, in nats of KL divergence.",
        "Use it if soft protection is enough and no direction should be closed to the new task.",
    ),
    "sensitive-core": (
        "A new block that is exact on the directions that earlier answers depend on most, instead of the strongest features.",
        "",
    ),
    "rank-split": (
        "One shared adapter that is exact although B trains: B moves only where A does not carry the protected subspace.",
        "Here B trains as well; [`sfor`](sfor.md) freezes it.",
    ),
    "fold-8": (
        "[`fold-16`](fold-16.md) with a history of half the rank.",
        "",
    ),
    "fold-16": (
        "A new block for each task: exact on the directions that answers depend on, and slowed elsewhere by a penalty. At "
        "the end of the task, it is folded into one adapter of constant rank.",
        "",
    ),
}


def runs_of(folders: Sequence[str]) -> dict[str, list[Run]]:
    """Method -> its committed runs."""
    found: dict[str, list[Run]] = {}
    for run in find_runs([ROOT / "results" / folder for folder in folders]):
        found.setdefault(run.record.method, []).append(run)
    return found


def equation(part: Any) -> tuple[str, str]:
    """What a part does, the first paragraph of its docstring, and its equation, the block after it; "" where there is none."""
    paragraphs = inspect.cleandoc(type(part).__doc__ or "").split("\n\n")
    said = " ".join(paragraphs[0].split())
    if type(part).__name__ in BY_MODULE:
        paragraphs = inspect.cleandoc(sys.modules[type(part).__module__].__doc__ or "").split("\n\n")
    block = next((each for each in paragraphs[1:] if each.startswith("    ")), "")
    return said, dedent(block).rstrip()


def needs(method: Method) -> str:
    """What a method needs of earlier tasks, besides its own adapters."""
    names, found = {type(part).__name__ for part in method.parts}, []
    if method.rehearsal:
        found.append(f"{method.rehearsal.memory} examples of earlier tasks, stored and trained on again")
    if "FisherAnchor" in names:
        found.append("one pass over examples of each finished task, with their right answers")
    if "AnswerSensitivity" in names:
        (part,) = (part for part in method.constraints if type(part).__name__ == "AnswerSensitivity")
        found.append(f"one pass over {part.examples} examples of each finished task; the model samples the answers")
    elif {"core", "wide"} & method.requires:
        found.append("feature rows of finished tasks: text is enough")
    if "NullStart" in names:
        (part,) = (part for part in method.constraints if type(part).__name__ == "NullStart")
        found.append(f"one pass over {part.examples} examples of each finished task: text is enough")
    if "start" in method.requires:
        found.append("a second forward pass, with the model as it was before the task")
    return "; ".join(found) or "nothing"


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
    count, (ran,) = len(runs[method.name]), {run.record.definition for run in runs[method.name]}
    settings = (
        ""
        if ran == method.definition
        else f"\nIt was run as `{ran}`, with a strength that was selected on a holdout of the training data.\n"
    )
    return f"""\
{table}
{settings}
Means over {count} runs of [`mini`](../mini.md) (three orders, three seeds), with 95 % intervals over runs.
[The scores](../study.md#the-scores) explains AA, LA, BWT, and FM.
[Results](../results-mini.md) and [Our own methods](../own-methods.md) test the differences between methods.
"""


def cost(method: Method, runs: Mapping[str, Sequence[Run]], times: Mapping[str, float]) -> str:
    """What it stores and how long its steps take."""
    rows = [("needed from earlier tasks", needs(method))]
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
    what, when = ABOUT.get(method.name, ("", ""))
    chosen = [each for each in CHOICES if each.method == method.name]
    when = " ".join([*(f"You have, at the end of each task: {each.have}. You want: {each.want}." for each in chosen), when]).strip()
    parts, shown = [], set()
    for part, phrase in zip(method.parts, method.definition.split(" + "), strict=True):
        said, block = equation(part)
        fence = f"\n\n```text\n{block}\n```" if block and block not in shown else ""
        shown.add(block)
        parts.append(f"**`{phrase}`** {said}{fence}")
    sections = [
        f"# {method.name}",
        what,
        f"**When to use it.** {when}",
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


def linked(table: str) -> str:
    """The table of all methods with a link from every name to its page."""
    return re.sub(r"\| `([\w-]+)`( *) \|", lambda m: f"| [`{m[1]}`](methods/{m[1]}.md){m[2]} |" if m[1] in METHODS else m[0], table)


def pages() -> dict[Path, str]:
    """Every file that this tool writes -> its text."""
    runs, times = runs_of(GRIDS), {}
    for folder in COSTS:
        times |= relative_times(find_runs([ROOT / "results" / folder]), to=BESIDE[0])
    most = max(map(len, runs.values()))
    runs = {name: found for name, found in runs.items() if len(found) == most}  # else a mean would be over other orders and seeds
    made = {PAGES / f"{name}.md": page(method, runs, times) for name, method in METHODS.items()}
    return {TABLE: linked(methods_page()), **made}


if __name__ == "__main__":
    written = pages()
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir()
    for file, text in written.items():
        file.write_text(text)
