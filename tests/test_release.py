"""A release is refused unless the checkout, the tag, the changelog and the citation agree; what it packs is looked through."""

import io
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import anchorlora

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import release  # noqa: E402

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "tag.gpgSign=false", "-c", "commit.gpgSign=false"]
FILES = {
    "pyproject.toml": '[project]\nname = "anchorlora"\nversion = "1.2.3"\n',
    "CHANGELOG.md": "# Changelog\n\n## 1.2.3\n\n- A line.\n",
    "CITATION.cff": "cff-version: 1.2.0\nversion: 1.2.3\n",
}


def stated():
    return re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.M)[1]


@pytest.fixture
def tagged(tmp_path):
    """A repository that is ready; the function returned changes files and tags it anew."""

    def git(*words):
        subprocess.run([*GIT, *words], cwd=tmp_path, check=True, capture_output=True)

    def commit(tag="v1.2.3", **changed):
        for name, content in FILES.items():
            (tmp_path / name).write_text(changed.get(name.partition(".")[0], content))
        git("add", "-A")
        git("commit", "-qm", "all", "--allow-empty")
        if tag:
            git("tag", "-f", tag)
        return tmp_path

    git("init", "-q")
    return commit


def test_a_clean_checkout_of_the_tag_is_ready(tagged):
    assert release.ready(tagged(), "v1.2.3") == "1.2.3"


@pytest.mark.parametrize(
    ("tag", "changed", "message"),
    [
        ("v1.2.4", {}, "the tag v1.2.4 is not v1.2.3, the version in pyproject.toml"),
        ("1.2.3", {}, "the tag 1.2.3 is not v1.2.3"),
        ("v1.2.3", {"CHANGELOG": "# Changelog\n\n## 1.2.2\n"}, "CHANGELOG.md has no heading '## 1.2.3'"),
        ("v1.2.3", {"CITATION": "version: 1.2.2\n"}, "CITATION.cff does not say 'version: 1.2.3'"),
        ("v1.2.3", {"pyproject": "[project]\n"}, "pyproject.toml states no version"),
        ("v1.2.3", {"tag": None}, "there is no tag v1.2.3; make it with: git tag v1.2.3"),
    ],
)
def test_what_does_not_agree_is_refused(tag, changed, message, tagged):
    with pytest.raises(SystemExit, match=re.escape(message)):
        release.ready(tagged(**changed), tag)


@pytest.mark.parametrize("name", ["CHANGELOG.md", "left.txt"])
def test_a_checkout_with_changes_is_refused(name, tagged):
    root = tagged()
    with (root / name).open("a") as file:
        file.write("more\n")
    with pytest.raises(SystemExit, match=rf"the checkout is not clean \(.*{name}\)"):
        release.ready(root, "v1.2.3")


def test_a_tag_on_an_earlier_commit_is_refused(tagged):
    tagged()
    with pytest.raises(SystemExit, match="the tag v1.2.3 is on another commit"):
        release.ready(tagged(tag="other"), "v1.2.3")


def test_a_dry_run_makes_nothing(tagged, monkeypatch, capsys):
    monkeypatch.setattr(release, "ROOT", tagged())
    release.main(["v1.2.3", "--dry-run"])
    said = capsys.readouterr().out
    assert "v1.2.3 is ready; next: make lint types test-all site" in said
    assert "anchorlora run mini --method sfor" in said
    assert {path.name for path in release.ROOT.iterdir()} == {*FILES, ".git"}
    with pytest.raises(SystemExit, match="give one tag"):
        release.main(["--dry-run"])


def packed(path, *names):
    if path.suffix == ".whl":
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, b"0" * 100)
    else:
        with tarfile.open(path, "w:gz") as archive:
            for name in names:
                info = tarfile.TarInfo(f"anchorlora-1.2.3/{name}")
                archive.addfile(info, io.BytesIO())
    return path


def test_what_is_no_part_of_the_package_is_found_in_what_was_packed(tmp_path, monkeypatch):
    wheel, source = tmp_path / "a-1.2.3-py3-none-any.whl", tmp_path / "a-1.2.3.tar.gz"
    assert release.held(packed(wheel, "anchorlora/__init__.py", "anchorlora-1.2.3.dist-info/RECORD"))
    assert release.held(packed(source, "src/anchorlora/__init__.py", "LICENSE", "docs/package.md"))
    for path, stray in ((wheel, "tests/test_a.py"), (source, "results/mini/record.json"), (source, "tests/test_a.py")):
        with pytest.raises(SystemExit, match=f"holds {stray}, which is no part of the package"):
            release.held(packed(path, "src/anchorlora/a.py" if path == source else "anchorlora/a.py", stray))
    monkeypatch.setattr(release, "LARGEST", 10)
    with pytest.raises(SystemExit, match="more than 10; what else is in it"):
        release.held(packed(source, "LICENSE"))


def test_the_version_stands_in_one_place_and_the_citation_agrees():
    assert stated() == anchorlora.__version__
    cited = YAML(typ="safe").load((ROOT / "CITATION.cff").read_text())
    assert str(cited["version"]) == stated()
    assert cited["cff-version"] == "1.2.0"
    assert {"title", "message", "authors", "abstract", "license", "type"} <= set(cited)
    assert cited["license"] == "Apache-2.0"
    paper = cited["references"][0]
    assert paper["title"].startswith("Bilinear Optimization Divergence")
    assert [author["family-names"] for author in paper["authors"]] == ["Wang", "Su", "Ma"]


def test_the_changelog_has_the_version_and_one_entry_a_line():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## {stated()}\n" in text
    entries = re.findall(r"^- .*(?:\n(?!- |#).+)*", text, flags=re.M)
    assert len(entries) == len(set(entries))
    assert [each for each in entries if "\n" in each] == [], "an entry is one line"
    assert [each for each in entries if len(each) > 300] == [], "and short enough to be read"
    assert [each for each in entries if not each.endswith(".")] == []


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_the_forms_of_the_repository_are_yaml_that_asks_for_something(path):
    form = YAML(typ="safe").load(path.read_text())
    if path.name in ("bug.yml", "feature.yml"):
        assert {"name", "description", "body"} <= set(form)
        assert all(field["attributes"]["label"] for field in form["body"])
    if path.name == "ci.yml":
        assert form["jobs"]["test"]["steps"][-1] == {"run": ".ci/run"}


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_links_and_targets_of_make_that_are_named_exist(name):
    text, makefile = (ROOT / name).read_text(), (ROOT / "Makefile").read_text()
    assert [link for link in re.findall(r"\]\(([^)#]+)", text) if not (ROOT / link).exists()] == []
    named = re.findall(r"(?:`|^)make ([a-z-]+)", text, flags=re.M)
    assert [target for target in named if f"\n{target}:" not in makefile] == []
