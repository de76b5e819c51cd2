"""The model card of an export: what it is, how it was made, its scores, and what the form cost.

Text from files stays text: every character that Markdown, HTML, or YAML could act on is escaped.
"""

from __future__ import annotations

import json
import re
from typing import Any

from anchorlora.pages.html import templates
from anchorlora.pages.record import short_layers
from anchorlora.scores import Scores
from anchorlora.store.export import Export
from anchorlora.store.record import Record

HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
MARKDOWN = re.compile(r"([\\`*_\[\]#|~$@]|:(?=//)|(?<=www)\.)")  # with what makes a link of a bare address


def card(export: Export, record: Record | None) -> str:
    """Return the README.md of an exported folder, for the hub."""
    environment = templates(html=False)  # Markdown: the filter `text` escapes
    environment.filters |= {"text": as_text, "yaml": as_yaml, "e": scientific}
    values: dict[str, Any] = {
        "x": export,
        "record": record,
        "title": _title(export, record),
        "layers": list(zip(short_layers([layer.module for layer in export.layers]), export.layers, strict=True)),
        **_results(export, record),
    }
    return environment.get_template("card.md.j2").render(values)


def as_text(value: Any) -> str:
    """Return a value as one line that Markdown shows unchanged."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return MARKDOWN.sub(r"\\\1", "".join(HTML.get(c, c) for c in line))


def as_yaml(value: Any) -> str:
    """Return a value as a quoted scalar that every version of YAML reads alike."""
    return json.dumps("".join(c if c.isprintable() else " " for c in str(value)), ensure_ascii=False)


def scientific(value: float | None) -> str:
    """Return a number with two significant digits; a dash for None."""
    return "-" if value is None else format(value, ".1e")


def _title(export: Export, record: Record | None) -> str:
    source = export.source
    what = f"LoRA after task {source.number}, {source.task}" if source.kind == "run" else "LoRA adapter"
    return f"{record.method.name}: {what}" if record else what


def _results(export: Export, record: Record | None) -> dict[str, Any]:
    """The order up to the exported task, with the accuracies, scores, and drift up to it."""
    if record is None or export.source.number is None:
        return {"order": [], "accuracy": [], "scores": None, "drift": []}
    n = export.source.number
    return {
        "order": record.order[:n],
        "accuracy": record.accuracy[:n],
        "scores": Scores.of(record.accuracy[:n]).as_dict(),
        "drift": [d for d in record.drift if d.task <= n],
    }
