"""The law of docstrings: a reference for names of the API pages and the stub, one sentence with shapes and units elsewhere."""

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
SECTION = re.compile(r"^ *(Args|Attributes|Returns|Yields|Raises|Example|Examples):$", re.MULTILINE)


@functools.cache
def names_of_the_api():
    """(module, name in it) of every class and function of the stub and of the API pages; of a module, what it defines or lists."""
    named = set(re.findall(r" as (\w+)$", (SOURCE / "anchorlora/__init__.pyi").read_text(), re.MULTILINE))
    named = {f"anchorlora.{name}" for name in named}
    for page in (ROOT / "docs").rglob("*.md"):
        named |= set(re.findall(r"^::: ([\w.]+)", page.read_text(), re.MULTILINE))
    found = set()
    for name in named:
        value = resolved(name)
        listed, all_of = getattr(value, "__all__", ()), inspect.ismodule(value)
        members = [v for n, v in vars(value).items() if n in listed or of_module(n, v, value)] if all_of else [value]
        found |= {
            (member.__module__, member.__qualname__)
            for member in map(inspect.unwrap, members)
            if inspect.isclass(member) or inspect.isfunction(member)
        }
    return found


def resolved(name):
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        return functools.reduce(getattr, parts[count:], value)
    raise AssertionError(f"nothing is called {name}")


def of_module(name, value, module):
    return not name.startswith("_") and getattr(value, "__module__", None) == module.__name__


def definitions():
    """(place, node, whether it is of the API) of every class and function."""

    def below(node, path, module, in_api):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path}.{child.name}".removeprefix(".")
                public = (module, name) in names_of_the_api() or (in_api and (child.name == "__init__" or child.name[0] != "_"))
                yield f"{module}.{name}", child, public
                kind = isinstance(child, ast.ClassDef)
                yield from below(child, name if kind else f"{name}.<locals>", module, public and kind)
            elif isinstance(child, ast.If | ast.Try | ast.With):
                yield from below(child, path, module, in_api)

    for file in sorted(SOURCE.rglob("*.py")):
        module = ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        yield from below(ast.parse(file.read_text()), "", module, False)


def test_a_name_outside_the_api_has_no_reference():
    wordy = [place for place, node, public in definitions() if not public and SECTION.search(ast.get_docstring(node) or "")]
    assert wordy == [], "one sentence that says what it is for, with shapes and units"


def test_every_parameter_of_the_api_is_described():
    lacking = []
    for place, node, public in definitions():
        if not public or isinstance(node, ast.ClassDef) or node.name == "__init__":
            continue
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        said = ast.get_docstring(node) or ""
        names = [each.arg for each in given if each.arg not in ("self", "cls") and not each.arg.startswith("_")]
        lacking += [f"{place}: {name}" for name in names if not re.search(rf"^ +{name}: ", said, flags=re.MULTILINE)]
    assert lacking == []


@pytest.mark.parametrize("kind", [ast.ClassDef, ast.FunctionDef])
def test_every_name_of_the_api_says_what_it_is(kind):
    silent = [place for place, node, public in definitions() if public and isinstance(node, kind) and not ast.get_docstring(node)]
    assert [place for place in silent if not place.endswith(".__init__")] == []
