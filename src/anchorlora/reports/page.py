"""A report: tables, figures and one self-contained HTML page, from records alone."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from anchorlora.reports.figures import FIGURES, as_png
from anchorlora.reports.records import Run, mixed
from anchorlora.reports.tables import all_tables, drift_table, main_table, triangle_table

SUFFIXES = {"text": "txt", "markdown": "md", "latex": "tex", "csv": "csv"}


def write_report(runs: Sequence[Run], to: Path) -> Path:
    """Write every table in four forms, every figure as PNG, and index.html; returns the page's path."""
    tables, pictures = all_tables(runs), {name: as_png(draw(runs)) for name, draw in FIGURES.items()}
    page = render(runs, pictures)
    for folder in (to / "tables", to / "figures"):
        folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        for form, suffix in SUFFIXES.items():
            (to / "tables" / f"{table.name}.{suffix}").write_text(getattr(table, form)(), encoding="utf-8")
    for name, picture in pictures.items():
        (to / "figures" / f"{name}.png").write_bytes(picture)
    (to / "index.html").write_text(page, encoding="utf-8")
    return to / "index.html"


def render(runs: Sequence[Run], pictures: dict[str, bytes]) -> str:
    """The page.  Everything that comes from records is escaped; nothing is loaded from elsewhere."""
    environment = Environment(
        loader=PackageLoader("anchorlora.reports"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html.j2").render(
        runs=runs,
        first=runs[0].record,
        tables=all_tables(runs),
        scores=main_table(runs),
        drift=drift_table(runs),
        triangles=[triangle_table(run) for run in runs],
        definitions={run.method: run.record.definition for run in runs},
        mixed=mixed(runs),
        pictures={name: base64.b64encode(data).decode() for name, data in pictures.items()},
    )
