import hashlib
import json
import subprocess

import pytest

import small
from anchorlora.data import Benchmark, importing
from anchorlora.data.importing import agrees, import_benchmark, verify_benchmark
from anchorlora.data.manifest import facts_of, official
from anchorlora.errors import InvalidValue


@pytest.fixture
def source(tmp_path):
    root = small.write_folders(tmp_path / "source")
    (root / "TC/toys/dev.json").write_text((root / "TC/toys/test.json").read_text())
    return root


def test_a_copy_verifies_and_reads_and_leaves_dev_out(source, tmp_path):
    manifest = import_benchmark(str(source), tmp_path / "to")
    assert not (tmp_path / "to/TC/toys/dev.json").exists()
    assert manifest["files"]["TC/toys/train.json"]["instances"] == 12
    found = verify_benchmark(tmp_path / "to")
    assert set(found) == set(manifest["files"])
    assert all(map(agrees, found.values()))
    assert len(list(Benchmark(tmp_path / "to").examples("toys", "test"))) == 6


def test_the_blob_hash_is_the_one_git_gives(source):
    path = source / "TC/toys/labels.json"
    said = subprocess.run(["git", "hash-object", str(path)], check=True, capture_output=True, text=True).stdout.strip()
    assert facts_of(path).git_blob_sha1 == said


def test_a_repository_url_is_cloned_with_its_instructions_commit_and_line_ends(source, tmp_path, monkeypatch):
    for name, value in {"COUNT": "1", "KEY_0": "core.autocrlf", "VALUE_0": "true"}.items():  # as Git for Windows is installed
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    labels = source / "TC/toys/labels.json"
    labels.write_bytes(b'["ball",\n"doll"]\n')
    written = labels.read_bytes()
    repo = tmp_path / "repo"
    (repo / "configs").mkdir(parents=True)
    source.rename(repo / "CL_Benchmark")
    (repo / "CL_Benchmark/instruction_config.json").rename(repo / "configs/instruction_config.json")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(repo), *command], check=True)
    commit = subprocess.run(
        ["git", "-C", str(repo), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    manifest = import_benchmark(f"file://{repo}", tmp_path / "to")
    assert manifest["source"] == {"url": f"file://{repo}", "commit": commit}
    assert Benchmark(tmp_path / "to").task("toys").instruction == "Which toy?\n"
    assert (tmp_path / "to/TC/toys/labels.json").read_bytes() == written


def test_a_changed_file_is_altered_and_a_lost_one_missing(source, tmp_path):
    import_benchmark(str(source), tmp_path / "to")
    train = tmp_path / "to/TC/toys/train.json"
    before = hashlib.sha256(train.read_bytes()).hexdigest()
    train.write_text(train.read_text().replace("passage 3", "passage three"))
    (tmp_path / "to/SC/views/test.json").unlink()
    found = verify_benchmark(tmp_path / "to")
    after = hashlib.sha256(train.read_bytes()).hexdigest()
    assert found["TC/toys/train.json"] == f"altered: expected SHA-256 {before}, found {after}"
    assert found["SC/views/test.json"] == "missing"
    assert sum(not agrees(kind) for kind in found.values()) == 2
    with pytest.raises(ValueError, match=f"train.json is altered: MANIFEST.json expects SHA-256 {before}, found {after}"):
        list(Benchmark(tmp_path / "to").examples("toys", "train"))


def test_an_official_path_with_other_bytes_is_refused_until_it_is_imported_as_it_is(source, tmp_path):
    (source / "TC/toys").rename(source / "TC/agnews")
    expected = official()["TC/agnews/train.json"]["git_blob_sha1"]
    assert verify_benchmark(source)["TC/agnews/train.json"].startswith(f"altered: expected git blob {expected}, found ")
    with pytest.raises(ValueError, match=f"not the official file: git blob SHA-1 {expected} expected.*adopt it"):
        list(Benchmark(source).examples("agnews", "train"))
    import_benchmark(str(source), tmp_path / "to")
    assert verify_benchmark(tmp_path / "to")["TC/agnews/train.json"] == "altered"
    benchmark = Benchmark(tmp_path / "to")
    list(benchmark.examples("agnews", "train"))
    assert benchmark.opened["TC/agnews/train.json"].kind == "altered"


def test_kinds_of_a_source_with_a_manifest_are_carried_on(source, tmp_path):
    first = import_benchmark(str(source), tmp_path / "a")
    path = tmp_path / "a/MANIFEST.json"
    first["files"]["TC/toys/train.json"]["kind"] = "subset of official instances"
    path.write_text(json.dumps(first))
    assert (
        import_benchmark(str(tmp_path / "a"), tmp_path / "b")["files"]["TC/toys/train.json"]["kind"]
        == "subset of official instances"
    )
    assert verify_benchmark(tmp_path / "b")["TC/toys/train.json"] == "subset of official instances"


def test_a_failing_import_leaves_nothing_behind(source, tmp_path):
    (source / "TC/toys/test.json").write_text('[{"label": "no such", "sentence": "x"}]')
    with pytest.raises(ValueError, match=r"source/TC/toys/test.json, line 1: the label 'no such'"):
        import_benchmark(str(source), tmp_path / "to")
    (source / "TC/toys/test.json").write_text("[")
    with pytest.raises(ValueError, match="toys/test.json: not complete JSON"):
        import_benchmark(str(source), tmp_path / "to")
    (source / "TC/toys/test.json").write_text("[]")
    (source / "TC/toys/labels.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"source/TC/toys/labels.json is not a list of label names: 1 is no text"):
        import_benchmark(str(source), tmp_path / "to")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_of_two_imports_at_once_the_second_ends_in_one_line_and_spoils_nothing(source, tmp_path, monkeypatch):
    checked, to = importing._readable, tmp_path / "data/to"

    def after_another(*args, **named):
        monkeypatch.setattr(importing, "_readable", checked)
        import_benchmark(str(source), to)

    monkeypatch.setattr(importing, "_readable", after_another)
    with pytest.raises(InvalidValue, match="to exists already; import into a new folder"):
        import_benchmark(str(source), to)
    assert all(map(agrees, verify_benchmark(to).values()))
    assert list(to.parent.iterdir()) == [to]


def test_wrong_sources_and_targets_are_named(source, tmp_path):
    with pytest.raises(ValueError, match="neither a folder nor a git URL"):
        import_benchmark(str(tmp_path / "nowhere"), tmp_path / "to")
    with pytest.raises(ValueError, match="git could not clone"):
        import_benchmark(f"file://{tmp_path}/nowhere", tmp_path / "to")
    with pytest.raises(ValueError, match="exists already"):
        import_benchmark(str(source), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no <group>/<task>/labels.json"):
        import_benchmark(str(tmp_path / "empty"), tmp_path / "to")


def test_links_are_not_followed(source, tmp_path):
    (tmp_path / "secret.json").write_text("[]")
    (source / "TC/toys/train.json").unlink()
    (source / "TC/toys/train.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ValueError, match=r"train.json is a link"):
        import_benchmark(str(source), tmp_path / "to")


def test_git_transports_that_run_programs_are_not_allowed(tmp_path):
    with pytest.raises(ValueError, match="git could not clone"):
        import_benchmark(f"ext::touch {tmp_path}/canary ://", tmp_path / "to")
    assert not (tmp_path / "canary").exists()


def test_a_broken_manifest_is_refused(source):
    (source / "MANIFEST.json").write_text('{"schema": 9}')
    with pytest.raises(ValueError, match=r"MANIFEST.json is not a manifest of schema 1"):
        Benchmark(source)
