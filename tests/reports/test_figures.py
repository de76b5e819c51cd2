import math
import statistics
from dataclasses import replace
from pathlib import Path

import made
import matplotlib.colors
import matplotlib.image
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.text import Text

import records
from anchorlora import METHODS
from anchorlora_lab.report.chapters import chapters_of
from anchorlora_lab.report.comparability import studies_of
from anchorlora_lab.report.figures import FIGURES, as_bytes, looks_of
from anchorlora_lab.report.figures.mechanism import methods_with_paths
from anchorlora_lab.report.figures.style import COLORS, OTHERS, TIERS
from anchorlora_lab.report.paired_tests import mean_interval
from anchorlora_lab.report.records import Run, find_runs

OF_ONE_STUDY = [name for name in FIGURES if name != "base-models"]


def as_png(figure):
    return as_bytes(figure, ("png",))["png"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return find_runs([made.save(tmp_path_factory.mktemp("grid"), *made.grid())])


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return find_runs([made.traced(tmp_path_factory.mktemp("traces"))])


@pytest.fixture
def three(tmp_path):
    return find_runs([records.three_methods(tmp_path / "runs")])


def lines_of(axes):
    """The lines that have a name, by its first word."""
    return {line.get_label().split(" (")[0]: line for line in axes.get_lines() if not line.get_label().startswith("_")}


def names_of(figure):
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    return {text.get_text().split(" (")[0] for legend in legends for text in legend.get_texts()}


@pytest.mark.parametrize("name", ["accuracy", "aa-fm", "drift", "cores", "energy"])
def test_every_method_is_named_in_the_panel_of_its_family(name, whole):
    figure = FIGURES[name](whole, looks_of(whole))
    assert names_of(figure) >= set(made.DEFINITIONS)
    left = {text.get_text().split(" (")[0] for text in figure.axes[0].get_legend().get_texts()}
    assert left & set(made.DEFINITIONS) == {m for m, d in made.DEFINITIONS.items() if d.startswith("Shared()")}
    as_png(figure)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", OF_ONE_STUDY)
def test_a_figure_is_the_same_bytes_again_and_large_enough(name, three, traces, tmp_path):
    runs = traces if name == "trajectories" else three
    figures = [FIGURES[name](runs, looks_of(runs)) for _ in range(2)]
    first, again = map(as_png, figures)
    assert first == again
    assert min(text.get_fontsize() for text in figures[0].findobj(Text) if text.get_text()) > 6.75  # points: 9 pixels on a phone
    (tmp_path / "f.png").write_bytes(first)
    height, width, _ = matplotlib.image.imread(tmp_path / "f.png").shape
    assert height > 300
    assert width > 800


def test_no_two_methods_look_alike_and_each_looks_the_same_everywhere(whole):
    looks = looks_of(whole)
    assert len({(look.color, look.marker) for look in looks.values()}) == len(looks) == 17
    markers = "".join(TIERS.values()) + OTHERS
    assert len(set(COLORS)) == len(COLORS)
    assert len(set(markers)) == len(markers)
    for name in ("accuracy", "drift", "cores", "energy"):
        figure = FIGURES[name](whole, looks)
        for axes in figure.axes:
            for method, line in lines_of(axes).items():
                if method in looks:
                    assert (line.get_color(), line.get_marker()) == (looks[method].color, looks[method].marker), (name, method)
        as_png(figure)


def test_more_methods_than_colors_still_look_different(tmp_path):
    many = [made.run("sfor", name=f"own-{i}") for i in range(25)]
    looks = looks_of(find_runs([made.save(tmp_path, *many)]))
    assert len({(look.color, look.marker) for look in looks.values()}) == 25


def test_drift_is_drawn_on_a_logarithmic_axis_at_the_recorded_values(three):
    shared, blocks = FIGURES["drift"](three, looks_of(three)).axes
    assert shared.get_yscale() == blocks.get_yscale() == "log"
    assert list(lines_of(shared)["sfor"].get_ydata()) == pytest.approx([6.7e-9] * 3)
    assert list(lines_of(blocks)["o-lora-hard"].get_ydata()) == pytest.approx([2.2e-9] * 3)
    assert list(lines_of(shared)["chance"].get_ydata()) == pytest.approx([0.07] * 3)
    assert list(lines_of(shared)["numerical tolerance"].get_ydata()) == pytest.approx([1e-7] * 3)


def test_powers_of_ten_are_text(three):
    at = FIGURES["drift"](three, looks_of(three)).axes[0]
    told = at.yaxis.get_major_formatter()
    assert [told(value, 0) for value in (1e-7, 1.0, 1e3, 0.2)] == ["10⁻⁷", "10⁰", "10³", "0.2"]


def test_accuracy_is_drawn_as_the_mean_over_the_tasks_so_far_with_a_band_over_seeds_of_one_order(three, whole):
    axes = FIGURES["accuracy"](three, looks_of(three)).axes[0]
    triangle, shift = records.TRIANGLES["sfor"], (-0.5 + 0.0 + 1.0) / 3
    means = [sum(row) / len(row) + shift for row in triangle]
    assert list(lines_of(axes)["sfor"].get_ydata()) == pytest.approx(means)
    band = axes.collections[1].get_paths()[0].vertices  # of the second method, sfor
    assert max(band[:, 1]) == pytest.approx(max(means) + statistics.stdev([-0.5, 0.0, 1.0]))
    bands = FIGURES["accuracy"](whole, looks_of(whole)).axes[0].collections
    assert not any(isinstance(each, PolyCollection) for each in bands)


def test_accuracy_against_forgetting_marks_each_method_at_its_means(three):
    axes = FIGURES["aa-fm"](three, looks_of(three)).axes[0]
    marks = {c.get_label().split(" (")[0]: c.get_offsets()[0] for c in axes.collections if not c.get_label().startswith("_")}
    mine = [run.record.scores for run in three if run.method == "sfor"]
    assert list(marks["sfor"]) == pytest.approx([statistics.mean(s.FM for s in mine), statistics.mean(s.AA for s in mine)])


def test_trajectories_are_means_over_seeds_and_end_where_the_endpoints_stand(traces):
    figure = FIGURES["trajectories"](traces, looks_of(traces))
    top, _, bottom, _ = figure.axes
    points = [made.points("sfor", seed=seed) for seed in made.SEEDS]
    line = lines_of(top)["sfor"]
    assert list(line.get_xdata()) == [p["step"] for p in points[0][1:]]  # step 0 is left out
    means = [statistics.mean(p["rho"] for p in same) for same in list(zip(*points, strict=True))[1:]]
    assert list(line.get_ydata()) == pytest.approx(means)
    assert lines_of(top)["chance"].get_ydata()[-1] == pytest.approx(0.07)
    assert lines_of(top)["numerical tolerance"].get_ydata()[-1] == pytest.approx(1e-7)
    at = [label.get_text().replace("\n", "") for label in bottom.get_xticklabels()].index("sfor")
    told = [text.get_text() for text in bottom.texts][at]
    assert float(told.removesuffix(" %")) == pytest.approx(100 * means[-1], rel=5e-3)
    band = next(c for c in top.collections if c.get_paths()[0].vertices[:, 1].max() < 1e-7).get_paths()[0].vertices[:, 1]
    last = [p[-1]["rho"] for p in points]
    assert max(band) == pytest.approx(statistics.mean(last) + statistics.stdev(last), rel=1e-6)
    assert {axes.get_yscale() for axes in figure.axes} == {"log"}
    assert len({axes.get_ylim() for axes in figure.axes}) == 1


def test_accuracy_has_intervals_of_the_mean_where_runs_suffice(whole, three):
    axes = FIGURES["accuracy"](whole, looks_of(whole)).axes[0]
    mine = [statistics.mean(run.record.accuracy[-1]) for run in whole if run.method == "seq-lora"]
    ends = axes.containers[0].lines[2][0].get_segments()[-1][:, 1]
    assert list(ends) == pytest.approx(mean_interval(mine))
    assert not FIGURES["accuracy"](three, looks_of(three)).axes[0].containers


def test_cores_are_drawn_at_their_geometric_means(whole):
    axes = FIGURES["cores"](whole, looks_of(whole)).axes[0]
    last = [run.record.drift[-1] for run in whole if run.method == "sfor"]
    by_hand = [math.exp(statistics.mean(math.log(getattr(d, f)) for d in last)) for f in ("rho", "rho_first", "rho_union")]
    assert list(lines_of(axes)["sfor"].get_ydata()) == pytest.approx(by_hand)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", OF_ONE_STUDY)
def test_names_with_signs_of_formulas_are_drawn_as_words(name, tmp_path):
    odd = {"method": made.run("sfor", name=r"_$\frac$").method, "order": [r"$\a$", "$^$"]}
    runs = find_runs([made.traced(tmp_path, ("sfor",), (42,))])
    runs = [replace(run, record=run.record.model_copy(update=odd)) for run in runs]
    figure = FIGURES[name](runs, looks_of(runs))
    legends = [text.get_text() for axes in figure.axes if axes.get_legend() for text in axes.get_legend().get_texts()]
    assert name in ("stages", "heat", "paths") or any(r"_\$\frac\$" in text for text in legends)
    assert as_png(figure)


def test_accuracy_against_forgetting_shares_both_axes_and_has_intervals_where_runs_suffice(whole, three):
    left, right = FIGURES["aa-fm"](whole, looks_of(whole)).axes
    assert (left.get_xlim(), left.get_ylim()) == (right.get_xlim(), right.get_ylim())
    assert len(left.containers) == 8  # nine runs of each method
    mine = [run.record.scores.FM for run in whole if run.method == "seq-lora"]
    ends = left.containers[0].lines[2][0].get_segments()[0][:, 0]
    assert list(ends) == pytest.approx(mean_interval(mine))
    assert not FIGURES["aa-fm"](three, looks_of(three)).axes[0].containers[0].lines[2]


def test_paths_show_rho_of_every_task_and_run_of_the_methods_that_differ_in_them(whole):
    drawn = [methods_with_paths(whole, family) for family in ("shared", "cumulative")]
    assert all(drawn)
    for at, methods in zip(FIGURES["paths"](whole, looks_of(whole)).axes, drawn, strict=True):
        for place, method in enumerate(methods):
            drifts = [d.rho for run in whole if run.method == method for d in run.record.drift]
            dots, middle = at.collections[2 * place : 2 * place + 2]
            assert sorted(x for x, _ in dots.get_offsets()) == pytest.approx(sorted(drifts))
            assert float(middle.get_offsets()[0][0]) == pytest.approx(math.exp(statistics.mean(map(math.log, drifts))))
            assert at.get_yticklabels()[place].get_text().startswith(f"{method}\n")


@pytest.mark.parametrize(("name", "style"), [("cores", "None"), ("energy", "None"), ("drift", "-"), ("accuracy", "-")])
def test_lines_join_what_follows_in_time_and_no_categories(name, style, whole):
    axes = FIGURES[name](whole, looks_of(whole)).axes[0]
    styles = {line.get_linestyle() for method, line in lines_of(axes).items() if method in made.DEFINITIONS}
    assert ("None" in styles) == (style == "None")
    assert style in styles


def test_a_method_looks_the_same_in_reports_of_other_methods(whole, traces):
    every, some = looks_of(whole), looks_of(traces)
    assert {method: every[method] for method in some} == dict(some)


def test_every_method_of_the_table_has_a_look_of_its_own():
    places = [(m.plan.family, m.entry.place) for m in METHODS.values() if m.entry.place is not None]
    assert len(set(places)) == len(places)
    runs = [replace(one_run(), record=made.run("sfor").model_copy(update={"method": m.facts})) for m in METHODS.values()]
    assert len({(look.color, look.marker) for look in looks_of(runs).values()}) == len(METHODS)


def one_run():
    return Run(Path(), made.run("sfor"))


def test_a_method_without_a_place_looks_the_same_beside_others():
    def of(*names):
        return looks_of([replace(one_run(), record=made.run("sfor", name=name)) for name in names])

    assert of("mine")["mine"] == of("sfor", "mine", "other")["mine"]


def luminance(color, matrix=None):
    """A color as three numbers, as a reader without red or green cones sees it (Vienot, Brettel and Mollon 1999)."""
    linear = [((c + 0.055) / 1.055) ** 2.4 if c > 0.04045 else c / 12.92 for c in matplotlib.colors.to_rgb(color)]
    seen = linear if matrix is None else [sum(m * c for m, c in zip(row, linear, strict=True)) for row in matrix]
    return [max(c, 0.0) ** (1 / 2.2) for c in seen]


DEUTAN = [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]
PROTAN = [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]


@pytest.mark.parametrize("matrix", [None, DEUTAN, PROTAN], ids=["all cones", "no green cones", "no red cones"])
def test_colors_are_apart_for_readers_without_red_or_green_cones(matrix):
    seen = [luminance(color, matrix) for color in COLORS]
    assert min(math.dist(a, b) for i, a in enumerate(seen) for b in seen[:i]) > 0.12


def test_stages_show_an_unprotected_method_beside_the_best_protected_one(three, whole):
    figure, of_orders = (FIGURES["stages"](runs, looks_of(runs)).get_supxlabel() for runs in (three, whole))
    assert (figure, of_orders) == ("tasks trained so far", "tasks trained so far in order1, without the other orders")
    figure = FIGURES["stages"](three, looks_of(three))
    assert [at.get_title() for at in figure.axes] == records.ORDER
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == ["seq-lora (unprotected, mean of 3 runs)", "o-lora-hard (protected, mean of 3 runs)"]
    for i, at in enumerate(figure.axes):
        for container, method in zip(at.containers, ("seq-lora", "o-lora-hard"), strict=True):
            expected = [row[i] + (0.5 / 3) for row in records.TRIANGLES[method] if len(row) > i]
            assert list(container.lines[0].get_ydata()) == pytest.approx(expected)
    as_png(figure)


def test_one_run_has_intervals_over_examples_where_its_answers_are_known(tmp_path):
    folder = records.write(tmp_path, records.record())
    (run,) = find_runs([folder])
    (_, second, *_) = run.record.accuracy
    answers = {(task, i): i < 52 for task in records.ORDER for i in range(100)}
    run.__dict__["answers"] = {"AA": answers, "LA": answers}  # where the cached property keeps them
    at = FIGURES["stages"]([run], looks_of([run])).axes[1]
    first, between, _ = (segment[:, 1] for segment in at.containers[0].lines[2][0].get_segments())
    assert second[1] == 52
    assert [round(end, 1) for end in first] == [42.3, 61.5]  # Wilson's interval of 52 in 100
    assert between[0] == between[1]  # nothing is known of single answers there


@pytest.mark.parametrize("orders", [("order1",), ("order1", "order3")])
def test_heat_maps_show_the_means_over_runs_of_every_method_on_one_scale(orders, tmp_path):
    runs = find_runs([made.save(tmp_path, *made.grid(("sfor", "seq-lora"), orders))])
    figure = FIGURES["heat"](runs, looks_of(runs))
    at, texts = figure.axes[0], [text.get_text() for text in figure.axes[0].texts]
    assert {mesh.get_clim() for mesh in at.collections} == {at.collections[0].get_clim()}
    assert len(at.collections) == 2
    final = statistics.mean(run.record.accuracy[-1][0] for run in runs if run.method == "sfor")
    assert f"{final:.0f}" in texts[texts.index("sfor") :]
    rows = [label.get_text() for label in at.get_yticklabels()]
    assert rows == (list(made.TASKS) if len(orders) == 1 else ["task 1", "task 2", "task 3", "task 4"])


@pytest.mark.drawn(3)
def test_vector_forms_are_the_same_bytes_again_and_name_no_time(three):
    first, again = (as_bytes(FIGURES["aa-fm"](three, looks_of(three)), ("png", "pdf", "svg")) for _ in range(2))
    assert first == again
    assert first["pdf"].startswith(b"%PDF")
    assert b"<svg" in first["svg"]
    assert b"CreationDate" not in first["pdf"]
    assert b"dc:date" not in first["svg"]


def test_base_models_are_drawn_against_each_other_at_each_methods_means(tmp_path):
    facts = {"revision": None, "parameters": 1000, "dtype": "float32"}
    for name, methods in (("one", ("sfor", "o-lora", "ewc")), ("$two$", ("sfor", "o-lora"))):
        model = facts | {"name": name, "sha256": name[1] * 64}
        made.save(tmp_path / name[1], *made.grid(methods, ("order1",), base_model=model))
    runs = find_runs([tmp_path])
    (chapter,) = [chapter for chapter in chapters_of(studies_of(runs)) if chapter.study is None]
    assert chapter.sections[0].figures == ("base-models",)
    figure = FIGURES["base-models"](chapter.spanned, looks_of(runs))
    aa, bwt = figure.axes
    assert (aa.get_xlabel(), bwt.get_ylabel()) == (r"AA on \$two\$, %", "BWT on one, percentage points")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["sfor", "o-lora"], "ewc ran on one of them alone"
    for at, score in ((aa, "AA"), (bwt, "BWT")):
        marks = {c.get_label(): list(c.get_offsets()[0]) for c in at.collections if not c.get_label().startswith("_")}
        for method in ("sfor", "o-lora"):
            means = [
                statistics.mean(
                    getattr(run.record.scores, score) for run in runs if run.method == method and run.record.base_model.name == name
                )
                for name in ("$two$", "one")
            ]
            assert marks[method] == pytest.approx(means)
    assert as_png(figure) == as_png(FIGURES["base-models"](chapter.spanned, looks_of(runs)))
