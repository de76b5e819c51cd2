"""From records to the frontier's table: each row's setting by the log's rule of 2026-11-25, and what it gives on the rest.

Even places of every list of examples choose, odd places are reported.  Learned is the score on the new skill in percent, kept the
mean change of old abilities in points.  Intervals are 95 % of a bootstrap over clusters (skill, seed) and over questions: clusters
that are asked the same ones (old abilities in all, a new skill over seeds) are asked the same draw of them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from anchorlora.pages.table import Column, Table, Value
from anchorlora_lab.report.figures.style import COLORS, LINES, OTHERS, REFERENCE, canvas
from anchorlora_lab.report.grid import pivot
from anchorlora_lab.report.records import group_by

PLAIN, BEFORE = "plain", "before"
SLACK = 0.5  # points of learning that a row may lack of plain LoRA's best
ABOVE_CHANCE = 10  # points that an ability must have before
CHANCE = {"choice": 25.0}  # percent; a record of the model before may say more
DRAWS = 4000
Values = Sequence[float]
Setting = tuple[float, int, float]  # rate, epoch, scale
Cluster = tuple[str, int]  # skill, seed


@dataclass(frozen=True)
class Point:
    """Answers of one model at one setting, example by example."""

    row: str
    setting: Setting
    cluster: Cluster
    new: Values
    changes: Mapping[str, Values]  # of each old ability, after less before
    kl: Mapping[str, float]
    norm: float
    seconds: float  # of the CPU: training, and the model's own text and cores
    bytes: int
    peak: int  # bytes of memory while it trained, beyond the model

    def half(self, first: int) -> Point:
        """The examples at even (0) or odd (1) places."""
        changes = {name: values[first::2] for name, values in self.changes.items()}
        return replace(self, new=self.new[first::2], changes=changes)

    @property
    def learned(self) -> float:
        """The mean score on the new skill, in percent."""
        return 100 * fmean(self.new)

    @property
    def kept(self) -> float:
        """The mean change of old abilities, in points."""
        return 100 * fmean(fmean(values) for values in self.changes.values())


def abilities(before: Mapping[str, Any]) -> list[str]:
    """The old abilities that a model has, by the record of what it was before: those far enough above chance."""
    chance = CHANCE | before.get("chance", {})
    old = before["points"][0]["old"]
    return [name for name, values in old.items() if 100 * fmean(values) >= chance.get(name, 0.0) + ABOVE_CHANCE]


def points_of(records: Iterable[Mapping[str, Any]]) -> list[Point]:
    """The points of a model's records; abilities that it did not have before are left out."""
    records = list(records)
    before = {record["skill"]: record for record in records if record["row"] == BEFORE}
    points = []
    for record in records:
        if record["row"] == BEFORE or record["skill"] not in before:
            continue
        old, there = before[record["skill"]]["points"][0]["old"], abilities(before[record["skill"]])
        cluster, size = (record["skill"], record["seed"]), record["stored_bytes"] + record["kept_bytes"]
        for point in record["points"]:
            setting = (record["rate"], point["epoch"], point["scale"])
            changes = {name: [a - b for a, b in zip(point["old"][name], old[name], strict=True)] for name in there}
            kl, seconds = {name: fmean(values) for name, values in point["kl"].items()}, sum(point["cpu_seconds"].values())
            made = (record["row"], setting, cluster, point["new"], changes, kl, point["norm"], seconds, size, record["peak_bytes"])
            points.append(Point(*made))
    return points


def settings_of(points: Sequence[Point]) -> dict[Setting, list[Point]]:
    """Points by setting; a setting without all clusters of the row is left out."""
    clusters, by = {point.cluster for point in points}, group_by(points, lambda point: point.setting)
    return {setting: members for setting, members in by.items() if {point.cluster for point in members} == clusters}


def chosen(points: Sequence[Point]) -> dict[str, tuple[Setting, bool]]:
    """Each row's setting by the rule at `points`, and whether it learns as much as plain LoRA, on the clusters that both have."""
    rows = group_by(points, lambda point: point.row)
    settings: dict[str, tuple[Setting, bool]] = {}
    for name, members in rows.items():
        both = (members, rows.get(PLAIN, []))
        clusters = set.intersection(*({point.cluster for point in group} for group in both))
        own, plain = (settings_of([point for point in group if point.cluster in clusters]) for group in both)
        if not own or not plain:
            continue
        learned = {setting: fmean(p.learned for p in at) for setting, at in own.items()}
        least = max(fmean(p.learned for p in at) for setting, at in plain.items() if setting[2] == 1) - SLACK
        kept = {setting: fmean(p.kept for p in own[setting]) for setting, mean in learned.items() if mean >= least}
        settings[name] = (max(kept, key=kept.__getitem__), True) if kept else (max(learned, key=learned.__getitem__), False)
    return settings


def chosen_rates(records: Sequence[Mapping[str, Any]], *, choosing: Sequence[str]) -> dict[str, float]:
    """The rate of each row's setting by the rule, at even places of the skills that choose."""
    points = [point.half(0) for point in points_of(records) if point.cluster[0] in choosing]
    return {row: setting[0] for row, (setting, _) in chosen(points).items()}


def interval(clusters: Sequence[Mapping[str, Values]]) -> tuple[float, float]:
    """The 95 % interval of the mean over clusters, lists, and examples, in points; lists of one name answer the same questions."""
    draw = np.random.default_rng(0)
    asked = sorted({(name, len(values)) for cluster in clusters for name, values in cluster.items()})
    places = {questions: draw.integers(questions[1], size=(DRAWS, questions[1])) for questions in asked}
    means = np.stack(
        [np.mean([np.asarray(v)[places[n, len(v)]].mean(1) for n, v in cluster.items()], axis=0) for cluster in clusters], axis=1
    )
    taken = draw.integers(len(clusters), size=means.shape)
    low, high = np.quantile(100 * np.take_along_axis(means, taken, 1).mean(1), (0.025, 0.975))
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """How much more one row learns and keeps than another, over the clusters that both have; in points, with 95 % intervals."""

    learned: float
    learned_interval: tuple[float, float]
    kept: float
    kept_interval: tuple[float, float]


def difference(pairs: Sequence[tuple[Point, Point]]) -> Difference:
    """Return how the first points of pairs of one cluster differ from the second ones."""
    new = [{a.cluster[0]: [x - y for x, y in zip(a.new, b.new, strict=True)]} for a, b in pairs]
    old = [{k: [x - y for x, y in zip(a.changes[k], b.changes[k], strict=True)] for k in a.changes} for a, b in pairs]
    learned, kept = fmean(a.learned - b.learned for a, b in pairs), fmean(a.kept - b.kept for a, b in pairs)
    return Difference(learned, interval(new), kept, interval(old))


@dataclass(frozen=True)
class RowResult:
    """A row of the table: its chosen setting, what it gives there, and how that differs from plain LoRA."""

    name: str
    data: str
    setting: Setting
    members: Sequence[Point]
    less: Difference

    def mean(self, of: Callable[[Point], float]) -> float:
        """The mean of a value over the row's points."""
        return fmean(map(of, self.members))

    @property
    def changes(self) -> list[float]:
        """The changes of all examples of old abilities."""
        return [change for p in self.members for values in p.changes.values() for change in values]


def spanned(difference: float, interval: tuple[float, float]) -> str:
    """A difference with its interval, as text."""
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(difference, *interval)


def frontier_tables(records: Sequence[Mapping[str, Any]], *, choosing: Sequence[str]) -> list[Table]:
    """The frontier on the skills that choose, and on the others as far as they have runs."""
    skills = dict.fromkeys(record["skill"] for record in records if record["row"] == PLAIN)
    chooses, others = ([skill for skill in skills if (skill in choosing) == side] for side in (True, False))
    parts = {f"skills that chose: {', '.join(chooses)}": chooses, f"other skills: {', '.join(others)}": others}
    return [frontier_table(records, title, choosing=chooses, reported=part) for title, part in parts.items() if chooses and part]


def frontier_table(records: Sequence[Mapping[str, Any]], title: str, *, choosing: Sequence[str], reported: Sequence[str]) -> Table:
    """The frontier of one model: each row's setting, chosen at even places, and what it gives at odd places."""
    points = points_of(records)
    settings = chosen([point.half(0) for point in points if point.cluster[0] in choosing])
    test = [point.half(1) for point in points if point.cluster[0] in reported]
    data = {record["row"]: record["data"] for record in records}
    by_place = {(p.row, p.setting, p.cluster): p for p in test}
    abilities = sorted({name for point in test for name in point.changes})
    entries = []
    for name, (setting, enough) in settings.items():
        members = [point for point in test if (point.row, point.setting) == (name, setting)]
        pairs = [(p, by_place.get((PLAIN, settings[PLAIN][0], p.cluster))) for p in members]
        if both := [(a, b) for a, b in pairs if b is not None]:
            entries.append(RowResult(name if enough else f"{name} †", data[name], setting, members, difference(both)))
    entries.sort(key=lambda entry: ("†" in entry.name, -entry.mean(lambda p: p.kept)))
    measures: list[tuple[Column, Callable[[RowResult], Value]]] = [
        (Column("row"), lambda e: e.name),
        (Column("data"), lambda e: e.data),
        (Column("rate, epochs, scale"), lambda e: "{:g}, {}, {:g}".format(*e.setting)),
        (Column("n"), lambda e: len({p.cluster for p in e.members})),
        (Column("new", 1, better="higher"), lambda e: e.mean(lambda p: p.learned)),
        (Column("less plain"), lambda e: spanned(e.less.learned, e.less.learned_interval)),
        (Column("kept", 1, better="higher"), lambda e: e.mean(lambda p: p.kept)),
        (Column("less plain's"), lambda e: spanned(e.less.kept, e.less.kept_interval)),
        *((Column(name, 1), lambda e, name=name: 100 * e.mean(lambda p: fmean(p.changes[name]))) for name in abilities),
        (Column("lost, gained"), lambda e: f"{sum(c < 0 for c in e.changes)}, {sum(c > 0 for c in e.changes)}"),
        (Column("KL own", 3), lambda e: e.mean(lambda p: p.kl["chats"])),
        (Column("KL new", 3), lambda e: e.mean(lambda p: p.kl["new"])),
        (Column("KL human", 3), lambda e: e.mean(lambda p: p.kl["passages"])),
        (Column("norm", 2), lambda e: e.mean(lambda p: p.norm)),
        (Column("CPU s", 0), lambda e: e.mean(lambda p: p.seconds)),
        (Column("MiB", 1), lambda e: e.mean(lambda p: p.bytes) / 2**20),
        (Column("peak GiB", 1), lambda e: e.mean(lambda p: p.peak) / 2**30),
    ]
    pairs_of = [len({p.cluster for p in entry.members}) for entry in entries]
    apart = frozenset(i for i, entry in enumerate(entries) if "†" in entry.name or pairs_of[i] < max(pairs_of))
    return pivot("frontier", f"Learning and keeping, {title}", entries, measures, partial=apart)


PANELS = {"none": "new examples alone", "own text": "with text of the model's own", "old data": "with old data"}


def best_of(means: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of pairs of what is learned and kept, those that no other beats in both, in the order of what they learn."""
    best: list[tuple[float, float]] = []
    for learned, kept in sorted(means, reverse=True):
        if not best or kept > best[-1][1]:
            best.append((learned, kept))
    return best[::-1]


def picture(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw a point for each rate, epoch and scale, over the pairs that most rows have; a line joins the best of a row."""
    data = {record["row"]: record["data"] for record in records}
    points = points_of(records)
    pairs = {name: {point.cluster for point in points if point.row == name} for name in dict.fromkeys(p.row for p in points)}
    clusters = dict.fromkeys(point.cluster for point in points)
    shared = [cluster for cluster in clusters if 2 * sum(cluster in own for own in pairs.values()) >= len(pairs)]
    means: dict[str, list[tuple[float, float]]] = {}
    for name in pairs:
        own = settings_of([point for point in points if point.row == name and point.cluster in shared]).values()
        if at_all := [(fmean(p.learned for p in at), fmean(p.kept for p in at)) for at in own if len(at) == len(shared)]:
            means[name] = at_all
    panels = [kind for kind in PANELS if any(data[name] == kind for name in means)]
    columns = max(1, len(panels))
    figure, (axes,) = canvas((1 + 4.4 * columns, 6.2), 1, columns, sharex=True, sharey=True)
    color_of: dict[str, str] = {}  # of a method in all panels, with its marker
    for at, kind in zip(axes, panels, strict=False):
        names = [name for name in means if data[name] == kind]
        methods = list(dict.fromkeys(name.split()[0] for name in names))
        free = [color for color in COLORS if color not in {color_of.get(method) for method in methods}]
        color_of |= dict(
            zip((method for method in methods if method not in color_of), itertools.cycle(free or COLORS), strict=False)
        )
        variants: Counter[str] = Counter()
        for name in names:
            method = name.split()[0]
            variant, color = variants[method], color_of[method]
            variants[method] += 1
            look: dict[str, Any] = {"color": color, "marker": OTHERS[COLORS.index(color) % len(OTHERS)], "markersize": 5}
            look["fillstyle"] = ("full", "none", "left")[variant % 3]
            at.plot(*zip(*means[name], strict=True), linestyle="", alpha=0.3, **look)
            line: dict[str, Any] = {"linewidth": 1, "linestyle": LINES[variant % len(LINES)], "label": name}
            at.plot(*zip(*best_of(means[name]), strict=True), **line, **look)
        at.axhline(0, color=REFERENCE, linewidth=0.8)
        at.set_title(PANELS[kind], fontsize="medium")
        at.set_xlabel("new skill, % right")
        at.grid(alpha=0.25)
        at.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False)
    axes[0].set_ylabel("old abilities, change in points")
    figure.suptitle(", ".join(f"{skill} with seed {seed}" for skill, seed in shared), fontsize="small", color=REFERENCE)
    return figure
