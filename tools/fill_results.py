"""Write measured tables and figures into docs/results.md from the records in results/; `make docs` runs it.

`<!-- table FOLDER NAME -->` .. `<!-- /table -->` holds the table NAME of the report of results/FOLDER,
`<!-- selections FOLDER -->` .. `<!-- /selections -->` the candidates of all selections there,
`<!-- chance FOLDER -->` .. `<!-- /chance -->` the scores that need no learning,
`<!-- lead FOLDER -->` .. `<!-- /lead -->` what the projected displacement changes, and
`<!-- precision FOLDER -->` .. `<!-- /precision -->` what lowered precision leaves of rho. Figures go to docs/figures/.
"""

import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from tabulate import tabulate

from anchorlora.reports.chapters import chapters_of
from anchorlora.reports.comparability import studies_of
from anchorlora.reports.figures import looks_of
from anchorlora.reports.grid import Grid
from anchorlora.reports.page import all_pictures, all_tables
from anchorlora.reports.published import printed_endpoint
from anchorlora.reports.records import find_runs, mean
from anchorlora.reports.tables import comparisons
from anchorlora.reports.tables.pairs import TESTED
from anchorlora.reports.tables.references import References
from anchorlora.study.selection import FILE, read_selection

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/results.md"
FIGURES = {
    "mini/grid": ("accuracy", "aa-fm", "drift", "cores"),
    "mini/trace": ("trajectories",),
    "mini-en/trace": ("trajectories",),
}


@cache
def report(folder: str):
    """(chapters, runs, references) of the records in results/folder and of the references beside it."""
    place = ROOT / "results" / folder
    runs, beside = find_runs([place]), place.parent / "references"
    others = tuple(find_runs([beside])) if beside.is_dir() else ()
    return chapters_of([replace(study, others=others) for study in studies_of(runs)]), runs, others


def table(folder: str, name: str) -> str:
    """A table as Markdown, less its title."""
    known = {each.name: each for each in all_tables(report(folder)[0])}
    if name not in known:
        raise SystemExit(f"results/{folder} gives no table {name}; it gives: {', '.join(known)}")
    return known[name].markdown().split("\n", 2)[2].strip()


def selections(folder: str) -> str:
    """Every candidate and what it reached on the holdout."""
    rows = []
    for path in sorted((ROOT / "results" / folder).rglob(FILE)):
        found = read_selection(path)
        for declared, c in zip(found.declared, found.candidates, strict=True):
            reached = c.error if c.AA is None else f"{c.AA:.2f}"
            mark = "selected" if c.value == found.selected else ""
            rows.append((found.method, found.parameter, f"{declared:g}", f"{c.value:g}", reached, mark))
    headings = ("method", "parameter", "declared", "scaled", "AA on the holdout", "")
    return tabulate(rows, headings, tablefmt="github", disable_numparse=True)


def chance(folder: str) -> str:
    """What guessing and the best single answer reach on the tested examples, beside what the runs reached."""
    _, runs, others = report(folder)
    rows, tasks, levels = [], Grid.of(runs).orders[0], References.of(runs, others)
    counts, guessing = runs[0].labels, levels.chance
    constant = {task: 100 * max(count.test for count in counts[task].values()) / levels.tested[task] for task in tasks}
    measured = {name: level for name, level in (("zero-shot", levels.zero_shot), ("alone", levels.alone)) if level}
    for task in tasks:
        learned = [run.record.accuracy[at][at] for run in runs for at in [run.order.index(task)]]
        more = [level[task] for level in measured.values()]
        rows.append((task, len(counts[task]), guessing[task], constant[task], *more, mean(learned), min(learned), max(learned)))
    above, means = [], [mean([*level.values()]) for level in (guessing, constant, *measured.values())]
    for name in ("LA", "AA"):
        found = [getattr(run.record.scores, name) for run in runs]
        rows.append((f"all tasks, {name}", "", *means, mean(found), min(found), max(found)))
        above.append(f"{name} of {sum(value > means[1] for value in found)}")
    headings = ("task", "labels", "guessing", "one answer", *measured, "mean", "min", "max")
    told = {"zero-shot": "the base model", "alone": "seq-lora right after training on this task alone"}
    beside = "".join(f"{name}: {told[name]}; " for name in measured)
    note = (
        "Percent. guessing: every label equally often; one answer: always the most frequent label of the test examples; "
        f"{beside}mean, min, max: over {len(runs)} runs, accuracy on a task right after training on it; LA is the mean "
        f"of these, AA the mean after the last task. Above one answer: {' and '.join(above)} of the runs."
    )
    return f"{tabulate(rows, headings, tablefmt='github', floatfmt='.2f')}\n\n{note}"


LEAD = (("sfor", "projected-lora-freeze-b"), ("o-lora-hard", "o-lora-retract-gradient"))  # what ProjectDisplacement adds


def lead(folder: str) -> str:
    """What the projected displacement changes: rho of the last task, and the scores with their intervals."""
    runs, rows = report(folder)[1], []
    tests, grid = comparisons(runs), Grid.of(runs)
    for one, other in LEAD:
        with_it, without = (mean([run.record.drift[-1].rho for run in grid.of_method(method)]) for method in (one, other))
        changes = []
        for name in TESTED:
            test = tests[one, other, name]
            changes.append(f"{test.mean:+.2f} ({test.interval[0]:+.2f} to {test.interval[1]:+.2f})")
        smallest = min(tests[one, other, name].adjusted for name in TESTED)
        orders = f"{math.log10(without / with_it):.1f}"
        rows.append((f"{one} - {other}", f"{with_it:.1e}", f"{without:.2g}", orders, *changes, f"{smallest:.2f}"))
    headings = ("difference", "rho with it", "without", "orders of magnitude", *TESTED, "smallest adjusted p")
    note = (
        "rho of the last task on its core, means over runs; scores in percentage points, mean paired difference over "
        f"{tests[LEAD[0][0], LEAD[0][1], 'AA'].n} runs with its 95 % interval."
    )
    return f"{tabulate(rows, headings, tablefmt='github', disable_numparse=True)}\n\n{note}"


def precision(folder: str) -> str:
    """rho that lowered arithmetic leaves, by method, beside what the paper prints."""
    names = {"float32": "float32", "tf32": "TF32 products", "bf16_core": "core in bfloat16"}
    found, rows = {run.method: run for run in find_runs([ROOT / "results" / folder])}, []
    for host, method in (("sfor", "sfor"), ("hard", "o-lora-hard")):
        for kind, words in names.items():
            if (run := found.get(f"{host}_{kind}")) is not None:
                rows.append((method, words, *(f"{d.rho:.1e}" for d in run.record.drift), f"{printed_endpoint(method, 'rho'):.0e}"))
    headings = ("method", "arithmetic of the projection", "rho, task 2", "task 3", "task 4", "paper prints")
    return tabulate(rows, headings, tablefmt="github", disable_numparse=True)


def filled(text: str) -> str:
    """The page with every region made again from the records."""
    text = re.sub(
        r"(<!-- table (\S+) (\S+) -->\n).*?(<!-- /table -->)",
        lambda m: f"{m[1]}{table(m[2], m[3])}\n{m[4]}",
        text,
        flags=re.S,
    )
    for name, make in (("selections", selections), ("chance", chance), ("lead", lead), ("precision", precision)):
        pattern = rf"(<!-- {name} (\S+) -->\n).*?(<!-- /{name} -->)"
        text = re.sub(pattern, lambda m, make=make: f"{m[1]}{make(m[2])}\n{m[3]}", text, flags=re.S)
    return text


def draw() -> None:
    """The figures that the page shows."""
    for folder, names in FIGURES.items():
        if (ROOT / "results" / folder).is_dir():
            chapters, runs, _ = report(folder)
            for (_, name), picture in all_pictures(chapters, looks_of(runs), forms=("png",)).items():
                if name in names:
                    path = ROOT / "docs/figures" / f"{folder.replace('/', '-')}-{name}.png"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(picture.forms["png"])


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
    draw()
