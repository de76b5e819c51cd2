"""Who may import whom: the arrows of docs/architecture.md, read from the syntax trees."""

import ast
import subprocess
import sys
from pathlib import Path

import anchorlora

SOURCE = Path(anchorlora.__file__).parent
EVERYONE = {"devices", "errors", "exactness", "naming", "sealed_file", "shown", "strict"}
LIBRARY = {"geometry", "adapters", "features", "constraints", "methods", "tasks", "scores"}
ALLOWED = {
    "devices": set(),
    "errors": set(),
    "exactness": set(),
    "naming": set(),
    "sealed_file": set(),
    "shown": set(),
    "strict": set(),
    "general_file": set(),
    "export_file": set(),
    "scores": set(),
    "record": {"scores"},
    "artifacts": {"record"},
    "embedded": set(),
    "geometry": set(),
    "tasks": set(),
    "adapters": {"geometry"},
    "features": {"geometry", "adapters"},
    "constraints": {"geometry", "adapters"},
    "methods": {"constraints", "tasks", "adapters", "geometry"},  # the last two as types only
    "diagnostics": {"geometry", "adapters", "constraints"},
    "integrations": {"geometry", "adapters", "constraints", "diagnostics"},
    "continual": LIBRARY,
    "experiments": LIBRARY | {"diagnostics", "continual", "record", "artifacts", "general_file", "export_file", "embedded"},
    "recipes": {"continual", "experiments"},
    "reports": {"scores", "record", "artifacts", "general_file", "export_file"},
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


def test_only_adapters_imports_peft_and_reports_never_torch():
    for part, path in files():
        _, others = imports(path)
        assert part == "adapters" or "peft" not in others, path
        assert part not in (
            "reports",
            "scores",
            "record",
            "artifacts",
            "general_file",
            "export_file",
            "naming",
            "sealed_file",
            "shown",
            "strict",
            "tasks",
            "cli",
        ) or not others & {
            "torch",
            "peft",
        }, path
        assert part != "geometry" or others <= {"torch", "__future__", "collections", "contextlib", "dataclasses", "functools"}, path


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
