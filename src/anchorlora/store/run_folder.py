"""Check that the files of a run are what the run wrote.

The record of a finished run holds their hashes. For a run that is not finished, and for one that an earlier version finished, the
seals in its state hold those of adapters and cores. Imports nothing that needs torch.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from anchorlora.errors import InvalidValue
from anchorlora.store.json import read_file
from anchorlora.store.record import RECORD_FILE, SEAL_FILE, Record, read_record
from anchorlora.store.seal import AGAIN, BEFORE, SEAL, Seal, sha256

CONFIG_FILE, TRACE_FILE, CORES_FILE, PREDICTIONS_FILE = "config.yaml", "trace.jsonl", "cores.safetensors", "predictions.jsonl"
RIGHT_FILE = "right.json"  # instead of the predictions, in collected results
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # PEFT's names
TASK_FILES = (*(f"adapter/{name}" for name in ADAPTER_FILES), CORES_FILE, PREDICTIONS_FILE)
REMEDY = f"put it back, or call the run again, without {RECORD_FILE} if it has one"


def read_run(run: Path) -> Record:
    """Read the record of a finished run, and check every file of the run.

    A record without tasks/, as in a collection of records, stands for itself: only the trace beside it is checked.
    """
    record = read_record(run / RECORD_FILE)
    known: Mapping[str, str] = record.files or {}
    if not (run / "tasks").is_dir():
        known = {name: value for name, value in known.items() if name == TRACE_FILE and (run / name).exists()}
    elif record.files is None:
        for number, task in enumerate(record.order, 1):
            _compare_with_seal(run, number, task)
    _compare(run, known, run / RECORD_FILE)
    return record


def refuse_altered(place: Path) -> None:
    """Refuse the folder of a task in a run directory, or a file in it, that is not what the run wrote.

    Nothing is known about folders elsewhere, or where neither a record nor a state is left; they pass.
    """
    for path in dict.fromkeys((Path(os.path.abspath(place)), Path(os.path.realpath(place)))):
        for folder in (path, *path.parents)[:3]:
            run, found = folder.parent.parent, re.fullmatch(r"(\d{1,9})-(.+)", folder.name)
            if found and folder.parent.name == "tasks" and ((run / RECORD_FILE).is_file() or (run / "state").is_dir()):
                _refuse_altered_task(run, int(found[1]), found[2])


def refuse_lost_record(run: Path) -> None:
    """Refuse a run that has finished but has no record anymore."""
    if (run / SEAL_FILE).exists() and not (run / RECORD_FILE).exists():
        raise InvalidValue(
            f"{run / RECORD_FILE} is missing, although the run has finished; anchorlora run {run / CONFIG_FILE} --out {run} "
            "writes it again"
        )


def adapter_sha256(adapter: Path) -> str:
    """Return one SHA-256 over the two files of a saved adapter."""
    return hashlib.sha256(b"".join((adapter / name).read_bytes() for name in ADAPTER_FILES)).hexdigest()


def _refuse_altered_task(run: Path, number: int, task: str) -> None:
    refuse_lost_record(run)
    record, folder = read_record(run / RECORD_FILE) if (run / RECORD_FILE).exists() else None, f"tasks/{number}-{task}"
    if record is None or record.files is None:
        _compare_with_seal(run, number, task, finished=record is not None)
        return
    known = {name: value for name, value in record.files.items() if name.startswith(f"{folder}/")}
    if not known:
        raise InvalidValue(f"{run / folder} is not a task of this run: {run / RECORD_FILE} does not name it")
    _compare(run, known, run / RECORD_FILE)


def _compare_with_seal(run: Path, number: int, task: str, *, finished: bool = True) -> None:
    """Compare a task's files with the seal of its state, which may be deleted once the run has finished."""
    seal, folder = run / "state" / str(number) / SEAL, f"tasks/{number}-{task}"
    if finished and not seal.exists():
        return
    try:
        beside = read_file(seal, Seal, remedy=AGAIN).beside
    except FileNotFoundError:
        raise InvalidValue(
            f"{run / folder} does not count yet: {seal} is missing, so it cannot be verified; "
            "resume the run, or copy the adapter out of the run directory to use it as it is"
        ) from None
    known = {f"{folder}/{name}": value for name, value in beside.items() if name in TASK_FILES}
    if not finished and BEFORE in beside:
        known[f"state/{number - 1}/{SEAL}"] = beside[BEFORE]
    _compare(run, known, seal)


def _compare(run: Path, known: Mapping[str, str], where: Path) -> None:
    """Raise InvalidValue for a file whose hash is not the one in `where`."""
    for name, value in known.items():
        path = run / name
        if not path.is_file():
            raise InvalidValue(f"{path} is missing, which {where} names; {REMEDY}")
        if sha256(path) != value:
            raise InvalidValue(f"{path} is not what the run wrote: its hash differs from that in {where}; {REMEDY}")
