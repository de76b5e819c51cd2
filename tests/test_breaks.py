"""The list of what is broken on purpose fits the code, and a break that no test notices is told from one that is caught."""

import ast
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
    """By the text of the files; `make breaks` collects them."""
    root = Path(__file__).parents[1]
    for name in {test for each in tool.listed() for test in each.tests}:
        path, *within = name.partition("[")[0].split("::")
        here = ast.parse((root / path).read_text()).body if (root / path).is_file() else []
        for part in within:
            found = [node for node in here if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
            assert found, name
            here = found[0].body
        assert (root / path).exists(), name


def test_a_break_is_caught_by_a_test_that_fails_and_by_nothing_else(tool):
    fails = {"test_a::test_b": "assert 1 == 2"}
    assert tool.survived(tool.Outcome(1, fails, "")) is None
    assert tool.survived(tool.Outcome(0, {}, "")) == "every test passed"
    assert "ended with 1" in tool.survived(tool.Outcome(1, {}, "an error of a fixture"))
    assert "ended with 2" in tool.survived(tool.Outcome(2, fails, "not collected"))
    assert "no program" in tool.survived(tool.Outcome(1, {"test_a::test_b": "NameError: name 'x' is not defined"}, ""))
    assert tool.survived(tool.Outcome(None, {}, "no end within 9 s")) == "no end within 9 s"
