"""Words of strangers through every form of output: they stay words."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import unicodedata
import warnings
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import records
from anchorlora.cli.app import main
from anchorlora.cli.console import Terminal, print_json
from anchorlora.pages.table import Column, Table
from anchorlora.runs.directory import RunDirectory
from anchorlora.store.files import write_lines
from anchorlora.text import shown, visible
from anchorlora_lab.report import writers
from pages import OURS, elements
from reports import made

ESCAPES = [
    "\x1b]0;owned\x07",
    "\x1b[2J",
    "\x9b31m",
    "\x1bP+q\x1b\\",
    "\r",
    "\x08",
    "\u202egnp.exe",
    "\u2066",
    "\u200f",
    "\u2028",
    "\x85",
]
FORMULAS = ['=HYPERLINK("http://x")', "+1+1", "-2+3", "@SUM(1)", "\t=1+1", "\r=1", " =1", "＝1+1", "\n=1"]
FORMULAS += ["n;=1+1", "n; @SUM(1)", "n\t-2+3", 'n";=1+1', "n\n=1+1"]
SEPARATORS = ",;\t"  # at which programs part cells, by the country that they are set to
MARKUP = ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</script><b>", "<!--", "]]>", "<svg/onload=x>", "{{ 7*7 }}"]
MARKDOWN = ["[a](javascript:alert(1))", "![a](http://x/y.png)", "`a`", "| a |", "http://x.example", "*a*", "[red]a[/red]"]
LATEX = [r"\input{/etc/passwd}", "$x$", "%", "a & b"]
HOSTILE = [*ESCAPES, *FORMULAS, *MARKUP, *MARKDOWN, *LATEX]
TURNING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def steering(text):
    """Characters that a terminal obeys, or that turn a line round."""
    odd = {"Cc", "Cs", "Zl", "Zp"}
    return [c for c in text if (unicodedata.category(c) in odd and c not in "\n\t") or unicodedata.bidirectional(c) in TURNING]


def saved(root, word):
    """Two runs in which every word that a record may choose is hostile."""
    plan = made.protocol(["a", word, "c", "d"], tuned={word: word})
    words = {"definition": word, "recipe": word, "host": {word: word}, "versions": {word: word}, "protocol": plan}
    words |= {"data": {word: {"sha256": word, "kind": word}}, "order": ["a", word, "c", "d"]}
    words["base_model"] = {"name": word, "revision": word, "sha256": None, "parameters": 1, "dtype": word}
    for i, method in enumerate((word, f"b{word}")):
        folder = root / str(i)
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(records.record(name=method, **words).as_json())
        (folder / "eval.json").write_text(made.evaluation(after=1.0, task=word, metric=word))
    return root


def page_of(word, root):
    """The report of runs that are full of a word."""
    assert main(["report", str(saved(root / "runs", word)), "--out", str(root / "report")]) == 0
    return (root / "report/index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def harmless(tmp_path_factory):
    """The elements of the report of a harmless word."""
    return Counter(tag for tag, _ in elements(page_of("harmless", tmp_path_factory.mktemp("harmless"))))


WORDS = ["".join(HOSTILE), *HOSTILE]
FEW = {"".join(HOSTILE)}


@pytest.mark.filterwarnings("ignore::UserWarning")  # matplotlib: glyphs that its font lacks, names longer than the figure
@pytest.mark.parametrize("word", [pytest.param(w, marks=() if w in FEW else pytest.mark.slow, id=ascii(w)) for w in WORDS])
def test_a_report_of_hostile_words_has_no_element_formula_or_control_of_theirs(word, harmless, figure, tmp_path, capsys):
    page, said = page_of(word, tmp_path), capsys.readouterr()
    foreign = Counter(tag for tag, _ in elements(page)) - harmless
    links = [(tag, attrs) for tag, attrs in elements(page) if handles_or_leads_out(tag, attrs)]
    controls, formulas = steering(said.out + said.err + page), []
    for path in (tmp_path / "report/tables").iterdir():
        text = path.read_bytes().decode()
        controls += steering(text)
        if path.suffix == ".csv":
            formulas += formulas_of(text)
        if path.suffix == ".md":
            foreign += Counter(tag for tag, _ in elements(text))
            links += re.findall(r"(?<!\\)\]\(|(?<![\\:])://", text)
    figure("words", words=1, elements=foreign.total(), links=len(links), formulas=len(formulas), controls=len(controls))
    assert (foreign, links, formulas, controls) == (Counter(), [], [], [])
    assert {tag for tag, _ in elements(page)} <= OURS
    places = {p.parent.relative_to(tmp_path / "report").as_posix() for p in (tmp_path / "report").rglob("*") if p.is_file()}
    assert places == {".", "tables", "figures"}


def handles_or_leads_out(tag, attrs):
    ours = r"#(chapter-\d+|[mr]\d+-\d+)|(\.\./)+[\w./%~-]*record\.json"  # a place in the page, or a record beside it
    return any(name.startswith("on") for name in attrs) or (tag == "a" and not re.fullmatch(ours, attrs["href"]))


def formulas_of(text):
    """What a spreadsheet would compute of a CSV, whatever it takes for the end of a cell."""
    rows = [row for mark in SEPARATORS for row in csv.reader(io.StringIO(text, newline=""), delimiter=mark)]
    return [cell for row in rows for cell in row if is_formula(cell)]


def is_formula(cell):
    """Whether a spreadsheet would compute a cell; numbers, and a line of them that is taken for one cell, are none."""
    try:
        float(cell.partition(",")[0])
    except ValueError:
        return cell.lstrip()[:1] in set("=+-@＝＋－＠") and cell != "-"
    return False


@given(words=st.lists(st.one_of(st.text(max_size=20), st.sampled_from(HOSTILE)), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_a_table_of_any_words_keeps_its_shape_and_steers_nothing(words):
    words = [w for w in words if not any("\ud800" <= c <= "\udfff" for c in w)] or ["x"]
    table = Table("t", words[0], tuple(Column(w) for w in words), (tuple(words), tuple(words)), note=words[-1])
    for suffix, written in writers.WRITERS.items():
        assert not steering(written(table)), suffix
    rows = list(csv.reader(io.StringIO(writers.csv(table), newline="")))
    assert [len(row) for row in rows if row] in ([len(words)] * 3, [])
    assert not formulas_of(writers.csv(table))
    assert not elements(writers.markdown(table))
    latex = "".join(line for line in writers.latex(table).splitlines(keepends=True) if not line.startswith("%"))
    assert r"\input" not in latex


@pytest.mark.parametrize("word", FORMULAS)
def test_a_cell_is_no_formula_wherever_cells_are_parted(word):
    text = writers.csv(Table("t", "t", (Column("a"), Column(word)), (("a", word), (word, -1.0), (f"a{word}", None))))
    assert not formulas_of(text)


@given(st.one_of(st.text(), st.sampled_from(HOSTILE)))
@settings(max_examples=300, deadline=None)
def test_nothing_that_is_shown_steers_and_json_stays_the_same_json(text):
    assert not steering(shown(text))
    assert visible(visible(text)) == visible(text)
    assert json.loads(visible(json.dumps([text], ensure_ascii=False))) == [text]


@pytest.mark.parametrize("word", HOSTILE, ids=ascii)
def test_the_terminal_shows_words_as_words(word, capsys):
    for terminal in (Terminal(), Terminal(stderr=True)):
        terminal.print(f"warning: {word}", style="yellow")
    print_json({word: word})
    said = capsys.readouterr()
    assert not steering(said.out + said.err)
    assert all(said.err.count(part) for part in re.findall(r"[\w<>\[\]:=]+", visible(word)))


@pytest.mark.parametrize("word", HOSTILE, ids=ascii)
def test_an_error_that_repeats_them_is_one_line_of_words(word, capsys, tmp_path):
    (tmp_path / "own.yaml").write_text(json.dumps({"extends": "mini", "name": "a", word: word}))
    for arguments in (
        ["run", word],
        ["run", "mini", "--method", word],
        ["run", "mini", "--method", "sfor", "--order", f"{word},a"],
    ):
        assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1, said
        assert not steering(said)
    assert main(["run", str(tmp_path / "own.yaml"), "--method", "sfor", "--out", str(tmp_path / "out")]) == 2
    assert not steering(capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_path_of_two_lines_is_named_in_one(tmp_path, capsys):
    assert main(["report", str(tmp_path / "no\nsuch"), "--out", str(tmp_path / "report")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{tmp_path}/no such" in said


@pytest.mark.parametrize("word", ESCAPES, ids=ascii)
def test_what_libraries_log_and_warn_of_is_words_while_a_command_runs(word, monkeypatch, tmp_path):
    said = io.StringIO()

    def tell(runs):
        library = logging.getLogger("transformers.modeling_utils")
        handler = logging.StreamHandler(said)
        library.addHandler(handler)
        library.error("%s is unexpected, of https://me:secret@host/", word)
        library.removeHandler(handler)
        said.write(warnings.formatwarning(word, UserWarning, "file.py", 1, "line"))
        raise ValueError

    monkeypatch.setattr("anchorlora_lab.report.page.all_tables", tell)
    (tmp_path / "record.json").write_text(records.record().as_json())
    before = (logging.getLogRecordFactory(), warnings.formatwarning)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "report")]) == 1
    assert not steering(said.getvalue())
    assert said.getvalue().count(visible(word)) == 2
    assert said.getvalue().endswith(f"warning: {visible(word)}\n")
    assert "is unexpected, of https://host/" in said.getvalue()
    assert (logging.getLogRecordFactory(), warnings.formatwarning) == before


@pytest.mark.parametrize("word", HOSTILE, ids=ascii)
def test_a_log_and_predictions_have_one_line_an_event(word, tmp_path):
    RunDirectory(tmp_path).log.write({"event": word, "said": word})
    write_lines(tmp_path / "predictions.jsonl", [{"text": word, "label": None, "gold": word}] * 2)
    log = (tmp_path / "log.jsonl").read_bytes().decode()
    assert not steering(log)
    assert json.loads(log)["said"] == word
    rows = (tmp_path / "predictions.jsonl").read_bytes().decode().split("\n")
    assert [json.loads(row)["text"] for row in rows if row] == [word] * 2
    assert not steering("".join(rows))
