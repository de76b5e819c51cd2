"""Folders of data that others made: what they hold is read as plain files of a size, and only bytes make a file official."""

import hashlib
import json
import os
import subprocess

import pytest

import small
from anchorlora.cli.app import main
from anchorlora.data import Benchmark
from anchorlora.data.importing import import_benchmark, verify_benchmark

PARTS = ("labels.json", "train.json", "test.json")


@pytest.fixture
def data(tmp_path):
    return small.write_benchmark(tmp_path / "data")


def declare(root, task, kind):
    """A manifest that says this of a task's files, with their true hashes."""
    hashes = {f"{task}/{part}": hashlib.sha256((root / task / part).read_bytes()).hexdigest() for part in PARTS}
    entries = {path: {"sha256": sha256, "kind": kind} for path, sha256 in hashes.items()}
    (root / "MANIFEST.json").write_text(json.dumps({"schema": 1, "files": entries}))


@pytest.mark.parametrize("kind", ["official bytes", " Official bytes", "own", "altered"])
@pytest.mark.parametrize(("task", "found"), [("TC/fruit", "own"), ("TC/agnews", "altered")])
def test_a_manifest_does_not_make_bytes_official(task, found, kind, data, tmp_path):
    if task != "TC/fruit":
        (data / "TC/fruit").rename(data / task)
    declare(data, task, kind)
    benchmark = Benchmark(data)
    list(benchmark.examples(task.removeprefix("TC/"), "train"))
    assert benchmark.opened[f"{task}/train.json"].kind == found
    verified = verify_benchmark(data)[f"{task}/train.json"]
    assert verified == found or (kind == "official bytes" and verified.startswith("altered: expected git blob"))
    assert import_benchmark(str(data), tmp_path / "to")["files"][f"{task}/train.json"]["kind"] == found


def fifo(path):
    os.mkfifo(path)


def endless(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


def sparse(path):
    path.touch()
    os.truncate(path, 100 * 2**30)


@pytest.mark.parametrize("part", ["labels.json", "train.json"])
@pytest.mark.parametrize("put", [fifo, endless, folder, sparse])
def test_only_regular_files_of_a_size_are_read(put, part, data, tmp_path, capsys):
    (data / "TC/fruit" / part).unlink()
    put(data / "TC/fruit" / part)
    assert main(["data", "verify", str(data)]) == 2
    assert main(["data", "import", str(data), "--out", str(tmp_path / "to")]) == 2
    with pytest.raises(ValueError, match=f"{part} is ") as raised:
        list(Benchmark(data).examples("fruit", "train"))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    for line in (*said, str(raised.value)):
        assert "is a link" in line or "is not a regular file" in line or "is larger than 2147483648 bytes" in line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data"]


def test_a_linked_benchmark_folder_is_not_imported(data, tmp_path, capsys):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/CL_Benchmark").symlink_to(data)
    assert main(["data", "import", str(tmp_path / "source"), "--out", str(tmp_path / "to")]) == 2
    assert "CL_Benchmark is a link, which is not followed; import what it points to" in capsys.readouterr().err


def test_an_origin_that_is_no_text_is_written_as_text(data, tmp_path):
    subprocess.run(["git", "init", "-q", str(data)], check=True)
    with (data / ".git/config").open("ab") as file:
        file.write(b'[remote "origin"]\n\turl = "\xff\xfe"\n')
    assert import_benchmark(str(data), tmp_path / "to")["source"] == {"url": "\ufffd\ufffd"}
    assert Benchmark(tmp_path / "to").names


@pytest.mark.parametrize("url", ["https://h/\0", "git@\udcff", "https://h/\n", "https://h/\x1b[2J"])
def test_a_url_with_odd_characters_is_refused_in_one_line(url, tmp_path, capsys):
    assert main(["data", "import", url, "--out", str(tmp_path / "to")]) == 2
    said = capsys.readouterr().err
    assert "holds characters that a URL cannot have; remove them" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("key", ["path", "kind", "sha256"])
def test_a_manifest_forges_no_line_of_verify(key, data, capsys):
    forged = {"path": "x", "sha256": "0", "kind": "own"} | {key: "x\nTC/fruit/train.json   official bytes"}
    content = {"schema": 1, "files": {forged["path"]: {"sha256": forged["sha256"], "kind": forged["kind"]}}}
    (data / "MANIFEST.json").write_text(json.dumps(content))
    assert main(["data", "verify", str(data)]) == 2
    said = capsys.readouterr()
    assert "holds line breaks or controls in what it says of" in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_folder_forges_no_line_of_verify(data, tmp_path, capsys):
    (data / "TC/fruit").rename(data / "TC/fruit\nTC")
    assert main(["data", "verify", str(data)]) == 2
    assert main(["data", "import", str(data), "--out", str(tmp_path / "to")]) == 2
    said = capsys.readouterr()
    assert said.err.count("a name with line breaks or controls; rename it\n") == said.err.count("\n") == 2
    assert said.out == ""
