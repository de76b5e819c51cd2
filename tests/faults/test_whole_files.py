"""A file or a folder has its name when all of it is on disk, and not before; a write that fails leaves what was there.

What lies beside a sealed folder is said by who reads it, never by the seal.
"""

import errno
import json
import os
import stat
from pathlib import Path

import pytest
import torch

from anchorlora.adapters import read_adapter, write_adapter
from anchorlora.adapters.whole import WholeWeights
from anchorlora.features.files import read_tensors
from anchorlora.geometry import Factors
from anchorlora.store.files import link, new_file, new_folder, write_text
from anchorlora.store.log import prefix_hash
from anchorlora.store.run_folder import may_precede_config
from anchorlora.store.seal import damage, seal, sha256
from anchorlora.store.tensors import write_tensors


def inode(path):
    return path.stat().st_ino


@pytest.fixture
def done(monkeypatch):
    """What is put on disk and what gets its name, in order."""
    found, sync = [], os.fsync

    def syncing(number):
        found.append(("on disk", os.fstat(number).st_ino))
        sync(number)

    def naming(change):
        def changing(path, target):
            found.append(("named", inode(path)))
            return change(path, target)

        return changing

    monkeypatch.setattr(os, "fsync", syncing)
    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, naming(getattr(Path, name)))
    return found


def test_a_file_has_its_name_when_it_is_on_disk_and_not_before(done, tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    write_text(path, "new")
    assert done == [("on disk", inode(path)), ("named", inode(path)), ("on disk", inode(tmp_path))]
    assert path.read_text() == "new"


def test_a_folder_has_its_name_when_everything_in_it_is_on_disk_and_not_before(done, tmp_path):
    path = tmp_path / "1"
    with new_folder(path) as folder:
        (folder / "within").mkdir()
        for name in ("a.json", "within/b.json"):
            (folder / name).write_text("{}")
        assert not path.exists()
    named = done.index(("named", inode(path)))
    wanted = {("on disk", inode(place)) for place in (path, *path.rglob("*"))}
    assert len(wanted) == 4
    assert set(done[:named]) == wanted
    assert done[named + 1 :] == [("on disk", inode(tmp_path))]


def test_a_mark_is_of_what_is_on_disk(done, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("{}\n")
    assert prefix_hash(path).size == 3
    assert done == [("on disk", inode(path))]


def test_a_refused_write_leaves_what_was_there_and_no_temporary(tmp_path, monkeypatch):
    def refuse(number):
        raise OSError("no space")

    (tmp_path / "a.json").write_text("old")
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="no space"):
            write_text(tmp_path / "a.json", "new")
        with pytest.raises(OSError, match="no space"), new_folder(tmp_path / "1") as folder:
            (folder / "b.json").write_text("{}")
    with pytest.raises(OSError, match="no space"), new_file(tmp_path / "c.json") as temporary:
        temporary.write_text("half")
        raise OSError("no space")
    assert [path.name for path in tmp_path.rglob("*")] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "old"


def test_a_file_gets_another_name_and_is_copied_where_there_are_no_links(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("a")
    link(tmp_path / "linked", path)
    assert inode(tmp_path / "linked") == inode(path)

    def refusing(number):
        def refused(source, target):
            raise OSError(number, os.strerror(number), source)

        return refused

    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    link(tmp_path / "copied", path)
    assert (tmp_path / "copied").read_text() == "a"
    assert inode(tmp_path / "copied") != inode(path)
    monkeypatch.setattr(os, "link", refusing(errno.ENOSPC))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        link(tmp_path / "full", path)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells which files are mapped")
def test_tensors_that_were_read_do_not_keep_their_file(tmp_path):
    """Windows neither replaces nor removes a file that is mapped."""
    whole = WholeWeights.of({"lm_head.weight": torch.ones(9, 3000)}, {"modules_to_save": ["lm_head"]})
    factors = {"layer": Factors(torch.ones(2, 3000), torch.ones(3000, 2), 1.0)}
    write_adapter(tmp_path / "adapter", factors, base=None, whole=whole)
    write_tensors(tmp_path / "some.safetensors", {"x": torch.ones(3000)})
    beside = {}
    held = read_tensors(tmp_path / "some.safetensors"), read_adapter(tmp_path / "adapter", beside=beside)
    assert all(map(len, (*held, beside)))
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_file_system_that_flushes_no_folder_is_written_to(tmp_path, monkeypatch):
    """As some network drives."""
    sync = os.fsync

    def syncing(number):
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(number)

    monkeypatch.setattr(os, "fsync", syncing)
    write_text(tmp_path / "a", "a")
    with new_folder(tmp_path / "b") as folder:
        write_text(folder / "c", "c")
    assert (tmp_path / "a").read_text() + (tmp_path / "b/c").read_text() == "ac"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "words")
    assert (os.read(end, 99), pipe.is_fifo(), len(list(tmp_path.iterdir()))) == (b"words", True, 1)
    os.close(end)


@pytest.fixture
def sealed(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    (state / "facts.json").write_text("{}")
    (tmp_path / "cores").write_text("c")
    (tmp_path / "outside").write_text("x")
    seal(state, beside={"cores": tmp_path / "cores"})
    return state


@pytest.mark.parametrize("name", ["/etc/hostname", "../outside", "facts.json", "..", "a\0b", "other"])
def test_a_seal_that_names_other_files_beside_its_folder_is_damaged(name, sealed, tmp_path):
    """Even where the hash fits."""
    content = json.loads((sealed / "SEAL.json").read_text())
    place = sealed / name
    content["beside"][name] = sha256(place) if "\0" not in name and place.is_file() else "0" * 64
    (sealed / "SEAL.json").write_text(json.dumps(content))
    said = damage(sealed, beside={"cores": tmp_path / "cores"})
    assert said == f"{sealed / 'SEAL.json'} names {name!r} beside its folder, which is not a file that belongs to it"


@pytest.mark.parametrize("name", [".DS_Store", "Thumbs.db", "desktop.ini"])
def test_what_a_file_manager_leaves_damages_nothing(name, sealed, tmp_path):
    """Finder writes .DS_Store into a folder that somebody looks into."""
    (sealed / "within").mkdir()
    for folder in (sealed, sealed / "within"):
        (folder / name).write_text("icons")
    beside = {"cores": tmp_path / "cores"}
    assert damage(sealed, beside=beside) is None
    seal(sealed, beside=beside)
    (sealed / name).write_text("other icons")
    assert damage(sealed, beside=beside) is None
    assert may_precede_config(sealed / name)
    (sealed / f"{name}.json").write_text("{}")
    assert "does not belong there" in damage(sealed, beside=beside)
    assert not may_precede_config(sealed / f"{name}.json")


def test_a_seal_may_lack_what_is_looked_for_beside_its_folder(sealed, tmp_path):
    beside = {"cores": tmp_path / "cores", "before": tmp_path / "nowhere"}
    assert damage(sealed, beside=beside) is None
    (tmp_path / "cores").write_text("other")
    assert "is not what was written" in damage(sealed, beside=beside)
    assert "names 'cores' beside its folder" in damage(sealed)
