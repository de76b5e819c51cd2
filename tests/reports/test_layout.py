"""Columns, groups, reference and spread of the tables of scores, over drawn grids: each changes what it says and nothing else."""

import csv
import io
import re
import statistics
from pathlib import Path

import made
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorlora import METHODS
from anchorlora.cli.app import main
from anchorlora.errors import InvalidValue, UnknownName
from anchorlora_lab.report import writers
from anchorlora_lab.report.figures import FIGURES, looks_of
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.layout import COLUMNS, Layout, value_of
from anchorlora_lab.report.records import Run
from anchorlora_lab.report.tables.pairs import methods_to_compare
from anchorlora_lab.report.tables.scores import main_table

OWN = "mine"
NAMES = ("seq-lora", "sfor", "ewc", "o-lora-hard", OWN)


def as_run(record):
    return Run(Path(f"{record.method.name}-{'-'.join(record.order)}-{record.seed}"), record)


@st.composite
def grids(draw):
    """Some methods, one of them the user's own, at some orders and seeds; single runs may be missing."""
    methods = draw(st.lists(st.sampled_from(NAMES), min_size=2, unique=True))
    orders = draw(st.lists(st.sampled_from(tuple(made.PLACES)), min_size=1, max_size=2, unique=True))
    seeds = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True))
    kinds = {OWN: {"definition": "Shared() + FisherAnchor(3.0)"}}
    whole = [made.run(m, order=o, seed=s, **kinds.get(m, {})) for m in methods for o in orders for s in seeds]
    gone = draw(st.sets(st.integers(0, len(whole) - 1), max_size=2))
    kept = [record for i, record in enumerate(whole) if i not in gone] or whole
    return [as_run(record) for record in kept]


@st.composite
def layouts(draw, runs):
    methods = sorted({run.method for run in runs})
    columns = draw(st.lists(st.sampled_from((*COLUMNS, *made.TASKS)), unique=True))
    named = draw(st.permutations(methods))[: draw(st.integers(0, len(methods)))]
    cut = draw(st.integers(0, len(named)))
    groups = {heading: some for heading, some in (("Ours", named[:cut]), ("Theirs & others", named[cut:])) if some}
    reference = draw(st.sampled_from((None, *methods)))
    return Layout(tuple(columns), groups, reference, draw(st.sampled_from((None, "none", "sd", "interval"))))


LAW = settings(max_examples=40, deadline=None)


def column(table, heading):
    headings = [c.heading for c in table.columns]
    return {row[headings.index("method")]: row[headings.index(heading)] for row in table.rows}


def by_hand(runs, method, name):
    found = [value_of(run, name) for run in runs if run.method == method]
    return [value for value in found if value is not None]


@LAW
@given(st.data())
def test_every_cell_is_the_mean_deviation_or_difference_of_its_runs_in_every_form(data):
    runs = data.draw(grids())
    layout = data.draw(layouts(runs))
    layout.refuse_unknown(runs)
    table = main_table(runs, (), layout)
    asked, methods = layout.columns or ("AA", "BWT", "FM"), {run.method for run in runs}
    headings = [c.heading for c in table.columns]
    assert [name for name in headings if name in asked] == list(asked)
    assert [name.removesuffix(" sd") for name in headings if name.endswith(" sd")] in ([], list(asked))
    for name in asked:
        values = {method: by_hand(runs, method, name) for method in methods}
        for method, mine in values.items():
            assert column(table, name)[method] == (pytest.approx(statistics.fmean(mine)) if mine else None)
            if layout.spread == "sd":
                assert column(table, f"{name} sd")[method] == (pytest.approx(statistics.stdev(mine)) if len(mine) > 1 else None)
            if layout.reference:
                at = {(r.order, r.seed): value_of(r, name) for r in runs if r.method == layout.reference}
                mine = [value_of(r, name) - at[r.order, r.seed] for r in runs if r.method == method and (r.order, r.seed) in at]
                right = pytest.approx(statistics.fmean(mine)) if mine and method != layout.reference else None
                assert column(table, f"{name} - {layout.reference}")[method] == right
    assert (layout.spread in ("none", "interval")) <= (not any(name.endswith(" sd") for name in headings))
    assert (layout.spread in ("none", "sd")) <= (not any("95 %" in name for name in headings))
    rows = list(csv.reader(io.StringIO(writers.csv(table))))
    assert [tuple(rows[0]), len(rows)] == [tuple(headings), len(table.rows) + 1]
    for write in (writers.text, writers.markdown, writers.latex):
        shown = write(table).replace("\\_", "_")
        assert all(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", shown) for name in (*asked, *methods))


@LAW
@given(st.data())
def test_groups_put_rows_in_their_order_and_change_no_row(data):
    runs = data.draw(grids())
    layout = data.draw(layouts(runs))
    table = main_table(runs, (), layout)
    plain = main_table(runs, (), Layout(layout.columns, {}, layout.reference, layout.spread))
    if not layout.groups:
        assert table == plain
        return
    assert table.columns[0].heading == "group"
    assert {row[1:] for row in table.rows} == set(plain.rows)
    named = [method for methods in layout.groups.values() for method in methods]
    shown = [str(row[1]) for row in table.rows]
    assert set(shown[: len(named)]) == set(named)
    assert dict(table.groups).keys() == {row[0] for row in table.rows}
    marks = {(table.rows[i][1], table.columns[j].heading): mark for (i, j), mark in table.marked.items()}
    assert marks == {(plain.rows[i][0], plain.columns[j].heading): mark for (i, j), mark in plain.marked.items()}
    lines = writers.latex(table).splitlines()
    assert [re.search(r"emph\{(.*)\}\}", line).group(1) for line in lines if "multicolumn" in line] == [
        name.replace("&", r"\&") for name, _ in table.groups
    ]
    assert not any(line.startswith(" group") for line in lines)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_every_other_method_is_compared_with_the_reference_and_stands_beside_it_in_the_first_figure(data):
    runs = data.draw(grids())
    grid = Grid(runs)
    reference = data.draw(st.sampled_from(grid.methods))
    assert methods_to_compare(grid, reference) == [(method, reference) for method in grid.methods if method != reference]
    for asked in (None, reference):
        figure = FIGURES["stages"](runs, looks_of(runs), asked)
        named = {text.get_text().split(" (")[0] for text in figure.legends[0].get_texts()}
        first = grid.orders[0]
        assert named >= {run.method for run in runs if run.order == first and (run.method not in METHODS or run.method == asked)}


@given(st.sampled_from(("aa", "acc", "bwtt", "secs", "dbpdia", "AA ", "")), st.booleans())
def test_what_the_runs_do_not_have_is_refused_in_one_line_with_the_nearest(name, as_method):
    runs = [as_run(made.run("sfor")), as_run(made.run("seq-lora"))]
    layout = Layout(reference=name) if as_method and name else Layout(columns=(name,))
    with pytest.raises(UnknownName, match=r"^no (column|method in these runs) called '.*'; (nearest: |there are )[^\n]+$"):
        layout.refuse_unknown(runs)


def test_a_method_in_two_groups_is_refused():
    with pytest.raises(InvalidValue, match="'sfor' stands in two groups"):
        Layout(groups={"a": ("sfor",), "b": ("sfor",)}).refuse_unknown([as_run(made.run("sfor"))])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--columns", "AA,bwt"], "no column called 'bwt'; nearest: BWT"),
        (["--columns", ","], "an empty list: ','; give names separated by commas"),
        (["--reference", "sfr"], "no method in these runs called 'sfr'; nearest: sfor"),
        (["--group", "Ours=sfro"], "no method in these runs called 'sfro'; nearest: sfor"),
        (["--group", "sfor"], "--group takes a heading of its own and methods, 'Ours=mine,mine-2', not 'sfor'"),
        (["--group", "a=sfor", "--group", "a=ewc"], "--group takes a heading of its own"),
    ],
)
def test_the_command_refuses_what_it_cannot_lay_out_and_writes_nothing(words, told, tmp_path, capsys):
    made.save(tmp_path / "runs", made.run("sfor"), made.run("ewc"))
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report"), *words]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
    assert not (tmp_path / "report").exists()


def test_the_command_writes_the_same_layout_in_all_forms(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("anchorlora_lab.report.page.all_pictures", lambda *args, **kwargs: {})
    own = [made.run(OWN, definition="Shared() + FisherAnchor(3.0)", seed=seed) for seed in made.SEEDS]
    made.save(tmp_path / "runs", *made.grid(("sfor", "ewc"), ("order1",)), *own)
    words = ["--columns", "AA,agnews", "--group", "Ours=mine", "--reference", "ewc", "--spread", "sd"]
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report"), *words]) == 0
    rows = list(csv.reader(io.StringIO((tmp_path / "report/tables/main.csv").read_text())))
    assert rows[0] == ["group", "method", "runs", "AA", "AA sd", "AA - ewc", "agnews", "agnews sd", "agnews - ewc"]
    assert rows[1][:2] == ["Ours", OWN]
    assert re.search(r"^group +method +runs +AA +AA sd +AA - ewc", capsys.readouterr().out, flags=re.M)
    page = (tmp_path / "report/index.html").read_text()
    assert page.index(">AA - ewc<") < page.index(">agnews sd<")
