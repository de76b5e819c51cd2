"""Hooks of mkdocs: measured text comes into pages; README.md, CHANGELOG.md, the notebook and every method are pages.

Links that GitHub follows lead on: README.md is written for GitHub, where it stands one folder above docs/; a link of docs/ that
leaves the folder has no page here.
"""

import json
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))  # mkdocs runs a hook as a file of no package
import built_pages  # noqa: E402
import results  # noqa: E402

COPIED = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
NOTEBOOK = "docs/notebook.ipynb"
EACH = "Each method"  # the section of the navigation that has a page for every method
PAGES = {name: page for page, name in COPIED.items()} | {NOTEBOOK: "notebook.md"}
MARKER = re.compile(r"<!-- .*? -->")  # of tools/built_pages.py; at the start of a line it would end the item of a list
MESSAGES = "troubleshooting.md"  # its blocks are messages: sentences, which wrap
LINK = re.compile(r"\[([^]]+)\]\(((?!https?://|#)[^)#\s]+)(#[^)\s]*)?\)")


def on_files(files, config):
    """Add the pages that stand outside docs/, and those of the methods."""
    results.unpack_all()
    for page, text in built_pages.method_pages.pages().items():
        files.append(File.generated(config, page, content=text))
    for page, name in COPIED.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, PAGES[NOTEBOOK], content=notebook()))
    return files


def on_config(config):
    """Put the page of every method into the navigation, in the order of the table of methods."""
    text = built_pages.page("methods.md")
    listed = [{name: page} for name, page in re.findall(r"^\| \[`([\w-]+)`\]\((methods/[\w-]+\.md)\)", text, flags=re.M)]
    (methods,) = (section for entry in config["nav"] for name, section in entry.items() if name == "Methods")
    (place,) = (entry for entry in methods if EACH in entry)
    place[EACH] = listed
    return config


def notebook():
    """The notebook as a page; it is stored without outputs."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads((ROOT / NOTEBOOK).read_text())["cells"]]
    first, *others = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells]
    return "\n\n".join([first, "[Download the notebook](notebook.ipynb){ download }", *others])


def on_page_markdown(markdown, page, config, files):
    """Write the measured text; point each relative link at a page of the site; keep only the text of one that leads to no page.

    The first page is wide, the markers of tools go, and messages wrap.
    """
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    if page.file.src_uri not in COPIED:  # README.md is stored with its measured text
        markdown = built_pages.built(markdown, page.file.src_uri)
    markdown = MARKER.sub("", markdown)
    if page.file.src_uri == MESSAGES:
        markdown = markdown.replace("```text\n", "``` { .text .wrap }\n")
    here = ROOT if page.file.src_uri in COPIED else (ROOT / "docs" / page.file.src_uri).parent

    def led(match):
        target = (here / match[2]).resolve()
        name = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else match[2]
        page_name = PAGES.get(name, name.removeprefix("docs/"))
        if files.get_file_from_path(page_name) is None:
            return match[1] if target.exists() else match[0]  # strict mode names the latter
        up = "../" * page.file.src_uri.count("/")
        return f"[{match[1]}]({up}{page_name}{match[3] or ''})"

    return LINK.sub(led, markdown)
