"""Hooks of mkdocs: README.md is the site's first page, CHANGELOG.md a page of it, and links that GitHub follows lead on.

README.md is written for GitHub, where it stands one folder above docs/; a link of docs/ that leaves the folder has no page here.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
COPIED = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
PAGES = {name: page for page, name in COPIED.items()}
LINK = re.compile(r"\[([^]]+)\]\(((?!https?://|#)[^)#\s]+)(#[^)\s]*)?\)")


def on_files(files, config):
    """Add the pages that stand outside docs/."""
    for page, name in COPIED.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    """Point each relative link at a page of the site; keep only the text of one that leads to no page."""
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
