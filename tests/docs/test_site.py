"""The pages of docs/api name what the package has.  `make site` builds them and fails at a broken link or an unknown name."""

import json
import re
from importlib import import_module
from pathlib import Path

import anchorlora
import built_pages
import site_pages
from anchorlora.recipes import standard_cl

API = Path(__file__).parents[2] / "docs/api"
NAMED = [name for page in sorted(API.glob("*.md")) for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), flags=re.M)]


def called(name):
    """The class, function or module of a full name."""
    module, _, last = name.rpartition(".")
    found = getattr(import_module(module), last, None)
    return import_module(name) if found is None else found


def test_every_public_name_has_its_place():
    shown = [called(name) for name in NAMED]
    public = [name for name in anchorlora.__all__ if not name.startswith("_")]
    assert [name for name in public if not any(getattr(anchorlora, name) is each for each in shown)] == []
    assert len(NAMED) == len(set(NAMED)), "a name stands on one page"


def test_every_error_has_its_place():
    from anchorlora.errors import AnchorloraError

    family, new = {AnchorloraError}, [AnchorloraError]
    while new:
        new = [each for kind in new for each in kind.__subclasses__() if each.__module__ == "anchorlora.errors"]
        family |= set(new)
    assert {each.__name__ for each in family} == {name.rpartition(".")[2] for name in NAMED if ".errors." in name}


def test_the_notebook_is_a_page_with_every_cell():
    root = API.parents[1]
    page = site_pages.notebook()
    cells = json.loads((root / "docs/notebook.ipynb").read_text())["cells"]
    assert [cell["id"] for cell in cells if "".join(cell["source"]) not in page] == []
    assert page.count("```python\n") == sum(cell["cell_type"] == "code" for cell in cells)
    assert page.startswith("# ")


def test_every_field_of_a_recipe_has_a_row_with_its_meaning():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in built_pages.table_of_fields().splitlines()[2:]]
    fields = [name for part in standard_cl().model_dump().values() if isinstance(part, dict) for name in part]
    assert [row[0].strip("`") for row in rows] == fields
    assert [row[0] for row in rows if not row[1]] == []


def test_every_page_says_how_to_get_a_search():
    """Browsers run no search in pages that are opened from disk."""
    assert re.search(
        r"^copyright: .* no search\. .*http\.server -d build/site", (API.parents[1] / "mkdocs.yml").read_text(), flags=re.M
    )
