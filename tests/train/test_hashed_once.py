"""A command reads a file of a run for its hash once, however many of its steps ask for it."""

import os
from collections import Counter
from pathlib import Path

import pytest

from anchorlora.cli.app import main
from anchorlora.store import seal
from anchorlora_lab.report.records import find_runs
from skills import FEW


@pytest.fixture
def read(monkeypatch):
    """How often the content of each file was read for its hash."""
    counts, hash_of = Counter(), seal.hash_of

    def counted(file):
        counts[Path(file.name).resolve()] += 1
        return hash_of(file)

    monkeypatch.setattr(seal, "_hashes", {})
    monkeypatch.setattr(seal, "SETTLED", 0)  # the run is older than a moment, as a user's is
    monkeypatch.setattr(seal, "hash_of", counted)
    return counts


def of(folder, counts):
    return {path: n for path, n in counts.items() if path.is_relative_to(folder.resolve())}


@pytest.mark.parametrize("what", ["export", "audit", "report", "train --after"])
def test_a_command_hashes_each_file_of_a_run_once(what, finished, less_data, small_model, read, tmp_path):
    if what == "report":
        find_runs([finished])
    else:
        task = finished / "tasks/1-news"
        new = ["train", str(small_model), "--out", str(tmp_path / "new")]
        words = {
            "export": ["export", str(finished), "--out", str(tmp_path / "out")],
            "audit": ["audit", str(task), str(finished), "--cores", str(task / "cores.safetensors")],
            "train --after": [*new, "--data", less_data["questions"], "--after", str(finished), *FEW],
        }[what]
        assert main(words) == 0
    counts = of(finished, read)
    assert counts
    assert set(counts.values()) == {1}, counts
    assert any(path.name == "adapter_model.safetensors" for path in counts)


def test_a_file_that_was_touched_is_read_again(tmp_path, read):
    file = tmp_path / "facts.json"
    file.write_text("before")
    first = seal.sha256(file)
    assert seal.sha256(file) == first
    assert read[file.resolve()] == 1
    file.write_text("after!")  # of the same size
    os.utime(file, ns=(1, 1))
    assert seal.sha256(file) != first


def test_a_file_is_not_known_by_a_hash_within_a_tick_of_its_clock(tmp_path, read, monkeypatch):
    monkeypatch.setattr(seal, "SETTLED", 10**12)
    file = tmp_path / "facts.json"
    file.write_text("{}")
    assert seal.sha256(file) == seal.sha256(file)
    assert read[file.resolve()] == 2
