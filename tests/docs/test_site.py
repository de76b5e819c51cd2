"""The pages of docs/api name what the package has.  `make site` builds them and fails at a broken link or an unknown name."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

import anchorlora
import built_pages
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
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    import site_pages

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


DARK = "#1e2129"  # the page in Material's dark scheme


def contrast(one, other):
    """The ratio of two colors (#rgb or #rrggbb, the first with alpha perhaps) by WCAG 2."""

    def parts(color):
        digits = color.removeprefix("#")
        digits = "".join(2 * digit for digit in digits) if len(digits) < 6 else digits
        return [int(digits[i : i + 2], 16) / 255 for i in range(0, len(digits), 2)]

    def light(color):
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in color]
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    (*front, alpha), back = (*parts(one), 1.0)[:4], parts(other)
    low, high = sorted(light(each) for each in ([a * alpha + b * (1 - alpha) for a, b in zip(front, back, strict=True)], back))
    return (high + 0.05) / (low + 0.05)


def test_words_stand_out_in_both_schemes():
    css = (API.parent / "site.css").read_text()
    rules = dict(re.findall(r"data-md-color-scheme=\"(\w+)\"[^{]*\{([^}]*--md[^}]*)\}", css))
    assert rules.keys() == {"default", "slate"}
    for scheme, page in (("default", "#fff"), ("slate", DARK)):
        for name, color in re.findall(r"(--[\w-]+): (#\w+)", rules[scheme]):
            assert contrast(color, page) >= 4.5, (scheme, name)
    style = (API.parents[1] / "src/anchorlora/pages/templates/style.css.j2").read_text()
    for part in (style.partition("@media")[0], style.partition("@media")[2].partition("} }")[0]):
        color = dict(re.findall(r"--(\w+): (#\w+)", part))
        for name in ("text", "soft", "link"):
            assert min(contrast(color[name], color[on]) for on in ("page", "panel")) >= 4.5, name


def test_letters_of_the_figures_have_nine_pixels_at_the_size_that_a_phone_shows():
    """A figure is shown at its own size there, and scrolls."""
    assert ".md-typeset p > img { max-width: none; }" in (API.parent / "site.css").read_text()
    for figure in (API.parent / "figures").glob("*.svg"):
        text = figure.read_text()
        shown, unit, drawn = re.search(r'<svg[^>]* width="([\d.]+)(pt|px|)"[^>]* viewBox="0 0 ([\d.]+)', text).groups()
        scale = float(shown) * (4 / 3 if unit == "pt" else 1) / float(drawn)
        sizes = [float(size) for size in re.findall(r"font(?:-size)?: ?([\d.]+)px", text)]
        assert sizes, figure
        assert min(sizes) * scale >= 9, figure
