"""Breaks the code on purpose, one place at a time, and requires that a test notices:  python tools/break_on_purpose.py [WORD ...]

Each file of tools/breaks/ states a promise and ways to break it: a function of src/anchorlora, a text in it, what replaces it, and
the tests that must fail then. WORD: only breaks in whose file or name it stands. The working tree is copied and never written to.
"""

import ast
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

import pytest
from tabulate import tabulate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
LISTS, PACKAGE = ROOT / "tools/breaks", Path("src/anchorlora")
COPIED = ("src", "tests", "pyproject.toml")
ONE, ALL = 900.0, 3600.0  # seconds of pytest up to the first failure, and of all tests; a test that hangs catches nothing
# imported once, for every process that is forked; nothing of ours
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "hypothesis", "pydantic", "matplotlib.pyplot")
# a test that fails with these fails because the broken code is no program, whatever it would have done
NO_PROGRAM = ("NameError", "UnboundLocalError", "SyntaxError", "IndentationError")


@dataclass(frozen=True)
class Break:
    """One place of the code, what stands there instead, and the tests that must fail."""

    promise: str
    group: str
    what: str
    file: Path  # below the root
    function: str  # such as "Class.method"
    old: str  # stands once in the function
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How a call of pytest ended: its status, and each test that failed with what it said."""

    status: int | None  # none: it did not end in time
    failed: dict[str, str]
    said: str


def listed(words: Sequence[str] = ()) -> list[Break]:
    """Every break of tools/breaks/ whose file or name has one of the words, or every one."""
    found = []
    for path in sorted(LISTS.glob("*.toml")):
        content = tomllib.loads(path.read_text())
        for each in content["break"]:
            tests = tuple(f"tests/{name}" for name in each["tests"])
            place = PACKAGE / each["file"]
            found.append(
                Break(content["promise"], path.stem, each["what"], place, each["function"], each["old"], each["new"], tests)
            )
    return [b for b in found if not words or any(word in f"{b.group} {b.what}" for word in words)]


def stale(breaks: Sequence[Break]) -> list[str]:
    """What of the list no longer fits the code or the tests."""
    wrong = []
    for b in breaks:
        begin, end = lines_of(ROOT / b.file, b.function)
        count = "".join((ROOT / b.file).read_text().splitlines(keepends=True)[begin:end]).count(b.old) if end else 0
        if count != 1:
            wrong.append(
                f"{b.group}: {b.what}: {b.old!r} stands {count} times in {b.function} of {b.file}, and must stand there once"
            )
        for test in b.tests:
            path, _, name = test.partition("::")
            function = name.partition("[")[0]
            if not (ROOT / path).is_file() or f"def {function}(" not in (ROOT / path).read_text():
                wrong.append(f"{b.group}: {b.what}: there is no test {test}")
    return wrong


def lines_of(file: Path, function: str) -> tuple[int, int]:
    """The lines of a function, by its name with those of the classes and functions that it is in; (0, 0) where it is not."""
    nodes = [ast.parse(file.read_text())] if file.is_file() else []
    for name in function.split("."):
        inner = [each for node in nodes for each in ast.iter_child_nodes(node)]
        nodes = [each for each in inner if isinstance(each, (ast.FunctionDef, ast.ClassDef)) and each.name == name]
    return (nodes[0].lineno - 1, nodes[0].end_lineno or 0) if nodes else (0, 0)


@contextmanager
def applied(b: Break, copy: Path) -> Iterator[None]:
    """The copy with this break in it."""
    path = copy / b.file
    whole = path.read_text()
    (begin, end), lines = lines_of(path, b.function), whole.splitlines(keepends=True)
    path.write_text("".join([*lines[:begin], "".join(lines[begin:end]).replace(b.old, b.new), *lines[end:]]))
    try:
        yield
    finally:
        path.write_text(whole)


def tried(tests: Sequence[str], copy: Path, *, first: bool, long: bool = False) -> Outcome:
    """Run tests on the copy.  first: only up to the first that fails.  long: with the cases that the short suite leaves out."""
    report, said = copy / "report.xml", copy / "said.txt"
    report.unlink(missing_ok=True)
    words = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "-m",
        "" if long else "not slow",
        f"--basetemp={copy / 'tmp'}",
        f"--junitxml={report}",
    ]
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of a plugin among what is imported already
    process = get_context("fork").Process(target=pytest_in, args=(copy, [*words, *(["-x"] if first else []), *tests]))
    process.start()
    longest = ONE if first else ALL
    process.join(longest)
    if process.is_alive():
        process.kill()
        return Outcome(None, {}, f"no end within {longest:.0f} s")
    failed = {}
    for case in ElementTree.parse(report).iter("testcase") if report.is_file() else ():
        for failure in case.findall("failure"):
            failed[f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"] = failure.get("message", "")
    return Outcome(process.exitcode, failed, said.read_text()[-3000:])


def pytest_in(copy: Path, words: Sequence[str], plugins: Sequence[object] = ()) -> None:
    """In a process of its own, which has the libraries from its parent and this project from the copy."""
    said = os.open(copy / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(said, standard)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(copy / "src"))
    import anchorlora

    assert Path(anchorlora.__file__).is_relative_to(copy), f"the tests would run on {anchorlora.__file__}"
    raise SystemExit(int(pytest.main([*words], [*plugins])))


def survived(outcome: Outcome) -> str | None:
    """Why a break was not caught; None where a test failed for what the code did."""
    if outcome.status is None:
        return outcome.said
    if outcome.status == 0:
        return "every test passed"
    if outcome.status != 1 or not outcome.failed:
        return f"no test failed, and pytest ended with {outcome.status}: {outcome.said}"
    message = next(iter(outcome.failed.values()))
    return f"the broken code is no program: {message}" if message.startswith(NO_PROGRAM) else None


def unbroken(breaks: Sequence[Break], copy: Path) -> None:
    """Every test that the breaks name passes on the code as it is, which is that of the copy."""
    outcome = tried(list(dict.fromkeys(test for b in breaks for test in b.tests)), copy, first=False)
    if outcome.status != 0:
        raise SystemExit(f"without a break, the tests do not pass:\n{outcome.said}")


def main(words: Sequence[str]) -> int:
    breaks = listed(words)
    wrong = stale(breaks) if breaks else [f"no break has {' or '.join(words)} in its name"]
    if wrong:
        raise SystemExit("\n".join(["the list of breaks is stale:" if breaks else "nothing to do:", *wrong]))
    rows, alive = [], []
    with TemporaryDirectory(prefix="breaks-") as folder:
        copy = Path(folder).resolve()
        for name in COPIED:
            whole = ROOT / name
            if whole.is_dir():
                shutil.copytree(whole, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copyfile(whole, copy / name)
        for library in LIBRARIES:
            import_module(library)
        unbroken(breaks, copy)
        for b in breaks:
            with applied(b, copy):
                outcome = tried(b.tests, copy, first=True)
                if survived(outcome):
                    outcome = tried(b.tests, copy, first=True, long=True)
            reason = survived(outcome)
            by = "nothing" if reason else next(iter(outcome.failed))
            print(f"{b.group}: {b.what}: {reason or 'caught by ' + by}", file=sys.stderr, flush=True)
            alive += [b] if reason else []
            rows.append([b.group, b.what, by.partition("[")[0]])
    print(tabulate(rows, ["promise", "what was broken", "caught by"], tablefmt="github", disable_numparse=True))
    print(f"\n{len(rows) - len(alive)} of {len(rows)} breaks were caught")
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
