"""A method that a user's file defines: the file is run as Python runs it, and what goes wrong in it is said to be its own."""

import json
import sys

import pytest

from anchorlora import METHODS, Freeze, Shared
from anchorlora.cli.app import main
from anchorlora.cli.parsing import method_named
from anchorlora.errors import UserFileFailed
from golden import one_line

MODERN = """
from __future__ import annotations
from dataclasses import dataclass, field
from typing import ClassVar
from anchorlora import *

@dataclass(frozen=True)
class Nothing:
    strength: float = 1.0
    requires: tuple[str, ...] = ()
    first_task: ClassVar[int] = 2
    def begin_task(self, anchor: Anchor) -> ActiveConstraint:
        return ActiveConstraint()
    def end_task(self, anchor: Anchor) -> dict:
        return {}

mine = Shared() + ProjectGradient("A") + Nothing(2.0)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes idea.py, which then lies in the working folder."""
    monkeypatch.chdir(tmp_path)

    def written(text: str | bytes) -> str:
        (tmp_path / "idea.py").write_bytes(text if isinstance(text, bytes) else text.encode())
        return "idea.py:mine"

    return written


def test_a_sum_takes_the_name_of_its_variable(write):
    found = method_named(write("from anchorlora import *\nmine = Shared() + Freeze('B')\n"))
    assert (found.name, found) == ("mine", Shared() + Freeze("B"))


def test_a_name_of_its_own_stays_and_a_plan_alone_is_a_method(write):
    assert method_named(write("from anchorlora import *\nmine = Method('own', Shared())\n")).name == "own"
    assert method_named(write("from anchorlora import *\nmine = PerTask()\n")) == METHODS["inc-lora"]


def test_dataclasses_and_annotations_of_the_future_work(write):
    found = method_named(write(MODERN))
    assert found.definition == "Shared() + ProjectGradient('A') + Nothing(2.0, ())"
    assert sys.modules[type(found.constraints[1]).__module__].mine == found
    assert found.changed({"Nothing.strength": 3}).constraints[1].strength == 3.0


def test_a_file_is_run_once_and_two_of_one_name_are_two(write, tmp_path):
    once = "from pathlib import Path\nassert not Path('ran').exists()\nPath('ran').touch()\n"
    write(f"{once}from anchorlora import *\nmine = PerTask()\nother = Shared()\n")
    assert method_named("idea.py:mine") != method_named("idea.py:other")
    assert (tmp_path / "ran").exists()
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper/idea.py").write_text("from anchorlora import *\nmine = Shared()\n")
    assert method_named("deeper/idea.py:mine") == METHODS["seq-lora"]
    assert not list(tmp_path.rglob("__pycache__"))


@pytest.mark.parametrize(
    ("good", "wrong", "said"),
    [
        ("return ActiveConstraint()", "ActiveConstraint()", "begin_task of Nothing returned None, not an ActiveConstraint"),
        ("return {}", "pass", "end_task of Nothing returned None; return a dict of tensors by name, {} for nothing"),
        ("return {}", "return {'x': 3}", "end_task of Nothing returned {'x': 3}; return a dict of tensors by name"),
    ],
)
def test_a_constraint_that_returns_something_else_is_named(good, wrong, said, write, capsys):
    assert MODERN.count(good) == 1
    write(MODERN.replace(good, wrong))
    assert main(["check", "idea.py:mine"]) == 2
    assert said in one_line(capsys)


def test_what_a_file_prints_does_not_stand_in_the_output(write, capsys):
    write("from anchorlora import *\nprint('hello')\nmine = Shared() + Freeze('B')\n")
    assert main(["check", "idea.py:mine", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["method"] == "mine"
    assert "hello" in said.err


FAILING = {
    "mine = 1/0": "idea.py failed in line 1: ZeroDivisionError: division by zero",
    "\n\nmine = (": "idea.py failed in line 3: SyntaxError: '(' was never closed",
    "import sys\nsys.exit(3)": "idea.py failed in line 2: SystemExit: 3",
    "def f():\n    return {}['x']\nmine = f()": "idea.py failed in line 2: KeyError: 'x'",
    "import nothing_by_this_name": "idea.py failed in line 1: ModuleNotFoundError: No module named 'nothing_by_this_name'",
    "from anchorlora import *\nmine = Shared() + 3": "idea.py failed in line 2: 3 is not a part of a method",
    "from anchorlora import *\nmine = Freeze('B') + Shared()": "idea.py failed in line 2: TypeError: unsupported operand",
    "from anchorlora import Nonsense": "idea.py failed in line 1: ImportError: cannot import name 'Nonsense'",
    "raise ValueError('of\\nmine')": "idea.py failed in line 1: ValueError: of mine",
    "raise KeyboardInterrupt.__class__('E', (Exception,), {})": "idea.py failed in line 1: E",
    b"mine = '\xff'": "idea.py failed in line 1: SyntaxError: ",
    "mine = 1\0": "idea.py failed: ",
    "def f(): f()\nf()": "idea.py failed in line 1: RecursionError: maximum recursion depth exceeded",
}


@pytest.mark.parametrize(("text", "said"), FAILING.items(), ids=range(len(FAILING)))
def test_what_a_file_raises_is_its_own_fault_and_exit_status_2(text, said, write, capsys):
    write(text)
    before = set(sys.modules)
    assert main(["check", "idea.py:mine"]) == 2
    line = one_line(capsys)
    assert said in line
    assert "fault of anchorlora" not in line
    assert not {name for name in set(sys.modules) - before if "idea" in name}


def test_the_traceback_comes_with_v(write, capsys):
    write("def f():\n    return 1 / 0\nmine = f()")
    assert main(["-v", "check", "idea.py:mine"]) == 2
    said = capsys.readouterr().err
    assert "return 1 / 0" in said
    assert said.rstrip().endswith("error: idea.py failed in line 2: ZeroDivisionError: division by zero")


@pytest.mark.parametrize("moment", ["begin_task", "after_optimizer_step", "violation", "readings"])
def test_what_it_raises_while_it_holds_is_its_own_too(moment, write, capsys):
    held = MODERN.replace("return ActiveConstraint()", "return Wrong()").replace(
        "@dataclass", f"class Wrong(ActiveConstraint):\n    def {moment}(self):\n        return [][0]\n\n@dataclass"
    )
    write(MODERN.replace("return ActiveConstraint()", "return [][0]") if moment == "begin_task" else held)
    assert main(["check", "idea.py:mine"]) == 2
    assert "idea.py failed in line" in (line := one_line(capsys))
    assert "IndexError: list index out of range" in line


def test_an_error_of_ours_with_a_users_method_is_none_of_the_file(write, capsys, monkeypatch):
    write(MODERN)
    monkeypatch.setattr("anchorlora.measurement.check.conditions", lambda anchor: [][0])
    assert main(["check", "idea.py:mine"]) == 1
    assert "this is a bug in anchorlora" in one_line(capsys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "from anchorlora import *\nmine = Freeze('B')",
            "idea.py:mine: Freeze('B') is not a method: a method begins with a plan, as in Shared() + Freeze('B')",
        ),
        ("mine = 3", "idea.py:mine: 3 is not a method: a method begins with a plan, as in Shared() + Freeze('B')"),
        ("from anchorlora import *\nother = Shared()", "idea.py defines no 'mine'; methods in it: other"),
        ("from anchorlora import *\nmine = Shared", "Shared'> is not a method"),
        (
            "from anchorlora import *\nmine = Method('sfor', Shared())",
            "'sfor' is already the name of a different method; choose another",
        ),
    ],
)
def test_a_variable_that_is_no_method_is_refused_in_words(text, said, write, capsys):
    write(text)
    assert main(["check", "idea.py:mine"]) == 2
    assert said in one_line(capsys)


def test_a_method_of_the_table_may_be_named_through_a_file(write):
    assert method_named(write("from anchorlora import *\nmine = METHODS['sfor']\n")).name == "sfor"


def test_the_error_says_file_line_and_reason(write):
    with pytest.raises(UserFileFailed, match="^idea.py failed in line 1: ZeroDivisionError: division by zero$") as caught:
        method_named(write("mine = 1/0"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
