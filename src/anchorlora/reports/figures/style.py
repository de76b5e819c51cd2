"""How figures look: one color and one marker a method in all figures of a report, a panel a family, bytes that do not change."""

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

from anchorlora.reports.records import FAMILIES, Run, by_method, families_of
from anchorlora.schemas.text import visible

# told apart in print and by most readers; gray is kept for reference lines
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#8c564b", "#e377c2", "#000000", "#bcbd22")
MARKERS = "osD^vP*X<>"
SHIFT = {"shared": 0, "cumulative": 5}  # a family's first marker, so that no two methods share both color and marker
SMALLEST = 1e-10  # what an exactly zero ratio is drawn at
REFERENCE = "0.45"
LONGEST = 150  # letters of a name in a figure: two tasks and an arrow between them have room


@dataclass(frozen=True)
class Look:
    """A method's color and marker."""

    color: str
    marker: str


Looks = Mapping[str, Look]


def looks_of(runs: Sequence[Run]) -> Looks:
    """A look for every method of a report, by its place in its family."""
    looks = {}
    for family, mine in families_of(runs).items():
        for i, method in enumerate(by_method(mine)):
            marker = MARKERS[(i + i // len(COLOURS) + SHIFT[family]) % len(MARKERS)]
            looks[method] = Look(COLOURS[i % len(COLOURS)], marker)
    return looks


@contextmanager
def panels(
    runs: Sequence[Run], *, title: str, rows: int = 1, height: float = 4.8, below: float = 0.14
) -> Iterator[tuple[Figure, list[list[Axes]]]]:
    """A column of axes for each family, sharing the vertical axis along a row; below each column, what its first row shows.

    below: where the names begin under the axes, as a share of their height.
    """
    families = families_of(runs)
    size = (max(6.4, 5.6 * len(families)), height * rows)
    figure, axes = plt.subplots(rows, len(families), figsize=size, layout="constrained", sharey="row", squeeze=False)
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
    """Small sideways shifts that keep the marks of so many methods apart."""
    return [width * (i - (count - 1) / 2) / max(count, 1) for i in range(count)]


def plain(text: str) -> str:
    """Words from a record as words: a dollar sign begins no formula, and a leading underscore hides nothing; long ones are cut."""
    text = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}…{text[-LONGEST // 2 :]}"
    return ("\u200a" if text.startswith("_") else "") + visible(text).replace("$", r"\$")


def drawable(ratio: float | None) -> float | None:
    """A ratio on a logarithmic axis: exact zeros stand at its lower end."""
    return None if ratio is None else max(ratio, SMALLEST)


def as_png(figure: Figure) -> bytes:
    """The picture's bytes, without time or version in them; closes the figure."""
    out = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that the font lacks, and names that leave little room
        figure.savefig(out, format="png", dpi=130, metadata={"Software": None})
    plt.close(figure)
    return out.getvalue()
