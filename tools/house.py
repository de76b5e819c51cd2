"""Count how large the house is: python tools/house.py

code        lines with a token that is neither a comment nor a docstring
docstrings  lines of docstrings
circles     pairs of packages that import each other, or of modules of one package
to read     lines of the files that a newcomer reads before a first edit, at most 700
to edit     files under src that name one such thing
lists       places outside methods/ with two or more names of methods in one list, tuple, set or dict
"""

import ast
import io
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("anchorlora", "anchorlora_lab")
NOT_COUNTED = ("api", "methods", "lab")  # folders of docs/: references of names, and the laboratory, which no user needs
INDEX = "package.md"  # the text for a package index, most of which is README.md's
READ = 700  # lines that a newcomer reads at most before a first edit
EDITS = {  # what is added or sought -> the files to read first; of FILE#SECTION, that section
    "a constraint": (
        *("CONTRIBUTING.md", "docs/extend.md#Your own method", "src/anchorlora/constraints/base.py"),
        *("src/anchorlora/constraints/freeze.py", "src/anchorlora/methods/entry.py"),
    ),
    "a metric": ("CONTRIBUTING.md", "docs/extend.md#A metric", "src/anchorlora/data/metrics.py"),
    "an engine": ("CONTRIBUTING.md", "docs/extend.md#An engine", "src/anchorlora_lab/grid/scheduler.py"),
    "a number on the verdict page": ("src/anchorlora/train/verdict.py", "src/anchorlora/pages/templates/verdict.html.j2"),
    "a NaN": ("src/anchorlora/continual/learn.py", "src/anchorlora/continual/not_finite.py"),
}
NAMED = {"a constraint with its method": "InputStart", "a row form": "conversations", "a number on the verdict page": "over_chain"}
SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def docstring_lines(tree: ast.AST) -> set[int]:
    """Numbers of the lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            lines |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def lines_of(path: Path) -> tuple[int, int]:
    """Lines of code and of docstrings."""
    text = path.read_text()
    docstrings, code = docstring_lines(ast.parse(text)), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings), len(docstrings)


def imports(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports outside of functions and type checking."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            yield node.module or ""


def documents() -> list[Path]:
    """Pages of docs/ that users read, which are at most 15, with 30,000 words."""
    return [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name not in NOT_COUNTED and page.name != INDEX]


def circles() -> list[tuple[str, str]]:
    """Pairs of modules that import each other, over any number of others."""
    files = {path for package in PACKAGES for path in (ROOT / "src" / package).rglob("*.py") if path.name != "__init__.py"}
    name = {".".join(path.relative_to(ROOT / "src").with_suffix("").parts): path for path in files}
    graph = {module: {imported for imported in imports(path) if imported in name} for module, path in name.items()}
    reached = {module: set(nexts) for module, nexts in graph.items()}
    for _ in graph:
        grown = {m: r | {far for near in r for far in graph[near]} for m, r in reached.items()}
        if grown == reached:
            break
        reached = grown
    return sorted({tuple(sorted((a, b))) for a in graph for b in reached[a] if a != b and a in reached[b]})


def text_of(file: str) -> str:
    """The text of a file, or of one section of it, FILE#SECTION."""
    path, _, section = file.partition("#")
    text = (ROOT / path).read_text()
    return text.partition(f"\n## {section}\n")[2].partition("\n## ")[0] if section else text


def loads() -> list[str]:
    """Places of `train` that open a base model; `run_sequence` and the rest are given the session."""
    paths = sorted((ROOT / "src/anchorlora/train").glob("*.py"))
    calls = [(path, node) for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [f"{p.name}:{c.lineno}" for p, c in calls if getattr(c.func, "id", "") in ("Session", "load_base_model")]


def lists() -> list[str]:
    """Places in the packages with two or more names of methods in one list, tuple, set or dict, outside methods/."""
    from anchorlora.methods import METHODS

    places = []
    for path in (p for package in PACKAGES for p in sorted((ROOT / "src" / package).rglob("*.py")) if "methods" not in p.parts):
        for node in ast.walk(ast.parse(path.read_text())):
            items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
            if len({item.value for item in items if isinstance(item, ast.Constant)} & set(METHODS)) > 1:
                places.append(f"{path.name}:{node.lineno}")
    return places


def main() -> None:
    """Print one line a row."""
    from anchorlora.data.forms import FORMS

    for package in PACKAGES:
        counts = [lines_of(path) for path in (ROOT / "src" / package).rglob("*.py")]
        code, docstrings = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
        print(f"{package}: {len(counts)} files, {code:,} lines of code, {docstrings:,} lines of docstrings")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    print(f"files in the repository: {len(tracked):,}, of which results: {sum(name.startswith('results/') for name in tracked):,}")
    pages = documents()
    words = sum(len(page.read_text().split()) for page in pages)
    print(f"documents for users: {len(pages)} pages, {words:,} words; README {len((ROOT / 'README.md').read_text().split()):,}")
    for edit, files in EDITS.items():
        lines = sum(len(text_of(file).splitlines()) for file in files)
        print(f"to read for {edit}: {lines} lines of {READ} in {len(files)} files")
    print(f"row forms: {len(FORMS)}, of which {sum(form.read is not None for form in FORMS)} are read and the others refused")
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.*") if path.suffix in (".py", ".pyi", ".j2")]
    for thing, name in NAMED.items():
        print(f"to edit for {thing}: {sum(name in text for text in sources)} files under src name {name}")
    print(f"places of train/ that open a base model: {loads()}; lists of methods outside methods/: {lists()}")
    print(f"modules in circles: {len(circles())} pairs {circles()[:5]}")


if __name__ == "__main__":
    main()
