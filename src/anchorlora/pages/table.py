"""Tables as data: rows, columns, rounding, and marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Literal

from anchorlora.text import file_name, visible

DAGGER = "†"
GROUP = "group"  # the heading of the column of `Table.groups`, which LaTeX writes as lines
Value = str | float | int | None  # what stands in one cell
Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Column:
    """A heading, and how its values are rounded and ranked.

    Args:
        heading: With the unit, where the title or note does not give it.
        digits: Digits after the decimal point; "e": scientific with two significant digits; "g": three significant digits.
        better: Which end is better; the best and second values are marked.
        signed: Whether values are differences, written with their sign.
        printed: Whether the values are the paper's, or differences from them.
    """

    heading: str
    digits: int | Literal["e", "g"] = 2
    better: Better | None = None
    signed: bool = False
    printed: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of values under columns, rounded and marked only when written.

    Args:
        name: The file name, without suffix.
        title: One line above the table.
        columns: One for each value of a row.
        rows: Values; None stands for an undefined one and is written as a dash.
        note: Sentences under the table that explain its headings.
        partial: Row numbers (0-based) that are neither ranked nor compared with the paper: those that lack some of their runs, and
            references such as guessing.
        unlearned: Cells (row number, heading) that show no learning; they carry a dagger and are neither ranked nor compared.
        groups: Heading of a group of rows -> their numbers, for LaTeX, in the order in which they stand there.
        printed_notes: Sentences of the note that speak of the paper's values.
        within: A heading; rows are ranked among those that have the same value in that column. By default, among all.

    Example:
        >>> from anchorlora.pages.table import Column, Table
        >>> columns = (Column("method"), Column("AA", better="higher"), Column("rho", "e"))
        >>> table = Table("main", "Scores", columns, (("sfor", 74.625, 6.7e-9), ("seq-lora", 67.5, None)))
        >>> [[text for text, _ in row] for row in table.cells()]
        [['sfor', '74.62', '6.7e-09'], ['seq-lora', '67.50', '-']]
        >>> table.without("rho").rows
        (('sfor', 74.625), ('seq-lora', 67.5))
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""
    partial: frozenset[int] = frozenset()
    unlearned: frozenset[tuple[int, str]] = frozenset()
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    printed_notes: tuple[str, ...] = ()
    within: str | None = None

    def cells(self) -> list[list[tuple[str, str]]]:
        """The rounded cells, each with its mark ("best", "second", or ""), for a page."""
        return [[(self._shown(i, j), self.marked.get((i, j), "")) for j, _ in enumerate(row)] for i, row in enumerate(self.rows)]

    def without(self, heading: str) -> Table:
        """Return the table without the columns of a heading.

        Args:
            heading: A heading; one that no column has changes nothing.
        """
        return self._only([column.heading != heading for column in self.columns])

    def beside(self, values: Mapping[str, Sequence[float | None]]) -> Table:
        """Return the table with the paper's values and Δ (ours minus the paper's) after each of our columns that has any.

        Args:
            values: The paper's values by our heading, one for each row; None where the paper has none.

        Example:
            >>> from anchorlora.pages.table import Column, Table
            >>> table = Table("main", "Scores", (Column("method"), Column("AA")), (("sfor", 80.5), ("mine", 81.0)))
            >>> beside = table.beside({"AA": [80.45, None]})
            >>> [column.heading for column in beside.columns]
            ['method', 'AA', 'AA paper', 'AA Δ']
            >>> [[text for text, _ in row] for row in beside.cells()]
            [['sfor', '80.50', '80.45', '+0.05'], ['mine', '81.00', '-', '-']]
        """
        columns: list[Column] = []
        rows: list[list[Value]] = [[] for _ in self.rows]
        for j, column in enumerate(self.columns):
            paper_values = [*values.get(column.heading, ()), *[None] * len(self.rows)]  # rows below the methods have none
            known = any(value is not None for value in paper_values)
            columns += [column, *(_paper_columns(column) if known else ())]
            for i, row in enumerate(self.rows):
                rows[i] += [row[j], *(self._against(i, j, paper_values[i]) if known else ())]
        return replace(self, columns=tuple(columns), rows=tuple(map(tuple, rows)))

    def under(self, rows: Sequence[tuple[Value, ...]]) -> Table:
        """Return the table with rows below its own that are neither ranked nor compared.

        Args:
            rows: Values for every column.
        """
        there = len(self.rows)
        return replace(self, rows=(*self.rows, *rows), partial=self.partial | frozenset(range(there, there + len(rows))))

    def arranged(self, rows: Sequence[int]) -> Table:
        """Return the table with its rows in another order, without groups.

        Args:
            rows: Row numbers (0-based), each once.
        """
        row_of = {old: new for new, old in enumerate(rows)}
        partial, unlearned = frozenset(row_of[i] for i in self.partial), frozenset((row_of[i], name) for i, name in self.unlearned)
        return replace(self, rows=tuple(self.rows[i] for i in rows), partial=partial, unlearned=unlearned, groups=())

    def ours(self) -> Table:
        """Return the table without the paper's values and what its note says of them."""
        note = self.note
        for sentence in self.printed_notes:
            note = " ".join(part for part in map(str.strip, note.split(sentence)) if part)
        return replace(self._only([not column.printed for column in self.columns]), note=note, printed_notes=())

    def noting_printed(self, sentence: str) -> Table:
        """Return the table with a sentence on the paper's values in its note, which `ours` takes out again.

        Args:
            sentence: What to add.
        """
        return replace(self.noting(sentence), printed_notes=(*self.printed_notes, sentence))

    def called(self, name: str) -> Table:
        """Return the table under another file name.

        Args:
            name: The new name; characters that do not belong in file names become hyphens.
        """
        return replace(self, name=file_name(name))

    def noting(self, *sentences: str) -> Table:
        """Return the table with more sentences in its note.

        Args:
            *sentences: What to add; empty ones are left out.
        """
        return replace(self, note=" ".join(s for s in (self.note, *sentences) if s))

    def is_text(self, column: int) -> bool:
        """Tell whether a column holds words, which are aligned left.

        Args:
            column: Its number, 0-based.
        """
        return column in self._of_words

    @cached_property
    def _of_words(self) -> frozenset[int]:
        """The columns that hold words; cached, since a page asks for every cell."""
        return frozenset(j for row in self.rows for j, cell in enumerate(row) if isinstance(cell, str))

    @cached_property
    def marked(self) -> dict[tuple[int, int], str]:
        """Marks ("best" or "second") by row and column number, where a column has a better end; equal rounded values share one."""
        out: dict[tuple[int, int], str] = {}
        for rivals in self._rivals():
            for j, column in enumerate(self.columns):
                shown = {
                    i: cell
                    for i in rivals
                    if isinstance(cell := self.rows[i][j], (int, float)) and (i, column.heading) not in self.unlearned
                }
                if column.better is None or len(shown) < 2:
                    continue
                rounded = {i: float(printed(value, column)) for i, value in shown.items()}
                ranked = sorted(set(rounded.values()), reverse=column.better == "higher")
                for mark, value in zip(("best", "second"), ranked, strict=False):
                    out |= {(i, j): mark for i, v in rounded.items() if v == value}
        return out

    def _only(self, kept: Sequence[bool]) -> Table:
        """The table with some of its columns."""
        columns, rows = tuple(compress(self.columns, kept)), tuple(tuple(compress(row, kept)) for row in self.rows)
        return replace(self, columns=columns, rows=rows)

    def _rivals(self) -> list[list[int]]:
        """Groups of rows that are ranked among each other."""
        groups: dict[Value, list[int]] = {}
        at = None if self.within is None else [c.heading for c in self.columns].index(self.within)
        for i, row in enumerate(self.rows):
            if i not in self.partial:
                groups.setdefault(None if at is None else row[at], []).append(i)
        return list(groups.values())

    def _shown(self, i: int, j: int) -> str:
        column = self.columns[j]
        return printed(self.rows[i][j], column) + (DAGGER if (i, column.heading) in self.unlearned else "")

    def _against(self, i: int, j: int, paper_value: float | None) -> tuple[Value, Value]:
        ours, left_out = self.rows[i][j], i in self.partial or (i, self.columns[j].heading) in self.unlearned
        comparable = isinstance(ours, (int, float)) and paper_value is not None and not left_out
        return paper_value, ours - paper_value if comparable else None  # type: ignore[operator]


def printed(value: Value, column: Column) -> str:
    """Return a cell as text: rounded as its column says; a dash for None, and no minus before zero.

    Args:
        value: The cell.
        column: Its column.
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        form = {"e": ".1e", "g": ".3g"}.get(str(column.digits), f".{column.digits}f")
        text = format(value, ("+" if column.signed else "") + form)
        return text.replace("-", "+" if column.signed else "", 1) if text[0] == "-" and float(text) == 0 else text
    return visible(str(value))


def _paper_columns(column: Column) -> tuple[Column, Column]:
    paper_column = Column(f"{column.heading} paper", column.digits, signed=column.signed, printed=True)
    return paper_column, Column(f"{column.heading} Δ", column.digits, signed=True, printed=True)
