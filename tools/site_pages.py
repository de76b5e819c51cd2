"""Hooks of mkdocs: README.md, CHANGELOG.md and the notebook are pages, and so is every method; links that GitHub follows lead on.

README.md is written for GitHub, where it stands one folder above docs/; a link of docs/ that leaves the folder has no page here.
"""

import json
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
COPIED = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
NOTEBOOK = "docs/notebook.ipynb"
EACH = "Each method"  # the section of the navigation that has a page for every method
PAGES = {name: page for page, name in COPIED.items()} | {NOTEBOOK: "notebook.md"}
MARKER = re.compile(r"<!-- .*? -->")  # of the tools that fill pages; at the start of a line it would end the item of a list
MESSAGES = "troubleshooting.md"  # its blocks are messages: sentences, which wrap
LINK = re.compile(r"\[([^]]+)\]\(((?!https?://|#)[^)#\s]+)(#[^)\s]*)?\)")


def on_files(files, config):
    """Add the pages that stand outside docs/."""
    for page, name in COPIED.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, PAGES[NOTEBOOK], content=notebook()))
    return files


def on_config(config):
    """Put the page of every method into the navigation, in the order of the table of methods."""
    table = (ROOT / "docs/methods.md").read_text(encoding="utf-8").partition("## ")[0]
    pages = [{name: page} for name, page in re.findall(r"^\| \[`([\w-]+)`\]\((methods/[\w-]+\.md)\)", table, flags=re.M)]
    (methods,) = (section for entry in config["nav"] for name, section in entry.items() if name == "Methods")
    (place,) = (entry for entry in methods if EACH in entry)
    place[EACH] = pages
    return config


def notebook():
    """The notebook as a page; it is stored without outputs."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads((ROOT / NOTEBOOK).read_text())["cells"]]
    first, *others = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells]
    return "\n\n".join([first, "[Download the notebook](notebook.ipynb){ download }", *others])


def on_page_markdown(markdown, page, config, files):
    """Point each relative link at a page of the site; keep only the text of one that leads to no page.

    The first page is wide, the markers of tools go, and messages wrap.
    """
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    markdown = MARKER.sub("", markdown)
    if page.file.src_uri == MESSAGES:
        markdown = markdown.replace("```text\n", "``` { .text .wrap }\n")
    here = ROOT if page.file.src_uri in COPIED else (ROOT / "docs" / page.file.src_uri).parent

    def led(match):
        target = (here / match[2]).resolve()
        if not target.exists():
            return match[0]  # strict mode names it
        name = target.relative_to(ROOT).as_posix()
        found = PAGES.get(name, name.removeprefix("docs/"))
        if files.get_file_from_path(found) is None:
            return match[1]
        up = "../" * page.file.src_uri.count("/")
        return f"[{match[1]}]({up}{found}{match[3] or ''})"

    return LINK.sub(led, markdown)
