import base64
import csv
import hashlib
import io
import re
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import made
import pytest

import records
from anchorlora.cli.app import main
from anchorlora.pages import html
from anchorlora.pages.record import triangle_table
from anchorlora_lab.report import writers
from anchorlora_lab.report.chapters import chapters_of
from anchorlora_lab.report.comparability import studies_of
from anchorlora_lab.report.figures import style
from anchorlora_lab.report.page import Links, all_tables, write_report
from anchorlora_lab.report.records import find_runs
from anchorlora_lab.report.tables.mechanism import drift_table
from anchorlora_lab.report.tables.scores import main_table, seed_table
from anchorlora_lab.report.tables.settings import orders_table
from pages import OURS, Elements, elements

SUFFIXES = ("txt", "md", "tex", "csv")


def written(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.vector
def test_a_report_has_every_table_in_four_forms_and_every_figure(tmp_path, monkeypatch):
    for form in ("png", "pdf"):  # which take longest; test_figures draws them
        drawn = SimpleNamespace(**{f"print_{form}": lambda out, metadata: out.write(b"drawn")})
        monkeypatch.setitem(style.CANVASES, form, lambda figure, drawn=drawn: drawn)
    grid = made.grid(("seq-lora", "projected-lora", "sfor", "inc-lora", "o-lora", "o-lora-hard"), seeds=(38, 42))
    made.save(tmp_path / "runs/grid", *grid)
    made.traced(tmp_path / "runs/traces")
    runs = find_runs([tmp_path / "runs"])
    page = write_report(runs, tmp_path / "report").page
    names = {table.name for table in all_tables(chapters_of(studies_of(runs)))}
    assert names >= {"main", "complete", "by-order", "by-seed", "seed-sd", "paired", "learning", "orders", "settings", "methods"}
    assert names >= {"components-shared", "components-cumulative", "drift", "cores", "invalid", "invalid-by-seed", "cost"}
    assert names >= {"mechanism-shared", "mechanism-shared-sd", "mechanism-cumulative", "mechanism-cumulative-sd", "violations"}
    assert len([name for name in names if name.startswith("accuracy-")]) == len(grid) == 36
    assert written(tmp_path / "report/tables") == {f"{name}.{suffix}" for name in names for suffix in SUFFIXES}
    assert names >= {"forgetting", "gradients"}
    figures = {"stages", "heat", "accuracy", "aa-fm", "drift", "cores", "energy", "trajectories"}
    figures |= {"paths", "forgetting", "boundaries", "gradients"}
    assert written(tmp_path / "report/figures") == {f"{name}.{form}" for name in figures for form in ("png", "pdf", "svg")}
    html = page.read_text()
    assert html.count("<img") == len(figures)
    assert html.count("<script>") == 1
    assert "http" not in html.replace("http-equiv", "")
    rows = list(csv.reader(io.StringIO((tmp_path / "report/tables/main.csv").read_text())))
    assert len(rows) == 1 + 6
    comparisons = (tmp_path / "report/tables/comparisons.tex").read_text()
    assert "\\label{tab:comparisons}" in comparisons


def test_tables_without_data_do_not_appear(tmp_path):
    runs = find_runs([made.save(tmp_path, made.run("seq-lora", order=("a",), drift=[]))])
    names = {table.name for table in all_tables(chapters_of(studies_of(runs)))}
    assert names.isdisjoint(
        {"paired", "learning", "components-shared", "components-cumulative", "drift", "cores", "capability", "by-order"}
    )
    assert {"main", "invalid", "cost"} <= names
    write_report(runs, tmp_path / "report")


@pytest.mark.slow
def test_two_studies_have_their_own_files(tmp_path):
    made.save(tmp_path / "runs", *made.grid(("sfor",), ("order1",)), *made.grid(("sfor",), ("order1",), recipe="other"))
    made.save(tmp_path / "runs", *made.grid(("sfor",), ("order1",), tasks=made.MINI))
    write_report(find_runs([tmp_path / "runs"]), tmp_path / "report")
    mains = {name for name in written(tmp_path / "report/tables") if name.endswith("-main.csv")}
    assert mains == {"other-tiny-main.csv", "standard-cl-tiny-1-main.csv", "standard-cl-tiny-2-main.csv"}
    assert "other-tiny-accuracy.svg" in written(tmp_path / "report/figures")


@pytest.mark.slow
def test_the_same_runs_make_the_same_files_in_whatever_order_they_are_found(tmp_path):
    made.save(tmp_path / "runs", *made.grid(("sfor", "o-lora"), ("order1", "order2")))
    runs = find_runs([tmp_path / "runs"])
    for name, mine in (("a", runs), ("b", runs[::-1])):
        write_report(mine, tmp_path / name)
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert len(files) > 50
    for path in files:
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes(), path


def test_the_command_prints_the_main_tables_and_where_the_page_is(tmp_path, capsys, without_pictures):
    made.save(tmp_path / "runs", *made.grid(("sfor",), ("order1",)))
    made.traced(tmp_path / "runs/traces", ("sfor", "o-lora"), (42,))
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 0
    said = capsys.readouterr().out
    assert "Scores: means over 1 order and 3 seeds" in said
    assert "Mechanism endpoints, shared adapter" in said
    assert "Mechanism endpoints, one block per task" in said
    assert f"5 runs; tables and figures in {tmp_path / 'report'}, page: {tmp_path / 'report/index.html'}" in said


@pytest.mark.slow
def test_a_whole_grid_is_reported_within_a_minute(tmp_path):
    runs = find_runs([made.save(tmp_path / "runs", *made.grid())])
    begun = time.monotonic()
    write_report(runs, tmp_path / "report")
    assert time.monotonic() - begun < 60
    assert len(runs) == 153


HOSTILE = '<script>alert(1)</script><img src=x onerror="x">'


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Runs and a trace in which every word that a record, a trace or a score may choose is hostile, and their report."""
    tmp_path = tmp_path_factory.mktemp("hostile")
    words = {"definition": HOSTILE, "recipe": HOSTILE, "data": {HOSTILE: {"sha256": "a" * 64, "kind": HOSTILE}}}
    words |= {"host": {HOSTILE: HOSTILE}, "versions": {"anchorlora": HOSTILE}}
    words["base_model"] = {"name": HOSTILE, "revision": None, "sha256": None, "parameters": 1, "dtype": HOSTILE}
    tasks, layer = ["=HYPERLINK(1)", HOSTILE, "c", "d"], {"k": 1, "k_star": 1, "retained_energy": 0.9, "rows": 9}
    protocol = {"</pre><script>": HOSTILE, "tuned": {HOSTILE: HOSTILE}}
    layers = [[layer | {"module": HOSTILE}, layer | {"module": "b"}]] * 4
    for i, method in enumerate((HOSTILE, "=cmd()")):
        made_record = records.record(order=tasks, protocol=protocol, layers=layers, name=method, **words)
        folder = tmp_path / f"runs/{i}"
        folder.mkdir(parents=True)
        changed = {"versions": {"anchorlora": HOSTILE * (i + 1)}}  # a footnote
        (folder / "record.json").write_text(made_record.model_copy(update=changed).as_json())
        (folder / "eval.json").write_text(made.evaluation(after=1.0, task=HOSTILE, metric=HOSTILE))
    made.traced(tmp_path / "runs/trace", ("sfor",), (42,))
    (path,) = (tmp_path / "runs/trace").rglob("trace.jsonl")
    made.write_points(path, [p | {"penalties": {HOSTILE: 1.0}, "layers": {HOSTILE: {}}} for p in made.points("sfor", seed=42)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anchorlora_lab.report.page.FILES", ())
        write_report(find_runs([tmp_path / "runs"]), tmp_path / "report")
    return tmp_path


def test_nothing_that_comes_from_a_record_becomes_an_element_or_a_load(hostile):
    html = (hostile / "report/index.html").read_text()
    elements = Elements()
    elements.feed(html)
    policies = [attrs["content"] for tag, attrs in elements.found if attrs.get("http-equiv") == "Content-Security-Policy"]
    script = html.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    own = f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert policies == [f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; {own}"]  # what slips through does not run
    assert html.count("&lt;script&gt;") > 10
    assert {tag for tag, _ in elements.found} <= OURS
    assert [attrs for tag, attrs in elements.found if tag == "script"] == [{}]
    assert not any(name.startswith("on") for _, attrs in elements.found for name in attrs)
    assert all(attrs["src"].startswith("data:image/svg+xml;base64,") for tag, attrs in elements.found if tag == "img")
    pictures = [base64.b64decode(attrs["src"].partition(",")[2]) for tag, attrs in elements.found if tag == "img"]
    assert pictures
    assert not any(b"<script" in picture or b'href="http' in picture for picture in pictures)
    ids = [attrs["id"] for _, attrs in elements.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = {attrs["href"] for tag, attrs in elements.found if tag == "a"}
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    assert all(link.startswith("../runs/") and link.endswith("/record.json") for link in links if not link.startswith("#"))


def test_no_page_names_anything_that_a_browser_would_load():
    for page in Path(html.__file__).parent.joinpath("templates").glob("*.html.j2"):
        found = elements(page.read_text())
        assert not {tag for tag, _ in found} & {"link", "iframe", "object", "embed", "base", "form", "video", "audio"}, page.name
        loads = [
            value for _, attrs in found for name, value in attrs.items() if name in ("src", "srcset", "action", "data", "poster")
        ]
        assert set(loads) <= {"{{ picture.source }}"}, page.name
        policy = [attrs["content"] for tag, attrs in found if attrs.get("http-equiv") == "Content-Security-Policy"]
        assert policy[0].startswith("default-src 'none'"), page.name
        assert "width=device-width" in page.read_text(), page.name
    for part in Path(html.__file__).parent.joinpath("templates").glob("*.j2"):
        assert not re.search(r"https?:|//\w|@import|url\(", part.read_text().replace("// ", "")), part.name


def test_numbers_lead_to_the_record_that_they_come_from(tmp_path, without_pictures):
    made.save(tmp_path / "runs", *made.grid(("sfor", "seq-lora"), ("order1", "order2"), seeds=(38, 42)))
    runs = find_runs([tmp_path / "runs"])
    found = elements(write_report(runs, tmp_path / "deep/report").page.read_text())
    records_of = {attrs["id"]: attrs["href"] for tag, attrs in found if tag == "a" and "id" in attrs}
    files = {(tmp_path / "deep/report" / unquote(path)).resolve() for path in records_of.values()}
    assert files == {(run.folder / "record.json").resolve() for run in runs}
    links = Links(studies_of(runs)[0], "1")
    for table, link in ((seed_table(runs), links.of_run), (drift_table(runs), links.of_run), (main_table(runs), links.of_method)):
        for row in table.rows:
            anchor = links.of_row(table, row)
            told = {column.heading: value for column, value in zip(table.columns, row, strict=True)}
            place = (told["method"], told["order"], told["seed"]) if link is links.of_run else told["method"]
            assert anchor == link[place]
    (run,) = [run for run in runs if (run.method, run.seed, run.order[2]) == ("sfor", 38, "yahoo")]
    assert unquote(records_of[links.of_row(triangle_table(run.record), ("dbpedia",))]).endswith(f"{run.folder.name}/record.json")
    assert links.of_row(orders_table(runs), orders_table(runs).rows[0]) == ""  # it is about no run


def test_the_name_of_a_folder_cannot_make_a_link_of_another_kind(tmp_path, without_pictures):
    names = ("javascript:alert(1)", 'a"onclick="x', "a b#c?d%65")
    folders = [tmp_path / name for name in names]
    for folder, seed in zip(folders, made.SEEDS, strict=True):
        folder.mkdir()
        (folder / "record.json").write_text(made.run("sfor", seed=seed).as_json())
    found = elements(write_report(find_runs(folders), tmp_path).page.read_text())
    links = [attrs["href"] for tag, attrs in found if tag == "a" and "id" in attrs]
    assert sorted(map(unquote, links)) == sorted(f"{name}/record.json" for name in names)
    assert not any(set(':"#? ') & set(link) for link in links)


def test_the_page_begins_with_the_verdict_then_advice_then_evidence(tmp_path, without_pictures):
    root = records.three_methods(tmp_path / "runs")
    page = write_report(find_runs([root]), tmp_path / "report").page.read_text()
    places = [page.index(part) for part in ('class="verdict"', 'class="cards"', 'class="advice"', "<h2>Evidence</h2>", "<table")]
    assert places == sorted(places)
    assert page.count('id="chapter-1"') == 1


def test_without_its_script_the_page_has_every_row_and_no_control(tmp_path, without_pictures):
    page = write_report(find_runs([records.three_methods(tmp_path / "runs")]), tmp_path / "report").page.read_text()
    found = [tag for tag, _ in elements(page)]
    assert "button" not in found
    assert "input" not in found
    assert "hidden" not in {name for _, attrs in elements(page) for name in attrs}
    script = page.partition("<script>")[2]
    for part in ('createElement("button")', "aria-sort", "table.sorts", "filter rows", "aria-label"):
        assert part in script


def test_nothing_that_comes_from_a_record_becomes_a_formula_markup_or_a_path(hostile):
    for path in (hostile / "report/tables").iterdir():
        text = path.read_text()
        assert "<script" not in text or path.suffix in (".txt", ".csv"), path
        if path.suffix == ".tex":
            assert "<script" not in text, path
        if path.suffix == ".csv":
            cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
            assert not any(cell.startswith(("=", "@")) for cell in cells), path
    for path in (hostile / "report/figures").glob("*.svg"):
        assert "<script" not in path.read_text(), path
    rows = list(csv.reader(io.StringIO(writers.csv(triangle_table(find_runs([hostile / "runs"])[0].record)))))
    assert rows[0][1] == rows[1][0] == "'=HYPERLINK(1)"
    files = [path for path in (hostile / "report").rglob("*") if path.is_file()]
    assert {path.parent for path in files} == {hostile / "report", hostile / "report/tables", hostile / "report/figures"}


def test_the_papers_values_are_left_out_of_every_table_where_asked(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("anchorlora_lab.report.page.all_pictures", lambda *args, **kwargs: {})
    monkeypatch.setattr("anchorlora_lab.report.page.render", lambda *args, **kwargs: "")
    root = made.save(tmp_path / "runs", *made.papers_own(made.grid(("projected-lora", "sfor"), seeds=(42,))))
    for option, there in (("--printed", True), ("--no-printed", False)):
        assert main(["report", str(root), "--out", str(tmp_path / option), option]) == 0
        assert ("AA paper" in capsys.readouterr().out) == there
        told = [path.read_text() for path in (tmp_path / option / "tables").glob("*.tex")]
        assert any("published value" in text for text in told) == there
        assert any(r"$\Delta$" in text for text in told) == there
