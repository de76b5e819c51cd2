"""Installed from the wheel the program works without the checkout: recipes, templates, data and base model travel along."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_holds_everything_that_the_program_reads(tmp_path):
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    source = ROOT / "src"
    wanted = {p.relative_to(source) for p in (source / "anchorlora").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert not wanted - packed
    assert not any(path.parts[0] in ("tests", "tools", "benchmarks") for path in packed)


@pytest.mark.slow
def test_the_source_distribution_has_no_tests(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    for name in ("src", "docs", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    build = "from setuptools.build_meta import build_sdist; build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = [Path(*Path(name).parts[1:]).as_posix() for name in packed.getnames()]
    assert "docs/package.md" in names, "the text for a package index"
    assert "src/anchorlora/runs/__init__.py" in names
    assert not [name for name in names if name.startswith("tests")]
