import csv
import io
import re

import made
import pytest

import records
from anchorlora.pages.html import templates
from anchorlora.pages.record import triangle_table
from anchorlora.pages.table import Column, Table
from anchorlora.store.record import read_record
from anchorlora_lab.report import writers
from anchorlora_lab.report.chapters import chapters_of
from anchorlora_lab.report.comparability import studies_of
from anchorlora_lab.report.page import all_tables
from anchorlora_lab.report.records import find_runs
from anchorlora_lab.report.tables.mechanism import drift_table
from anchorlora_lab.report.tables.pairs import component_table, paired_table
from anchorlora_lab.report.tables.scores import complete_table, main_table
from anchorlora_lab.report.tables.settings import cost_table
from golden import assert_golden


@pytest.mark.parametrize("form", ["text", "markdown", "latex", "csv"])
def test_tables_are_byte_for_byte_what_they_were(tmp_path, form):
    runs = find_runs([records.three_methods(tmp_path / "runs")])
    tables = [main_table(runs), complete_table(runs), drift_table(runs[:1]), cost_table(runs), triangle_table(runs[0].record)]
    pairs = made.grid(("sfor", "projected-lora"), ("order1",))
    mistral = made.papers_own(pairs, model="mistralai/Mistral-7B-v0.3", parameters=7_248_023_552)
    tables.append(paired_table(find_runs([made.save(tmp_path / "pair", *mistral)])))
    assert_golden(f"tables.{form}.txt", "\n".join(getattr(writers, form)(table) for table in tables))


def test_a_record_reads_back_as_it_was_written(tmp_path):
    records.write(tmp_path, records.record())
    assert read_record(tmp_path / "sfor-42/record.json") == records.record()


def test_best_and_second_are_marked_by_what_is_printed():
    columns = (Column("m"), Column("AA", 1, "higher"), Column("FM", 1, "lower"))
    table = Table("t", "T", columns, (("a", 80.04, 1.0), ("b", 80.01, 0.5), ("c", 79.0, None)))
    assert table.marked == {(0, 1): "best", (1, 1): "best", (2, 1): "second", (1, 2): "best", (0, 2): "second"}


def test_rows_that_lack_runs_are_neither_ranked_nor_compared():
    rows = (("a", 90.0), ("b", 80.0), ("c", 70.0))
    table = Table("t", "T", (Column("m"), Column("AA", 1, "higher")), rows, partial=frozenset({0}))
    assert table.marked == {(1, 1): "best", (2, 1): "second"}
    assert [row[2:] for row in table.beside({"AA": [89.0, 79.0, None]}).rows] == [(89.0, None), (79.0, 1.0), (None, None)]


def test_the_papers_values_stand_beside_ours_with_the_difference_signed():
    table = Table("t", "T", (Column("m"), Column("AA"), Column("FM")), (("a", 80.5, 1.0), ("b", 79.0, 2.0)))
    shown = table.beside({"AA": [81.0, None], "FM": [None, None]})
    assert [c.heading for c in shown.columns] == ["m", "AA", "AA paper", "AA Δ", "FM"]
    assert [[text for text, _ in row] for row in shown.cells()] == [
        ["a", "80.50", "81.00", "-0.50", "1.00"],
        ["b", "79.00", "-", "-", "2.00"],
    ]


def test_undefined_values_print_as_a_dash_and_stay_empty_in_csv_and_zero_has_no_minus():
    table = Table("t", "T", (Column("x"), Column("y"), Column("z", signed=True)), (("a", None, -0.001), ("b", -0.001, 0.5)))
    assert table.cells() == [[("a", ""), ("-", ""), ("+0.00", "")], [("b", ""), ("0.00", ""), ("+0.50", "")]]
    assert writers.csv(table) == '"x","y","z"\n"a","",-0.001\n"b",-0.001,0.5\n'


def test_without_takes_every_column_of_a_heading_and_none_that_is_not_there():
    table = Table("t", "T", (Column("a"), Column("sd"), Column("b"), Column("sd")), ((1, 2, 3, 4),))
    assert table.without("sd").rows == ((1, 3),)
    assert table.without("none") == table


def test_words_from_records_stay_words_in_every_form():
    table = Table("t", "a\n\\input{x}", (Column("=1+1"), Column("<b>")), (("=cmd|' /C calc'!A0", "<script>\n$x$"),))
    assert list(csv.reader(io.StringIO(writers.csv(table)))) == [["'=1+1", "<b>"], ["'=cmd|' /C calc'!A0", "<script>\n$x$"]]
    assert "<script" not in writers.markdown(table)
    assert "\\|" in writers.markdown(table)
    latex = writers.latex(table).splitlines()
    assert latex[1] == r"\caption{a \textbackslash{}input\{x\}.}"
    assert "\\textless{}script\\textgreater{} \\$x\\$" in writers.latex(table)


def test_latex_has_a_caption_a_label_and_the_papers_groups_in_their_order(tmp_path):
    methods = ("replay", "seq-lora", "sfor", "o-lora-hard", "projected-lora")
    own = made.run("sfor", name="mine")
    table = main_table(find_runs([made.save(tmp_path, *made.grid(methods, ("order1",), (42,)), own)]))
    lines = [line.strip() for line in writers.latex(table).splitlines()]
    assert lines[:4] == [r"\begin{table}[t]", lines[1], r"\label{tab:main}", r"\centering"]
    assert lines[1].startswith(r"\caption{Scores: means over 1 order and 1 seed. AA and LA in percent")
    assert lines[-1] == r"\end{table}"
    assert [lines.count(rule) for rule in (r"\toprule", r"\bottomrule", r"\midrule")] == [1, 1, 5]
    shown = [line.split("&")[0].strip() for line in lines if "&" in line or line.startswith(r"\multicolumn")]
    assert [line.replace(r"\multicolumn{5}{l}{\emph{", "").removesuffix(r"}} \\") for line in shown[1:]] == [
        *("Shared adapter: fixed total rank", "projected-lora", "sfor"),
        *("Cumulative adapter: matched block growth", "o-lora-hard"),
        *("Other rehearsal-free references", "seq-lora"),
        *("Replay reference: historical examples available", "replay"),
        *("Other methods", "mine"),
    ]
    assert r"\label{tab:a-b}" in writers.latex(Table("a b", "T", (Column("x"),), ((1,),)))


def test_the_papers_values_can_be_left_out(tmp_path):
    runs = find_runs([made.save(tmp_path, *made.papers_own(made.grid(("projected-lora", "sfor"))))])
    for table in (main_table(runs), component_table(runs, "shared")):
        assert any("paper" in column.heading for column in table.columns)
        ours = table.ours()
        assert "paper" not in writers.text(ours)
        assert "Δ" not in writers.text(ours)
        assert ours.note.startswith("AA and LA in percent")
        assert [row[0] for row in ours.rows] == [row[0] for row in table.rows]
    plain = Table("t", "T", (Column("time on paper"),), ((1,),), "paper: made of wood.")
    assert plain.ours() == plain


def test_every_latex_table_is_whole(tmp_path):
    """Environments are balanced, every row has as many cells as the table has columns, and no letter is left special."""
    methods = ("replay", "seq-lora", "sfor", "projected-lora", "o-lora", "o-lora-hard", "lwf")
    sequences, traces = made.save(tmp_path / "runs", *made.grid(methods)), made.traced(tmp_path / "traces")
    tables = all_tables(chapters_of(studies_of(find_runs([sequences, traces]))))
    assert len(tables) > 20
    for table in tables:
        lines = [line.strip() for line in writers.latex(table).splitlines() if line.strip()]
        opened = []
        for line in lines:
            for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", line):
                assert kind == "begin" or opened.pop() == name, table.name
                opened += [name] if kind == "begin" else []
        assert not opened
        (columns,) = re.findall(r"\\begin\{tabular\}\{([lcr]+)\}", "\n".join(lines))
        assert len(columns) == len(table.columns)
        rules = [line for line in lines if re.fullmatch(r"\\(top|mid|bottom)rule", line)]
        assert (rules[0], rules[-1]) == (r"\toprule", r"\bottomrule")
        body = lines[lines.index(r"\toprule") + 1 : lines.index(r"\bottomrule")]
        for line in body:
            if line in rules:
                continue
            assert line.endswith(r"\\"), line
            cells = re.split(r"(?<!\\)&", line.removesuffix(r"\\"))
            spans = re.findall(r"\\multicolumn\{(\d+)\}", line)
            assert len(cells) - len(spans) + sum(map(int, spans)) == len(columns), line
        for line in (*body, next(line for line in lines if line.startswith(r"\caption"))):
            bare = re.sub(r"\\[&%$#_{}]|\$\^\\dagger\$|\$\\Delta\$", "", line)
            assert not re.search(r"(?<!\\)[%$#_]", bare), line
            assert bare.count("{") == bare.count("}")


def test_an_option_of_a_sentence_is_code_also_in_parentheses():
    written = templates().filters["options"]
    assert written("keep more (--self-texts N), or --margin POINTS") == (
        "keep more (<code>--self-texts</code> N), or <code>--margin</code> POINTS"
    )
    assert written("a--b and <i>") == "a--b and &lt;i&gt;"
