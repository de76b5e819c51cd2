"""Write into README.md, between their markers, what `make run` and `make demo` measured.

From runs/mini: the table of scores, and docs/figures/mini-stages.svg, the figure `stages` of its report. From runs/demo: the
verdict. What was not run stays as it is. docs/package.md, the page for a package index, has its chooser and loop: links would
lead nowhere there. `make docs` calls this.
"""

import json
import re
from pathlib import Path

from anchorlora_lab.report import writers
from anchorlora_lab.report.records import find_runs
from anchorlora_lab.report.tables import complete_table

ROOT = Path(__file__).parents[1]
README, PACKAGE, FIGURE = ROOT / "README.md", ROOT / "docs/package.md", ROOT / "docs/figures/mini-stages.svg"


def fill(text: str, name: str, content: str) -> str:
    """The text with what stands between `<!-- name -->` and `<!-- /name -->` replaced."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    found, count = re.subn(pattern, lambda m: f"{m[1]}{content.rstrip()}\n{m[2]}", text, flags=re.S)
    if count != 1:
        raise SystemExit(f"there are no markers for {name}")
    return found


def in_step(package: str, readme: str) -> str:
    """The page for a package index with the chooser and the loop of README.md."""
    (chooser,) = re.findall(r"^\| you have \| command.*?\n\n", readme, flags=re.S | re.M)
    loop = re.search(r"```python\n.*?```\n", readme, flags=re.S)
    if loop is None:
        raise SystemExit("README.md has no Python")
    return fill(fill(package, "chooser", chooser), "loop", loop[0])


def measured(readme: str) -> str:
    """README.md with what was run in this checkout; its figure is copied."""
    run, demo = ROOT / "runs/mini", ROOT / "runs/demo/skill/verdict.json"
    if run.is_dir():
        _, table, *_ = writers.markdown(complete_table(find_runs([run]))).split("\n\n")  # title, table, notes
        rows = [line for line in table.splitlines() if line.split("|")[2].strip() != "-"]  # the picture has the majority label
        readme = fill(readme, "scores", "\n".join(rows))
        (drawn,) = (run / "report/figures").glob("*stages.svg")
        FIGURE.write_bytes(drawn.read_bytes())
    if demo.is_file():
        sentences = json.loads(demo.read_text())["sentences"]
        readme = fill(readme, "verdict", "\n".join(f"> - {sentence}" for sentence in sentences))
    return readme


if __name__ == "__main__":
    README.write_text(measured(README.read_text()))
    PACKAGE.write_text(in_step(PACKAGE.read_text(), README.read_text()))
