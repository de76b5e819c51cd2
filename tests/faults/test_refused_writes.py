"""A write is refused: exit status 1, one line, the state before it intact, no temporary left, the next run ends the same."""

import errno
import os
import random
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from safetensors import SafetensorError

from anchorlora.cli.app import main
from anchorlora.data import EncodedExamples
from anchorlora.errors import Unwritten
from anchorlora.store import tensors as adapter_files
from anchorlora.store.files import new_folder
from audited import full_weights, write_weights
from faults.runs import assert_same, command
from faults.test_kills import standing

METHOD = "o-lora-bsr"


class Disk:
    """Counts writes, and refuses the one numbered `full` (from 1) and all after it.  Half of the refused one is written."""

    def __init__(self, full=None):
        self.full, self.count = full, 0

    def wants_room(self, path, half=lambda: None):
        self.count += 1
        if self.full is not None and self.count >= self.full:
            half()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *([] if path is None else [str(path)]))


class Full:
    """A file that is open for writing on a disk."""

    def __init__(self, file, disk):
        self.file, self.disk = file, disk

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, text):
        self.disk.wants_room(None, lambda: (self.file.write(text[: len(text) // 2]), self.file.flush()))
        return self.file.write(text)


def on(disk, monkeypatch):
    """Everything that a run writes goes to this disk: text, tensors, folders, names, what it flushes and what it cuts."""
    opened, save, sync = Path.open, adapter_files.save_file, os.fsync

    def opening(path, mode="r", *args, **kwargs):
        file = opened(path, mode, *args, **kwargs)
        return Full(file, disk) if set(mode) & set("wax") else file

    def saving(tensors, path, metadata=None):
        disk.wants_room(path, lambda: Path(path).open("wb").close())
        save(tensors, path, metadata=metadata)

    def syncing(number):
        disk.wants_room(f"descriptor {number}")
        sync(number)

    def of_a_path(change):
        def changing(path, *args, **kwargs):
            disk.wants_room(path)
            return change(path, *args, **kwargs)

        return changing

    monkeypatch.setattr(Path, "open", opening)
    monkeypatch.setattr(adapter_files, "save_file", saving)
    monkeypatch.setattr(os, "fsync", syncing)
    for place, name in ((Path, "mkdir"), (Path, "rename"), (Path, "replace"), (os, "link"), (os, "truncate")):
        monkeypatch.setattr(place, name, of_a_path(getattr(place, name)))


def said_by(recipe, out):
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        status = main(command(recipe, out, METHOD))
    return status, said.getvalue()


def temporaries(out):
    return [str(path) for path in out.rglob(".*") if path.name.endswith(".tmp")]


def writes_of_a_run(recipe, out):
    disk = Disk()
    with pytest.MonkeyPatch.context() as patch:
        words = command(recipe, out, METHOD)  # the configuration beside the run is not part of it
        on(disk, patch)
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            assert main(words) == 0
    return disk.count


@pytest.fixture(scope="module")
def recipe(small_benchmark, small_model):
    import small

    return small.recipe(small_benchmark, small_model, trace_points=4)


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, writes_of_a_run(recipe, out)


def refused_at(number, recipe, out, whole):
    words = command(recipe, out, METHOD)
    said = StringIO()
    with pytest.MonkeyPatch.context() as patch:
        on(Disk(number), patch)
        with redirect_stdout(said), redirect_stderr(said):
            status = main(words)
    last = said.getvalue().strip().splitlines()[-1]
    assert status == 1, said.getvalue()
    assert last.lower().startswith("error: no space left on device"), said.getvalue()
    assert "Traceback" not in said.getvalue()
    assert not temporaries(out)
    if (out / "config.yaml").exists():
        (done, step), complaints = standing(out)
        assert not complaints
        kept = last.partition("; ")[2]
        if 0 < step < 10**6:
            assert f"the state after step {step} of task {done} is kept" in kept, last
        elif step:
            assert f"the state after task {done} was trained is kept" in kept, last
        else:
            assert (f"the state after task {done - 1} is kept" if done > 1 else "nothing was saved before") in kept, last
    assert said_by(recipe, out)[0] == 0
    assert_same(out, whole)


def test_a_run_makes_many_writes(whole):
    """Else the tests below would try little."""
    assert whole[1] > 300


@pytest.mark.slow
def test_writes_that_are_refused_at_drawn_moments(recipe, whole, tmp_path):
    """The first, some in between, and the last ones; the long form tries every one."""
    folder, count = whole
    draw = random.Random(3)
    within = [1 + draw.randrange(part * count // 10, (part + 1) * count // 10) for part in range(0, 10, 3)]
    last = range(count - 3, count + 1)  # the last state has its name; then the record is committed, and written
    for number in sorted({1, 2, *within, *last}):
        refused_at(number, recipe, tmp_path / str(number), folder)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_every_single_write_refused(part, recipe, whole, figure, tmp_path):
    folder, count = whole
    for number in range(1 + part, count + 1, 20):
        refused_at(number, recipe, tmp_path / str(number), folder)
        figure("writes", refused=1, told=1, most_writes=count)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from anchorlora.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [3000, 40000])
def test_a_limit_that_the_system_enforces_is_the_same(limit, recipe, whole, tmp_path):
    """No file may grow beyond it: the largest of a save is refused inside the library that writes it."""
    out = tmp_path / "run"
    words = [sys.executable, "-c", LIMITED.format(limit=limit), *command(recipe, out, METHOD)]
    done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: file too large: ")
    assert "Traceback" not in done.stderr
    assert not temporaries(out)
    assert said_by(recipe, out)[0] == 0
    assert_same(out, whole[0])


@pytest.mark.parametrize("kind", [Exception, SafetensorError])
def test_a_write_that_a_library_refuses_in_words_alone_is_the_systems_own_error(kind, tmp_path):
    with pytest.raises(OSError, match=str(tmp_path / "out")) as raised, new_folder(tmp_path / "out"):
        raise kind("Error while serializing: I/O error: No space left on device (os error 28)")  # tokenizers, safetensors
    assert raised.value.errno == errno.ENOSPC
    assert not any(tmp_path.iterdir())


def test_a_merged_export_that_the_system_cuts_is_a_failure(whole, tmp_path):
    words = [sys.executable, "-c", LIMITED.format(limit=40000), "export", str(whole[0]), "--form", "merged", "--out"]
    done = subprocess.run([*words, str(tmp_path / "made")], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: File too large: ")
    assert not any(tmp_path.iterdir())


def test_where_no_temporary_folder_can_be_written_to_the_remedy_is_named(monkeypatch):
    """As in a container that is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    with pytest.raises(Unwritten, match=r"no usable temporary directory .*; make room, or name another folder with TMPDIR"):
        EncodedExamples()


def test_a_request_that_cannot_be_read_stays_a_wrong_request(tmp_path, capsys):
    assert main(["run", str(tmp_path / "nowhere.yaml"), "--method", "sfor", "--out", str(tmp_path / "r")]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["data", "import", "{data}", "--out", "{to}"],
        ["audit", "{weights}", "{weights}", "--html", "{to}"],
        ["report", "{run}", "--out", "{to}"],
    ],
)
def test_a_refused_write_of_any_command_is_a_failure(words, small_benchmark, whole, tmp_path, monkeypatch, capsys):
    weights = write_weights(tmp_path / "weights", full_weights())
    on(Disk(1), monkeypatch)
    assert main([word.format(data=small_benchmark, weights=weights, run=whole[0], to=tmp_path / "made") for word in words]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {os.strerror(errno.ENOSPC)}: {tmp_path}")
    assert said.count("\n") == 1
