"""The list of what is broken on purpose fits the code, and a break that no test notices is told from one that is caught."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    import break_on_purpose

    return break_on_purpose


def test_every_break_is_of_code_and_tests_that_are_there(tool):
    breaks = tool.listed()
    assert not tool.stale(breaks)
    assert len({(b.group, b.what) for b in breaks}) == len(breaks)
    assert not [b for b in breaks if b.old == b.new]


def test_every_test_that_a_break_names_is_collected(tool):
    names = sorted({test for each in tool.listed() for test in each.tests})
    words = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", *names]
    done = subprocess.run(words, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_break_is_caught_by_a_test_that_fails_and_by_nothing_else(tool):
    fails = {"test_a::test_b": "assert 1 == 2"}
    assert tool.survived(tool.Outcome(1, fails, "")) is None
    assert tool.survived(tool.Outcome(0, {}, "")) == "every test passed"
    assert "ended with 1" in tool.survived(tool.Outcome(1, {}, "an error of a fixture"))
    assert "ended with 2" in tool.survived(tool.Outcome(2, fails, "not collected"))
    assert "no program" in tool.survived(tool.Outcome(1, {"test_a::test_b": "NameError: name 'x' is not defined"}, ""))
    assert tool.survived(tool.Outcome(None, {}, "no end within 9 s")) == "no end within 9 s"
