"""A report: tables, figures, and one self-contained HTML page, made from records alone."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from anchorlora.reports.chapters import Chapter, chapters_of
from anchorlora.reports.comparability import studies_of
from anchorlora.reports.figures import FIGURES, Looks, as_bytes, looks_of
from anchorlora.reports.html import escaping
from anchorlora.reports.records import Run
from anchorlora.reports.tables import Table

VECTOR = ("pdf", "svg")
SUFFIXES = {"text": "txt", "markdown": "md", "latex": "tex", "csv": "csv"}


@dataclass(frozen=True)
class Picture:
    """A rendered figure.

    Args:
        name: Its file name, without suffix.
        alt: A sentence on what it shows.
        png: Its bytes.
        vector: The same as PDF and SVG, by suffix.
    """

    name: str
    alt: str
    png: bytes
    vector: Mapping[str, bytes]

    @property
    def source(self) -> str:
        """The picture as a data URL, so that the page loads nothing."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


@dataclass(frozen=True)
class Report:
    """A report that was written: its chapters, and the path of its page."""

    chapters: list[Chapter]
    page: Path


def write_report(runs: Sequence[Run], to: Path, *, printed: bool = True) -> Report:
    """Write every table in four formats, every figure as PNG, PDF and SVG, and index.html.

    Tables go to tables/ (NAME.txt, .md, .tex, .csv), figures to figures/ (NAME.png, .pdf, .svg). The same runs give the same bytes.
    To have the tables as data, take them from the returned chapters.

    Args:
        runs: Finished runs, as `find_runs` returns them.
        to: The folder to write into; existing files of the same names are replaced.
        printed: Whether the paper's values stand beside ours, where they may.

    Returns:
        The chapters, with their tables, and the path of the page.

    Raises:
        InvalidValue: If runs of one study differ in what they must share; nothing is written then.

    Example:
        >>> import json
        >>> from anchorlora.reports.page import write_report
        >>> from anchorlora.reports.records import find_runs
        >>> layer = {"module": "q_proj", "k": 4, "k_star": 4, "retained_energy": 0.95, "rows": 128}
        >>> cost = {"train_seconds": [9.5], "evaluate_seconds": 2.0, "peak_memory_bytes": 10**9}
        >>> cost |= {"trained_parameters": 100, "stored_parameters": 100, "history_bytes": 0}
        >>> model = {"name": "tiny", "revision": None, "sha256": None, "parameters": 1000, "dtype": "float32"}
        >>> record = {"schema": 2, "method": "seq-lora", "definition": "Shared()", "recipe": "mine", "base_model": model}
        >>> record |= {"order": ["news"], "seed": 42, "protocol": {}, "threads": 1, "accuracy": [[88.0]], "invalid": [[0.0]]}
        >>> record |= {"scores": {"AA": 88.0, "LA": 88.0, "BWT": None, "FM": None}, "drift": [], "layers": [[layer]]}
        >>> record |= {"cost": cost, "versions": {}, "data": {}, "host": {}, "started": "2026-01-01", "finished": "2026-01-01"}
        >>> (tmp / "run").mkdir()
        >>> _ = (tmp / "run/record.json").write_text(json.dumps(record))
        >>> report = write_report(find_runs([tmp / "run"]), tmp / "report")
        >>> report.page.name
        'index.html'
        >>> main = report.chapters[0].main[0]
        >>> [column.heading for column in main.columns], main.rows
        (['method', 'runs', 'AA', 'BWT', 'FM'], (('seq-lora', '1 of 1', 88.0, None, None),))
    """
    chapters = chapters_of(studies_of(runs))
    chapters = chapters if printed else [chapter.ours() for chapter in chapters]
    tables, pictures = all_tables(chapters), all_pictures(chapters, looks_of(runs), vector=VECTOR)
    page = render(chapters, pictures)
    for folder in (to / "tables", to / "figures"):
        folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        for form, suffix in SUFFIXES.items():
            (to / "tables" / f"{table.name}.{suffix}").write_text(getattr(table, form)(), encoding="utf-8")
    for picture in pictures.values():
        for suffix, content in {"png": picture.png, **picture.vector}.items():
            (to / "figures" / f"{picture.name}.{suffix}").write_bytes(content)
    (to / "index.html").write_text(page, encoding="utf-8")
    return Report(chapters, to / "index.html")


def all_tables(chapters: Sequence[Chapter]) -> list[Table]:
    """Return the tables of all chapters, in the order of the page.

    Args:
        chapters: As `chapters_of` returns them.
    """
    return [table for chapter in chapters for table in chapter.tables]


def all_pictures(chapters: Sequence[Chapter], looks: Looks, *, vector: Sequence[str] = ()) -> dict[tuple[int, str], Picture]:
    """Draw every figure, by chapter (0-based) and name; a method looks the same in all of them.

    Args:
        chapters: As `chapters_of` returns them.
        looks: A color and marker for each method.
        vector: Other forms to draw beside PNG: "pdf", "svg".
    """
    out = {}
    for number, chapter in enumerate(chapters):
        for name in (name for section in chapter.sections for name in section.figures):
            assert chapter.study is not None
            drawing = FIGURES[name]
            forms = as_bytes(drawing.draw(chapter.study.runs, looks), ("png", *vector))
            png = forms.pop("png")
            out[number, name] = Picture(chapter.study.prefix + name, drawing.alt, png, forms)
    return out


def render(chapters: Sequence[Chapter], pictures: dict[tuple[int, str], Picture]) -> str:
    """Return the HTML page. Everything that comes from records is escaped, and nothing is loaded from elsewhere.

    Args:
        chapters: As `chapters_of` returns them.
        pictures: As `all_pictures` returns them.
    """
    return escaping().get_template("page.html.j2").render(chapters=chapters, pictures=pictures)
