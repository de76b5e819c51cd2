"""Writes docs/methods.md, and into README.md, between their markers, the measured table of `make run` and the table of methods.

`make docs` calls it.
"""

import re
from pathlib import Path

from anchorlora.cli.methods import methods_page, methods_table
from anchorlora.reports.records import find_runs
from anchorlora.reports.tables import complete_table

ROOT = Path(__file__).parents[1]


def fill(text: str, name: str, content: str) -> str:
    """The text with what stands between `<!-- name -->` and `<!-- /name -->` replaced."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    found, count = re.subn(pattern, lambda m: f"{m[1]}{content.rstrip()}\n{m[2]}", text, flags=re.S)
    if count != 1:
        raise SystemExit(f"README.md has no markers for {name}")
    return found


(ROOT / "docs/methods.md").write_text(methods_page())
page = ROOT / "README.md"
text = fill(page.read_text(), "methods", methods_table())
if (ROOT / "runs/mini").is_dir():
    table = complete_table(find_runs([ROOT / "runs/mini"]))
    text = fill(text, "scores", table.markdown().split("\n", 2)[2])
page.write_text(text)
