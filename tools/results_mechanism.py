"""Regions of docs/lab/results-mini.md on experiments of their own: brake, sizes and rows of cores, precision, and correlations.

The rules that they follow are in docs/lab/log.md, 2026-11-23.
"""

import random
import statistics
from functools import cache

from tabulate import tabulate

from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.paired_tests import mean_interval, paired_tests
from anchorlora_lab.report.published import printed_endpoint
from anchorlora_lab.report.records import find_runs, mean
from anchorlora_lab.report.tables.mechanism import correlation_table, gradient_table
from anchorlora_lab.report.tables.pairs import TESTED
from results_studies import RESULTS, report


def precision(folder: str) -> str:
    """rho that lowered arithmetic leaves, by method, beside what the paper prints."""
    names = {"float32": "float32", "tf32": "TF32 products", "bf16_core": "core in bfloat16"}
    found, rows = {run.method: run.record.drift for run in find_runs([RESULTS / folder])}, []
    for host, method in (("sfor", "sfor"), ("hard", "o-lora-hard")):
        for kind, words in names.items():
            rho = [f"{d.rho:.1e}" for d in found[f"{host}_{kind}"]]
            rows.append((method, words, *rho, f"{printed_endpoint(method, 'rho'):.0e}"))
    headings = ("method", "arithmetic of the projection", "rho, task 2", "task 3", "task 4", "paper prints")
    return tabulate(rows, headings, tablefmt="github", disable_numparse=True)


def unaligned(folder: str) -> str:
    """rho of a change less what an unaligned change would read, for methods without exact protection: means with intervals."""
    grid, rows = Grid(report(folder)[1]), []
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


def lowered(where: str) -> str:
    """By how much one method's rho at the end is below another's, over seeds: "real/trace:o-lora:o-lora-effective"."""
    study, one, other = where.split(":")
    last = {(run.method, run.seed): run.record.drift[-1].rho for run in report(study)[1] if run.record.drift}
    less = sorted(100 * (1 - last[other, seed] / rho) for (method, seed), rho in last.items() if method == one)
    return f"{less[0]:.2g} to {less[-1]:.2g} %"


BRAKE = (  # what is compared, and what it is called
    ("total", "o-lora", "inc-lora"),
    ("brake", "second_moment", "inc-lora"),
    ("rest", "o-lora", "second_moment"),
    ("rescaled", "rescaled", "inc-lora"),
)
QUANTITIES = ("LA", "FM", "AA", "D_eff")


def measured(run, name: str) -> float:
    """A score, or the mean size of the change of the tasks from the second on."""
    return mean([d.d_eff for d in run.record.drift]) if name == "D_eff" else getattr(run.record.scores, name)


@cache
def brake_tests(folder: str):
    """(what, quantity) -> the test of its paired differences, and the differences by (order, seed)."""
    there = {(run.method, run.order, run.seed): run for run in find_runs([RESULTS / folder])}
    changes = {}
    for what, one, other in BRAKE:
        places = [place for method, *place in there if method == one]
        for name in QUANTITIES:
            changes[what, name] = {tuple(p): measured(there[(one, *p)], name) - measured(there[(other, *p)], name) for p in places}
    return dict(zip(changes, paired_tests(list(changes.values())), strict=True)), changes


def brake_rho(folder: str) -> dict[str, list[float]]:
    """Paired differences of rho, mean over tasks from the second on, by what is compared."""
    rho = {(run.method, run.order, run.seed): mean([d.rho for d in run.record.drift]) for run in find_runs([RESULTS / folder])}
    places = [place for method, *place in rho if method == "second_moment"]
    return {what: [rho[(one, *p)] - rho[(other, *p)] for p in places] for what, one, other in BRAKE}


def verdict(tests, name: str) -> str:
    """The rule of docs/lab/log.md, 2026-11-23, for one quantity."""
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
    ratio = [(changes["brake", name][p], total) for p, total in changes["total", name].items()]
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
    for name in QUANTITIES:
        for what, one, other in BRAKE:
            test = tests[what, name]
            ends = f"{test.interval[0]:+.2f} to {test.interval[1]:+.2f}"
            told = verdict(tests, name) if what == "total" else ""
            part = share(changes, name) if what == "brake" and tests["total", name].adjusted < LEVEL else ""
            rows.append((name, f"{one} - {other}", what, test.n, f"{test.mean:+.2f}", ends, f"{test.adjusted:.3g}", part, told))
    for what, one, other in BRAKE:
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
    return f"{tabulate(rows, headings, tablefmt='github', disable_numparse=True)}\n\n{note}"


T95 = 4.30  # Student's, for three pairs


def ranks(folder: str) -> str:
    """The sweep of the cap and of the energy: cores, scores, and the paired difference to the recipe's setting."""
    found = find_runs([RESULTS / folder])
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
            less = [runs[seed].record.scores.AA - usual[seed].record.scores.AA for seed in runs]
            reach = T95 * statistics.stdev(less) / len(less) ** 0.5
            difference = f"{mean(less):+.2f} ({mean(less) - reach:+.2f} to {mean(less) + reach:+.2f})" if most != 20 else ""
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
ROWS_COMPARED = (  # the rule of docs/lab/log.md, 2026-11-23
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
    for run in find_runs([RESULTS / folder, RESULTS / "beyond/grid/sensitive-core"]):
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
def correlations(folder: str):
    """The rows of the table of correlations, by points and by what they are against, without spaces."""
    return {tuple(name.replace(" ", "-") for name in row[:2]): row for row in correlation_table(report(folder)[1]).rows}


def correlation(where: str) -> str:
    """Spearman's correlation with its interval: "mini/grid:all-runs:rho" names its row of the table."""
    folder, points, against = where.split(":")
    _, _, _, value, ends = correlations(folder)[points, against]
    place = "what-the-mechanism-shows" if folder.startswith("mini/") else "was-the-past-touched"
    return f"[{value:+.2f}" + (f" ({ends})" if ends else "") + f"](#{place})"


def gradient(where: str) -> str:
    """A cell of the table of gradients: "o-lora:moved A" with hyphens for spaces."""
    method, heading = where.split(":")
    found = gradient_table([run for run in report("mini/moves")[1] if run.trace])
    at = [column.heading.replace(" ", "-") for column in found.columns].index(heading)
    return f"{next(row[at] for row in found.rows if row[0] == method):.2g}"
