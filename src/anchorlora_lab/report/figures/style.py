"""The look of figures: one color, marker and line per method in all figures of all reports, a panel per family, reproducible bytes.

A method's place in the catalog gives its color, and which tier of markers and lines it takes; one without a place gets it from its
name. The colors are those of Okabe and Ito, which readers with any color vision tell apart.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from anchorlora.methods import METHODS
from anchorlora.text import visible
from anchorlora_lab.report.records import FAMILIES, Family, Run, by_method, families_of

# without their yellow, which white paper swallows; gray is kept for reference lines
COLORS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7")
LINES = ("-", "--", ":", "-.")  # of the first tier, the second, ..
TIERS: dict[Family, str] = {"shared": "osD", "cumulative": "^vP*"}  # markers: no two methods share both color and marker
OTHERS = "X<>dhp8H1234|x+"  # markers of methods without a place
SMALLEST = 1e-10  # where a ratio of exactly zero is drawn
REFERENCE = "0.45"
LONGEST = 150  # letters of a name in a figure: two tasks and an arrow between them have room
METHOD = 60  # letters of a method's name, which stands beside what is drawn


@dataclass(frozen=True)
class PlotStyle:
    """A method's color, marker, and line style."""

    color: str
    marker: str
    line: str = "-"


PlotStyles = Mapping[str, PlotStyle]


def looks_of(runs: Sequence[Run]) -> PlotStyles:
    """Return a look for every method of a report: the same in every report, unless two without a place would look alike."""
    looks: dict[str, PlotStyle] = {}
    for family, of_family in families_of(runs).items():
        places = {method: METHODS[method].entry.place for method in by_method(of_family) if method in METHODS}
        looks |= {method: _look(position, TIERS[family]) for method, position in places.items() if position is not None}
    most = len(COLORS) * len(OTHERS)
    for method in sorted({run.method for run in runs} - set(looks)):
        first = zlib.crc32(method.encode(errors="surrogatepass"))
        tried = [_look((first + i) % most, OTHERS) for i in range(most)]
        taken = {(look.color, look.marker) for look in looks.values()}
        looks[method] = next((look for look in tried if (look.color, look.marker) not in taken), tried[0])
    return looks


def _look(position: int, markers: str) -> PlotStyle:
    tier = position // len(COLORS)
    return PlotStyle(COLORS[position % len(COLORS)], markers[tier], LINES[tier % len(LINES)])


def canvas(
    size: tuple[float, float], rows: int = 1, columns: int = 1, *, title: str = "", grid: bool = False, **shared: Any
) -> tuple[Figure, list[list[Axes]]]:
    """Open a figure of a size in inches, with axes in rows and columns; `shared` says which axes have one scale."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    if title:
        figure.suptitle(title, fontsize="large")
    for at in figure.axes if grid else ():
        at.grid(alpha=0.25, which="major")
        at.set_axisbelow(True)
    return figure, axes.tolist()


@contextmanager
def panels(
    runs: Sequence[Run], *, title: str, rows: int = 1, height: float = 4.8, below: float = 0.14, sharex: bool = False
) -> Iterator[tuple[Figure, list[list[Axes]]]]:
    """Open a figure with axes for each family in a column, one vertical axis in a row, and a legend below each column."""
    families = families_of(runs)
    size = (max(6.4, 5.6 * len(families)), height * rows)
    figure, axes = canvas(size, rows, len(families), title=title, grid=True, sharex=sharex, sharey="row")
    for at, family in zip(axes[0], families, strict=True):
        at.set_title(FAMILIES[family], fontsize="medium")
    yield figure, axes
    for first, last in zip(axes[0], axes[-1], strict=True):
        handles, labels = first.get_legend_handles_labels()
        anchor = (0.5, -below)
        last.legend(handles, labels, loc="upper center", bbox_to_anchor=anchor, ncols=2, fontsize="small", frameon=False)


def logarithmic(at: Axes) -> None:
    """Make the vertical axis logarithmic, over many decades without the ticks between them, which nobody counts."""
    at.set_yscale("log")
    low, high = at.get_ylim()
    at.yaxis.set_major_formatter(FuncFormatter(_power))  # as text: formulas need fonts that take half a second to look for
    at.yaxis.set_minor_formatter(NullFormatter() if high > 20 * low else FuncFormatter(lambda value, _: f"{value:.2g}"))
    if high > 1e4 * low:
        at.yaxis.set_minor_locator(NullLocator())


def _power(value: float, _: object) -> str:
    """A power of ten with a raised exponent; another number as it is."""
    exponent = math.log10(value) if value > 0 else 0.5
    if abs(exponent - round(exponent)) > 1e-6:
        return f"{value:.2g}"
    return "10" + str(round(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def curve(
    at: Axes, method: str, looks: PlotStyles, index: int, steps: Sequence[int], values: Sequence[float], *, marks: int, **line: Any
) -> None:
    """Draw values over optimizer steps, with markers staggered by place, so that those of curves that coincide do not."""
    every = max(1, len(steps) // marks)
    style: dict[str, Any] = {"color": looks[method].color, "marker": looks[method].marker, "markersize": 5, **line}
    at.plot(steps, values, markevery=(index * every // 4 % every, every), label=named(method), **style)


def beside_each_other(count: int, *, width: float = 0.5) -> list[float]:
    """Return horizontal shifts that keep the marks of several methods apart."""
    return [width * (i - (count - 1) / 2) / max(count, 1) for i in range(count)]


def plain(text: str, longest: int = LONGEST) -> str:
    """Return text from a record for matplotlib to draw literally: no formulas, no hidden labels, long text cut in the middle."""
    text = text if len(text) <= longest else f"{text[: longest // 2]}…{text[-longest // 2 :]}"
    return ("\u200a" if text.startswith("_") else "") + visible(text).replace("$", r"\$")


def named(method: str) -> str:
    """Return a method's name as a label beside what is drawn, cut to 60 letters."""
    return plain(method, METHOD)


def drawable(ratio: float | None) -> float | None:
    """Return a ratio for a logarithmic axis, where exact zeros stand at the lower end."""
    return None if ratio is None else max(ratio, SMALLEST)


# what matplotlib would write of itself and of the time
ABOUT = {"png": ("Software",), "pdf": ("Creator", "Producer", "CreationDate"), "svg": ("Creator", "Date")}
STEADY = {"svg.hashsalt": "anchorlora", "svg.fonttype": "none", "pdf.fonttype": 42}
CANVASES = {"png": FigureCanvasAgg, "pdf": FigureCanvasPdf, "svg": FigureCanvasSVG}  # savefig would draw everything twice


def as_bytes(figure: Figure, forms: Sequence[str]) -> dict[str, bytes]:
    """Return a figure in several forms without time or version in it; the words in an SVG are text."""
    content = {}
    with warnings.catch_warnings(), matplotlib.rc_context(STEADY):
        warnings.simplefilter("ignore", UserWarning)  # letters that the font lacks, and names that leave little room
        for form in forms:
            out = BytesIO()
            figure.set_dpi(130)
            getattr(CANVASES[form](figure), f"print_{form}")(out, metadata=dict.fromkeys(ABOUT[form]))
            figure.set_layout_engine("none")  # the first form has placed everything
            content[form] = out.getvalue()
    return content
