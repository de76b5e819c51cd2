"""Output of commands: literal text without markup, terminal control sequences, or secrets; log messages and warnings included.

No table is wider than 100 columns.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from anchorlora.text import shown

if TYPE_CHECKING:
    from anchorlora.pages.table import Table

WIDTH = 100  # columns of a terminal
LONGEST = 40  # characters of a word; what is longer is cut
NUMBER = re.compile(r"[-+]?\.?\d|-?$")  # how a cell begins that is never cut, and stands at the right
WORDS = re.compile(r"(?<=\s)(?=\S)|(?<=[.,/>])(?=[A-Za-z])")  # where a line may end


class Terminal(Console):
    """A console that shows text literally, and silently drops progress on stderr once nobody reads it, as when `tee` has ended."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def print(self, *objects: Any, **how: Any) -> None:
        """Print objects; control sequences and secrets in strings are made harmless."""
        text = [shown(item) if isinstance(item, str) else item for item in objects]
        with suppress(OSError) if self.stderr else nullcontext():
            super().print(*text, **how)

    def on_broken_pipe(self) -> None:
        """Go on without stderr; rich would end the program here."""
        if not self.stderr:
            super().on_broken_pipe()


class ShownRecord(logging.LogRecord):
    """A log record with a harmless message, for every logger and handler, those that libraries add later included."""

    def getMessage(self) -> str:  # noqa: N802  # the name is logging's
        """The message, without control sequences and secrets."""
        return shown(super().getMessage())


@contextmanager
def libraries_in_words() -> Iterator[None]:
    """Make every log message and warning in the block harmless: no control sequences, no secrets."""
    record, warning = logging.getLogRecordFactory(), warnings.formatwarning
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it lists missing kernels whatever is asked
    logging.setLogRecordFactory(ShownRecord)
    warnings.formatwarning = lambda message, category, *where: shown(
        f"warning: {message}\n" if category is UserWarning else warning(message, category, *where)
    )
    try:
        yield
    finally:
        logging.setLogRecordFactory(record)
        warnings.formatwarning = warning


out = Terminal()
err = Terminal(stderr=True)


count_option = partial(click.option, type=click.IntRange(min=1), metavar="N")
above_zero_option = partial(click.option, type=click.FloatRange(min=0, min_open=True))
path_option = partial(click.option, type=click.Path(path_type=Path))


def example(line: str) -> str:
    """Return the end of a command's help: one command line."""
    return f"\b\nExample:\n  {line}"


def hide_loading() -> None:
    """Show no progress of transformers while weights load."""
    from transformers.utils import logging as of_transformers

    of_transformers.disable_progress_bar()


def print_json(content: Any) -> None:
    """Print one JSON object on stdout."""
    utf8 = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    print(shown(json.dumps(content, indent=1, ensure_ascii=not utf8)))


def fitted(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that a terminal has room for.

    Headings and cells of words continue on the next line. Where that is not enough, the table is cut into parts, one above the
    other, which all begin with the first column. Numbers are never cut.
    """
    columns = [[heading, *(row[j] for row in rows)] for j, heading in enumerate(headings)]
    least = [max(len(piece.rstrip()) for text in column for piece in _pieces(text)) for column in columns]
    parts, used = [[0]], least[0]
    for j in range(1, len(columns)):
        if used + 2 + least[j] > WIDTH and len(parts[-1]) > 1:
            parts.append([0])
            used = least[0]
        parts[-1].append(j)
        used += 2 + least[j]
    return "\n\n".join(_grid([columns[j] for j in part], [least[j] for j in part]) for part in parts)


def render_table(table: Table) -> str:
    """Return a table of a report with its title and note, as a terminal has room for it."""
    cells = [[text for text, _ in row] for row in table.cells()]
    note = f"\n{wrap(table.note)}\n" if table.note else ""
    return f"{table.title}\n\n{fitted([column.heading for column in table.columns], cells)}\n{note}"


def wrap(text: str, *, before: str = "", after: str = "") -> str:
    """Return a paragraph in lines that a terminal has room for."""
    from textwrap import fill

    return fill(text, WIDTH, initial_indent=before, subsequent_indent=after, break_long_words=False, break_on_hyphens=False)


def _grid(columns: Sequence[Sequence[str]], least: Sequence[int]) -> str:
    wide = [max(map(len, column)) for column in columns]
    while sum(wide) + 2 * (len(wide) - 1) > WIDTH:
        able = [j for j, room in enumerate(wide) if room > least[j]]
        if not able:
            break
        wide[max(able, key=wide.__getitem__)] -= 1
    lines = [[_lines(text, room) for text in column] for column, room in zip(columns, wide, strict=True)]
    wide = [max(len(line) for cell in column for line in cell) for column in lines]
    aligned = [str.rjust if j and all(map(NUMBER.match, column[1:])) else str.ljust for j, column in enumerate(columns)]
    heading, *rows = zip(*lines, strict=True)
    shown = []
    for row in (heading, [["-" * room] for room in wide], *rows):
        for line in zip_longest(*row, fillvalue=""):
            shown.append("  ".join(align(text, room) for align, text, room in zip(aligned, line, wide, strict=True)).rstrip())
    return "\n".join(shown)


def _pieces(text: str) -> list[str]:
    """Parts of a text that may stand on a line of their own, with the space that follows."""
    text = " ".join(text.split())
    if NUMBER.match(text):
        return [text]
    return [word[i : i + LONGEST] for word in WORDS.split(text) for i in range(0, len(word), LONGEST)]


def _lines(text: str, room: int) -> list[str]:
    lines = [""]
    for piece in _pieces(text):
        if lines[-1] and len((lines[-1] + piece).rstrip()) > room:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]
