"""The look of figures: one color and marker per method in all figures of a report, one panel per family, reproducible bytes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # after the backend is chosen
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from anchorlora.reports.records import FAMILIES, Family, Run, by_method, families_of
from anchorlora.schemas.text import visible

# distinguishable in print and for most readers; gray is kept for reference lines
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#8c564b", "#e377c2", "#000000", "#bcbd22")
MARKERS = "osD^vP*X<>"
SHIFT = {"shared": 0, "cumulative": 5}  # a family's first marker, so that no two methods share both color and marker
KNOWN: dict[Family, tuple[str, ...]] = {  # so that a method looks the same in the figures of all reports
    "shared": (
        *("seq-lora", "ewc", "lwf", "projected-lora", "replay"),
        *("projected-lora-freeze-b", "projected-lora-wrp", "sfor", "rank-split", "lora-plus", "lora-fa"),
    ),
    "cumulative": (
        *("inc-lora", "sd-lora", "n-lora", "o-lora", "o-lora-effective", "o-lora-retract", "o-lora-retract-gradient"),
        *("o-lora-hard", "o-lora-bsr", "o-lora-bsr-strong", "inc-lora-hard", "oplora", "sd-lora-per-layer"),
        *("brake", "sensitive-core", "fold-8", "fold-16", "lora-fa-retract", "inf-lora", "orthogonal-adaptation"),
    ),
}
SMALLEST = 1e-10  # where a ratio of exactly zero is drawn
REFERENCE = "0.45"
LONGEST = 150  # letters of a name in a figure: two tasks and an arrow between them have room
METHOD = 60  # letters of a method's name, which stands beside what is drawn


@dataclass(frozen=True)
class Look:
    """A method's color and marker."""

    color: str
    marker: str


Looks = Mapping[str, Look]


def looks_of(runs: Sequence[Run]) -> Looks:
    """Return a look for every method of a report, by its place in its family.

    Args:
        runs: All runs of the report.
    """
    looks = {}
    for family, mine in families_of(runs).items():
        own = [method for method in by_method(mine) if method not in KNOWN[family]]
        places = {method: i for i, method in enumerate((*KNOWN[family], *own))}
        for method in by_method(mine):
            i = places[method]
            marker = MARKERS[(i + i // len(COLORS) + SHIFT[family]) % len(MARKERS)]
            looks[method] = Look(COLORS[i % len(COLORS)], marker)
    return looks


@contextmanager
def panels(
    runs: Sequence[Run], *, title: str, rows: int = 1, height: float = 4.8, below: float = 0.14, sharex: bool = False
) -> Iterator[tuple[Figure, list[list[Axes]]]]:
    """Open a figure with a column of axes for each family, which share the vertical axis in a row, and a legend below each column.

    Args:
        runs: The runs to draw, which decide the families.
        title: The figure's title.
        rows: Rows of axes.
        height: Height of a row in inches.
        below: Distance of the legend below the axes, as a fraction of their height.
        sharex: Whether all axes share the horizontal axis, too.
    """
    families = families_of(runs)
    size = (max(6.4, 5.6 * len(families)), height * rows)
    shared = {"sharex": sharex, "sharey": "row"}
    figure, axes = plt.subplots(rows, len(families), figsize=size, layout="constrained", squeeze=False, **shared)
    figure.suptitle(title, fontsize="large")
    for column, family in enumerate(families):
        axes[0][column].set_title(FAMILIES[family], fontsize="medium")
    yield figure, axes.tolist()
    for row in axes:
        for each in row:
            each.grid(alpha=0.25, which="major")
            each.set_axisbelow(True)
    for first, last in zip(axes[0], axes[-1], strict=True):
        handles, labels = first.get_legend_handles_labels()
        place = (0.5, -below)
        last.legend(handles, labels, loc="upper center", bbox_to_anchor=place, ncols=2, fontsize="small", frameon=False)


def beside_each_other(count: int, *, width: float = 0.5) -> list[float]:
    """Return horizontal shifts that keep the marks of several methods apart.

    Args:
        count: Number of methods.
        width: Distance between the outermost marks.
    """
    return [width * (i - (count - 1) / 2) / max(count, 1) for i in range(count)]


def plain(text: str, longest: int = LONGEST) -> str:
    """Return text from a record so that matplotlib draws it literally: no formulas, no hidden labels, long text cut in the middle.

    Args:
        text: Any text.
        longest: Letters from which on it is cut.
    """
    text = text if len(text) <= longest else f"{text[: longest // 2]}…{text[-longest // 2 :]}"
    return ("\u200a" if text.startswith("_") else "") + visible(text).replace("$", r"\$")


def named(method: str) -> str:
    """Return a method's name as a label beside what is drawn, cut to 60 letters.

    Args:
        method: The name in the record.
    """
    return plain(method, METHOD)


def drawable(ratio: float | None) -> float | None:
    """Return a ratio for a logarithmic axis, where exact zeros stand at the lower end.

    Args:
        ratio: A ratio, or None.
    """
    return None if ratio is None else max(ratio, SMALLEST)


def as_png(figure: Figure) -> bytes:
    """Return a figure as PNG without time or version in it, and close the figure.

    Args:
        figure: A figure.
    """
    return as_bytes(figure, ("png",))["png"]


# what matplotlib would write of itself and of the time
ABOUT = {"png": ("Software",), "pdf": ("Creator", "Producer", "CreationDate"), "svg": ("Creator", "Date")}
STEADY = {"svg.hashsalt": "anchorlora", "pdf.fonttype": 42}


def as_bytes(figure: Figure, forms: Sequence[str]) -> dict[str, bytes]:
    """Return a figure in several forms without time or version in it, and close the figure.

    Args:
        figure: A figure.
        forms: Of "png", "pdf", "svg".

    Returns:
        Form -> bytes of the file.
    """
    found = {}
    with warnings.catch_warnings(), matplotlib.rc_context(STEADY):
        warnings.simplefilter("ignore", UserWarning)  # letters that the font lacks, and names that leave little room
        for form in forms:
            out = BytesIO()
            figure.savefig(out, format=form, dpi=130, metadata=dict.fromkeys(ABOUT[form]))
            figure.set_layout_engine("none")  # the first form has placed everything
            found[form] = out.getvalue()
    plt.close(figure)
    return found
