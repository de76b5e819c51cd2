"""Fills the table of docs/lab/reliability.md with what tests/faults counted:  python tools/fill_reliability.py RESULTS

`make faults` calls it. A run that failed anywhere, or was not of all tests, leaves the page as it was.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tabulate import tabulate

PAGE = Path("docs/lab/reliability.md")
WHOLE = ["tests/faults"]  # what pytest must have been asked for


@dataclass(frozen=True)
class Row:
    """One line of the table; least: the numbers that it must reach, by the name of the count."""

    what: str
    said: str
    least: dict[str, int] = field(default_factory=dict)


ROWS = {
    "resume": Row(
        "a run is stopped and taken up again",
        "{methods} methods, {steps} drawn steps ({partly} of them with a partly filled store of rows) and {boundaries} moments at "
        "boundaries: {equal} ended bitwise as the run that was not stopped",
        {"methods": 17, "steps": 17 * 20},
    ),
    "items": Row(
        "an item of the state is left out, is as a task begins with it, or has another value",
        "{items} tried, {fresh} of them in a fresh process: {detected} refused, or seen in how the run ended",
        {"items": 120, "fresh": 60},
    ),
    "tensors": Row(
        "one tensor of the state is left out or zero, every one in turn", "{items} tried: {detected} refused, or with another end"
    ),
    "kills": Row(
        "`kill -9`",
        "{kills} kills, {inside} inside a save: {unreadable} unreadable, {lost} acknowledged states lost; the most work lost was "
        "{most_steps_lost} steps with up to {most_interval} between two saves, and never more than one interval",
        {"kills": 200, "inside": 50},
    ),
    "damage": Row(
        "a file of the run is truncated, emptied, one bit flipped, deleted, or of another run",
        "{damages} damages: {named} named; {went_on} runs went on and ended bitwise the same, {stopped} stopped with one line",
        {"damages": 150},
    ),
    "finished": Row(
        "the same to a finished run, with and without its `state/`, and every command that reads it",
        "{damages} damages: {named} named, with exit status 2 and nothing written",
        {"damages": 400},
    ),
    "bits": Row("a drawn bit of a drawn file is flipped", "{damages} bits: {named} named", {"damages": 190}),
    "inputs": Row("the same to a file of the model or of the data", "{damages} damages: {named} named", {"damages": 60}),
    "writes": Row(
        "a write is refused, every one in turn",
        "{refused} of the {most_writes} writes of a run: {told} with exit status 1, the state before it intact, no temporary, "
        "and the same end",
        {"refused": 300},
    ),
    "signals": Row(
        "SIGTERM, SIGINT, SIGUSR1 at random moments",
        "{signals} signals, {accumulating} between the micro-batches of a step and {answering} while tasks were answered: {saved} "
        "exit statuses 75, the slowest after {most_seconds:.1f} s; {equal} of {runs} runs ended bitwise the same",
        {"signals": 60, "accumulating": 3, "answering": 3},
    ),
    "early": Row(
        "the same signals before anything is learned",
        "{signals} signals, {early} of them while nothing was learned yet: {stopped} exit statuses 75, the slowest after "
        "{most_seconds:.1f} s",
        {"signals": 60, "early": 30},
    ),
    "readers": Row(
        "mutated files to every reader",
        "{files} files of {readers} kinds: {read} read, {refused} refused in words; {tracebacks} tracebacks, {outside} files "
        "outside their folder, the slowest {most_seconds:.1f} s of a processor",
        {"files": 20_000},
    ),
    "words": Row(
        "hostile words through whole reports",
        "{words} words: {elements} elements of a page, {links} links, {formulas} formulas and {controls} control characters "
        "came of them",
        {"words": 30},
    ),
}
# what is counted in tests, not in figures: row -> files
PASSED = {
    "hooks removed, parameters replaced, precision changed, numbers not finite": ("test_watch", "test_not_finite"),
    "two processes on one directory, one of them suspended or dead; other software": ("test_lease", "test_other_software"),
}


def results_of(path: Path) -> tuple[dict[str, dict[str, float]], dict]:
    """(the counts of each row, how the session ended).  Stops with what is missing unless everything was run and passed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    ends = [line for line in lines if "status" in line]
    if len(ends) != 1:
        raise SystemExit(f"{path} holds the end of {len(ends)} sessions, not of one; run make faults")
    if ends[0]["status"] != 0:
        raise SystemExit(f"pytest ended with status {ends[0]['status']}; the table stays as it was")
    left_out = [name for line in lines for name in line.get("left_out", [])]
    if left_out or ends[0]["asked_for"] != WHOLE:
        raise SystemExit(
            f"only a part was run ({', '.join(ends[0]['asked_for'])}; left out: {len(set(left_out))}); run make faults"
        )
    counts: dict[str, dict[str, float]] = {}
    for line in lines:
        if "figure" in line:
            added(counts.setdefault(line["figure"], {}), line["counts"])
    for name, row in ROWS.items():
        if name not in counts:
            raise SystemExit(f"{name}: no figure; the table stays as it was")
        short = [f"{key} {counts[name].get(key, 0)} of {n}" for key, n in row.least.items() if counts[name].get(key, 0) < n]
        if short:
            raise SystemExit(f"{name}: {', '.join(short)}; the table stays as it was")
    return counts, ends[0]


def added(total: dict[str, float], counts: dict[str, float]) -> None:
    for key, value in counts.items():
        total[key] = max(total.get(key, value), value) if key.startswith("most_") else total.get(key, 0) + value


def table(counts: dict[str, dict[str, float]], end: dict) -> str:
    rows = [[row.what, row.said.format(**counts[name])] for name, row in ROWS.items()]
    for what, files in PASSED.items():
        missing = [name for name in files if not end["passed"].get(name)]
        if missing:
            raise SystemExit(f"no test of {', '.join(missing)} has passed; the table stays as it was")
        rows.append([what, f"{sum(end['passed'][name] for name in files)} tests of {' and '.join(f'`{n}`' for n in files)}"])
    under = ", ".join([end["date"], *(f"{name} {version}" for name, version in end["versions"].items()), end["cpu"]])
    total = f"{sum(end['passed'].values())} tests passed and {sum(end['skipped'].values())} were skipped"
    return tabulate(rows, ["what happens", "what was counted"], tablefmt="github") + f"\n\n{under}; {total}.\n"


def filled(page: str, path: Path) -> str:
    before, _, rest = page.partition("<!-- figures -->\n")
    return f"{before}<!-- figures -->\n{table(*results_of(path))}<!-- /figures -->{rest.partition('<!-- /figures -->')[2]}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    PAGE.write_text(filled(PAGE.read_text(), Path(sys.argv[1])))
