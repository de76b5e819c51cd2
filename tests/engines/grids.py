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

from anchorlora.storage.log import read_events
from faults.runs import assert_same

SEEDS = (1, 2, 3, 4)
SHORT = {"train_limit": 48, "test_limit": 8, "epochs": 6, "max_new_tokens": 4}
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


def trains(root):
    """True once some unfinished run has made a step."""
    return any(
        not (folder / "record.json").exists() and (folder / "log.jsonl").exists() and '"step"' in (folder / "log.jsonl").read_text()
        for folder in folders(root)
    )


def until(condition, seconds=LONGEST):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it takes too long"
        time.sleep(0.2)


def assert_every_record_once(root, twin):
    """Every run has a record, each step of it counts once, and every byte is that of the undisturbed run."""
    assert finished(root) == len(SEEDS)
    assert len(list(root.rglob("record.json"))) == len(SEEDS)
    for folder, other in zip(folders(root), folders(twin), strict=True):
        steps = Counter((e["task"], e["step"]) for e in read_events(folder / "log.jsonl") if e["event"] == "step")
        assert set(steps.values()) == {1}
        assert_same(folder, other)
