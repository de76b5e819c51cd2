import csv
import io
import json
import statistics
from html.parser import HTMLParser

import matplotlib.image
import pytest

import records
from anchorlora.record import read_record
from anchorlora.reports.figures import FIGURES, as_png
from anchorlora.reports.page import write_report
from anchorlora.reports.records import deviation, find_runs, mixed
from anchorlora.reports.tables import Column, Table, all_tables, cost_table, drift_table, main_table, triangle_table
from golden import assert_golden


@pytest.fixture
def runs(tmp_path):
    return find_runs([records.three_methods(tmp_path / "runs")])


def test_a_record_reads_back_as_it_was_written(tmp_path):
    records.write(tmp_path, records.record())
    assert read_record(tmp_path / "sfor-42/record.json") == records.record()


@pytest.mark.parametrize("form", ["text", "markdown", "latex", "csv"])
def test_tables_are_byte_for_byte_what_they_were(runs, form):
    tables = [main_table(runs), drift_table(runs[:1]), cost_table(runs), triangle_table(runs[0])]
    assert_golden(f"tables.{form}.txt", "\n".join(getattr(table, form)() for table in tables))


def test_means_and_sample_deviations_are_over_the_runs(runs):
    table = main_table(runs)
    rows = {row[0]: row for row in table.rows}
    mine = [run.record.scores.AA for run in runs if run.method == "sfor"]
    assert rows["sfor"][1:4] == (3, pytest.approx(statistics.mean(mine)), pytest.approx(statistics.stdev(mine)))
    assert deviation([1.0]) is None


def test_best_and_second_are_marked_by_what_is_printed():
    columns = (Column("m"), Column("AA", 1, "higher"), Column("FM", 1, "lower"))
    table = Table("t", "T", columns, (("a", 80.04, 1.0), ("b", 80.01, 0.5), ("c", 79.0, None)))
    assert table.marked() == {(0, 1): "best", (1, 1): "best", (2, 1): "second", (1, 2): "best", (0, 2): "second"}


def test_undefined_values_print_as_a_dash_and_stay_empty_in_csv(tmp_path):
    table = Table("t", "T", (Column("x"), Column("y")), (("a", None),))
    assert table.cells() == [[("a", ""), ("-", "")]]
    assert table.csv() == "x,y\na,\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schema": 9}, "has schema 9, and this version reads schema 1"),
        ({"seed": None}, "seed: Input should be a valid integer"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
        ({"accuracy": [[50.0], [1.0]]}, "row 2 of an accuracy triangle has 2 entries, not 1"),
        ({"accuracy": [[150.0]]}, "accuracy.0.0: Input should be less than or equal to 100"),
        ({"scores": {"AA": float("nan"), "LA": 1, "BWT": 1, "FM": 1}}, "holds NaN, which is no number"),
    ],
)
def test_records_that_are_none_are_refused_with_file_and_field(tmp_path, fields, message):
    with pytest.raises(ValueError, match=rf"record.json:? .*{message}"):
        find_runs([records.edited(tmp_path, **fields)])


def test_a_cut_record_and_an_empty_folder_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no finished run"):
        find_runs([tmp_path / "empty"])
    path = records.write(tmp_path / "r", records.record()) / "sfor-42/record.json"
    path.write_text(path.read_text()[:200])
    with pytest.raises(ValueError, match="not complete JSON"):
        find_runs([tmp_path / "r"])


def test_runs_that_differ_in_more_than_the_axes_are_told_apart(tmp_path):
    other = records.record(seed=7, protocol={"training": {"learning_rate": 5e-4}})
    runs = find_runs([records.write(tmp_path, records.record(), other)])
    assert mixed(runs) == ["protocol.training.learning_rate: 0.0001, 0.0005"]
    assert mixed(runs[:1]) == []


def test_the_same_run_named_twice_counts_once(tmp_path):
    root = records.write(tmp_path, records.record())
    assert len(find_runs([root, root / "sfor-42"])) == 1


def test_figures_show_every_method_and_are_the_same_bytes_again(runs):
    for name, draw in FIGURES.items():
        figure = draw(runs)
        labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        assert {label.split(" ")[0] for label in labels} >= {"seq-lora", "sfor", "o-lora-hard"}, name
        assert as_png(figure) == as_png(draw(runs)), name


def test_drift_is_drawn_on_a_logarithmic_axis_at_the_recorded_values(runs):
    axes = FIGURES["drift"](runs).axes[0]
    assert axes.get_yscale() == "log"
    lines = {line.get_label().split(" ")[0]: list(line.get_ydata()) for line in axes.get_lines()}
    assert lines["sfor"] == pytest.approx([6.7e-9] * 3)
    assert lines["chance"] == pytest.approx([0.07] * 3)
    assert lines["largest"] == pytest.approx([1e-7] * 3)


def test_accuracy_is_drawn_as_the_mean_over_the_tasks_so_far(runs):
    axes = FIGURES["accuracy"](runs).axes[0]
    lines = {line.get_label().split(" ")[0]: list(line.get_ydata()) for line in axes.get_lines()}
    triangle, shift = records.TRIANGLES["sfor"], (-0.5 + 0.0 + 1.0) / 3
    assert lines["sfor"] == pytest.approx([sum(row) / len(row) + shift for row in triangle])


def test_a_report_is_complete(runs, tmp_path):
    page = write_report(runs, tmp_path / "report")
    names = {table.name for table in all_tables(runs)}
    assert {p.name for p in (tmp_path / "report/tables").iterdir()} == {
        f"{n}.{s}" for n in names for s in ("txt", "md", "tex", "csv")
    }
    for name in FIGURES:
        assert matplotlib.image.imread(tmp_path / f"report/figures/{name}.png").shape[0] > 300
    html = page.read_text()
    assert "<script" not in html
    assert "http" not in html.replace("http-equiv", "")
    rows = list(csv.reader(io.StringIO((tmp_path / "report/tables/scores.csv").read_text())))
    assert [row[0] for row in rows] == ["method", "seq-lora", "sfor", "o-lora-hard"]


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


HOSTILE = '<script>alert(1)</script><img src=x onerror="x">'


def test_nothing_that_comes_from_a_record_becomes_an_element_or_a_formula(tmp_path):
    hostile = records.record(
        definition=HOSTILE,
        recipe=HOSTILE,
        order=["=HYPERLINK(1)", HOSTILE, "c", "d"],
        data={HOSTILE: {"sha256": "a" * 64, "kind": HOSTILE}},
        protocol={"</pre><script>": HOSTILE},
    )
    runs = find_runs([records.write(tmp_path / "runs", hostile)])
    page = write_report(runs, tmp_path / "report")
    elements = Elements()
    elements.feed(page.read_text())
    assert not any(tag == "script" for tag, _ in elements.found)
    assert not any(name.startswith("on") for _, attrs in elements.found for name in attrs)
    assert all(attrs["src"].startswith("data:image/png") for tag, attrs in elements.found if tag == "img")
    rows = list(csv.reader(io.StringIO(triangle_table(runs[0]).csv())))
    assert rows[1][0] == "'=HYPERLINK(1)"


def test_records_hold_no_nan(tmp_path):
    with pytest.raises(ValueError, match="finite"):
        records.record(accuracy=[[float("nan")]])
    assert json.loads(records.record().as_json())["schema"] == 1
