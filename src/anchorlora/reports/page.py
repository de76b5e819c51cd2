"""A report: tables, figures and one self-contained HTML page, from records alone."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anchorlora.reports.chapters import Chapter, chapters_of
from anchorlora.reports.comparability import studies_of
from anchorlora.reports.figures import FIGURES, Looks, as_png, looks_of
from anchorlora.reports.html import escaping
from anchorlora.reports.records import Run
from anchorlora.reports.tables import Table

SUFFIXES = {"text": "txt", "markdown": "md", "latex": "tex", "csv": "csv"}


@dataclass(frozen=True)
class Picture:
    """A figure as it is written: its file's name less the suffix, what it shows, its bytes."""

    name: str
    alt: str
    png: bytes

    @property
    def source(self) -> str:
        """The picture as an address that loads nothing."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


@dataclass(frozen=True)
class Report:
    """What was written: the chapters, and the page."""

    chapters: list[Chapter]
    page: Path


def write_report(runs: Sequence[Run], to: Path) -> Report:
    """Write every table in four forms, every figure as PNG, and index.html.  Raises ValueError for runs that do not go together."""
    chapters = chapters_of(studies_of(runs))
    tables, pictures = all_tables(chapters), all_pictures(chapters, looks_of(runs))
    page = render(chapters, pictures)
    for folder in (to / "tables", to / "figures"):
        folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        for form, suffix in SUFFIXES.items():
            (to / "tables" / f"{table.name}.{suffix}").write_text(getattr(table, form)(), encoding="utf-8")
    for picture in pictures.values():
        (to / "figures" / f"{picture.name}.png").write_bytes(picture.png)
    (to / "index.html").write_text(page, encoding="utf-8")
    return Report(chapters, to / "index.html")


def all_tables(chapters: Sequence[Chapter]) -> list[Table]:
    return [table for chapter in chapters for table in chapter.tables]


def all_pictures(chapters: Sequence[Chapter], looks: Looks) -> dict[tuple[int, str], Picture]:
    """Every figure, by chapter (0-based) and name; a method looks the same in all of them."""
    out = {}
    for number, chapter in enumerate(chapters):
        for name in (name for section in chapter.sections for name in section.figures):
            assert chapter.study is not None
            drawing = FIGURES[name]
            png = as_png(drawing.draw(chapter.study.runs, looks))
            out[number, name] = Picture(chapter.study.prefix + name, drawing.alt, png)
    return out


def render(chapters: Sequence[Chapter], pictures: dict[tuple[int, str], Picture]) -> str:
    """The page.  Everything that comes from records is escaped; nothing is loaded from elsewhere."""
    return escaping().get_template("page.html.j2").render(chapters=chapters, pictures=pictures)
