"""A grid of short runs, its undisturbed twin, and what must be equal between them."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from anchorlora.store.log import read_events
from faults.runs import assert_same

SEEDS = (1, 2, 3)
SHORT = {"train_limit": 48, "test_limit": 8, "epochs": 3, "max_new_tokens": 4}
LONGEST = 900.0  # seconds


def words(root, *options):
    settings = [word for name, value in SHORT.items() for word in ("--set", f"{name}={value}")]
    grid = ["grid", "mini", "--methods", "sfor", "--orders", "order1", "--seeds", ",".join(map(str, SEEDS)), *settings]
    return [sys.executable, "-m", "anchorlora", *grid, "--save-every", "2", "--out", str(root), *options]


def undisturbed(root):
    """The same grid by the local engine."""
    subprocess.run(words(root), check=True, stdout=subprocess.DEVNULL)
    return root


def folders(root):
    return [root / "sfor" / f"order1-{seed}" for seed in SEEDS]


def finished(root):
    return sum((folder / "record.json").exists() for folder in folders(root))


def kill(pattern):
    """Kill -9 one of the processes whose command line has a pattern; True if there was one."""
    found = [pid for pid, line in processes() if pattern in line]
    with suppress(ProcessLookupError):
        if found:
            os.kill(random.choice(found), signal.SIGKILL)
    return bool(found)


def processes():
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield int(place.parent.name), place.read_bytes().replace(b"\0", b" ").decode(errors="replace")


def steps(root):
    """Steps that all runs of a grid have made."""
    logs = [folder / "log.jsonl" for folder in folders(root)]
    return sum(log.read_text().count('"event": "step"') for log in logs if log.exists())


def came(condition, seconds):
    """True as soon as it holds, False after so many seconds."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return False
        time.sleep(0.2)
    return True


def until(condition, seconds=LONGEST):
    assert came(condition, seconds), "it takes too long"


def assert_every_record_once(root, twin):
    """Every run has a record, each step of it counts once, and every byte is that of the undisturbed run."""
    assert finished(root) == len(SEEDS)
    assert len(list(root.rglob("record.json"))) == len(SEEDS)
    for folder, other in zip(folders(root), folders(twin), strict=True):
        steps = Counter((e["task"], e["step"]) for e in read_events(folder / "log.jsonl") if e["event"] == "step")
        assert set(steps.values()) == {1}
        assert_same(folder, other)
