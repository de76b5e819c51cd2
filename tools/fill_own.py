"""Write the measured tables of docs/own-methods.md from the records in results/beyond and results/mini/grid; `make docs` runs it.

`<!-- NAME -->` .. `<!-- /NAME -->` holds a table: scores, pairs, unseen, controls, ablation, holdout or cost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from anchorlora.reports.records import Run, find_runs, mean
from anchorlora.scores import PairedTest, paired_tests

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/own-methods.md", ROOT / "results"
OURS = ("fold-16", "fold-8", "sensitive-core", "brake", "rank-split")
LED = OURS[:3]  # those that are compared with every other method
SCORES = ("AA", "LA", "BWT", "FM")
TESTED = ("AA", "LA", "FM")
NAMED = {  # variables of the file that the runs were made with
    "idea.py:sfor_plain": "sfor without ProjectGradient",
    "idea.py:hard_plain": "o-lora-hard without ProjectGradient",
    "idea.py:inc_plain": "inc-lora-hard without ProjectGradient",
    "idea.py:sfor_sensitive": "sfor on a sensitive core",
    "idea.py:seq_brake": "seq-lora with the brake",
    "idea.py:fold_nobrake": "fold-16 without the brake",
    "idea.py:fold_nocore": "fold-16 without a core",
    "idea.py:fold_uniform": "fold-16 from a uniform start",
    "idea.py:old16": "rank 16, the next core alone, k = 8",
    "idea.py:both16k8": "rank 16, both cores, k = 8",
    "idea.py:both16k4": "rank 16, both cores, k = 4",
    "idea.py:both16k4u": "rank 16, both cores, k = 4, uniform start",
    "idea.py:f16m30": "rank 16, both cores, k = 8, mu = 30",
    "idea.py:f16m300": "rank 16, both cores, k = 8, mu = 300",
    "idea.py:old8": "rank 8, the next core alone, k = 4",
    "idea.py:both8k4": "rank 8, both cores, k = 4",
    "idea.py:both8k2": "rank 8, both cores, k = 2",
    "idea.py:both8k2u": "rank 8, both cores, k = 2, uniform start",
    "idea.py:f8m30": "rank 8, both cores, k = 2, mu = 30",
    "idea.py:f8m300": "rank 8, both cores, k = 2, mu = 300",
    "idea.py:sc_plain": "sensitive-core",
    "idea.py:sc_start": "sensitive-core, start from the gradient",
    "idea.py:sc_start_brake": "sensitive-core, start from the gradient, brake of mu = 30",
    "idea.py:brake_start": "brake, start from the gradient",
}
Found = dict[str, dict[tuple[tuple[str, ...], int], Run]]


def runs_in(*folders: str) -> Found:
    """Name -> (order, seed) -> run; a control of rank 16 is named so."""
    found: Found = {}
    for folder in folders:
        for run in find_runs([RESULTS / folder]) if (RESULTS / folder).is_dir() else ():
            name = run.record.method
            name = NAMED.get(name, name) + (", rank 16" if folder == "beyond/controls16" else "")
            found.setdefault(name, {})[tuple(run.order), run.seed] = run
    return found


def means(found: Found) -> str:
    """Scores of each method, the best AA first."""
    rows = []
    for name, runs in found.items():
        values = [mean([getattr(run.record.scores, score) for run in runs.values()]) for score in SCORES]
        rank = {run.record.cost.stored_parameters for run in runs.values()}
        rows.append((name, len(runs), *values, max(rank)))
    rows.sort(key=lambda row: -row[2])
    heads = ("method", "runs", *SCORES, "stored parameters")
    return tabulate(rows, heads, tablefmt="github", floatfmt=".2f")


def tests(found: Found, ones: Sequence[str]) -> dict[tuple[str, str, str], PairedTest]:
    """(method, other, score) -> the test of the paired differences, corrected for all of them."""
    changes: dict[tuple[str, str, str], Mapping] = {}
    for one in ones:
        for other in found:
            places = [place for place in found.get(one, {}) if place in found[other]]
            for score in TESTED if other != one else ():
                if places:
                    changes[one, other, score] = {
                        p: getattr(found[one][p].record.scores, score) - getattr(found[other][p].record.scores, score)
                        for p in places
                    }
    return dict(zip(changes, paired_tests(list(changes.values())), strict=True))


def differences(found: Found, ones: Sequence[str]) -> str:
    """AA, LA and FM of some methods less those of every other, with intervals and the corrected p of AA."""
    results, rows = tests(found, ones), []
    for one in ones:
        for other in found:
            if (one, other, "AA") not in results:
                continue
            cells = []
            for score in TESTED:
                test = results[one, other, score]
                ends = f" ({test.interval[0]:+.1f} to {test.interval[1]:+.1f})" if test.interval else ""
                cells.append(f"{test.mean:+.2f}{ends}")
            rows.append((f"{one} - {other}", results[one, other, "AA"].n, *cells, f"{results[one, other, 'AA'].adjusted:.3f}"))
    heads = ("difference", "pairs", *TESTED, "adjusted p, AA")
    return tabulate(rows, heads, tablefmt="github", disable_numparse=True)


def cost() -> str:
    """Bytes that a method keeps of its past beside the adapter, and what the adapter stores."""
    rows = []
    for name, runs in runs_in("mini/grid", "beyond/grid").items():
        first = next(iter(runs.values())).record
        if name in (*OURS, "sfor", "o-lora-hard", "lwf", "ewc", "replay"):
            largest = max(
                d.rho / max(1e-7, 3 * d.rho_floor) for run in runs.values() for d in run.record.drift if d.rho is not None
            )
            rows.append((name, first.cost.stored_parameters, first.cost.history_bytes, f"{largest:.2g}"))
    heads = ("method", "stored parameters, 4 tasks", "history, bytes", "largest rho over its tolerance")
    return tabulate(rows, heads, tablefmt="github", disable_numparse=True)


TABLES: dict[str, Callable[[], str]] = {
    "scores": lambda: means(runs_in("mini/grid", "beyond/grid")),
    "pairs": lambda: differences(runs_in("mini/grid", "beyond/grid"), LED),
    "unseen": lambda: means(runs_in("beyond/unseen")),
    "unseen-pairs": lambda: differences(runs_in("beyond/unseen"), LED),
    "controls": lambda: means(runs_in("beyond/grid", "beyond/controls", "beyond/controls16")),
    "ablation": lambda: means({n: r for n, r in runs_in("beyond/grid", "beyond/ablation").items() if n.startswith("fold-16")}),
    "holdout": lambda: means(runs_in("beyond/holdout", "beyond/holdout-mu", "beyond/holdout-push")),
    "cost": cost,
}


def filled(page: str) -> str:
    """The page with every table made again from the records."""
    for name, make in TABLES.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        page = re.sub(pattern, lambda m, make=make: f"{m[1]}{make()}\n{m[2]}", page, flags=re.S)
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
