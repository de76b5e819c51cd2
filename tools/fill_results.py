"""Write measured tables and figures into docs/results.md from the records in results/; `make docs` runs it.

`<!-- table FOLDER NAME -->` .. `<!-- /table -->` holds the table NAME of the report of results/FOLDER,
`<!-- selections FOLDER -->` .. `<!-- /selections -->` the candidates of all selections there,
`<!-- chance FOLDER -->` .. `<!-- /chance -->` the scores that need no learning,
`<!-- lead FOLDER -->` .. `<!-- /lead -->` what the projected displacement changes,
`<!-- precision FOLDER -->` .. `<!-- /precision -->` what lowered precision leaves of rho,
`<!-- brake FOLDER -->` .. `<!-- /brake -->` the controls of benchmarks/mechanism.py beside o-lora and inc-lora of mini/grid,
`<!-- ranks FOLDER -->` .. `<!-- /ranks -->` the sweep of caps and energies, and within a line
`<!-- test FOLDER ONE OTHER SCORE -->` .. `<!-- /test -->` a comparison with its interval and test, linked to its row, and
`<!-- value FOLDER NAME .. -->` .. `<!-- /value -->` a number. Figures go to docs/figures/.
"""

import math
import random
import re
import statistics
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
from anchorlora.reports.tables.mechanism import correlation_table, gradient_table
from anchorlora.reports.tables.pairs import TESTED, comparison_table
from anchorlora.reports.tables.references import References
from anchorlora.scores import mean_interval, paired_tests
from anchorlora.study.selection import FILE, read_selection

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/results.md"
FIGURES = {
    "mini/grid": ("accuracy", "aa-fm", "drift", "cores", "paths", "forgetting", "boundaries"),
    "mini/trace": ("trajectories",),
    "mini/moves": ("gradients",),
    "mini/predicted": ("forgetting",),
    "real/grid": ("heat", "cores"),
    "smollm2/grid": ("heat",),
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
    text = known[name].markdown().split("\n", 2)[2].strip()
    return with_rows_to_link(folder, text) if name == "comparisons" else text


def row_of(folder: str, one: str, other: str, score: str) -> str:
    """What a link to a row of a study's comparisons names."""
    return f"{folder.split('/')[0]}--{one}--{other}--{score.lower()}"


def with_rows_to_link(folder: str, text: str) -> str:
    """The comparisons of a study, each row with a name that a link can go to."""

    def named(match: re.Match) -> str:
        return f'| <a id="{row_of(folder, match[1], match[2], match[3])}"></a>{match[0][2:]}'

    return re.sub(r"^\| (\S+) - (\S+) +\| (\w+) ", named, text, flags=re.M)


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
    tests, grid = all_comparisons(folder), Grid.of(runs)
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


def unaligned(folder: str) -> str:
    """rho of a change less what an unaligned change would read, for methods without exact protection: means with intervals."""
    grid, rows = Grid.of(report(folder)[1]), []
    shared = ("seq-lora", "projected-lora", "projected-lora-wrp", "projected-lora-freeze-b")
    for method in (*shared, "inc-lora", "o-lora", "o-lora-retract"):
        runs = grid.of_method(method)
        rho = [mean([d.rho for d in run.record.drift]) for run in runs]
        less = [mean([d.rho - d.chance for d in run.record.drift]) for run in runs]
        low, high = mean_interval(less)
        rows.append((method, len(runs), f"{mean(rho):.3f}", f"{mean(less):+.3f}", f"{low:+.3f} to {high:+.3f}"))
    by_method = {run[0]: [mean([d.rho for d in r.record.drift]) for r in grid.of_method(run[0])] for run in rows}
    changes = [a - b for a, b in zip(by_method["o-lora"], by_method["inc-lora"], strict=True)]
    low, high = mean_interval(changes)
    note = (
        "rho on the core used, mean of tasks 2 to 4; less chance: minus the rho of an unaligned change of the same size, with its "
        f"95 % interval over orders and seeds. o-lora less inc-lora, paired: {mean(changes):+.3f} ({low:+.3f} to {high:+.3f})."
    )
    headings = ("method", "runs", "rho", "less chance", "95 % runs")
    return f"{tabulate(rows, headings, tablefmt='github', disable_numparse=True)}\n\n{note}"


BRAKE = (  # what is compared, and what it is called
    ("total", "o-lora", "inc-lora"),
    ("brake", "second_moment", "inc-lora"),
    ("rest", "o-lora", "second_moment"),
    ("rescaled", "rescaled", "inc-lora"),
)
FEWEST = 6  # pairs: below, no test can reject
QUANTITIES = ("LA", "FM", "AA", "D_eff")


def measured(run, name: str) -> float:
    """A score, or the mean size of the change of the tasks from the second on."""
    return mean([d.d_eff for d in run.record.drift]) if name == "D_eff" else getattr(run.record.scores, name)


def brake_runs(folder: str) -> list:
    """The controls, and o-lora and inc-lora: those that were run again, where all were, else those of mini/grid."""
    mine, hosts = find_runs([ROOT / "results" / folder]), ("o-lora", "inc-lora")
    usual = [run for run in report("mini/grid")[1] if run.method in hosts]
    again = [run for run in mine if run.method in hosts]
    return [run for run in mine if run.method not in hosts] + (again if len(again) == len(usual) else usual)


@cache
def brake_tests(folder: str):
    """(what, quantity) -> the test of its paired differences, and the differences by (order, seed)."""
    there = {(run.method, run.order, run.seed): run for run in brake_runs(folder)}
    changes = {}
    for what, one, other in BRAKE:
        places = [(order, seed) for method, order, seed in there if method == one and (other, order, seed) in there]
        for name in QUANTITIES if len(places) >= FEWEST else ():
            changes[what, name] = {p: measured(there[(one, *p)], name) - measured(there[(other, *p)], name) for p in places}
    return dict(zip(changes, paired_tests(list(changes.values())), strict=True)), changes


def brake_rho(folder: str) -> dict[str, list[float]]:
    """Paired differences of rho, mean over tasks from the second on, by what is compared."""
    rho = {(run.method, run.order, run.seed): mean([d.rho for d in run.record.drift]) for run in brake_runs(folder)}
    places = [place for method, *place in rho if method == "second_moment"]
    return {
        what: [rho[(one, *p)] - rho[(other, *p)] for p in places if (one, *p) in rho and (other, *p) in rho]
        for what, one, other in BRAKE
    }


def verdict(tests, name: str) -> str:
    """The rule of docs/log.md, 2026-11-23, for one quantity."""
    total, brake, rest = (tests[what, name] for what in ("total", "brake", "rest"))
    if total.adjusted >= LEVEL:
        return "nothing to explain"
    found = brake.adjusted < LEVEL and (brake.mean > 0) == (total.mean > 0)
    if found and rest.interval[0] <= 0 <= rest.interval[1]:
        return "the brake explains it"
    if found and rest.adjusted < LEVEL:
        return "the brake explains a part"
    return "the brake does not explain it" if rest.adjusted < LEVEL <= brake.adjusted else "undecided"


LEVEL = 0.05


def share(changes, name: str) -> str:
    """brake / total with a bootstrap over the pairs, percent."""
    pairs = [place for place in changes["total", name] if place in changes["brake", name]]
    ratio = [(changes["brake", name][p], changes["total", name][p]) for p in pairs]
    draw, found = random.Random(0), []
    for _ in range(4000):
        some = draw.choices(ratio, k=len(ratio))
        found.append(100 * sum(b for b, _ in some) / (sum(t for _, t in some) or 1e-9))
    found.sort()
    whole = 100 * sum(b for b, _ in ratio) / sum(t for _, t in ratio)
    return f"{whole:.0f} % ({found[100]:.0f} to {found[-101]:.0f})"


def brake(folder: str) -> str:
    """The differences of the rule, each with interval and test, and what the rule says."""
    tests, changes = brake_tests(folder)
    rows = []
    compared = [each for each in BRAKE if (each[0], "LA") in tests]
    for name in QUANTITIES:
        for what, one, other in compared:
            test = tests[what, name]
            ends = f"{test.interval[0]:+.2f} to {test.interval[1]:+.2f}" if test.interval else "-"
            told = verdict(tests, name) if what == "total" else ""
            part = share(changes, name) if what == "brake" and tests["total", name].adjusted < LEVEL else ""
            rows.append((name, f"{one} - {other}", what, test.n, f"{test.mean:+.2f}", ends, f"{test.adjusted:.3g}", part, told))
    for what, one, other in compared:
        less = brake_rho(folder)[what]
        low, high = mean_interval(less)
        told = f"{mean(less):+.3f}", f"{low:+.3f} to {high:+.3f}"
        rows.append(("rho", f"{one} - {other}", what, len(less), *told, "-", "", ""))
    headings = ("", "difference", "called", "pairs", "mean", "95 % runs", "p adjusted", "brake / total", "by the rule")
    note = (
        "LA, FM, AA in percentage points; D_eff: mean size of the change of tasks 2 to 4. Paired by order and seed; p "
        f"adjusted: for all {len(tests)} rows that have one (Westfall and Young's step-down); brake / total: ratio of means, "
        "bootstrap over the pairs. rho, mean of tasks 2 to 4, was not in the rule: it is shown with its interval alone."
    )
    if len(compared) < len(BRAKE):
        note += f" Left out for too few runs: {', '.join(what for what, *_ in BRAKE if (what, 'LA') not in tests)}."
    return f"{tabulate(rows, headings, tablefmt='github', disable_numparse=True)}\n\n{note}"


T95 = {2: 12.71, 3: 4.30}  # Student's, for two and three pairs


def ranks(folder: str) -> str:
    """The sweep of the cap and of the energy: cores, scores, and the paired difference to the recipe's setting."""
    found = find_runs([ROOT / "results" / folder])
    order = found[0].order
    found += [r for r in report("mini/grid")[1] if r.method in ("sfor", "o-lora-hard") and r.order == order]
    settings = {}
    for run in found:
        features = run.record.protocol["features"]
        settings.setdefault((run.method, features["energy"], features["at_most"]), {})[run.seed] = run
    rows = []
    for method in ("sfor", "o-lora-hard"):
        usual = settings[method, 0.93, 20]
        mine = sorted((key for key in settings if key[0] == method), key=lambda key: (key[1] != 0.93, key[2], key[1]))
        for _, energy, most in mine:
            runs = settings[method, energy, most]
            layers = [layer for run in runs.values() for task in run.record.layers[:-1] for layer in task]
            sizes, asked = [layer.k for layer in layers], [layer.k_star for layer in layers if layer.k_star]
            scores = [mean([getattr(run.record.scores, name) for run in runs.values()]) for name in ("AA", "LA", "FM")]
            held = [mean([d.held_out.total for run in runs.values() for d in run.record.drift])]
            less = [runs[seed].record.scores.AA - usual[seed].record.scores.AA for seed in runs if seed in usual]
            difference = "" if most == 20 else f"{mean(less):+.2f}"
            if most != 20 and len(less) in T95:
                reach = T95[len(less)] * statistics.stdev(less) / len(less) ** 0.5
                difference += f" ({mean(less) - reach:+.2f} to {mean(less) + reach:+.2f})"
            size = f"{mean(sizes):.0f}" if len(set(sizes)) == 1 else f"{mean(sizes):.0f} ({min(sizes)} to {max(sizes)})"
            energies = f"{100 * mean([layer.retained_energy for layer in layers]):.1f}"
            star = f"{min(asked)} to {max(asked)}"
            more = (*(f"{value:.2f}" for value in scores), f"{held[0]:.3f}", difference)
            rows.append((method, most, f"{energy:g}", len(runs), star, size, energies, *more))
    headings = ("method", "at_most", "energy", "seeds", "k\\*", "k", "held, %", "AA", "LA", "FM", "held-out", "AA less that of 20")
    note = (
        "order1. k\\*: directions that the energy asks for, over the cores used; k: directions used, mean (range); held: share of "
        "the energy of the rows that the cores hold; held-out: relative change of past rows that no core was built from, mean of "
        "tasks 2 to 4; AA less that of 20: percentage points, paired by seed, with Student's 95 % interval."
    )
    return f"{tabulate(rows, headings, tablefmt='github', disable_numparse=True)}\n\n{note}"


ROWS = (  # method -> core, most directions; in the order of the table
    ("first20", "first 128 rows", 20),
    ("spread20", "128 drawn rows", 20),
    ("answers20", "rows that predict an answer", 20),
    ("sensitive20", "all rows, weighted", 20),
    ("spread64", "128 drawn rows", 64),
    ("answers64", "rows that predict an answer", 64),
    ("sensitive-core", "all rows, weighted", 64),
)
ROWS_COMPARED = (  # the rule of docs/log.md, 2026-11-23
    ("spread20", "first20"),
    ("answers20", "spread20"),
    ("sensitive20", "answers20"),
    ("sensitive20", "spread20"),
    ("spread64", "spread20"),
    ("answers64", "spread64"),
    ("sensitive-core", "answers64"),
    ("sensitive-core", "spread64"),
)


@cache
def rows_tests(folder: str):
    """Runs of cores made of other rows by method, and the declared tests: (method, other, score) -> test."""
    found: dict[str, dict] = {}
    for run in find_runs([ROOT / "results" / folder, ROOT / "results/beyond/grid/sensitive-core"]):
        found.setdefault(run.method, {})[run.order, run.seed] = run.record
    changes = {
        (one, other, name): {p: getattr(found[one][p].scores, name) - getattr(found[other][p].scores, name) for p in found[one]}
        for one, other in ROWS_COMPARED
        for name in TESTED
    }
    return found, dict(zip(changes, paired_tests(list(changes.values())), strict=True))


def rows(folder: str) -> str:
    """Scores with cores of other rows, and the declared comparisons."""
    found, tests = rows_tests(folder)
    scores = []
    for name, core, most in ROWS:
        runs = list(found[name].values())
        sizes = [layer.k for run in runs for task in run.layers[:-1] for layer in task]
        means = [f"{mean([getattr(run.scores, score) for run in runs]):.2f}" for score in ("AA", "LA", "FM")]
        scores.append((name, core, most, f"{mean(sizes):.0f}", len(runs), *means))
    told = []
    for one, other in ROWS_COMPARED:
        cells = [tests[one, other, name] for name in TESTED]
        told.append(
            (
                f"{one} - {other}",
                *(f"{t.mean:+.1f} ({t.interval[0]:+.1f} to {t.interval[1]:+.1f}), {t.adjusted:.2g}" for t in cells),
            )
        )
    heads = ("method", "core made of", "at most", "k, mean", "runs", "AA", "LA", "FM")
    heads_told = ("difference", *(f"{name}, 95 % runs, p adjusted" for name in TESTED))
    note = (
        "Percent and percentage points, paired by order and seed. p adjusted: for all 24 comparisons "
        "(Westfall and Young's step-down)."
    )
    tables = (tabulate(scores, heads, tablefmt="github", disable_numparse=True), tabulate(told, heads_told, tablefmt="github"))
    return "\n\n".join((*tables, note))


@cache
def all_comparisons(folder: str):
    """The declared comparisons of a study."""
    return comparisons(report(folder)[1])


@cache
def correlations(folder: str):
    """The rows of the table of correlations, by points and by what they are against, without spaces."""
    return {tuple(name.replace(" ", "-") for name in row[:2]): row for row in correlation_table(report(folder)[1]).rows}


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


def correlation(where: str) -> str:
    """Spearman's correlation with its interval: "mini/grid:all-runs:rho" names its row of the table."""
    folder, points, against = where.split(":")
    _, _, _, value, ends = correlations(folder)[points, against]
    return f"[{value:+.2f}" + (f" ({ends})" if ends else "") + "](#what-the-mechanism-shows)"


def gradient(where: str) -> str:
    """A cell of the table of gradients: "o-lora:moved A" with hyphens for spaces."""
    method, heading = where.split(":")
    found = gradient_table([run for run in report("mini/moves")[1] if run.trace])
    at = [column.heading.replace(" ", "-") for column in found.columns].index(heading)
    return f"{next(row[at] for row in found.rows if row[0] == method):.2g}"


def examples(where: str) -> str:
    """A comparison where too few runs are paired for a test: "real/grid:sfor:seq-lora:AA", with its interval over test examples."""
    folder, one, other, score = where.split(":")
    found, runs = comparison_table(report(folder)[1]), report(folder)[1]
    headings = [column.heading for column in found.columns]
    row = next(dict(zip(headings, row, strict=True)) for row in found.rows if row[:2] == (f"{one} - {other}", score))
    places = [{(run.order, run.seed) for run in runs if run.method == name} for name in (one, other)]
    pairs = len(places[0] & places[1])
    ends = row["95 % examples"]
    low, high = (f"{float(end):+.1f}" for end in str(ends).split(" to "))
    many = "one pair of runs" if pairs == 1 else f"{pairs} pairs of runs"
    return f"[{score} {row['mean']:+.1f} ({low} to {high} over test examples, {many})](#{row_of(folder, one, other, score)})"


VALUES = {"correlation": correlation, "gradient": gradient, "examples": examples}


def filled(text: str) -> str:
    """The page with every region made again from the records."""
    text = re.sub(
        r"(<!-- table (\S+) (\S+) -->\n).*?(<!-- /table -->)",
        lambda m: f"{m[1]}{table(m[2], m[3])}\n{m[4]}",
        text,
        flags=re.S,
    )
    for make in (selections, chance, lead, precision, brake, ranks, rows, unaligned):
        name = make.__name__
        pattern = rf"(<!-- {name} (\S+) -->\n).*?(<!-- /{name} -->)"
        text = re.sub(pattern, lambda m, make=make: f"{m[1]}{make(m[2])}\n{m[3]}", text, flags=re.S)
    text = re.sub(
        r"<!-- test (\S+) (\S+) (\S+) (\S+) -->.*?<!-- /test -->",
        lambda m: f"<!-- test {m[1]} {m[2]} {m[3]} {m[4]} -->{test(*m.groups())}<!-- /test -->",
        text,
        flags=re.S,
    )
    return re.sub(
        r"<!-- value (\S+) (\S+) -->.*?<!-- /value -->",
        lambda m: f"<!-- value {m[1]} {m[2]} -->{VALUES[m[1]](m[2])}<!-- /value -->",
        text,
        flags=re.S,
    )


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
