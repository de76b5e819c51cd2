"""The pages of docs/api name what the package has.  `make site` builds them and fails at a broken link or an unknown name."""

import re
from importlib import import_module
from pathlib import Path

import anchorlora

API = Path(__file__).parents[2] / "docs/api"
NAMED = [name for page in sorted(API.glob("*.md")) for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), flags=re.M)]


def test_every_public_name_has_its_place():
    public = {f"anchorlora.{name}" for name in anchorlora.__all__ if not name.startswith("_")}
    assert not public - set(NAMED)
    assert len(NAMED) == len(set(NAMED)), "a name stands on one page"


def test_every_name_on_a_page_exists():
    for name in NAMED:
        module, _, last = name.rpartition(".")
        assert hasattr(import_module(module), last) or import_module(name), name
