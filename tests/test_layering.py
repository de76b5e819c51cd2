"""Who may import whom: the arrows of docs/architecture.md, read from the syntax trees."""

import ast
import subprocess
import sys
from pathlib import Path

import anchorlora

SOURCE = Path(anchorlora.__file__).parent
EVERYONE = {"devices", "errors", "processes", "schemas"}
ALLOWED = {  # lowest first
    "devices": set(),
    "errors": set(),
    "processes": set(),
    "scores": set(),
    "schemas": {"scores"},
    "config": set(),
    "storage": set(),
    "embedded": set(),
    "geometry": set(),
    "tasks": {"config"},  # as a type only
    "recipes": {"config"},
    "adapters": {"geometry", "storage"},
    "features": {"geometry", "adapters", "storage"},
    "models": {"config", "adapters", "features", "storage", "tasks"},
    "constraints": {"geometry", "adapters"},
    "methods": {"constraints", "tasks", "adapters", "geometry"},  # the last two as types only
    "diagnostics": {"geometry", "adapters", "constraints"},
    "audits": {
        *("geometry", "adapters", "features", "constraints", "diagnostics"),
        *("storage", "models", "tasks", "config", "recipes", "embedded"),
    },
    "integrations": {"geometry", "adapters", "constraints", "audits"},
    "continual": {"geometry", "adapters", "features", "constraints", "methods", "tasks", "models", "config"},
    "runs": {
        *("geometry", "adapters", "features", "constraints", "methods", "tasks", "models", "config"),
        *("diagnostics", "continual", "storage", "scores", "recipes", "embedded"),
    },
    "study": {
        *("geometry", "adapters", "features", "constraints", "methods", "tasks", "models", "config"),
        *("diagnostics", "continual", "storage", "runs"),
    },
    "capability": {"adapters", "models", "config", "storage", "tasks", "continual", "embedded"},
    "export": {
        "geometry",
        "adapters",
        "features",
        "models",
        "config",
        "storage",
        "diagnostics",
        "audits",
        "continual",
        "runs",
        "embedded",
    },
    "skills": {
        *("geometry", "adapters", "features", "methods", "tasks", "models", "config", "continual", "audits"),
        *("storage", "scores", "embedded", "runs", "export"),
    },
    "reports": {"scores", "methods"},
}


def imports(path):
    """(module of ours, outermost package of others) that a file imports, wherever in the file."""
    ours, others = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"anchorlora.{a.name}" for a in node.names] if node.module == "anchorlora" else [node.module]
        for name in names:
            head, *rest = name.split(".")
            if head == "anchorlora" and rest:
                ours.add(rest[0])
            elif head != "anchorlora":
                others.add(head)
    return ours, others


def files():
    for path in sorted(SOURCE.rglob("*.py")):
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        yield part, path


def test_arrows_point_down():
    for part, path in files():
        if part in ("cli", "__init__", "__main__"):
            continue
        ours, _ = imports(path)
        wrong = ours - ALLOWED[part] - {part} - EVERYONE
        assert not wrong, f"{path.relative_to(SOURCE)} imports {sorted(wrong)}"


def test_no_circle():
    assert list(ALLOWED) == [part for part in ALLOWED if ALLOWED[part] <= set(list(ALLOWED)[: list(ALLOWED).index(part)])]


def test_only_adapters_imports_peft_and_reports_never_torch():
    for part, path in files():
        _, others = imports(path)
        assert part == "adapters" or "peft" not in others, path
        assert part not in ("reports", "scores", "schemas", "tasks", "cli") or not others & {"torch", "peft"}, path
        assert part != "geometry" or others <= {"torch", "__future__", "collections", "dataclasses", "functools"}, path


def test_nothing_unpickles_and_no_remote_code_is_trusted():
    for _, path in files():
        _, others = imports(path)
        assert not others & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, path
        text = path.read_text()
        assert "weights_only=False" not in text, path
        assert "trust_remote_code=True" not in text, path


def test_float64_tensors_are_made_where_their_device_has_them():
    for part, path in files():
        if part != "devices":
            assert ".double()" not in path.read_text(), f"{path}: use devices.in_float64, Apple's GPUs have no float64"


def test_listing_methods_and_reading_records_do_not_wait_for_torch():
    code = (
        "import sys; from anchorlora.cli.app import main; main(['methods']); main(['report', '--help']);"
        "import anchorlora.reports.page; assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
