"""Fills the tables of docs/ whose rows are tests with what the tests found:  python tools/fill_tables.py RESULTS

RESULTS: one JSON line a row, as `ANCHORLORA_TABLES=RESULTS pytest tests/loops` writes them (see `make tables`). A table of which
RESULTS has no row stays as it is.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from tabulate import tabulate

DOCS = Path("docs")


def loops(lines: list[dict]) -> str:
    """One line a row of tests/loops/cases.py, in its order, the last that was written."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from loops.cases import ROWS

    found = {(x["loop"], x["parallelism"], x["optimizer"]): x for x in lines}
    missing = [str(row) for row in ROWS if (row.loop, row.parallelism, row.optimizer) not in found]
    if missing:
        raise SystemExit(f"no result of {', '.join(missing)}; run make tables where everything of the test extra is installed")
    rows = []
    for row in ROWS:
        line = found[row.loop, row.parallelism, row.optimizer]
        results = line["results"]
        what = results if isinstance(results, str) else f"rho {max(rho for rho, _ in results.values()):.1e}"
        rows.append([line["loop"], line["parallelism"], line["optimizer"], line["outcome"], what])
    return table(rows, ["loop", "parallelism", "optimizer", "outcome", "found"])


def guards(lines: list[dict]) -> str:
    """What moves a layer, refused and stopped first."""
    order = ("refused", "stopped", "preserved")
    found = {line["what"]: line for line in lines if not line["what"].startswith("PEFT: ")}
    rows = sorted(found.values(), key=lambda line: order.index(line["outcome"]))
    return table(
        [[x["what"], _ratio(x["rho"]), x["outcome"], x["said"]] for x in rows],
        ["what happens", "true rho, nobody looking", "outcome", "what is said"],
    )


def catalog(lines: list[dict]) -> str:
    """PEFT's options, preserved ones first."""
    found = {line["what"]: line for line in lines if line["what"].startswith("PEFT: ")}
    rows = sorted(found.values(), key=lambda line: (line["outcome"] != "preserved", line["what"]))
    return table(
        [[x["what"].removeprefix("PEFT: "), x["outcome"], x["said"] or f"true rho {_ratio(x['rho'])}"] for x in rows],
        ["option", "outcome", "found"],
    )


def architectures(lines: list[dict]) -> str:
    """One line a case of tests/architectures/cases.py, in its order; what is refused once for all layers."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from architectures.cases import CASES

    found = {(x["type"], x["layers"]): x for x in lines}
    rows = []
    for case in CASES:
        if case.of.refused and case.layers != "attention":
            continue
        line = found.get((case.of.model_type, "any" if case.of.refused else case.layers))
        if line is None:
            raise SystemExit(f"no result of {case}; run make tables")
        start = [line["of"], f"`{line['type']}`", line["layers"]]
        if case.of.refused:
            rows.append([*start, "-", *["refused"] * 4])
        else:
            rows.append([*start, " ".join(line["adapted"]), *(line[what] for what in ("protect", "cores", "run", "export"))])
    return table(rows, ["model", "type", "targets", "adapted layers", "protect", "cores", "run", "export"])


def table(rows: list[list[str]], headers: list[str]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return tabulate(escaped, headers, tablefmt="github", disable_numparse=True)


def _ratio(rho: float | None) -> str:
    return "-" if rho is None else f"{rho:.2f}" if rho >= 0.01 else f"{rho:.1e}"


TABLES: dict[str, tuple[str, str, Callable[[list[dict]], str]]] = {
    "loops": ("loops.md", "loops", loops),
    "guards": ("guarded.md", "guards", guards),
    "catalog": ("guarded.md", "guards", catalog),
    "architectures": ("architectures.md", "architectures", architectures),
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
