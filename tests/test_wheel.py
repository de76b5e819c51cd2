"""Wheel and source distribution hold the package and no more; installed elsewhere the program works."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import anchorlora

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import release  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the source distribution of the files that git knows."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("built")
    known = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, known):
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    return sorted(release.built_in(folder / "source", folder / "dist"), key=lambda path: path.suffix != ".whl")


@pytest.fixture(scope="module")
def program(built, tmp_path_factory):
    """The wheel in an environment of its own, with the libraries of this one but not its anchorlora."""
    place = tmp_path_factory.mktemp("elsewhere")
    venv.create(place / "env", with_pip=False)
    install = [sys.executable, "-m", "pip", "--python", place / "env/bin/python", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, built[0]], check=True, cwd=place)
    own = next((place / "env").glob("lib/python*/site-packages"))
    (own / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")  # behind its own, and nothing of its .pth files is run
    return place / "env/bin/anchorlora"


def run(program, *words, **more):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([program, *words], check=True, capture_output=True, text=True, env=env, cwd=program.parent, **more)


def test_the_wheel_holds_everything_that_the_program_reads_and_no_more(built):
    packed, source = {Path(name) for name in release.held(built[0])}, ROOT / "src"
    packages = [source / "anchorlora", source / "anchorlora_lab"]
    found = {path for package in packages for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    wanted = {path.relative_to(source) for path in found}
    assert not wanted - packed


def test_the_source_distribution_holds_the_same_package_and_no_tests_or_results(built):
    source = set(release.held(built[1]))
    assert {"docs/package.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "pyproject.toml"} <= source
    assert not [name for name in source if name.startswith(("tests", "results", "tools", "benchmarks"))]
    wheel = {f"src/{name}" for name in release.held(built[0]) if name.startswith(("anchorlora/", "anchorlora_lab/"))}
    assert wheel <= source


def test_a_wheel_from_the_source_distribution_is_the_wheel(built, tmp_path):
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    again = next(path for path in release.built_in(next(tmp_path.iterdir()), tmp_path / "dist") if path.suffix == ".whl")
    one, other = (
        {item.filename: item.CRC for item in zipfile.ZipFile(path).infolist() if not item.filename.endswith("RECORD")}
        for path in (built[0], again)
    )
    assert one == other


def test_both_are_as_small_as_the_embedded_model_lets_them_be(built):
    weights = (ROOT / "src/anchorlora/embedded/mini/base_model/model.safetensors").stat().st_size
    for path in built:
        assert path.stat().st_size < release.LARGEST < weights + 500_000


def test_the_metadata_names_what_an_index_shows(built):
    with zipfile.ZipFile(built[0]) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        said = message_from_string(archive.read(name).decode())
        assert name.replace("METADATA", "licenses/LICENSE") in archive.namelist()
    assert (said["Name"], said["Version"], said["License-Expression"]) == ("anchorlora", anchorlora.__version__, "Apache-2.0")
    assert said["Author"] == "anchorlora contributors"
    assert said["Requires-Python"] == ">=3.10"
    assert {line for line in said.get_all("Requires-Dist") if line.startswith(("matplotlib", "tabulate"))} == {
        'matplotlib>=3.10; extra == "lab"',
        'tabulate>=0.9; extra == "lab"',
    }
    assert said.get_payload().strip() == (ROOT / "docs/package.md").read_text().strip()
    assert "](docs/" not in said.get_payload(), "an index has no folder for relative links"
    assert {"Typing :: Typed", "Environment :: Console"} <= set(said.get_all("Classifier"))


def test_installed_elsewhere_the_program_starts_at_once(program):
    said = run(program.with_name("python"), "-c", "import anchorlora; print(anchorlora.__file__)").stdout
    assert str(program.parents[1]) in said, "the package of the wheel, not of the checkout"
    run(program, "--version")
    begun = os.times()
    assert run(program, "--version").stdout == f"{anchorlora.__version__}\n"
    ended = os.times()
    assert ended.children_user + ended.children_system - begun.children_user - begun.children_system < 2
    imported = run(program.with_name("python"), "-X", "importtime", "-c", "import anchorlora.cli.app").stderr
    assert "anchorlora" in imported
    assert not [line for line in imported.splitlines() if line.rpartition("|")[2].strip() in ("torch", "transformers")]


def test_installed_elsewhere_the_program_does_the_main_job(program, tmp_path):
    release.works(program, anchorlora.__version__, tmp_path, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    assert "sfor" in run(program, "report", tmp_path / "sfor", "--out", tmp_path / "report").stdout
