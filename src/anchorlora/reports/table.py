"""A table is data: rows, columns, rounding, marks.  Printed as text, Markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from typing import Literal

from tabulate import tabulate

from anchorlora.reports.labels import file_name
from anchorlora.schemas.text import visible

LATEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
MARKUP = re.compile(r"([\\`*\[\]|]|:(?=//)|(?<=www)\.)")  # what makes a link, a picture, code or a cell in Markdown
FORMULA = tuple("=+-@＝＋－＠")
WITHIN = re.compile(
    rf"([;\t\n]\s*)(?=[{re.escape(''.join(FORMULA))}])"
)  # where a cell begins for programs that part cells at ; or tabs
RunConfig = str | float | int | None
Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Column:
    """A heading with its unit, digits after the point ("e": scientific, "g": three significant), and the better end, if any."""

    heading: str
    digits: int | Literal["e", "g"] = 2
    better: Better | None = None
    signed: bool = False  # a difference: printed with its sign


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns; `name` is the file it is written to, `note` says what a reader must know.

    partial: rows that lack some of their cells; they are neither ranked nor compared with printed values.
    within: heading of a column; rows are ranked among those that have the same word in it.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[RunConfig, ...], ...]
    note: str = ""
    partial: frozenset[int] = frozenset()
    within: str | None = None

    def text(self) -> str:
        return visible(f"{self.title}\n\n{self._grid('simple', _plain)}\n" + (f"\n{self.note}\n" if self.note else ""))

    def markdown(self) -> str:
        title, note = _in_markdown(self.title, ""), _in_markdown(self.note, "")
        return f"### {title}\n\n{self._grid('github', _in_markdown)}\n" + (f"\n{note}\n" if note else "")

    def latex(self) -> str:
        note = f"% {_one_line(self.note)}\n" if self.note else ""
        grid = self._grid("latex_raw", _in_latex)
        for rule in ("toprule", "midrule", "bottomrule"):
            grid = grid.replace("\\hline", f"\\{rule}", 1)
        return f"% {_one_line(self.title)}\n{note}{grid}\n"

    def csv(self) -> str:
        out = StringIO()
        writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow([_guarded(c.heading) for c in self.columns])
        for row in self.rows:
            writer.writerow(["" if cell is None else _guarded(cell) for cell in row])
        return out.getvalue()

    def cells(self) -> list[list[tuple[str, str]]]:
        """Printed cells with their mark ("best", "second" or ""), for a page."""
        return [
            [(printed(cell, self.columns[j]), self.marked.get((i, j), "")) for j, cell in enumerate(row)]
            for i, row in enumerate(self.rows)
        ]

    def without(self, heading: str) -> Table:
        """The table less every column of that heading."""
        keep = [j for j, column in enumerate(self.columns) if column.heading != heading]
        rows = tuple(tuple(row[j] for j in keep) for row in self.rows)
        return replace(self, columns=tuple(self.columns[j] for j in keep), rows=rows)

    def beside(self, values: Mapping[str, Sequence[float | None]]) -> Table:
        """The table with printed values, and ours less the printed, after the columns named; one without any is left as it is."""
        columns: list[Column] = []
        rows: list[list[RunConfig]] = [[] for _ in self.rows]
        for j, column in enumerate(self.columns):
            theirs = values.get(column.heading, ())
            known = any(value is not None for value in theirs)
            columns += [column, *(_printed_columns(column) if known else ())]
            for i, row in enumerate(self.rows):
                rows[i] += [row[j], *(self._against(i, row[j], theirs[i]) if known else ())]
        return replace(self, columns=tuple(columns), rows=tuple(map(tuple, rows)))

    def called(self, name: str) -> Table:
        """The same table for another file."""
        return replace(self, name=file_name(name))

    def noting(self, *sentences: str) -> Table:
        """The table with further sentences in its note; empty ones are left out."""
        return replace(self, note=" ".join(s for s in (self.note, *sentences) if s))

    def is_text(self, column: int) -> bool:
        """Whether a column holds words, which stand on the left."""
        return column in self._of_words

    @cached_property
    def _of_words(self) -> frozenset[int]:
        """The columns that hold words, found once: a page asks for every cell."""
        return frozenset(j for row in self.rows for j, cell in enumerate(row) if isinstance(cell, str))

    @cached_property
    def marked(self) -> dict[tuple[int, int], str]:
        """The best and second cell of each column that has a better end.  Equal printed values share a mark."""
        out: dict[tuple[int, int], str] = {}
        for rivals in self._rivals():
            for j, column in enumerate(self.columns):
                shown = {i: cell for i in rivals if isinstance(cell := self.rows[i][j], (int, float))}
                if column.better is None or len(shown) < 2:
                    continue
                rounded = {i: float(printed(value, column)) for i, value in shown.items()}
                ranked = sorted(set(rounded.values()), reverse=column.better == "higher")
                for mark, value in zip(("best", "second"), ranked, strict=False):
                    out |= {(i, j): mark for i, v in rounded.items() if v == value}
        return out

    def _rivals(self) -> list[list[int]]:
        """Rows that are ranked among each other."""
        groups: dict[RunConfig, list[int]] = {}
        at = None if self.within is None else [c.heading for c in self.columns].index(self.within)
        for i, row in enumerate(self.rows):
            if i not in self.partial:
                groups.setdefault(None if at is None else row[at], []).append(i)
        return list(groups.values())

    def _against(self, i: int, ours: RunConfig, theirs: float | None) -> tuple[RunConfig, RunConfig]:
        comparable = isinstance(ours, (int, float)) and theirs is not None and i not in self.partial
        return theirs, ours - theirs if comparable else None  # type: ignore[operator]

    def _grid(self, form: str, dress: Callable[[str, str], str]) -> str:
        rows = [[dress(text, mark) for text, mark in row] for row in self.cells()]
        headings = [dress(c.heading, "") for c in self.columns]
        align = ["left" if self.is_text(j) else "right" for j in range(len(self.columns))]
        return tabulate(rows, headings, tablefmt=form, disable_numparse=True, colalign=align if rows else None)


def printed(value: RunConfig, column: Column) -> str:
    """A cell as it is read: rounded as its column says; undefined values are a dash, and zero has no minus."""
    if value is None:
        return "-"
    if isinstance(value, float):
        form = {"e": ".1e", "g": ".3g"}.get(str(column.digits), f".{column.digits}f")
        text = format(value, ("+" if column.signed else "") + form)
        return text.replace("-", "+" if column.signed else "", 1) if text[0] == "-" and float(text) == 0 else text
    return visible(str(value))


def _printed_columns(column: Column) -> tuple[Column, Column]:
    name = column.heading
    theirs = Column(f"{name} printed", column.digits, signed=column.signed)
    return theirs, Column(f"{name} diff", column.digits, signed=True)


def _plain(text: str, mark: str) -> str:
    return _one_line(text)


def _in_markdown(text: str, mark: str) -> str:
    safe = MARKUP.sub(r"\\\1", _one_line(text)).replace("&", "&amp;").replace("<", "&lt;")
    return {"best": f"**{safe}**", "second": f"*{safe}*"}.get(mark, safe)


def _in_latex(text: str, mark: str) -> str:
    safe = "".join(LATEX.get(letter, letter) for letter in _one_line(text))
    return {"best": rf"\textbf{{{safe}}}", "second": rf"\underline{{{safe}}}"}.get(mark, safe)


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))


def _guarded(cell: RunConfig) -> RunConfig:
    """A text cell, or a part of one, that a spreadsheet would run as a formula begins with an apostrophe."""
    if not isinstance(cell, str):
        return cell
    text = WITHIN.sub(r"\1'", visible(cell))
    return f"'{text}" if text.lstrip().startswith(FORMULA) else text
