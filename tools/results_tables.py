"""Measured text of docs/lab/results*.md from the records in results/, by the markers that tools/built_pages.py replaces.

`<!-- table STUDY NAME -->` is the table NAME of the report of a study; the other markers have the names of `REGIONS`. STUDY is what
tools/results_studies.py takes: a folder of results/, or several. `<!-- value NAME WHERE -->` is a number within a line, and
`<!-- test STUDY ONE OTHER SCORE -->` a comparison with its interval and test, linked to its row. Figures go to docs/figures/.
"""

import math
import posixpath
import re
from collections.abc import Callable

from tabulate import tabulate

from anchorlora.store.selection import FILE, read_selection
from anchorlora_lab.report import writers
from anchorlora_lab.report.figures import looks_of
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.layout import NOTES
from anchorlora_lab.report.page import all_pictures, all_tables
from anchorlora_lab.report.records import mean
from anchorlora_lab.report.tables.pairs import TESTED
from anchorlora_lab.report.tables.references import References
from anchorlora_lab.report.tables.scores import interval_over_examples
from results_mechanism import brake, brake_tests, correlation, gradient, lowered, precision, ranks, rows, rows_tests, unaligned
from results_studies import RESULTS, ROOT, all_comparisons, report, row_of

REAL = "lab/results-real.md"
PAGES = {"mini": "lab/results-mini.md", "mini-en": "lab/results-unlearned.md"}  # by the first folder of a study; all others: REAL
FIGURES = {
    "mini/grid": ("accuracy", "aa-fm", "drift", "cores", "paths", "forgetting", "boundaries"),
    "mini/trace": ("trajectories",),
    "real/trace": ("trajectories",),
    "mini/moves": ("gradients",),
    "mini/predicted": ("forgetting",),
    "real/grid": ("heat", "aa-fm", "cores", "forgetting"),
    "smollm2/grid": ("heat",),
    "dbpedia/mini-en+dbpedia/smollm2-135m": ("base-models",),
    "mini-en/trace": ("trajectories",),
}


def table(folder: str, name: str) -> str:
    """A table as Markdown, less its title."""
    known = {each.name: each for each in all_tables(report(folder)[0])}
    if name not in known:
        raise SystemExit(f"results/{folder} gives no table {name}; it gives: {', '.join(known)}")
    text = writers.markdown(known[name]).split("\n", 2)[2].strip()
    return with_rows_to_link(folder, text) if name == "comparisons" else text


def with_rows_to_link(folder: str, text: str) -> str:
    """The comparisons of a study, each row with a name that a link can go to."""

    def named(match: re.Match) -> str:
        return f'| <a id="{row_of(folder, match[1], match[2], match[3])}"></a>{match[0][2:]}'

    return re.sub(r"^\| (\S+) - (\S+) +\| (\w+) ", named, text, flags=re.M)


def selections(folder: str) -> str:
    """Every candidate and what it reached on the holdout; of a list that was continued, the longer one."""
    rows, lists = [], {}
    for found in map(read_selection, sorted((RESULTS / folder).rglob(FILE))):
        lists[found.method] = max(lists.get(found.method, found), found, key=lambda each: len(each.candidates))
    for found in lists.values():
        for declared, c in zip(found.declared, found.candidates, strict=True):
            reached = c.error if c.AA is None else f"{c.AA:.2f}"
            chosen = f"selected, the {found.end}" if found.end else "selected"
            mark = chosen if c.value == found.selected else ""
            rows.append((found.method, found.parameter, f"{declared:g}", f"{c.value:g}", reached, mark))
    headings = ("method", "parameter", "declared", "scaled", "AA on the holdout", "")
    return tabulate(rows, headings, tablefmt="github", disable_numparse=True)


def chance(folder: str) -> str:
    """What guessing and the best single answer reach on the tested examples, beside what the runs reached."""
    _, runs, others = report(folder)
    rows, tasks, levels = [], Grid(runs).orders[0], References.of(runs, others)
    counts, guessing = runs[0].labels, levels.by_task["chance"]
    constant = {task: 100 * max(count.test for count in counts[task].values()) / levels.tested[task] for task in tasks}
    measured = {"zero-shot": levels.by_task["zero-shot"], "alone": levels.by_task["single-task"]}
    measured = {name: level for name, level in measured.items() if level}
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
    tests, grid = all_comparisons(folder), Grid(runs)
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


BESIDE = ("seq-lora", "sfor", "o-lora-hard")  # what every method is compared with


def methods(study: str) -> str:
    """Every method of a study, the best AA first, and what it has more than three of the paper's."""
    grid, rows = Grid(report(study)[1]), []
    references, marked = References.of(grid.runs), set()
    for method in grid.methods:
        runs = grid.of_method(method)
        if "AA" in references.unlearned(runs):
            marked.add(method)
        scores = [mean([getattr(run.record.scores, name) for run in runs]) for name in ("AA", "LA", "FM")]
        less = []
        for other in BESIDE:
            theirs = grid.of_method(other)
            ends = None if method == other or method in marked else interval_over_examples(runs, theirs)
            difference = scores[0] - mean([run.record.scores.AA for run in theirs])
            less.append("" if ends is None else f"{difference:+.1f} ({ends[0]:+.1f} to {ends[1]:+.1f})")
        rows.append((method, grid.count(method), *scores, *less))
    rows.sort(key=lambda row: (row[0] in marked, -row[2]))
    told = []
    for method, count, AA, LA, FM, *less in rows:
        told.append((method, count, f"{AA:.2f}{'†' * (method in marked)}", f"{LA:.2f}", f"{FM:.2f}", *less))
    headings = ("method", "runs", "AA", "LA", "FM", *(f"AA less {other}'s" for other in BESIDE))
    note = (
        "AA and LA in percent, FM and differences in percentage points, means over seeds, the best AA first. In brackets: 95 % "
        "interval of the mean difference over test examples (paired bootstrap within each task), not over seeds."
    )
    if marked:
        note = f"{note} {NOTES['unlearned'].format(line=references.line)}"
    return f"{tabulate(told, headings, tablefmt='github', disable_numparse=True)}\n\n{note}"


def test(folder: str, one: str, other: str, score: str) -> str:
    """A comparison in a sentence: mean, interval, corrected p, and a link to its row."""
    if folder.endswith("rows"):
        found, where = rows_tests(folder)[1][one, other, score], "which-rows-make-a-core"
    elif folder.endswith("brake"):
        found, where = brake_tests(folder)[0][one, other], "what-the-mechanism-shows"
    else:
        found, where = all_comparisons(folder)[one, other, score], row_of(folder, one, other, score)
    ends = f"{found.interval[0]:+.1f} to {found.interval[1]:+.1f}"
    p = f"p {found.adjusted:.2g}" if found.adjusted >= 0.001 else "p < 0.001"
    return f"[{score} {found.mean:+.1f} ({ends}), {p}](#{where})"


def examples(where: str) -> str:
    """A comparison where too few runs are paired for a test: "real/grid:sfor:seq-lora:AA", with its interval over test examples."""
    folder, one, other, score = where.split(":")
    pairs = Grid(report(folder)[1]).pairs(one, other)
    low, high = interval_over_examples([pair.one for pair in pairs], [pair.other for pair in pairs], name=score)
    change = mean([pair.change(score) for pair in pairs])
    many = "one pair of runs" if len(pairs) == 1 else f"{len(pairs)} pairs of runs"
    place = row_of(folder, one, other, score)
    place = "every-method-on-one-order" if "@" in folder else "what-is-kept" if "+" in folder else place
    return f"[{score} {change:+.1f} ({low:+.1f} to {high:+.1f} over test examples, {many})](#{place})"


def mean_of_runs(where: str) -> str:
    """The mean of a score over a method's runs: "real/grid@order3:sfor:LA"."""
    study, method, score = where.split(":")
    return f"{mean([getattr(run.record.scores, score) for run in report(study)[1] if run.method == method]):.0f}"


def agreement(where: str) -> str:
    """Whether two base models put methods in one order: "dbpedia/one+dbpedia/other:AA"."""
    folder, score = where.split(":")
    (order,) = [each for each in all_tables(report(folder)[0]) if each.name == "base-models-order"]
    (row,) = [row for row in order.rows if row[1] == score]
    _, _, methods, found, reach, told = row
    return f"[rank correlation of {score} {found:+.2f} ({reach}, {methods} methods); one way: {told} pairs](#do-they-agree)"


VALUES = {
    "agreement": agreement,
    "mean": mean_of_runs,
    "correlation": correlation,
    "gradient": gradient,
    "examples": examples,
    "lowered": lowered,
}


def page_of(study: str) -> str:
    """The page that a study's tables are on."""
    return PAGES.get(study.split("/")[0], REAL)


def linked(text: str, words: str, page: str) -> str:
    """The text that a marker stands for, made of its words, with its links from a page."""
    at = next((page_of(word) for word in words.split() if "/" in word), page)
    return text if at == page else text.replace("](#", f"]({posixpath.relpath(at, posixpath.dirname(page))}#")


REGIONS: dict[str, Callable[..., str]] = {
    **{make.__name__: make for make in (table, selections, chance, lead, methods, precision, brake, ranks, rows, unaligned, test)},
    "value": lambda name, where: VALUES[name](where),
}


def drawn(study: str, name: str) -> str:
    """The file of a figure of a study; where it is of several folders, the one that they share names it."""
    return f"{study.replace('/', '-') if '+' not in study else study.split('/')[0]}-{name}.png"


def draw() -> None:
    """The figures that the page shows."""
    for study, names in FIGURES.items():
        chapters, runs, _ = report(study)
        for (_, name), picture in all_pictures(chapters, looks_of(runs), forms=("png",)).items():
            if name in names:
                (ROOT / "docs/figures" / drawn(study, name)).write_bytes(picture.forms["png"])
