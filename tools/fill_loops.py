"""Writes docs/loops.md from what the tests in tests/loops found:  python tools/fill_loops.py RESULTS   (see `make loops`)."""

import json
import sys
from pathlib import Path

from tabulate import tabulate

HEAD = """# Loops: where protection is kept, and where it is refused

Each row is a test in `tests/loops`, and `make loops` writes this page from what the tests found. *kept*: after the training the core saw
no more than rounding explains, rho <= max(1e-7, 3 rho_floor), for SFOR on a learned anchor and for hard protection of a fresh block beside
a history; the number is the larger rho of the two. Rows with AdamW are 200 steps with weight decay 0.1, gradient clipping and a
learning-rate schedule, others 60 (SFTTrainer 200). With two processes (gloo), both also ended with bitwise equal factors. *refused*: an
error when the constraints are attached, or before the first step, with the sentence that is shown.

The model is a Qwen3 of two layers, in float32 on a CPU. Nothing here has been run on a GPU.
"""

TAIL = """
How to attach: `protect(optimizer, scope, constraints)` around a plain or Accelerate loop; `ProtectionCallback(constraints, cores=...)` in
`transformers.Trainer` and TRL; `LightningProtection(constraints, cores=...)` in Lightning. Build the `Scope` after all wrapping. In several
processes make the cores once and load the same file in each: unlike cores are refused.

Under DDP, `Freeze` leaves the frozen factor in the graph with a gradient of zeros, because DDP waits for the gradients of all parameters
that trained when it was built; clipping therefore sees the same norm as in one process. FSDP2 splits A by rows, and the projection
works on rows alone: nothing is sent. `measure(scope)` gathers the factors, so all processes must call it.

While it is attached, protection is looked at on the live parameters after the second step, then every 100 (`check_every`), and at the end.
Taken-off hooks, a replaced optimizer, replaced parameters, or factors that somebody else wrote to end in `ProtectionLost`.
"""


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
    Path("docs/loops.md").write_text(HEAD + "\n" + table(ordered(results)) + "\n" + TAIL)
