"""Make the release of a tag: refuse what is not ready, run every check, build, install elsewhere, print hashes.  Uploads nothing.

python tools/release.py v0.1.0             # make release TAG=v0.1.0; the long tests take hours
python tools/release.py v0.1.0 --dry-run   # only what would be refused, and what would be run
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKS = ("lint", "types", "test-all", "site")  # of the Makefile, the longest but one last
LARGEST = 5_000_000  # bytes of a wheel or a source distribution: the embedded model in half precision is 4.5 MB of it, all else 0.5
BUILD = "from setuptools import build_meta as m; import sys; to = sys.argv[1]; m.build_sdist(to); m.build_wheel(to)"
MAIN_JOB = ("run", "mini", "--method", "sfor", "--out", "sfor")


def main(words: list[str]) -> None:
    tags = [word for word in words if word != "--dry-run"]
    if len(tags) != 1:
        raise SystemExit("give one tag: python tools/release.py v0.1.0 [--dry-run]")
    version = ready(ROOT, tags[0])
    if "--dry-run" in words:
        print(f"{tags[0]} is ready; next: make {' '.join(CHECKS)}, dist/, a fresh environment, anchorlora {' '.join(MAIN_JOB)}")
        return
    for check in CHECKS:
        subprocess.run(["make", check], cwd=ROOT, check=True)
    built = build(ROOT, tags[0], ROOT / "dist")
    for path in built:
        held(path)
    with tempfile.TemporaryDirectory() as elsewhere:
        installed(next(path for path in built if path.suffix == ".whl"), version, Path(elsewhere))
    for path in built:
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")
    print("nothing was uploaded")


def ready(root: Path, tag: str) -> str:
    """The version, if the checkout is what the tag names and says so everywhere; otherwise one line of what is not."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    stated = re.search(r'^version = "([^"]+)"$', (root / "pyproject.toml").read_text(), flags=re.M)
    if stated is None:
        raise SystemExit("pyproject.toml states no version")
    version = stated[1]
    if tag != f"v{version}":
        raise SystemExit(f"the tag {tag} is not v{version}, the version in pyproject.toml; change one of them")
    if changed := git("status", "--porcelain"):
        raise SystemExit(
            f"the checkout is not clean ({changed.splitlines()[0].strip()}); commit or remove what is not of the release"
        )
    if f"## {version}" not in (root / "CHANGELOG.md").read_text().splitlines():
        raise SystemExit(f"CHANGELOG.md has no heading '## {version}'; write what changed for users")
    if f"version: {version}" not in (root / "CITATION.cff").read_text().splitlines():
        raise SystemExit(f"CITATION.cff does not say 'version: {version}'; change it")
    if git("tag", "--list", tag) != tag:
        raise SystemExit(f"there is no tag {tag}; make it with: git tag {tag}")
    if git("rev-list", "-1", tag) != git("rev-parse", "HEAD"):
        raise SystemExit(f"the tag {tag} is on another commit; check it out, or move the tag")
    return version


def build(root: Path, commit: str, to: Path) -> list[Path]:
    """The source distribution and the wheel of a commit, and of nothing that lies about beside it."""
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(["git", "archive", "--format=tar", commit], cwd=root, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        return built_in(Path(folder), to)


def built_in(source: Path, to: Path) -> list[Path]:
    """The same of a folder, by the setuptools beside this Python; nothing is fetched."""
    to.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-c", BUILD, to.resolve()], cwd=source, check=True, stdout=subprocess.DEVNULL)
    return sorted(to.glob("anchorlora-*"))


def held(path: Path) -> list[str]:
    """The names in a distribution, if they are all of the package and not too much."""
    if path.suffix == ".whl":
        names = zipfile.ZipFile(path).namelist()
        wrong = [name for name in names if not re.match(r"anchorlora(_lab)?(/|-[^/]+\.dist-info/)", name)]
    else:
        with tarfile.open(path) as archive:
            names = [name.partition("/")[2] for name in archive.getnames() if "/" in name]
        whole = r"(README|CHANGELOG)\.md|LICENSE|CITATION\.cff|MANIFEST\.in|PKG-INFO"
        whole += r"|pyproject\.toml|setup\.cfg|docs(/package\.md)?|src(/.*)?"
        wrong = [name for name in names if not re.fullmatch(whole, name)]
    if wrong:
        raise SystemExit(f"{path.name} holds {wrong[0]}, which is no part of the package")
    if path.stat().st_size > LARGEST:
        raise SystemExit(f"{path.name} has {path.stat().st_size:,} bytes, more than {LARGEST:,}; what else is in it?")
    return names


def installed(wheel: Path, version: str, place: Path) -> None:
    """Install the wheel where no checkout is, and do the main job there."""
    venv.create(place / "env", with_pip=True)
    python = place / "env/bin/python"
    constraints = ROOT / "constraints.txt"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--constraint", constraints, wheel], cwd=place, check=True)
    works(place / "env/bin/anchorlora", version, place)


def works(program: Path, version: str, place: Path, **env: str) -> None:
    """The program says its version, and does the main job in a folder of its own."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | env
    said = subprocess.run([program, "--version"], cwd=place, env=clean, capture_output=True, text=True, check=True).stdout.strip()
    if said != version:
        raise SystemExit(f"the installed program says that it is {said}, not {version}")
    subprocess.run([program, *MAIN_JOB], cwd=place, env=clean, check=True)
    if not (place / "sfor/record.json").is_file():
        raise SystemExit("the main job wrote no record")


if __name__ == "__main__":
    main(sys.argv[1:])
