"""Fills the table of docs/loops.md with what tests/loops found:  python tools/fill_loops.py RESULTS   (see `make loops`)."""

import json
import sys
from pathlib import Path

from tabulate import tabulate

PAGE = Path("docs/loops.md")


def table(lines: list[dict]) -> str:
    rows = []
    for line in lines:
        found = line["results"]
        what = found if isinstance(found, str) else f"rho {max(rho for rho, _ in found.values()):.1e}"
        rows.append([line["loop"], line["parallelism"], line["optimizer"], line["outcome"], what.replace("|", "\\|")])
    return tabulate(rows, ["loop", "parallelism", "optimizer", "outcome", "found"], tablefmt="github", disable_numparse=True)


def ordered(lines: list[dict]) -> list[dict]:
    """One line a row, the last one that was written, in the order of tests/loops/cases.py."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from loops.cases import ROWS

    found = {(x["loop"], x["parallelism"], x["optimizer"]): x for x in lines}
    missing = [str(row) for row in ROWS if (row.loop, row.parallelism, row.optimizer) not in found]
    if missing:
        raise SystemExit(f"no result of {', '.join(missing)}; run make loops where everything of the test extra is installed")
    return [found[row.loop, row.parallelism, row.optimizer] for row in ROWS]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    results = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    before, _, rest = PAGE.read_text().partition("<!-- loops -->\n")
    PAGE.write_text(f"{before}<!-- loops -->\n{table(ordered(results))}\n<!-- /loops -->{rest.partition('<!-- /loops -->')[2]}")
