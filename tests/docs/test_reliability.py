"""The figures of docs/lab/reliability.md are those of one whole run of tests/faults that passed, or the page stays as it was."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "tests/faults"
PAGE = "before\n<!-- figures -->\nof an earlier run\n<!-- /figures -->\nafter\n"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import fill_reliability

    yield fill_reliability
    sys.modules.pop("fill_reliability")


@pytest.fixture
def lines(tool):
    """What a whole run would write: each figure in two parts, as two tests of it do."""
    end = {
        "status": 0,
        "asked_for": ["tests/faults"],
        "passed": {"test_watch": 5, "test_not_finite": 6, "test_lease": 3, "test_other_software": 4, "test_resume": 17},
    }
    end |= {
        "skipped": {"test_damage": 3},
        "versions": {"Python": "3.12.1", "torch": "2.99"},
        "cpu": "a processor",
        "date": "2030-01-02",
    }
    wanted = {name: dict.fromkeys(re.findall(r"{(\w+)", row.said), 3) | row.least for name, row in tool.ROWS.items()}
    return [*({"figure": name, "counts": counts} for name, counts in wanted.items() for _ in range(2)), end]


def written(lines, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_counts_are_added_and_of_the_most_the_largest_is_taken(tool, lines, tmp_path):
    lines[-1:-1] = [{"figure": "signals", "counts": {"signals": 1, "most_seconds": 28.25}}]
    page = tool.filled(PAGE, written(lines, tmp_path))
    assert "121 signals" in page
    assert "the slowest after 28.2 s" in page
    assert "11 tests of `test_watch` and `test_not_finite`" in page
    assert "2030-01-02, Python 3.12.1, torch 2.99, a processor; 35 tests passed and 3 were skipped." in page
    assert page.startswith("before\n<!-- figures -->\n| what")
    assert page.endswith("<!-- /figures -->\nafter\n")
    assert "of an earlier run" not in page


SPOILED = {
    "a test failed": (lambda lines: lines[-1].update(status=1), "pytest ended with status 1"),
    "the session was broken off": (lambda lines: lines.pop(), "the end of 0 sessions"),
    "two runs": (lambda lines: lines.append(lines[-1]), "the end of 2 sessions"),
    "slow tests were left out": (lambda lines: lines.insert(0, {"left_out": ["a", "b"]}), "only a part was run .*left out: 2"),
    "one file was run": (lambda lines: lines[-1].update(asked_for=["tests/faults/test_kills.py"]), "only a part was run"),
    "a figure is missing": (lambda lines: [lines.pop(0), lines.pop(0)], "resume: no figure"),
    "too few": (lambda lines: [line["counts"].update(steps=100) for line in lines[:2]], "resume: steps 200 of 340"),
    "no test of the watch": (lambda lines: lines[-1]["passed"].pop("test_watch"), "no test of test_watch has passed"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_of_a_run_that_failed_or_was_not_whole_no_table_is_made(how, tool, lines, tmp_path):
    spoil, message = SPOILED[how]
    spoil(lines)
    with pytest.raises(SystemExit, match=message):
        tool.filled(PAGE, written(lines, tmp_path))


def test_every_row_is_counted_in_a_test_and_every_count_has_a_row(tool):
    counted = {name for path in FAULTS.glob("test_*.py") for name in re.findall(r'\bfigure\(\s*"(\w+)"', path.read_text())}
    assert counted == set(tool.ROWS)


def test_the_page_has_a_place_for_the_table():
    assert (ROOT / "docs/lab/reliability.md").read_text().count("<!-- figures -->\n") == 1


TESTS = """
import pytest
def test_passes(figure): figure("kills", kills=3)
def test_fails(figure): assert False
def test_left_out(): pass
"""


@pytest.mark.slow
def test_what_pytest_did_stands_beside_the_figures(tmp_path):
    """In a session of several processes, as `make faults` has it."""
    folder = tmp_path / "tests/faults"
    folder.mkdir(parents=True)
    shutil.copy(FAULTS / "conftest.py", folder)
    (folder / "test_some.py").write_text(TESTS)
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "-q",
        "tests/faults",
        "--deselect",
        "tests/faults/test_some.py::test_left_out",
    ]
    environment = os.environ | {"ANCHORLORA_FAULTS": str(tmp_path / "results.jsonl"), "PYTHONPATH": str(FAULTS.parent)}
    assert subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True).returncode == 1
    found = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {"figure": "kills", "counts": {"kills": 3}} in found
    assert {"left_out": ["tests/faults/test_some.py::test_left_out"]} in found
    (end,) = [line for line in found if "status" in line]
    assert (end["status"], end["asked_for"], end["passed"]) == (1, ["tests/faults"], {"test_some": 1})


def test_mutants_are_made_of_packages_that_are_there():
    source = (ROOT / "tools/mutants.py").read_text()
    places = ast.literal_eval(re.search(r"^PLACES = (.+)$", source, flags=re.M)[1])
    assert [name for name in places if not (ROOT / "src/anchorlora" / name).exists()] == []
