"""`anchorlora status`: what the folder of many runs, or of one, says about them."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path

import click

from anchorlora.cli.console import example, out, print_json


@click.command(short_help="Show which runs are done, running, failed, or left.", epilog=example("anchorlora status runs/grid"))
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(folder: Path, as_json: bool) -> None:
    """Show which runs of a grid, a trace, or a selection are done, running, failed, or left, and when to expect the end.

    Reads only the folder, whichever engine executes the runs. A run that waits in a queue counts as left.
    """
    from anchorlora_lab.grid.folder import seconds_left, states

    runs = states(folder)
    counts = {state: sum(run.state == state for run in runs) for state in ("done", "running", "failed", "left")}
    left = seconds_left(runs)
    end = None if left is None else (datetime.now().astimezone() + timedelta(seconds=left)).isoformat(timespec="seconds")
    if as_json:
        content = {"schema": 1, "folder": str(folder), **counts, "seconds_left": left, "expected_end": end}
        print_json(content | {"runs": [asdict(run) for run in runs]})
        return
    out.print(f"{folder}: " + ", ".join(f"{count} {state}" for state, count in counts.items()) + f" of {len(runs)}")
    for run in runs:
        if run.state == "running":
            out.print(f"running  {run.folder}  {run.doing or 'starting'}")
        elif run.state == "failed":
            out.print(f"failed   {run.folder}  {run.error}")
    if end is not None:
        out.print(f"expected end: {end[:16].replace('T', ' ')}, at the pace so far and {counts['running']} at a time")
    elif counts["left"]:
        out.print("expected end: unknown, since nothing runs" if not counts["running"] else "expected end: unknown as yet")
