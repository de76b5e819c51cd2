"""A constraint with its method is added in one file outside of the package, and every command and page has it."""

import re
from pathlib import Path

import pytest

import method_pages
from anchorlora.cli.app import main
from anchorlora.cli.user_file import run_file
from anchorlora.methods import METHODS
from anchorlora.store.record import read_record

ROOT = Path(__file__).parents[2]
FILE = '''
from dataclasses import dataclass

from anchorlora import *
from anchorlora.constraints import ActiveConstraint
from anchorlora.constraints.base import ProtectsPast
from anchorlora.methods.entry import CatalogEntry


@dataclass(frozen=True)
class Still(ProtectsPast):
    """Undo every update of both factors after the first task.

        A <- A_0, B <- B_0

    Nothing is learned.
    """

    requires = ("core",)  # what it is measured on
    closes = ("displacement", "delta_b")
    needs = "patience"

    def begin_task(self, anchor):
        return Undoing(anchor)


class Undoing(ActiveConstraint):
    def __init__(self, anchor):
        self.layers = anchor.layers

    def project(self):
        for layer in self.layers:
            for factor in ("A", "B"):
                layer.rows(factor).copy_(layer.start_rows(factor))


class MyShared(Shared):
    """A plan of one's own with a shared adapter."""


still = (MyShared() + Still()).named("still")
stated = METHODS["seq-lora"].plus(Still(), name="stated", entry=CatalogEntry(about="It stands still.", when="Never."))
'''
FEWER = ["--order", "entities,reviews", "--seed", "42"]
FEWER += [word for setting in ("train_limit=8", "test_limit=2", "epochs=1", "threads=1") for word in ("--set", setting)]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("outside") / "still.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def runs(file):
    """A run of each of its methods and one of seq-lora."""
    for name, method in (("still", f"{file}:still"), ("stated", f"{file}:stated"), ("seq-lora", "seq-lora")):
        assert main(["run", "mini", "--method", method, *FEWER, "--out", str(file.parent / "runs" / name)]) == 0
    return file.parent / "runs"


def test_check_measures_what_it_closes(file, capsys):
    assert main(["check", f"{file}:still"]) == 0
    shown = capsys.readouterr().out
    assert dict(re.findall(r"^(displacement|response) .*?  (preserved|violated)", shown, flags=re.M)) == {
        "displacement": "preserved",
        "response": "preserved",
    }


def test_the_record_holds_its_facts(runs):
    facts = read_record(runs / "still/record.json").method
    assert facts.parts == ["MyShared()", "Still()"]
    assert (facts.family, facts.grows, facts.rehearses) == ("shared", False, False)
    assert facts.preserves == ["displacement", "delta_b", "response"]


def test_the_report_believes_the_record(runs, tmp_path, capsys):
    """A shared plan of another name is shared, its promise counts, and it is compared with what it extends."""
    assert main(["report", str(runs), "--out", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report/index.html").read_text()
    assert "stated - seq-lora" in page
    assert "stated and still leave protected directions alone" in re.sub(r"<[^>]*>", "", page)
    assert "One block per task" not in re.sub(r"<[^>]*>", "", page)


def test_methods_shows_it(file, capsys):
    assert main(["methods", f"{file}:stated"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for said in ("It stands still.", "Never.", "Shared() + Still()", "displacement, delta_b, response", "patience"):
        assert said in shown


def test_the_site_has_a_page_for_it(file):
    pytest.importorskip("ruff", reason="ruff, which formats the page's code, is not installed")
    page = method_pages.page(run_file(file).stated, {}, {})
    for said in ("# stated", "It stands still.", "A <- A_0, B <- B_0", "patience", "- response:"):
        assert said in page


def test_every_part_of_the_catalog_can_be_imported_from_anchorlora_though_no_list_names_it(monkeypatch, file):
    import anchorlora

    monkeypatch.setitem(METHODS, "stated", run_file(file).stated)
    assert "Still" in anchorlora.__all__
    assert anchorlora.Still is type(METHODS["stated"].constraints[0])
