"""The tables of docs/lab/own-methods.md and README.md on our own methods, from results/beyond and results/mini/grid.

Also the means that `anchorlora methods` shows, src/anchorlora/methods/measured.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scipy import stats  # comes with the extra "eval", as scikit-learn needs it
from tabulate import tabulate

from anchorlora.cli.methods import CHOICES, HEADS, choice_rows, meaning
from anchorlora_lab.report.records import Run, find_runs, mean

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
OURS = ("fold-16", "fold-8", "sensitive-core", "brake", "rank-split")
LED = OURS[:3]  # those that are compared with every other method
SCORES = ("AA", "LA", "BWT", "FM")
LEVEL = 0.05
NAMED = {  # variants in the file that the runs were made with
    "sfor-plain": "sfor without ProjectGradient",
    "hard-plain": "o-lora-hard without ProjectGradient",
    "inc-plain": "inc-lora-hard without ProjectGradient",
    "sfor-sensitive": "sfor on a sensitive core",
    "seq-brake": "seq-lora with the brake",
    "fold-16-no-brake": "fold-16 without the brake",
    "fold-16-no-core": "fold-16 without a core",
    "fold-16-uniform": "fold-16 from a uniform start",
    "old16": "rank 16, the next core alone, k = 8",
    "both16k8": "rank 16, both cores, k = 8",
    "both16k4": "rank 16, both cores, k = 4",
    "both16k4u": "rank 16, both cores, k = 4, uniform start",
    "f16m30": "rank 16, both cores, k = 8, mu = 30",
    "f16m300": "rank 16, both cores, k = 8, mu = 300",
    "old8": "rank 8, the next core alone, k = 4",
    "both8k4": "rank 8, both cores, k = 4",
    "both8k2": "rank 8, both cores, k = 2",
    "both8k2u": "rank 8, both cores, k = 2, uniform start",
    "f8m30": "rank 8, both cores, k = 2, mu = 30",
    "f8m300": "rank 8, both cores, k = 2, mu = 300",
    "nested": "sensitive-core that holds the core before it, 4 new directions a task",
    "equal-weights": "fold-16, tasks weighted alike",
    "soft1": "soft projection, mu = 1 % of the largest eigenvalue",
    "soft10": "soft projection, mu = 10 %",
    "beside-replay": "fold-16 with replay of 500 examples",
    "f12": "rank 12, k = 6",
    "f24": "rank 24, k = 12",
    "f32": "rank 32, k = 16",
    "replay-all-5": "replay of all examples, 5 %",
    "replay-all-25": "replay of all examples, 25 %",
    "replay-all-100": "replay of all examples, 100 %",
}
OTHER = {  # what a folder's runs have in common
    "beyond/controls16": ", rank 16",
    "beyond/holdout-linear": ", all linear layers",
    "real/pairs-64": " with a history of rank 64",
}
ROWS_AT_RATES = {
    "seq-lora-scaled-0.5": "seq-lora, each update scaled by 0.5",
    "seq-lora-scaled-0.7": "seq-lora, each update scaled by 0.7",
    "replay-5": "replay, 5 %",
    "replay-25": "replay, 25 %",
}
NEIGHBORS = "beyond/neighbors"
LED_BESIDE_NEIGHBORS = ("fold-16", "o-lora-hard", "sfor")
CONTROLS = ("beyond/grid", "beyond/controls", "beyond/controls16", "beyond/controls-replay")
COSTS = ("mini/cost", "beyond/cost", "beyond/cost2")  # a later folder counts where both have a method
Found = dict[str, dict[tuple[tuple[str, ...], int], Run]]


def relative_times(*folders: str) -> dict[str, float]:
    """Return the training time of each method over seq-lora's: the mean over the orders and seeds that both have in a folder."""
    times: dict[str, float] = {}
    for folder in folders:
        found = runs_in(folder)
        seconds = {name: {p: sum(run.record.cost.train_seconds) for p, run in runs.items()} for name, runs in found.items()}
        plain = seconds["seq-lora"]
        times |= {name: mean([each[p] / plain[p] for p in each if p in plain]) for name, each in seconds.items()}
    return times


def choices_table() -> str:
    """Return the choices as a Markdown table."""
    rows = [(have, want, f"`{method}`", *rest) for have, want, method, *rest in choice_rows()]
    align = ["left" if i < 3 else "right" for i in range(len(HEADS))]  # words, then numbers
    return tabulate(rows, HEADS, tablefmt="pipe", disable_numparse=True, colalign=align)


def runs_in(*folders: str) -> Found:
    """Name -> (order, seed) -> run, with what a folder's runs have in common."""
    found: Found = {}
    for folder in folders:
        for run in find_runs([RESULTS / folder]):
            name = run.method
            name = NAMED.get(name.replace("_", "-"), name) + OTHER.get(folder, "")
            found.setdefault(name, {})[tuple(run.order), run.seed] = run
    return found


def means(found: Found) -> str:
    """Scores of each method that ran everywhere, the best AA first."""
    rows, places = [], max(map(len, found.values()))
    for name, runs in found.items():
        if len(runs) < places:
            continue  # its mean would be over other orders and seeds
        values = [mean([getattr(run.record.scores, score) for run in runs.values()]) for score in SCORES]
        rank = {run.record.cost.stored_parameters for run in runs.values()}
        rows.append((name, len(runs), *values, max(rank)))
    rows.sort(key=lambda row: -row[2])
    heads = ("method", "runs", *SCORES, "stored parameters")
    return tabulate(rows, heads, tablefmt="github", floatfmt=".2f")


def differences(found: Found, ones: Sequence[str]) -> str:
    """AA of some methods less that of every other, paired by order and seed: Student's t, Holm's correction over the table."""
    changes: dict[tuple[str, str], list[float]] = {}
    for other in found:
        for one in ones:
            places = [place for place in found.get(one, {}) if place in found[other]]
            if other != one and len(places) > 1:
                both = ([found[name][place].record.scores.AA for place in places] for name in (one, other))
                changes[other, one] = [a - b for a, b in zip(*both, strict=True)]
    found_p = {pair: stats.ttest_1samp(values, 0.0).pvalue for pair, values in changes.items()}
    clear, left = set(), len(found_p)
    for pair, p in sorted(found_p.items(), key=lambda item: item[1]):
        if p * left >= LEVEL:
            break
        clear.add(pair)
        left -= 1
    rows = []
    for other in dict.fromkeys(other for other, _ in changes):
        cells = []
        for one in ones:
            values = changes.get((other, one))
            if values is None:
                cells.append("")
                continue
            middle, half = mean(values), stats.t.ppf(1 - LEVEL / 2, len(values) - 1) * stats.sem(values)
            star = " *" if (other, one) in clear else ""
            cells.append(f"{middle:+.1f} ({middle - half:+.1f} to {middle + half:+.1f}){star}")
        rows.append((other, max(len(v) for (o, _), v in changes.items() if o == other), *cells))
    return tabulate(rows, ("AA against", "pairs", *ones), tablefmt="github", disable_numparse=True)


def at_best_rates(tests: str = "rates/test") -> Found:
    """What benchmarks/best_rates.py wrote: each row at the rate that a holdout chose, which its name has."""
    found: Found = {}
    for place in sorted((RESULTS / tests).glob("*")):
        for run in find_runs([place]):
            rate = run.setting("training", "learning_rate")
            found.setdefault(f"{ROWS_AT_RATES.get(place.name, place.name)}, {rate:.0e}", {})[tuple(run.order), run.seed] = run
    return found


def on_real_text_at_best_rates() -> Found:
    """The same on real text, over the orders and seeds that all rows have; a row whose rate is 1e-3 has the runs of real/grid."""
    found, stored = at_best_rates("rates/real-test"), runs_in("real/grid")
    for place in sorted((RESULTS / "rates/real-holdout").glob("*")):
        if not (RESULTS / "rates/real-test" / place.name).is_dir():
            found[f"{place.name}, 1e-03"] = stored[place.name]
    places = set.intersection(*map(set, found.values()))
    return {name: {place: run for place, run in runs.items() if place in places} for name, runs in found.items()}


def differences_at_best_rates(found: Found) -> str:
    """AA of fold-64 less that of every other row, each at its best rate."""
    return differences(found, [name for name in found if name.startswith("fold-64")])


def of_osf() -> Found:
    """What `python -m benchmarks.osf` wrote, as runs: OSF trains weights, so it is no method of a run."""
    found: Found = {}
    for path in sorted((RESULTS / "beyond/osf").glob("*/*.json")):
        said, name = json.loads(path.read_text()), {"osf": "OSF of PEFT", "osf-projected": "OSF, steps projected"}[path.parent.name]
        cost = SimpleNamespace(stored_parameters=said["stored_parameters"])
        record: Any = SimpleNamespace(scores=SimpleNamespace(**said["scores"]), cost=cost)
        found.setdefault(name, {})[tuple(said["order"]), said["seed"]] = SimpleNamespace(record=record)  # type: ignore[assignment]
    return found


def with_neighbors() -> Found:
    """The neighbors, and what they are compared with."""
    led = {name: runs for name, runs in runs_in("mini/grid", "beyond/grid").items() if name in LED_BESIDE_NEIGHBORS}
    return led | runs_in(NEIGHBORS) | of_osf()


def beside_make_run() -> str:
    """The methods of `make run` and fold-16 over all orders and seeds, with the difference in AA."""
    found, rows = runs_in("mini/grid", "beyond/grid"), []
    for name in ("seq-lora", "sfor", "o-lora", "o-lora-hard", "fold-16"):
        values = [mean([getattr(run.record.scores, score) for run in found[name].values()]) for score in ("AA", "LA", "FM")]
        less = ""
        if name != "fold-16":
            changes = [found["fold-16"][place].record.scores.AA - run.record.scores.AA for place, run in found[name].items()]
            half = stats.t.ppf(1 - LEVEL / 2, len(changes) - 1) * stats.sem(changes)
            less = f"{mean(changes):+.1f} ({mean(changes) - half:+.1f} to {mean(changes) + half:+.1f})"
        rows.append((name, len(found[name]), *(f"{value:.2f}" for value in values), less))
    heads = ("method", "runs", "AA", "LA", "FM", "AA of fold-16 less this, 95 %")
    return tabulate(rows, heads, tablefmt="github", disable_numparse=True)


def goal() -> str:
    """In how many places AA is above that of every method of the paper, LA less that of seq-lora, and FM: what was aimed at."""
    found, paper, rows = runs_in("mini/grid", "beyond/grid"), runs_in("mini/grid"), []
    for name in OURS:
        scores = {place: run.record.scores for place, run in found[name].items()}
        ahead = [all(scores[place].AA > runs[place].record.scores.AA for runs in paper.values()) for place in scores]
        less = mean([scores[place].LA - paper["seq-lora"][place].record.scores.LA for place in scores])
        rows.append((name, f"{sum(ahead)} of {len(ahead)}", f"{less:+.1f}", f"{mean([each.FM for each in scores.values()]):.1f}"))
    heads = ("aimed at", "AA above all of the paper: 9 of 9", "LA less seq-lora's: -1 or more", "FM: 1.5 or less")
    return tabulate(rows, heads, tablefmt="github", disable_numparse=True)


def cost() -> str:
    """Bytes that a method keeps of its past beside the adapter, what the adapter stores, and how long it trains."""
    rows, times = [], relative_times(*COSTS)
    for name, runs in runs_in("mini/grid", "beyond/grid").items():
        first = next(iter(runs.values())).record
        if name in (*OURS, "sfor", "o-lora-hard", "lwf", "ewc", "replay"):
            largest = max(
                d.rho / max(1e-7, 3 * d.rho_floor) for run in runs.values() for d in run.record.drift if d.rho is not None
            )
            stored = (f"{first.cost.stored_parameters:,}", f"{first.cost.history_bytes / 1000:,.0f}")
            rows.append((name, f"{times[name]:.2f}", *stored, f"{largest:.2g}"))
    heads = ("method", "training time", "stored parameters, 4 tasks", "history, kB", "largest rho over its tolerance")
    return tabulate(rows, heads, tablefmt="github", disable_numparse=True)


def measured() -> str:
    """The means that the program itself shows, as JSON: of the methods of `CHOICES`, over all runs."""
    found, kept = runs_in("mini/grid", "beyond/grid", "beyond/ranks", "beyond/neighbors"), {}
    most = max(map(len, found.values()))
    for name in CHOICES:
        runs = [run.record for run in found[name].values()]
        assert len(runs) == most, f"{name} did not run everywhere"
        scores = {score: round(mean([getattr(run.scores, score) for run in runs]), 4) for score in ("AA", "LA", "FM")}
        kept[name] = {**scores, "stored_parameters": max(run.cost.stored_parameters for run in runs)}
    return json.dumps({"recipe": "mini", "runs": most, "methods": kept, "real": measured_on_real_text()}, indent=1) + "\n"


def measured_on_real_text() -> dict[str, Any]:
    """AA of the same methods and of seq-lora on real text, over the orders and seeds that all of them have."""
    names = ("seq-lora", *CHOICES)
    found = runs_in("real/grid", "real/order1")
    places = sorted(set.intersection(*(set(found[name]) for name in names)))
    assert len({order for order, _ in places}) == 1, "the means are told as those of one order"
    return {
        "runs": len(places),
        "AA": {name: round(mean([found[name][place].record.scores.AA for place in places]), 4) for name in names},
    }


def per_task() -> str:
    """Accuracy on each task of the real text, wherever in an order it comes: right after it was learned and after the last task."""
    found = runs_in("real/grid")
    order = next((run.order for runs in found.values() for run in runs.values()), ())
    rows = []
    for name, runs in sorted(found.items(), key=lambda item: -mean([run.record.scores.AA for run in item[1].values()])):
        cells = []
        for task in order:
            spots = [(run.record.accuracy, run.order.index(task)) for run in runs.values()]
            cells.append(f"{mean([a[i][i] for a, i in spots]):.0f} -> {mean([a[-1][i] for a, i in spots]):.0f}")
        rows.append((name, len(runs), *cells))
    return tabulate(rows, ("learned -> at the end", "runs", *order), tablefmt="github", disable_numparse=True)


def long_tasks() -> str:
    """Accuracy on each task of the long sequence, learned and at the end; tasks that seq-lora does not learn are marked."""
    found = {name: next(iter(runs.values())).record for name, runs in runs_in("real/pairs", "real/pairs-64").items()}
    names, plain = sorted(found, key=lambda name: -found[name].scores.AA), found["seq-lora"]
    rows = []
    for i, task in enumerate(plain.order):
        counts = plain.labels[task]
        most = max(counts, key=lambda label: counts[label].train)
        majority = 100 * counts[most].test / sum(count.test for count in counts.values())
        mark = " †" if plain.accuracy[i][i] < majority + 10 else ""
        cells = [f"{found[name].accuracy[i][i]:.0f} -> {found[name].accuracy[-1][i]:.0f}" for name in names]
        rows.append((f"{i + 1}. {task}{mark}", f"{majority:.0f}", *cells))
    return tabulate(rows, ("task", "majority label", *names), tablefmt="github", disable_numparse=True)


def real_in_words() -> str:
    """What four methods reach on real text at one rate, and with replay at the best rate of each, over the places that all have."""
    names = ("seq-lora", "o-lora-hard", "sensitive-core", "fold-64")
    found = runs_in("real/grid")
    places = set.intersection(*(set(found[name]) for name in names))
    ends = [f"`{name}` {mean([found[name][place].record.scores.AA for place in places]):.0f} %" for name in names]
    best = {name.rpartition(", ")[0]: runs for name, runs in on_real_text_at_best_rates().items()}
    tuned = {name: f"{mean([run.record.scores.AA for run in runs.values()]):.0f}" for name, runs in best.items()}
    numbers = ", ".join(tuned[name] for name in names)
    return (
        f"{', '.join(ends[:-1])}, and {ends[-1]} (AA at one rate, {len(places)} runs each); [each at the rate that a holdout chose]"
        f"(docs/lab/own-methods.md#on-real-text): {numbers}, and replay of 25 % {tuned['replay, 25 %']} "
        f"({len(best['fold-64'])} runs each)."
    )


TABLES: dict[str, Callable[[], str]] = {
    "all-scores": lambda: means(runs_in("mini/grid", "beyond/grid", "beyond/ranks")),
    "pairs": lambda: differences(runs_in("mini/grid", "beyond/grid"), LED),
    "goal": goal,
    "unseen": lambda: means(runs_in("beyond/unseen")),
    "unseen-pairs": lambda: differences(runs_in("beyond/unseen"), LED),
    "controls": lambda: means(runs_in(*CONTROLS)),
    "controls-pairs": lambda: differences(runs_in(*CONTROLS), LED),
    "rates": lambda: means(at_best_rates()),
    "rates-pairs": lambda: differences_at_best_rates(at_best_rates()),
    "real-rates": lambda: means(on_real_text_at_best_rates()),
    "real-rates-pairs": lambda: differences_at_best_rates(on_real_text_at_best_rates()),
    "neighbors": lambda: means(with_neighbors()),
    "neighbors-pairs": lambda: differences(with_neighbors(), LED_BESIDE_NEIGHBORS),
    "ablation": lambda: means({n: r for n, r in runs_in("beyond/grid", "beyond/ablation").items() if n.startswith("fold-16")}),
    "ablation-pairs": lambda: differences(
        {n: r for n, r in runs_in("beyond/grid", "beyond/ablation").items() if n.startswith("fold-16")}, ("fold-16",)
    ),
    "holdout": lambda: means(runs_in("beyond/holdout", "beyond/holdout-mu")),
    "further": lambda: means(
        runs_in("beyond/holdout", "beyond/holdout-further", "beyond/holdout-further2", "beyond/holdout-linear")
    ),
    "linear": lambda: means(runs_in("beyond/linear")),
    "linear-pairs": lambda: differences(runs_in("beyond/linear"), ("fold-16",)),
    "real": lambda: means(runs_in("real/grid")),
    "real-per-task": per_task,
    "known-model": lambda: means(runs_in("smollm2/grid")),
    "long": lambda: means(runs_in("real/pairs", "real/pairs-64")),
    "long-tasks": long_tasks,
    "cost": cost,
    "own": beside_make_run,
    "real-in-words": real_in_words,
    "which-one": lambda: f"{choices_table()}\n\n{meaning()}",
}
