"""The bench: runs in the order of what they tell, each a line of records.jsonl; called again, it goes on with what is left.

DIR/MODEL/records.jsonl   a run a line, appended under a lock; "before" is the model as it was, on each skill
DIR/MODEL/made/           the model's own chats, its cores and what its answers depend on, made once
DIR/MODEL/leases/         a lock a run, so that several processes share the folder; it dies with its process
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from filelock import FileLock, Timeout

from anchorlora.errors import InvalidValue, UnknownName
from anchorlora_lab.frontier.rows import ROWS, Row

SEEDS = (42, 7, 2026)
EPOCHS = 2
RECORDS, BEFORE = "records.jsonl", "before"
VERSIONS = ("torch", "transformers", "peft", "lm_eval")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """A row at one rate, on one skill, with one seed."""

    row: Row
    rate: float
    skill: str
    seed: int

    @property
    def id(self) -> str:
        """Its name in records and leases."""
        return BEFORE + f" {self.skill}" if self.row.name == BEFORE else f"{self.row.name} {self.rate:g} {self.skill} {self.seed}"


def planned(rows: Sequence[Row], skills: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """Return all runs, the most informative first: a tier's rows on every skill, then its next seed beside the next tier."""
    begin = [Run(Row(BEFORE, rates=(0.0,), tier=0), 0.0, skill, seeds[0]) for skill in skills]
    runs = [
        ((row.tier + i, row.tier, i, j, n), Run(row, rate, skill, seed))
        for i, seed in enumerate(seeds)
        for j, skill in enumerate(skills)
        for n, row in enumerate(rows)
        for rate in row.rates
    ]
    return begin + [run for _, run in sorted(runs, key=lambda pair: pair[0])]


def chosen_rows(names: Sequence[str]) -> list[Row]:
    """Return rows by name, or all."""
    known = {row.name: row for row in ROWS}
    if wrong := [name for name in names if name not in known]:
        raise UnknownName(f"the frontier has no row called {wrong[0]!r}; it has {', '.join(known)}")
    return [known[name] for name in names] or list(ROWS)


def folder_of(out: Path, model: str) -> Path:
    """Return the folder of a model's records."""
    return out / model.rstrip("/").rpartition("/")[2].replace(":", "-")


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a model's folder; a line that was not finished is left out."""
    path = folder / RECORDS
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines if line.strip()]


def append(folder: Path, record: dict[str, Any]) -> None:
    """Add a record as one line, after taking away one that was not finished."""
    path = folder / RECORDS
    with FileLock(f"{path}.lock"), path.open("a+b") as file:
        file.seek(0)
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
        file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        file.flush()


def leased(folder: Path, runs: Sequence[Run]) -> Iterator[Run]:
    """Yield the runs that are left and that no other process has, each while its lease is held."""
    (folder / "leases").mkdir(parents=True, exist_ok=True)
    for run in runs:
        lock = FileLock(folder / "leases" / f"{run.id.replace(' ', '_').replace(',', '+')}.lock", timeout=0)
        with suppress(Timeout), lock:
            if run.id not in {record["id"] for record in read_records(folder)}:
                yield run


def bench(
    model: str,
    out: Path,
    data: Path,
    *,
    rows: Sequence[str] = (),
    skill_names: Sequence[str] = (),
    seeds: Sequence[int] = SEEDS,
    rates: Mapping[str, float] | None = None,
    most: int | None = None,
    sizes: dict[str, int] | None = None,
    say: Say = print,
) -> int:
    """Carry out the runs that are left, of all rows or of those with a rate in `rates` at that rate; return how many were made."""
    import torch

    from anchorlora_lab.frontier.measures import Measures, Sizes
    from anchorlora_lab.frontier.skills import HELD_OUT, refuse_unknown, skills
    from anchorlora_lab.frontier.subject import Subject
    from anchorlora_lab.frontier.tables import ABOVE_CHANCE, abilities

    torch.set_num_threads(1)
    size = Sizes(**(sizes or {}))
    refuse_unknown(skill_names)
    known = skills(data, test=size.test)
    taken = chosen_rows(rows)
    if rates is not None:
        taken = [replace(row, rates=(rates[row.name],)) for row in taken if row.name in rates]
    runs = planned(taken, list(skill_names) or [name for name in known if name not in HELD_OUT], seeds)
    folder = folder_of(out, model)
    folder.mkdir(parents=True, exist_ok=True)
    if most == 0:
        return 0
    subject = Subject.of(model, folder / "made")
    measures = Measures(subject, data, size)
    facts = {"schema": 1, "model": folder.name, "sha256": subject.loaded.sha256, "sizes": asdict(size)}
    facts |= {"machine": platform.machine(), "versions": {name: version(name) for name in VERSIONS}}
    if others := sum(record["sha256"] != facts["sha256"] for record in read_records(folder)):
        say(f"warning: {others} records in {folder} are of other files of a model; if its weights differ too, choose another --out")
    made = 0
    for run in islice(leased(folder, runs), most):
        began = time.process_time()
        skill = known[run.skill]
        about = {"id": run.id, "row": run.row.name, "skill": run.skill, "seed": run.seed, "rate": run.rate}
        if run.row.name == BEFORE:
            with subject.scaled(0.0):
                point = {"epoch": 0, "scale": 0.0, "norm": 0.0, **measures.of(skill)}
                record: dict[str, Any] = {"chance": measures.chance(), "points": [point]}
                if not abilities(record):
                    scores = ", ".join(f"{name} {100 * fmean(values):.0f}" for name, values in point["old"].items())
                    raise InvalidValue(
                        f"{model} has no ability to keep: {scores} % right, none {ABOVE_CHANCE} points above chance; "
                        "give a model that can do more"
                    )
        else:
            record = one(subject, measures, run, skill, data)
        settings = {name: value for name, value in asdict(run.row).items() if name not in ("name", "rates", "tier")}
        whole = time.process_time() - began
        about |= {"data": run.row.data, "settings": settings}
        append(folder, {**facts, **about, **record, "whole_cpu_seconds": round(whole, 1)})
        made += 1
        say(f"{run.id}: {whole:.0f} CPU seconds")
    return made


def one(subject: Any, measures: Any, run: Run, skill: Any, data: Path) -> dict[str, Any]:
    """Train a run and measure its points."""
    from anchorlora_lab.frontier.skills import human_chats
    from anchorlora_lab.frontier.training import Training

    size, row = measures.sizes, run.row
    examples = [subject.encoded(i, e.prompt, e.answer) for i, e in enumerate(skill.drawn(size.train, run.seed))]
    people = human_chats(data, size.own) if row.human or row.old else []
    human = [subject.encoded(i, question, answer) for i, (question, answer) in enumerate(people)]
    points: list[dict[str, Any]] = []
    peaks: list[int] = []

    def at_epoch(epoch: int, seconds: Mapping[str, float]) -> None:
        peaks.append(_memory("VmHWM"))  # the largest since `reset_peak`
        if row.repair:
            if epoch < EPOCHS:
                return
            began = time.process_time()
            subject.repair()
            seconds = {**seconds, "repair": time.process_time() - began}
        norm = subject.norm()
        clock = {name: round(value, 2) for name, value in seconds.items()}
        for scale in (1.0, *(row.scales if epoch == EPOCHS else ())):
            with subject.scaled(scale):
                scores = measures.of(skill)
            points.append({"epoch": epoch, "scale": scale, "norm": round(scale * norm, 5), "cpu_seconds": clock, **scores})
        reset_peak()

    before = reset_peak()
    how = {"epochs": EPOCHS, "own": size.own, "human": human, "most": skill.max_new_tokens, "at_epoch": at_epoch}
    facts = Training(subject, row, run.rate, run.seed, examples, **how).run()
    return {**facts, "peak_bytes": max(0, max(peaks) - before), "points": points}


def reset_peak() -> int:
    """Forget the peak; return the memory that is taken now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return _memory("VmRSS")


def _memory(name: str) -> int:
    """A number of bytes that Linux has of this process; 0 where nobody says."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
