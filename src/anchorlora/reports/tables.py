"""A table is data: rows, columns, rounding, marks.  Printed as text, Markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Literal

from tabulate import tabulate

from anchorlora.reports.records import Run, by_method, deviation, mean

LATEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
Cell = str | float | int | None
Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Column:
    """A heading with its unit, digits after the point ("e": scientific, "g": three significant), and the better end, if any."""

    heading: str
    digits: int | Literal["e", "g"] = 2
    better: Better | None = None


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns; `name` is the file it is written to, `note` says what a reader must know."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    marks: dict[tuple[int, int], Literal["best", "second"]] = field(default_factory=dict, compare=False)

    def text(self) -> str:
        return f"{self.title}\n\n{self._grid('simple', _plain)}\n" + (f"\n{self.note}\n" if self.note else "")

    def markdown(self) -> str:
        return f"### {self.title}\n\n{self._grid('github', _in_markdown)}\n" + (f"\n{self.note}\n" if self.note else "")

    def latex(self) -> str:
        note = f"% {self.note}\n" if self.note else ""
        grid = self._grid("latex_raw", _in_latex)
        for rule in ("toprule", "midrule", "bottomrule"):
            grid = grid.replace("\\hline", f"\\{rule}", 1)
        return f"% {self.title}\n{note}{grid}\n"

    def csv(self) -> str:
        out = StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([c.heading for c in self.columns])
        for row in self.rows:
            writer.writerow(["" if cell is None else _guarded(cell) for cell in row])
        return out.getvalue()

    def cells(self) -> list[list[tuple[str, str]]]:
        """Printed cells with their mark ("best", "second" or ""), for a page."""
        return [
            [(printed(cell, self.columns[j]), self.marked().get((i, j), "")) for j, cell in enumerate(row)]
            for i, row in enumerate(self.rows)
        ]

    def without(self, heading: str) -> Table:
        """The table less one column."""
        at = [c.heading for c in self.columns].index(heading)
        rows = tuple(row[:at] + row[at + 1 :] for row in self.rows)
        return replace(self, columns=self.columns[:at] + self.columns[at + 1 :], rows=rows)

    def is_text(self, column: int) -> bool:
        """Whether a column holds words, which stand on the left."""
        return any(isinstance(row[column], str) for row in self.rows)

    def marked(self) -> dict[tuple[int, int], str]:
        """The best and second cell of each column that has a better end.  Equal printed values share a mark."""
        out: dict[tuple[int, int], str] = {}
        for j, column in enumerate(self.columns):
            if column.better is None or len(self.rows) < 2:
                continue
            shown = {i: row[j] for i, row in enumerate(self.rows) if isinstance(row[j], (int, float))}
            rounded = {i: float(printed(value, column)) for i, value in shown.items()}
            ranked = sorted(set(rounded.values()), reverse=column.better == "higher")
            for mark, value in zip(("best", "second"), ranked, strict=False):
                out |= {(i, j): mark for i, v in rounded.items() if v == value}
        return out

    def _grid(self, form: str, dress) -> str:
        rows = [[dress(text, mark) for text, mark in row] for row in self.cells()]
        headings = [dress(c.heading, "") for c in self.columns]
        align = ["left" if self.is_text(j) else "right" for j in range(len(self.columns))]
        return tabulate(rows, headings, tablefmt=form, disable_numparse=True, colalign=align if rows else None)


def printed(value: Cell, column: Column) -> str:
    """A cell as it is read: rounded as its column says; a value that is undefined is a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        form = {"e": ".1e", "g": ".3g"}.get(str(column.digits), f".{column.digits}f")
        return format(value, form)
    return str(value)


def main_table(runs: Sequence[Run]) -> Table:
    """AA, LA, BWT and FM of each method: means over its runs, with the standard deviation over all of them."""
    columns = [Column("method"), Column("n")]
    for score, better in (("AA", "higher"), ("LA", "higher"), ("BWT", "higher"), ("FM", "lower")):
        columns += [Column(score, better=better), Column("sd")]  # type: ignore[arg-type]
    rows = []
    for method, mine in by_method(runs).items():
        row: list[Cell] = [method, len(mine)]
        for score in ("AA", "LA", "BWT", "FM"):
            values = [v for run in mine if (v := getattr(run.record.scores, score)) is not None]
            row += [mean(values) if values else None, deviation(values)]
        rows.append(tuple(row))
    note = "AA and LA in percent, BWT and FM in percentage points; sd: sample standard deviation (ddof 1) over the n runs."
    return Table("scores", "Scores", tuple(columns), tuple(rows), note)


def drift_table(runs: Sequence[Run]) -> Table:
    """What each task did to the protected directions, one row a run and task."""
    columns = (
        Column("method"),
        Column("order"),
        Column("seed"),
        Column("after"),
        Column("rho", "e"),
        Column("zero is", "e"),
        Column("protected"),
        Column("chance", "g"),
        Column("rho first", "e"),
        Column("rho union", "e"),
        Column("held-out", "g"),
        Column("D_eff", "g"),
        Column("D_old", "e"),
    )
    rows = tuple(
        (
            run.method,
            order_name(run),
            run.record.seed,
            run.order[d.task - 1],
            d.rho,
            d.bound,
            "yes" if d.exact else "no",
            d.chance,
            d.rho_first,
            d.rho_union,
            d.held_out.total if d.held_out else None,
            d.d_eff,
            d.d_old,
        )
        for mine in by_method(runs).values()
        for run in mine
        for d in run.record.drift
    )
    note = (
        "rho: share of a task's change on the core used during it; zero is: the largest rho that float32 storage explains; "
        "chance: what an unaligned change would read; first, union: the same share on the first task's core and on all past cores; "
        "held-out: change of past feature rows that no core was made from, relative to them."
    )
    table = Table("drift", "Drift on protected directions", columns, rows, note)
    return table if len({run.order for run in runs}) > 1 else table.without("order")


def triangle_table(run: Run) -> Table:
    """The accuracy of every task after every task."""
    columns = (Column("after"), *(Column(task, 1) for task in run.order))
    size = len(run.order)
    rows = tuple((run.order[t], *row, *[None] * (size - len(row))) for t, row in enumerate(run.record.accuracy))
    title = f"Accuracy in percent: {run.method}, {order_name(run)}, seed {run.record.seed}"
    return Table(_file_name(f"accuracy-{run.method}-{order_name(run)}-{run.record.seed}"), title, columns, rows)


def cost_table(runs: Sequence[Run]) -> Table:
    """What each method took: means over its runs."""
    columns = (
        Column("method"),
        Column("train s", 1),
        Column("evaluate s", 1),
        Column("peak MB", 0),
        Column("trained"),
        Column("stored"),
        Column("history kB", 1),
    )
    rows = []
    for method, mine in by_method(runs).items():
        costs = [run.record.cost for run in mine]
        rows.append(
            (
                method,
                mean([sum(c.train_seconds) for c in costs]),
                mean([c.evaluate_seconds for c in costs]),
                mean([c.peak_memory_bytes / 1e6 for c in costs]),
                costs[-1].trained_parameters,
                costs[-1].stored_parameters,
                mean([c.history_bytes / 1e3 for c in costs]),
            )
        )
    note = "trained, stored: LoRA parameters in and after the last task; history: what the method itself needs of the past."
    return Table("cost", "Cost of a run", columns, tuple(rows), note)


def order_name(run: Run) -> str:
    """The order as words: its tasks, shortened to their first letters when there are many."""
    return ">".join(run.order if len(run.order) <= 4 else (task[:3] for task in run.order))


def all_tables(runs: Sequence[Run]) -> list[Table]:
    return [main_table(runs), drift_table(runs), cost_table(runs), *(triangle_table(run) for run in runs)]


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:120]


def _plain(text: str, mark: str) -> str:
    return text


def _in_markdown(text: str, mark: str) -> str:
    safe = text.replace("|", "\\|")
    return {"best": f"**{safe}**", "second": f"*{safe}*"}.get(mark, safe)


def _in_latex(text: str, mark: str) -> str:
    safe = "".join(LATEX.get(letter, letter) for letter in text)
    return {"best": rf"\textbf{{{safe}}}", "second": rf"\underline{{{safe}}}"}.get(mark, safe)


def _guarded(cell: Cell) -> Cell:
    """A text cell that a spreadsheet would run as a formula is quoted."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell
