"""The law of names: in these rooms a local names its thing, and everywhere a docstring says what its subject is or does."""

import ast
import re
from pathlib import Path

import anchorlora

SOURCE = Path(anchorlora.__file__).parent
LABORATORY = SOURCE.parent / "anchorlora_lab"
ROOMS = ("geometry", "adapters", "features", "models", "constraints", "methods")
ROOMS += ("continual", "measurement", "store", "runs", "integrations", "embedded", "recipes")
ROOMS += ("export", "pages", "train", "cli", "data")
EMPTY = {"found", "place", "each", "mine", "theirs", "said", "told"}
# functions of a module that return a value of another shape, as `sorted` does
VALUES = {"truncated", "folded", "fitted", "declared", "moved_by", "unprotected", "shown", "named", "_named"}
VALUES |= {"padded", "packed", "sealed", "checked", "upgraded", "indexed", "described", "tracked", "_undisturbed", "printed"}
PARTICIPLE = re.compile(
    r"_?([a-z]*(?<![ens])ed|made|kept|found|said|told|left|known|taken|given|seen|drawn|lost|held)(_(up|by|to|off|out|from|in|as|at|of))?$"
)


def trees():
    for room in (*(SOURCE / name for name in ROOMS), LABORATORY):
        for path in sorted(room.rglob("*.py")):
            yield path.relative_to(SOURCE.parent), ast.parse(path.read_text())


def test_no_local_is_empty():
    for path, tree in trees():
        names = {(n.lineno, n.id) for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in EMPTY}
        names |= {(n.lineno, n.arg) for n in ast.walk(tree) if isinstance(n, ast.arg) and n.arg in EMPTY}
        fields = {
            (n.target.lineno, n.target.id)
            for owner in ast.walk(tree)
            if isinstance(owner, ast.ClassDef)
            for n in owner.body
            if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
        }
        assert names <= fields, f"{path}: {sorted(names - fields)}"


def test_functions_of_a_module_are_verbs():
    for path, tree in trees():
        functions = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
        wrong = [name for name in functions if PARTICIPLE.match(name) and name not in VALUES]
        assert wrong == [], path


def test_no_docstring_begins_as_a_question():
    asking = set()
    for path in (path for package in (SOURCE, LABORATORY) for path in package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            if documented and re.match(r"(What|Whether)\b", ast.get_docstring(node) or ""):
                asking.add(path.relative_to(SOURCE.parent).as_posix().partition("/")[2])
    assert not asking
