"""`anchorlora audit`: measure the change between two checkpoints, with a verdict and advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from anchorlora.cli.check import LABELS
from anchorlora.cli.console import count_option, example, fitted, out, path_option, print_json
from anchorlora.errors import Failed

NUMBERS = {"d_eff": "|ΔW|", "rho": "rho", "bound": "tolerance", "chance": "chance"}
PROTECTED = ("preserved", "unmoved")


@click.command(
    short_help="Measure a change on protected directions, with advice.",
    epilog=example("anchorlora audit adapters/old adapters/new --cores old-cores.safetensors"),
)
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@path_option("--cores", help="Protected directions: a cores.safetensors file of a run.")
@path_option("--data", help="Protected directions: cores of the features that BEFORE computes on this text.")
@count_option("--weights", metavar="K", help="Protected directions: the K leading singular vectors of each weight.")
@click.option("--model", help="Base model for --weights and --data on adapters.  [default: the one that the adapter names]")
@path_option("--html", help="Also write the audit as one HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--fail-if-unprotected", is_flag=True, help="Exit with status 1 unless the protected directions are preserved.")
def audit(before: Path, after: Path, html: Path | None, as_json: bool, fail_if_unprotected: bool, **asked: Any) -> None:
    """Measure how much of the change between two checkpoints lies on protected directions, and name the missing constraint.

    BEFORE and AFTER are runs, tasks of runs, folders of PEFT LoRA adapters (several in one folder are summed), or full weights
    in safetensors. BEFORE may also be the base model. Without --cores, --data or --weights, the protected directions are the rows
    of A in BEFORE or, for full weights, the leading half of the singular vectors of BEFORE.
    """
    from anchorlora.measurement.checkpoints import audit as read

    report = read(before, after, **asked).as_dict()
    if html is not None:
        from anchorlora.pages.audit import render
        from anchorlora.store.files import write_text

        write_text(html, render(report))
    if as_json:
        print_json(report)
    else:
        for line in lines(report):
            out.print(line)
    if fail_if_unprotected and report["overall"]["status"] not in PROTECTED:
        raise Failed(f"{after} is not protected ({report['overall']['status']}): {report['verdict']}")


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the audit as text."""
    from anchorlora.pages.audit import verdict_on

    for name in ("before", "after", "protected", "storage"):
        yield f"{name:10} {report[name]}"
    overall, layers = report["overall"], report["layers"]
    rows = {"all layers": overall, **layers}
    kinds = {row["kind"] for row in rows.values()}
    if len(kinds) == 1:  # once is enough
        yield f"{'starts as':10} {overall['kind']}"
    yield ""
    table = [[name, row["kind"], *(short(row[field]) for field in NUMBERS), _status(row)] for name, row in rows.items()]
    headings = ["layer", "starts as", *NUMBERS.values(), "verdict"]
    if len(kinds) == 1:
        headings, table = [headings[0], *headings[2:]], [[row[0], *row[2:]] for row in table]
    yield fitted(headings, table)
    yield ""
    table = [
        [*LABELS[name], short(condition["value"]), short(condition["bound"]), verdict_on(condition, overall)]
        for name, condition in overall["conditions"].items()
    ]
    if overall["left"] and overall["left"]["rho"] is not None:
        table.append(["left", "|Uᵀ ΔW| / |ΔW|", short(overall["left"]["rho"]), short(overall["left"]["bound"]), ""])
    yield fitted(["condition", "measured", "value", "tolerance", "verdict"], table)
    yield ""
    for name in ("verdict", "advice"):
        yield f"{name}: {report[name]}"
    for note in report["notes"]:
        yield f"note: {note}"


def _status(row: Mapping[str, Any]) -> str:
    return row["status"] + (f" by {row['preserved_by']}" if row["preserved_by"] else "")


def short(value: float | None) -> str:
    """Return a number with two digits."""
    return "-" if value is None else "0" if value == 0 else format(value, ".1e")
