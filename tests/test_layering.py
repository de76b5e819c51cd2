"""Who may import whom: the arrows of docs/lab/architecture.md, read from the syntax trees."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import anchorlora
import anchorlora_lab

SOURCE, LABORATORY = (Path(package.__file__).parent for package in (anchorlora, anchorlora_lab))
EVERYONE = {"devices", "errors", "paths", "processes", "store", "text"}
ALLOWED = {  # lowest first
    "devices": set(),
    "errors": set(),
    "processes": set(),
    "text": set(),
    "paths": set(),
    "scores": set(),
    "config": set(),
    "store": {"scores", "config"},
    "embedded": set(),
    "geometry": set(),
    "data": {"config", "embedded"},
    "recipes": {"config"},
    "adapters": {"geometry"},
    "features": {"geometry", "adapters"},
    "models": {"config", "adapters", "features", "data", "geometry", "recipes", "embedded"},
    "constraints": {"geometry", "adapters"},
    "methods": {"constraints", "data", "adapters", "geometry"},  # the last two as types only
    "continual": {"geometry", "adapters", "features", "constraints", "methods", "data", "models", "config"},
    "measurement": {
        *("geometry", "adapters", "features", "constraints", "methods", "continual"),
        *("models", "data", "config", "recipes", "embedded"),
    },
    "integrations": {"geometry", "adapters", "features", "constraints", "measurement"},
    "runs": {
        *("geometry", "adapters", "features", "constraints", "methods", "data", "models", "config"),
        *("measurement", "continual", "scores", "recipes", "embedded"),
    },
    "export": {
        "geometry",
        "adapters",
        "features",
        "models",
        "config",
        "measurement",
        "continual",
        "runs",
        "embedded",
    },
    "train": {
        *("geometry", "adapters", "features", "constraints", "methods", "data", "models", "config", "continual", "measurement"),
        *("scores", "recipes", "embedded", "runs", "export"),
    },
    "pages": {"scores", "recipes"},
}
LAB = {  # the laboratory: its own rooms, then those of the library
    "suites": {"scores", "adapters", "features", "models", "config", "data", "continual", "embedded"},
    "grid": {
        *("geometry", "adapters", "features", "constraints", "methods", "data", "models", "config"),
        *("continual", "runs"),
    },
    "report": {"suites", "scores", "methods", "pages"},
    "frontier": {
        *("adapters", "config", "constraints", "continual", "data", "embedded"),
        *("features", "methods", "models", "pages", "report"),
    },
}


@cache
def imports(path):
    """(rooms of the library, rooms of the laboratory, outermost packages of others) that a file imports, wherever in the file."""
    found = {"anchorlora": set(), "anchorlora_lab": set()}
    others = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module in found else [node.module]
        for name in names:
            head, *rest = name.split(".")
            if head not in found:
                others.add(head)
            elif rest or head == "anchorlora_lab":
                found[head].add(rest[0] if rest else "")
    return *found.values(), others


def files(source=SOURCE):
    for path in sorted(source.rglob("*.py")):
        part = path.relative_to(source).parts[0].removesuffix(".py")
        yield part, path


def test_arrows_point_down():
    for part, path in files():
        if part in ("cli", "__init__", "__main__"):
            continue
        ours, _, _ = imports(path)
        wrong = ours - ALLOWED[part] - {part} - EVERYONE
        assert not wrong, f"{path.relative_to(SOURCE)} imports {sorted(wrong)}"


def test_nothing_in_the_library_imports_the_laboratory():
    for _, path in files():
        _, lab, others = imports(path)
        assert not lab, f"{path.relative_to(SOURCE)} imports anchorlora_lab"
        assert not others & {"matplotlib", "tabulate"}, f"{path.relative_to(SOURCE)} imports what only the extra lab installs"


def test_arrows_in_the_laboratory_point_down():
    for part, path in files(LABORATORY):
        if part in ("cli", "__init__"):
            continue
        ours, lab, others = imports(path)
        wrong = (ours | lab) - LAB[part] - {part} - EVERYONE
        assert not wrong, f"{path.relative_to(LABORATORY)} imports {sorted(wrong)}"
        assert part != "report" or not others & {"torch", "peft"}, path


def test_no_circle():
    assert list(ALLOWED) == [part for part in ALLOWED if ALLOWED[part] <= set(list(ALLOWED)[: list(ALLOWED).index(part)])]


def test_only_adapters_imports_peft_and_pages_never_torch():
    for part, path in files():
        *_, others = imports(path)
        assert part == "adapters" or "peft" not in others, path
        torchless = part in ("pages", "scores", "data", "cli") or (part == "store" and path.name != "tensors.py")
        assert not torchless or not others & {"torch", "peft"}, path
        assert part != "geometry" or others <= {"torch", "math", "__future__", "collections", "dataclasses", "functools"}, path


def test_nothing_unpickles_and_no_remote_code_is_trusted():
    for _, path in (*files(), *files(LABORATORY)):
        *_, others = imports(path)
        assert not others & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, path
        text = path.read_text()
        assert "weights_only=False" not in text, path
        assert "trust_remote_code=True" not in text, path


def test_float64_tensors_are_made_where_their_device_has_them():
    for part, path in (*files(), *files(LABORATORY)):
        if part != "devices":
            assert ".double()" not in path.read_text(), f"{path}: use devices.in_float64, Apple's GPUs have no float64"


def test_help_and_what_reads_records_do_not_wait_for_what_computes():
    words = [["--help"], *([command, "--help"] for command in ("export", "report", "eval")), ["methods"]]
    words.append(["status", str(Path(__file__).parents[1] / "results/mini-en/trace")])
    code = (
        "import sys; from anchorlora.cli.app import main;"
        f"assert not any(main(each) for each in {words!r});"
        "import anchorlora_lab.report.page;"
        "assert not {'torch', 'peft', 'transformers', 'lm_eval'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def modules_imported(path, names):
    """Modules among `names` that a file imports: at the top, in functions and for type checking."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names} & names
            yield from whole or {node.module} & names


def test_no_modules_import_each_other():
    """No circle of modules, over any number of others; a package's `__init__` only lists names."""
    graph = {}
    paths = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts): path
        for root in (SOURCE, LABORATORY)
        for path in root.rglob("*.py")
        if path.name != "__init__.py"
    }
    for module, path in paths.items():
        graph[module] = set(modules_imported(path, set(paths))) - {module}
    reached = {module: set(imported) for module, imported in graph.items()}
    for middle in graph:  # Warshall
        for module in graph:
            if middle in reached[module]:
                reached[module] |= reached[middle]
    circles = {tuple(sorted({m} | {n for n in reached[m] if m in reached[n]})) for m in graph if m in reached[m]}
    assert not circles, sorted(circles)
