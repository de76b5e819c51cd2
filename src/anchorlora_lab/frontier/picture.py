"""The frontier as a picture: what was kept against what was learned, one line a row over its rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from anchorlora_lab.frontier.tables import points_of, settings_of
from anchorlora_lab.report.figures.style import COLORS, LINES, OTHERS, REFERENCE

PANELS = {"without old data": ("none", "own text"), "with old data": ("old data",)}


def picture(records: Iterable[Mapping[str, Any]], skills: Sequence[str] = ()) -> Figure:
    """Draw a point for each rate, epoch and scale, joined in the order of what they learn; odd places of examples."""
    records = [record for record in records if not skills or record["skill"] in skills]
    points = [point.half(1) for point in points_of(records)]
    data = {record["row"]: record["data"] for record in records}
    panels = {title: kinds for title, kinds in PANELS.items() if any(data[point.row] in kinds for point in points)}
    figure = Figure(figsize=(6.8 * max(1, len(panels)), 5.2), layout="constrained")
    axes = figure.subplots(1, max(1, len(panels)), squeeze=False, sharey=True)[0]
    for at, (title, kinds) in zip(axes, panels.items(), strict=True):
        rows = dict.fromkeys(point.row for point in points if data[point.row] in kinds)
        for i, name in enumerate(rows):
            members = settings_of([point for point in points if point.row == name]).values()
            curve = sorted((fmean(p.learned for p in group), fmean(p.kept for p in group)) for group in members)
            at.plot(
                *zip(*curve, strict=True),
                color=COLORS[i % len(COLORS)],
                marker=OTHERS[i // len(COLORS) % len(OTHERS)],
                linestyle=LINES[i // len(COLORS) % len(LINES)],
                markersize=4,
                linewidth=1,
                label=name,
            )
        at.axhline(0, color=REFERENCE, linewidth=0.8)
        at.set_title(title, fontsize="medium")
        at.set_xlabel("new skill, % right")
        at.grid(alpha=0.25)
        at.legend(fontsize="x-small", ncols=2, loc="lower left")
    axes[0].set_ylabel("old abilities, change in points")
    return figure
