"""Mutants of the numerical core: cosmic-ray makes them, tests in forked processes must kill them.

    python tools/mutants.py [WORD ...]            what was not tried yet; only files with a WORD in their path
    python tools/mutants.py --again [WORD ...]    what survived, with the tests as they are now
    python tools/mutants.py --report              the table, and every mutant that lives

Sources and tests are copied to .mutants and only the copy is mutated. Outcomes are stored one by one in .mutants/session.sqlite, a
session that cosmic-ray's own tools (cr-report, cr-html) read too; a call goes on where the last one stopped. Remove .mutants to
begin anew, for example after the sources have changed.

A mutant meets the tests that execute its line, cheapest first: those of its own package, then others. They are few at first, and
ten times as many, in their present form, where it has survived and is tried again.
"""

import ast
import difflib
import gc
import json
import os
import re
import shutil
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path

import cosmic_ray.plugins
import coverage
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult
from tabulate import tabulate

from mutation_operators import OPERATORS

cosmic_ray.plugins.OPERATOR_PROVIDERS["ours"] = OPERATORS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".mutants"
COPY, SESSION = FOLDER / "copy", FOLDER / "session.sqlite"
LINES, SOURCES = FOLDER / "lines.json", FOLDER / "sources.json"
COPIED = ("src", "tests", "pyproject.toml", "conftest.py")
PACKAGE = Path("src/anchorlora")
PLACES = ("scores.py", "geometry", "constraints", "measurement")
WITH = ("mechanism", "features", "methods", "guards/test_whole_layer.py")  # tests of other packages
TESTS = ("test_scores.py", "geometry", "constraints", "measurement", *WITH)
# imported once, for every process that is forked; nothing of ours
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "hypothesis", "pydantic", "matplotlib.pyplot")
PLUGINS = ("_hypothesis_pytestplugin", "anyio.pytest_plugin", "xdist.plugin", "platformdirs")  # of pytest, imported once too
SLOW = 3.0  # seconds: a test that takes longer is left out
OWN, OTHERS = 4.0, 2.0  # seconds of tests of its own package, and of others, that a mutant meets at first
AGAIN = 10.0  # so many times as many where it has survived and is tried again
SHORTEST, FACTOR = 30.0, 5.0  # a mutant may take so many seconds, and so many times what its tests take
# one replacement for each operator; what the others make is killed by the same tests or is no program
TAKEN = re.compile(
    r"ours/.*|core/(Replace(True|False|And|Or|Break|Continue)With.*|AddNot|ExceptionReplacer|NumberReplacer|RemoveDecorator"
    r"|ZeroIterationForLoop|.*_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|Pow_Mul|FloorDiv_Mul|Mod_Mul|LShift_RShift|Eq_NotEq|NotEq_Eq"
    r"|Is_IsNot|IsNot_Is|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Lt_Gt|LtE_GtE|Gt_Lt|GtE_LtE|Delete_USub|Delete_Not|Delete_Invert))"
)
KILLED, SURVIVED, OVERTIME, UNTESTED = "killed", "survived", "timeout", "no test"


@dataclass(frozen=True)
class Lines:
    """Which tests execute a line, and how long each takes."""

    tests: dict[str, dict[int, list[str]]]  # file -> line -> tests; "" for what runs at import
    seconds: dict[str, float]

    def of(self, spec: MutationSpec, statement: range | None, times: float) -> list[list[str]]:
        """The tests of the mutant's own package and those of others, both cheapest first.

        statement: its lines; None for what runs at import: then every test that executes any line of the file.
        times: by how much OWN and OTHERS are multiplied.
        """
        file = str(spec.module_path)
        executed = self.tests.get(file, {})
        found = {test for line in statement or executed for test in executed.get(line, [])}
        ordered = sorted(found & self.seconds.keys(), key=lambda test: self.seconds[test])
        pools: list[list[str]] = []
        for mine, longest in ((True, OWN * times), (False, OTHERS * times)):
            pool = [test for test in ordered if is_own(test, spec.module_path) is mine]
            total = list(accumulate(self.seconds[test] for test in pool))
            pools.append([test for test, end in zip(pool, total, strict=True) if end <= longest])
        return [pool for pool in pools if pool]


def is_own(test: str, file: Path) -> bool:
    """Whether a test, or an example of a docstring, belongs to the package of a file."""
    part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return test.startswith((f"tests/{part}/", f"tests/test_{part}.py", f"{PACKAGE}/{part}"))


def operators() -> Iterator[tuple[str, object]]:
    for name in filter(TAKEN.fullmatch, cosmic_ray.plugins.operator_names()):
        yield name, cosmic_ray.plugins.get_operator(name)()


def mutants(file: Path) -> Iterator[WorkItem]:
    """Every mutant of a file that is a program of its own.

    Left out: annotations, what only a type checker reads, `strict=` in zip(), and the `not` before a condition that is one
    comparison or begins with `not`, because other operators make the same program.
    """
    source = (ROOT / file).read_text()
    tree, skipped = get_ast(source), unread(source)
    plain = {((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in ast.walk(ast.parse(source)) if is_plain(n)}
    for name, operator in operators():
        places = [place for node in ast_nodes(tree) for place in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(places):
            same = name.endswith("/AddNot") and (start, end) in plain
            if not same and not any(first <= start < last for first, last in skipped):
                yield WorkItem.single(uuid.uuid4().hex, MutationSpec(file, name, occurrence, start, end))


def is_plain(node: ast.AST) -> bool:
    comparison = isinstance(node, ast.Compare) and len(node.ops) == 1
    return comparison or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def unread(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Spans of a file that no run reads."""
    nodes: list[ast.AST] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.arg(annotation=ast.AST() as kind) | ast.AnnAssign(annotation=kind):
                nodes.append(kind)
            case ast.FunctionDef(returns=ast.AST() as kind):
                nodes.append(kind)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.keyword(arg="strict"):
                nodes.append(node)
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in nodes]


def statements(source: str) -> dict[int, range]:
    """Line within a function -> the lines of the smallest statement that it is part of; of a compound one, those of its head."""
    found: dict[int, range] = {}
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for node in (each for function in functions for part in function.body for each in ast.walk(part)):  # from the outside in
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
            last = max(first, body[0].lineno - 1) if body else node.end_lineno
            found |= dict.fromkeys(range(first, last + 1), range(first, last + 1))
    return found


class Watching:
    """A plugin of pytest: which lines a test executes, and how long it takes."""

    def __init__(self, copy: Path) -> None:
        self.coverage = coverage.Coverage(data_file=None, include=[f"{copy}/{PACKAGE}/*"])
        self.seconds: dict[str, float] = defaultdict(float)
        self.bad: set[str] = set()
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        result = yield
        self.coverage.switch_context("between")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.bad.add(report.nodeid)

    def pytest_unconfigure(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        root = Path.cwd()
        tests = {str(Path(file).relative_to(root)): data.contexts_by_lineno(file) for file in data.measured_files()}
        seconds = {test: took for test, took in self.seconds.items() if took <= SLOW and test not in self.bad}
        LINES.write_text(json.dumps({"tests": tests, "seconds": seconds}))


def in_child(copy: Path, words: Sequence[str], watch: bool) -> None:
    """Run pytest in a forked process; hypothesis draws the same examples each time, sets no deadline and does not shrink."""
    from hypothesis import HealthCheck, Phase, settings

    phases = (Phase.explicit, Phase.generate)
    settings.register_profile(
        "mutants", database=None, derandomize=True, deadline=None, phases=phases, suppress_health_check=list(HealthCheck)
    )
    settings.load_profile("mutants")
    pytest_in(copy, words, [Watching(copy)] if watch else [])


def pytest_in(copy: Path, words: Sequence[str], plugins: Sequence[object]) -> None:
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


def pytest_on(tests: Iterable[str], *, limit: float, watch: bool = False) -> int | None:
    """The status of pytest on the copy, or None where it did not end in time."""
    words = ["-q", "-p", "no:cacheprovider", "--tb=short", f"--basetemp={FOLDER / 'tmp'}", "-m", "not (slow or gpu or real)"]
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "--doctest-modules", *([] if watch else ["-x"])]
    process = get_context("fork").Process(target=in_child, args=(COPY, [*words, *tests], watch))
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def outcome(item: WorkItem, lines: Lines, source: str, times: float) -> tuple[str, str]:
    """(outcome, difference) of one mutant, whose file in the copy is restored afterwards."""
    spec = item.mutations[0]
    broken = mutate_code(source, cosmic_ray.plugins.get_operator(spec.operator_name)(), spec.occurrence)
    difference = "\n".join(difflib.unified_diff(source.splitlines(), broken.splitlines(), lineterm="", n=0))
    pools = lines.of(spec, statements(source).get(spec.start_pos[0]), times)
    if not pools:
        return UNTESTED, difference
    path = COPY / spec.module_path
    path.write_text(broken)
    try:
        for pool in pools:
            status = pytest_on(pool, limit=SHORTEST + FACTOR * sum(lines.seconds[test] for test in pool))
            if status != 0:
                return OVERTIME if status is None else KILLED, difference
    finally:
        path.write_text(source)
    return SURVIVED, difference


def begin(db: WorkDB) -> None:
    """List the mutants of the sources as they are."""
    db.add_work_items([item for file in files() for item in mutants(file)])
    SOURCES.write_text(json.dumps({str(file): (ROOT / file).read_text() for file in files()}))


def files() -> list[Path]:
    found = [path for place in PLACES for path in sorted((ROOT / PACKAGE / place).glob("*.py")) or [ROOT / PACKAGE / place]]
    return [path.relative_to(ROOT) for path in found]


def copied(name: str) -> None:
    if (ROOT / name).is_dir():
        shutil.rmtree(COPY / name, ignore_errors=True)
        shutil.copytree(ROOT / name, COPY / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    else:
        COPY.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, COPY / name)


def lines_executed() -> Lines:
    pools = [f"tests/{name}" for name in TESTS] + [f"{PACKAGE}/{place}" for place in PLACES]
    if pytest_on(pools, limit=3600, watch=True) not in (0, 1):  # a test that fails here is left out
        raise SystemExit(f"the tests do not pass without a mutant:\n{(COPY / 'said.txt').read_text()[-3000:]}")
    return read_lines()


def read_lines() -> Lines:
    content = json.loads(LINES.read_text())
    tests = {file: {int(line): names for line, names in found.items()} for file, found in content["tests"].items()}
    return Lines(tests, content["seconds"])


def report(db: WorkDB) -> str:
    """A table of outcomes by package, and every mutant that lives."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    alive = []
    for item, result in db.completed_work_items:
        spec = item.mutations[0]
        part = spec.module_path.relative_to(PACKAGE).parts[0]
        counts[part][str(result.output)] += 1
        if result.output in (SURVIVED, UNTESTED):
            changed = [line for line in str(result.diff).splitlines() if line[:1] in "-+" and line[:3] not in ("---", "+++")]
            alive.append((str(spec.module_path), spec.start_pos, f"{result.output}, {spec.operator_name}", "\n".join(changed)))
    kinds = (KILLED, OVERTIME, SURVIVED, UNTESTED)
    rows = [[part, sum(counts[part].values()), *(counts[part][kind] for kind in kinds)] for part in PLACES if part in counts]
    listed = "\n".join(f"{file}:{start[0]}: {what}\n{change}\n" for file, start, what, change in sorted(alive))
    pending = len(db.pending_work_items)
    return f"{listed}\n{tabulate(rows, ['package', 'mutants', *kinds], tablefmt='github')}\n\n{pending} mutants were not tried yet"


def main(words: Sequence[str]) -> None:
    again, words = "--again" in words, [word for word in words if word != "--again"]
    FOLDER.mkdir(exist_ok=True)
    db = WorkDB(SESSION, WorkDB.Mode.create)
    if "--report" in words:
        print(report(db))
        return
    for library in (*LIBRARIES, *PLUGINS):
        import_module(library)
    gc.freeze()  # otherwise every process that is forked goes through all objects of the libraries at its end
    found = LINES.exists() and not again  # which tests execute which lines; until then, tests stay as they were
    for name in COPIED[:1] if found else COPIED:
        copied(name)
    if not db.num_work_items:
        begin(db)
    changed = [file for file, text in json.loads(SOURCES.read_text()).items() if (ROOT / file).read_text() != text]
    if changed:
        raise SystemExit(f"{changed[0]} has changed since the mutants were made; remove {FOLDER} to begin anew")
    lines = read_lines() if found else lines_executed()
    if again:
        todo = [item for item, result in db.completed_work_items if result.output in (SURVIVED, UNTESTED)]
    else:
        todo = list(db.pending_work_items)
    order = {file: number for number, file in enumerate(files())}
    todo = [item for item in todo if not words or any(word in str(item.mutations[0].module_path) for word in words)]
    todo.sort(key=lambda item: (order[item.mutations[0].module_path], item.mutations[0].start_pos))
    print(f"{len(todo)} mutants", flush=True)
    for number, item in enumerate(todo, 1):
        spec, began = item.mutations[0], time.monotonic()
        found, difference = outcome(item, lines, (ROOT / spec.module_path).read_text(), AGAIN if again else 1.0)
        killed = TestOutcome.KILLED if found in (KILLED, OVERTIME) else TestOutcome.SURVIVED
        db.set_result(item.job_id, WorkResult(WorkerOutcome.NORMAL, found, killed, difference))
        where = f"{spec.module_path}:{spec.start_pos[0]} {spec.operator_name}"
        print(f"{number}: {found} in {time.monotonic() - began:.1f} s: {where}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
