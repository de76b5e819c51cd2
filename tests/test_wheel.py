"""Installed from the wheel the program works without the checkout: recipes, templates, data and base model travel along."""

import subprocess
import sys
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
