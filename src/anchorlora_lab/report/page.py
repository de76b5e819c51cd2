"""A report: tables, figures, and one self-contained HTML page, made from records alone: verdict, advice, evidence."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from anchorlora.pages.html import script_of, templates
from anchorlora.pages.record import order_label, triangle_table
from anchorlora.pages.table import Table
from anchorlora.store.files import naming
from anchorlora.store.record import RECORD_FILE
from anchorlora_lab.report.chapters import Chapter, chapters_of
from anchorlora_lab.report.comparability import Study, studies_of
from anchorlora_lab.report.figures import FIGURES, PlotStyles, as_bytes, looks_of
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.layout import AS_IS, WORDS, Layout
from anchorlora_lab.report.records import Run, by_method
from anchorlora_lab.report.writers import WRITERS

FILES = ("png", "pdf")  # what figures are written as, beside the SVG that the page shows
WORDY = 40  # letters from which on a cell breaks its lines


@dataclass(frozen=True)
class Picture:
    """A rendered figure.

    Args:
        name: Its file name, without suffix.
        alt: A sentence on what it shows.
        forms: Its bytes by suffix: "svg", "png", "pdf".
    """

    name: str
    alt: str
    forms: Mapping[str, bytes]

    @property
    def source(self) -> str:
        """The picture as a data URL, so that the page loads nothing."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.forms['svg']).decode()}"


@dataclass(frozen=True)
class Report:
    """A report that was written: its chapters, and the path of its page."""

    chapters: list[Chapter]
    page: Path


def write_report(runs: Sequence[Run], to: Path, *, printed: bool = True, layout: Layout = AS_IS) -> Report:
    """Write every table in four formats, every figure as PNG, PDF and SVG, index.html, and findings.json.

    Tables go to tables/ (NAME.txt, .md, .tex, .csv), figures to figures/ (NAME.png, .pdf, .svg). The same runs give the same bytes.
    findings.json has what the page begins with: by chapter, its sentences and, as data, the levels, differences and boundaries that
    they rest on. To have the tables as data, take them from the returned chapters.

    Args:
        runs: Finished runs, as `find_runs` returns them.
        to: The folder to write into; existing files of the same names are replaced.
        printed: Whether the paper's values stand beside ours, where they may.
        layout: Columns, groups, reference, and spread of the tables of scores.

    Returns:
        The chapters, with their tables, and the path of the page.

    Raises:
        InvalidValue: If runs of one study differ in what they must share; nothing is written then.
        UnknownName: If the layout names a column or a method that the runs do not have.

    Example:
        >>> import json
        >>> from anchorlora_lab.report.page import write_report
        >>> from anchorlora_lab.report.records import find_runs
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
    layout.refuse_unknown(runs)
    chapters = chapters_of([replace(study, layout=layout) for study in studies_of(runs)])
    chapters = chapters if printed else [chapter.with_tables(Table.ours) for chapter in chapters]
    tables, pictures = all_tables(chapters), all_pictures(chapters, looks_of(runs), forms=("svg", *FILES))
    page = render(chapters, pictures, to=to)
    findings = {chapter.title: asdict(chapter.findings) for chapter in chapters if chapter.findings}
    text = json.dumps(findings, indent=1, ensure_ascii=False) + "\n"
    files = {f"tables/{table.name}.{suffix}": written(table).encode() for table in tables for suffix, written in WRITERS.items()}
    files |= {f"figures/{p.name}.{suffix}": content for p in pictures.values() for suffix, content in p.forms.items()}
    for folder in (to / "tables", to / "figures"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in (files | {"findings.json": text.encode(), "index.html": page.encode()}).items():
        with naming(to / name):
            (to / name).write_bytes(content)
    return Report(chapters, to / "index.html")


def all_tables(chapters: Sequence[Chapter]) -> list[Table]:
    """Return the tables of all chapters, in the order of the page.

    Args:
        chapters: As `chapters_of` returns them.
    """
    return [table for chapter in chapters for table in chapter.tables]


def all_pictures(
    chapters: Sequence[Chapter], looks: PlotStyles, *, forms: Sequence[str] = ("svg",)
) -> dict[tuple[int, str], Picture]:
    """Draw every figure, by chapter (0-based) and name; a method looks the same in all of them.

    Args:
        chapters: As `chapters_of` returns them.
        looks: A color and marker for each method.
        forms: Of "svg", "png", "pdf".
    """
    out = {}
    for number, chapter in enumerate(chapters):
        for name in (name for section in chapter.sections for name in section.figures):
            runs, prefix = (chapter.study.runs, chapter.study.prefix) if chapter.study else (chapter.spanned, "")
            compared = {"reference": chapter.study.layout.reference} if chapter.study and name == "stages" else {}
            figure = FIGURES[name](runs, looks, **compared)
            out[number, name] = Picture(prefix + name, WORDS["figures"][name], as_bytes(figure, forms))
    return out


def render(chapters: Sequence[Chapter], pictures: dict[tuple[int, str], Picture], *, to: Path) -> str:
    """Return the HTML page. Everything that comes from records is escaped, and nothing is loaded from elsewhere.

    Args:
        chapters: As `chapters_of` returns them.
        pictures: As `all_pictures` returns them.
        to: The folder of the page, from which its links lead to records.
    """
    links = [Links(chapter.study, f"{number}") if chapter.study else None for number, chapter in enumerate(chapters, 1)]
    environment = templates("anchorlora_lab.report")
    script, digest = script_of(environment, "tables.js.j2")
    given = {"parts": list(zip(chapters, links, strict=True)), "pictures": pictures, "to": to, "cells": _cells}
    return environment.get_template("page.html.j2").render(given, script=script, script_hash=digest)


class Links:
    """Where the numbers of a study lead: to its runs' records, which are listed at the end of its chapter by method.

    Args:
        study: The study.
        name: What its anchors begin with.
    """

    def __init__(self, study: Study, name: str) -> None:
        self.grid, self.prefix = Grid(study.runs), study.prefix
        self.listed = by_method(study.runs)
        self.of_method = {method: f"m{name}-{i}" for i, method in enumerate(self.listed)}
        runs = [run for group in self.listed.values() for run in group]
        self.of_run = {(run.method, order_label(run.order), run.seed): f"r{name}-{i}" for i, run in enumerate(runs)}
        self.alone = {self.prefix + triangle_table(run.record).name: run for run in runs}

    def of_row(self, table: Table, row: Sequence[object]) -> str:
        """Return the anchor of what a row is about: a run, or a method; empty if it is about neither.

        Args:
            table: The row's table.
            row: Its values.
        """
        if (run := self.alone.get(table.name)) is not None:
            return self.of_run[run.method, order_label(run.order), run.seed]
        values = {column.heading: value for column, value in reversed(list(zip(table.columns, row, strict=True)))}
        method = values.get("method")
        if not isinstance(method, str) or method not in self.of_method:
            return ""
        order, seed = values.get("order", order_label(self.grid.orders[0])), values.get("seed")
        known = isinstance(order, str) and isinstance(seed, int) and (method, order, seed) in self.of_run
        return self.of_run[method, order, seed] if known else self.of_method[method]  # type: ignore[index]

    def methods(self, to: Path) -> list[dict[str, Any]]:
        """Return the list of records: each method with its runs, their anchors, and the way to their records.

        Args:
            to: The folder of the page.
        """

        def entry(run: Run) -> dict[str, str]:
            label = order_label(run.order)
            words, path = f"{label}, seed {run.seed}", _way(run.folder / RECORD_FILE, to)
            return {"anchor": self.of_run[run.method, label, run.seed], "words": words, "path": path}

        return [
            {"name": method, "anchor": self.of_method[method], "runs": [entry(run) for run in group]}
            for method, group in self.listed.items()
        ]


def _way(path: Path, to: Path) -> str:
    """A relative URL from a folder to a file, or the file's own where no relative path leads there (another drive)."""
    try:
        return quote(Path(os.path.relpath(path.resolve(), to.resolve())).as_posix(), errors="surrogateescape")
    except ValueError:
        return path.resolve().as_uri()


def _cells(table: Table, links: Links | None) -> list[list[dict[str, str]]]:
    """The cells of a table's rows: text, classes, and where a number of ours leads."""
    out = []
    for values, cells in zip(table.rows, table.cells(), strict=True):
        anchor = links.of_row(table, values) if links else ""
        row = []
        for j, (text, mark) in enumerate(cells):
            words = table.is_text(j)
            kinds = [mark, "text" if words else "", "long" if len(text) > WORDY else ""]
            counts = table.columns[j].heading == "runs" or not words
            leads = anchor and counts and values[j] is not None and not table.columns[j].printed
            row.append({"text": text, "kind": " ".join(filter(None, kinds)), "link": f"#{anchor}" if leads else ""})
        out.append(row)
    return out
