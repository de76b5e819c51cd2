"""Fills the tables of docs/ whose rows are tests with what the tests found:  python tools/fill_tables.py RESULTS

RESULTS: one JSON line a row, as `ANCHORLORA_TABLES=RESULTS pytest tests/loops` writes them (see `make tables`). A table of which
RESULTS has no row stays as it is.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tabulate import tabulate

DOCS = Path("docs")


def loops(lines: list[dict]) -> str:
    """The rows of tests/loops/cases.py; preserved ones together where they differ in the loop or the optimizer alone."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from loops.cases import ROWS

    found = {(x["loop"], x["parallelism"], x["optimizer"]): x for x in lines}
    missing = [str(row) for row in ROWS if (row.loop, row.parallelism, row.optimizer) not in found]
    if missing:
        raise SystemExit(f"no result of {', '.join(missing)}; run make tables where everything of the test extra is installed")
    optimizers: dict[tuple[str, str, str], list[str]] = {}  # (loop, parallelism, what is said if it is refused) -> optimizers
    largest: dict[tuple[str, str, str], float] = {}
    for row in ROWS:
        results = found[row.loop, row.parallelism, row.optimizer]["results"]
        said, rho = (results, 0.0) if isinstance(results, str) else ("", max(rho for rho, _ in results.values()))
        key = (row.loop, row.parallelism, said)
        optimizers.setdefault(key, []).append(row.optimizer)
        largest[key] = max(largest.get(key, 0.0), rho)
    alike: dict[tuple[str, str, str], list[tuple[str, str, str]]] = {}  # loops with the same optimizers are one row
    for key, names in sorted(optimizers.items(), key=lambda item: item[0][2] != ""):
        alike.setdefault((", ".join(names), *key[1:]), []).append(key)
    rows = [
        [
            "; ".join(loop for loop, _, _ in keys),
            parallelism,
            names,
            f"refused: {said}" if said else f"preserved, rho {max(largest[key] for key in keys):.1e}",
        ]
        for (names, parallelism, said), keys in alike.items()
    ]
    return table(rows, ["loops", "parallelism", "optimizers", "outcome"])


def guards(lines: list[dict]) -> str:
    """What moves a layer, refused and stopped first."""
    order = ("refused", "stopped", "preserved")
    found = {line["what"]: line for line in lines if not line["what"].startswith("PEFT: ")}
    rows = sorted(found.values(), key=lambda line: order.index(line["outcome"]))
    return table(
        [[x["what"], _ratio(x["rho"]), x["outcome"]] for x in rows], ["what happens", "true rho without the checks", "outcome"]
    )


def catalog(lines: list[dict]) -> str:
    """PEFT's options, preserved ones first, those that are refused by what the message advises."""
    found = sorted((line for line in lines if line["what"].startswith("PEFT: ")), key=lambda line: line["what"])
    groups: dict[str, list[dict]] = {}
    for line in sorted(found, key=lambda line: line["outcome"] != "preserved"):
        groups.setdefault(line["said"].rpartition("; ")[2], []).append(line)
    rows = [
        [
            ", ".join(line["what"].removeprefix("PEFT: ") for line in group),
            f"refused: {advice}" if advice else f"preserved, true rho {_ratio(max(line['rho'] for line in group))}",
        ]
        for advice, group in groups.items()
    ]
    return table(rows, ["options", "outcome"])


def architectures(lines: list[dict]) -> str:
    """The models of tests/architectures/cases.py, in its order; those with layers of the same names in one row."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from architectures.cases import CASES

    found = {(x["type"], x["layers"]): x for x in lines}
    alike: dict[tuple[str, ...], dict[str, float]] = {}  # layers -> model -> largest rho
    for model in (case.of for case in CASES if case.layers == "attention"):
        its = [found.get((model.model_type, layers)) for layers in (("any",) if model.refused else ("attention", "all-linear"))]
        if None in its:
            raise SystemExit(f"no result of {model.name}; run make tables")
        layers, rho = ("refused", "refused"), 0.0
        if not model.refused:
            if {(line["cores"], line["export"]) for line in its} != {("yes", "cat, svd, merged")}:
                raise SystemExit(f"{model.name}: the page says that cores and every form of export work")
            layers = tuple(" ".join(line["adapted"]) for line in its)
            rho = max(float(line[what].removeprefix("rho ")) for line in its for what in ("protect", "run"))
        alike.setdefault(layers, {})[f"{model.name} (`{model.model_type}`)"] = rho
    rows = [
        ["; ".join(group), *layers, f"{max(group.values()):.1e}" if any(group.values()) else "-"] for layers, group in alike.items()
    ]
    return table(rows, ["models", "attention", "all-linear", "largest rho"])


def table(rows: list[list[str]], headers: list[str]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return re.sub(" {2,}", " ", re.sub("-{4,}", "---", tabulate(escaped, headers, tablefmt="github", disable_numparse=True)))


def _ratio(rho: float | None) -> str:
    return "-" if rho is None else f"{rho:.2f}" if rho >= 0.01 else f"{rho:.1e}"


TABLES: dict[str, tuple[str, str, Callable[[list[dict]], str]]] = {
    "loops": ("supported.md", "loops", loops),
    "guards": ("supported.md", "guards", guards),
    "catalog": ("supported.md", "guards", catalog),
    "architectures": ("supported.md", "architectures", architectures),
}


def fill(page: Path, name: str, text: str) -> None:
    before, opened, rest = page.read_text().partition(f"<!-- {name} -->\n")
    if not opened:
        raise SystemExit(f"{page} has no place <!-- {name} -->")
    page.write_text(f"{before}{opened}{text}\n<!-- /{name} -->{rest.partition(f'<!-- /{name} -->')[2]}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    results = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    for name, (page, kind, made) in TABLES.items():
        lines = [line for line in results if line["table"] == kind]
        if lines:
            fill(DOCS / page, name, made(lines))
