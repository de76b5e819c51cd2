"""Tables as text, Markdown, LaTeX, or CSV."""

from __future__ import annotations

import csv as comma_separated
import re
from collections.abc import Callable
from io import StringIO

from tabulate import tabulate

from anchorlora.pages.table import GROUP, Table, Value
from anchorlora.text import file_name, visible

LATEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "Δ": r"$\Delta$",
    "†": r"$^\dagger$",
}
MARKUP = re.compile(r"([\\`*\[\]|]|:(?=//)|(?<=www)\.)")  # what makes a link, a picture, code, or a cell in Markdown
FORMULA = tuple("=+-@＝＋－＠")
# where a cell begins for programs that separate cells at semicolons or tabs
WITHIN = re.compile(rf"([;\t\n]\s*)(?=[{re.escape(''.join(FORMULA))}])")


def text(table: Table) -> str:
    """Return a table as plain text, with title and note.

    Args:
        table: The table.

    Example:
        >>> from anchorlora.pages.table import Column, Table
        >>> columns = (Column("method"), Column("AA", better="higher"), Column("rho", "e"))
        >>> print(text(Table("main", "Scores", columns, (("sfor", 74.625, 6.7e-9), ("seq-lora", 67.5, None)))))
        Scores
        <BLANKLINE>
        method       AA      rho
        --------  -----  -------
        sfor      74.62  6.7e-09
        seq-lora  67.50        -
        <BLANKLINE>
    """
    grid = _grid(table, "simple", lambda text, _: _one_line(text))
    return visible(f"{table.title}\n\n{grid}\n" + (f"\n{table.note}\n" if table.note else ""))


def markdown(table: Table) -> str:
    """Return a table as Markdown; the best value is bold, the second in italics.

    Args:
        table: The table.

    Example:
        >>> from anchorlora.pages.table import Column, Table
        >>> columns = (Column("method"), Column("AA", better="higher"))
        >>> print(markdown(Table("main", "Scores", columns, (("sfor", 74.625), ("seq-lora", 67.5)))))
        ### Scores
        <BLANKLINE>
        | method   |        AA |
        |----------|-----------|
        | sfor     | **74.62** |
        | seq-lora |   *67.50* |
        <BLANKLINE>
    """
    title, note = _in_markdown(table.title, ""), _in_markdown(table.note, "")
    return f"### {title}\n\n{_grid(table, 'github', _in_markdown)}\n" + (f"\n{note}\n" if note else "")


def latex(table: Table) -> str:
    """Return a table for LaTeX and booktabs, with caption and label; the best value is bold, the second underlined.

    Rows stand in their groups, if the table has any.

    Args:
        table: The table.
    """
    table = table.without(GROUP)
    before, *lines, after = _grid(table, "latex_raw", _in_latex).splitlines()
    top, heading, middle, *rows, bottom = lines
    assert top == middle == bottom == r"\hline"
    body = rows
    if table.groups:
        body = []
        for name, numbers in table.groups:
            heads = rf"\multicolumn{{{len(table.columns)}}}{{l}}{{\emph{{{_in_latex(name, '')}}}}} \\"
            body += [*([r"\midrule"] if body else []), heads, *(rows[i] for i in numbers)]
    caption = _in_latex(f"{table.title.rstrip('.')}. {table.note}".strip(), "")
    head = [r"\begin{table}[t]", rf"\caption{{{caption}}}", rf"\label{{tab:{file_name(table.name)}}}", r"\centering", before]
    return "\n".join([*head, r"\toprule", heading, r"\midrule", *body, r"\bottomrule", after, r"\end{table}", ""])


def csv(table: Table) -> str:
    """Return a table as CSV, unrounded; cells that a spreadsheet would run as formulas begin with an apostrophe.

    Args:
        table: The table.

    Example:
        >>> from anchorlora.pages.table import Column, Table
        >>> csv(Table("main", "Scores", (Column("method"), Column("AA")), (("sfor", 74.625),))).splitlines()[1]
        '"sfor",74.625'
    """
    out = StringIO()
    writer = comma_separated.writer(out, lineterminator="\n", quoting=comma_separated.QUOTE_NONNUMERIC)
    writer.writerow([_guard(c.heading) for c in table.columns])
    for row in table.rows:
        writer.writerow(["" if cell is None else _guard(cell) for cell in row])
    return out.getvalue()


WRITERS: dict[str, Callable[[Table], str]] = {"txt": text, "md": markdown, "tex": latex, "csv": csv}  # suffix -> writer


def _grid(table: Table, form: str, dress: Callable[[str, str], str]) -> str:
    rows = [[dress(text, mark) for text, mark in row] for row in table.cells()]
    headings = [dress(c.heading, "") for c in table.columns]
    align = ["left" if table.is_text(j) else "right" for j in range(len(table.columns))]
    return tabulate(rows, headings, tablefmt=form, disable_numparse=True, colalign=align if rows else None)


def _in_markdown(text: str, mark: str) -> str:
    safe = MARKUP.sub(r"\\\1", _one_line(text)).replace("&", "&amp;").replace("<", "&lt;")
    return {"best": f"**{safe}**", "second": f"*{safe}*"}.get(mark, safe)


def _in_latex(text: str, mark: str) -> str:
    safe = "".join(LATEX.get(letter, letter) for letter in _one_line(text))
    return {"best": rf"\textbf{{{safe}}}", "second": rf"\underline{{{safe}}}"}.get(mark, safe)


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))


def _guard(cell: Value) -> Value:
    """A text cell, or a part of one, that a spreadsheet would run as a formula begins with an apostrophe."""
    if not isinstance(cell, str):
        return cell
    text = WITHIN.sub(r"\1'", visible(cell))
    return f"'{text}" if text.lstrip().startswith(FORMULA) else text
