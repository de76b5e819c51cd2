"""Files of training text: every kind gives the same samples, and no file, however broken, gives more than one line."""

import csv
import json
from importlib import util

import pytest
from datasets import ClassLabel, Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorlora.data import examples_of, read_samples
from anchorlora.data.forms import known_forms
from anchorlora.errors import InvalidValue

ROWS = [{"text": "one"}, {"text": 'two\u2028lines, "quoted"\nand more'}, {"text": "ünï"}]


def contents(data, **asked):
    return [sample.content for sample in read_samples(data, **asked)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def test_every_kind_of_file_gives_the_same_samples(tmp_path):
    write_lines(tmp_path / "a.jsonl", ROWS)
    write_lines(tmp_path / "lines.json", ROWS)
    (tmp_path / "marked.jsonl").write_text("\ufeff" + (tmp_path / "a.jsonl").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "list.json").write_text(json.dumps(ROWS, indent=1))
    dataset = Dataset.from_list(ROWS)
    dataset.to_csv(str(tmp_path / "a.csv"))
    dataset.to_parquet(str(tmp_path / "a.parquet"))
    dataset.save_to_disk(str(tmp_path / "saved"))
    expected = [row["text"] for row in ROWS]
    for name in ("a.jsonl", "lines.json", "marked.jsonl", "list.json", "a.csv", "a.parquet", "saved"):
        assert contents(tmp_path / name) == expected, name
    assert contents(ROWS) == contents(dataset) == expected


def test_chats_keep_their_messages_in_parquet_and_saved_datasets(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    dataset = Dataset.from_list([{"messages": chat}])
    dataset.to_parquet(str(tmp_path / "a.parquet"))
    dataset.save_to_disk(str(tmp_path / "saved"))
    for data in (tmp_path / "a.parquet", tmp_path / "saved", dataset):
        assert contents(data) == [tuple(chat)]


def test_a_class_of_a_dataset_is_read_by_its_name(tmp_path):
    rows = Dataset.from_dict({"text": ["fine", "bad", "what?"], "label": [1, 0, -1]})
    dataset = rows.cast_column("label", ClassLabel(names=["no", "yes"]))
    dataset.to_parquet(str(tmp_path / "a.parquet"))
    dataset.save_to_disk(str(tmp_path / "saved"))
    for data in (tmp_path / "a.parquet", tmp_path / "saved", dataset):
        samples = read_samples(data, column="question=text,answer=label", limit=2)
        assert [example.label for example in examples_of(samples)] == ["yes", "no"]
        with pytest.raises(InvalidValue, match="answer must be text"):
            read_samples(data, column="question=text,answer=label")


def test_keys_that_arrow_adds_to_calls_and_tools_are_not_read(tmp_path):
    rows = []
    for name, arguments in (("weather", {"city": "Paris"}), ("add", {"a": [1, None], "b": {"c": 2}}), ("stop", {"b": {"d": 0}})):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        tool = {"type": "function", "function": {"name": name, "parameters": {key: {"type": key} for key in arguments}}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        rows.append({"messages": [{"role": "user", "content": "q"}, said], "tools": [tool]})
    dataset = Dataset.from_list(rows)
    dataset.to_parquet(str(tmp_path / "a.parquet"))
    dataset.save_to_disk(str(tmp_path / "saved"))
    for data in (tmp_path / "a.parquet", tmp_path / "saved", dataset):
        assert [[*map(dict, sample.content)] for sample in read_samples(data)] == [row["messages"] for row in rows]
        assert [[*sample.tools] for sample in read_samples(data)] == [row["tools"] for row in rows]
    null = {"function": {"name": "add", "arguments": {"a": None}}}
    rows[0]["messages"][1]["tool_calls"] = [null]
    write_lines(tmp_path / "a.jsonl", rows)
    assert read_samples(tmp_path / "a.jsonl")[0].content[1]["tool_calls"] == [null]


def test_places_are_lines_where_a_file_has_them(tmp_path):
    write_lines(tmp_path / "a.jsonl", ROWS)
    Dataset.from_list(ROWS).to_csv(str(tmp_path / "a.csv"))
    assert [sample.place for sample in read_samples(tmp_path / "a.jsonl")] == [f"{tmp_path}/a.jsonl, line {n}" for n in (1, 2, 3)]
    assert [sample.place for sample in read_samples(tmp_path / "a.csv")] == [f"{tmp_path}/a.csv, line {n}" for n in (2, 3, 5)]
    assert read_samples(ROWS)[2].place == "data, row 3"


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([("a.csv", ","), ("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", "\t")]),
    st.lists(st.tuples(*2 * [st.text("ab ,;\t\n\"'é", max_size=8).map("x".__add__)]), min_size=1, max_size=4),
)
def test_a_csv_is_read_by_the_separator_of_its_first_line(tmp_path_factory, kind, rows):
    (name, mark), folder = kind, tmp_path_factory.mktemp("csv")
    with (folder / name).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=mark).writerows([("prompt", "completion"), *rows])
    assert [(example.sentence, example.label) for example in examples_of(read_samples(folder / name))] == rows


def test_blanks_around_the_names_of_a_csv_are_none_of_them(tmp_path):
    (tmp_path / "a.csv").write_text("prompt, completion ,id\nq, a,1\n")
    assert [sample.content for sample in read_samples(tmp_path / "a.csv")] == ["q a"]
    (tmp_path / "a.csv").write_text("prompt, prompt\nq,a\n")
    with pytest.raises(InvalidValue, match="line 1: names column 'prompt' twice"):
        read_samples(tmp_path / "a.csv")


@settings(deadline=None, max_examples=40)
@given(
    st.recursive(st.just(1), lambda inner: st.lists(inner, min_size=1) | st.fixed_dictionaries({"x": inner}), max_leaves=4),
    st.data(),
)
def test_a_key_that_an_object_of_a_row_has_twice_is_refused_with_its_line(tmp_path_factory, value, draw):
    path = tmp_path_factory.getbasetemp() / "twice.jsonl"
    whole = json.dumps({"text": "a", "meta": {"x": value}})
    at = draw.draw(st.sampled_from([place + 1 for place, character in enumerate(whole) if character == "{"]))
    name = whole[at:].split('"')[1]
    path.write_text('{"text": "a"}\n' + whole[:at] + f'"{name}": "other", ' + whole[at:] + "\n")
    with pytest.raises(
        InvalidValue, match=f"twice.jsonl, line 2: holds '{name}' twice, and one of them would be dropped; keep one$"
    ):
        read_samples(path)


TWICE = '{"x": 1, "inner": {"x": 2, "x": 3}}'
CALL = '{"name": "add", "arguments": ' + TWICE + "}"


@pytest.mark.parametrize(
    ("said", "more", "where"),
    [
        ({"tool_calls": [{"function": {"name": "add", "arguments": TWICE}}]}, {}, r"a call of message 2 \(role 'assistant'\)"),
        ({"tool_calls": [{"name": "add", "arguments": TWICE}]}, {}, r"a call of message 2 \(role 'assistant'\)"),
        ({"from": "function_call", "value": CALL}, {}, "value of message 2 of messages"),
        ({}, {"tools": f"[{CALL}]"}, "tools"),
    ],
)
def test_a_key_that_json_text_within_a_row_has_twice_is_refused(said, more, where):
    answer = {"role": "assistant", "content": "4"} | said
    answer = {key: answer[key] for key in answer if "from" not in answer or key in said}
    row = {"messages": [{"role": "user", "content": "2 + 2?"}, answer], **more}
    with pytest.raises(InvalidValue, match=f"^data, row 1: {where} holds 'x' twice, and one of them would be dropped; keep one$"):
        read_samples([row])
    once = json.loads(json.dumps(row).replace(', \\"x\\": 3', ""))
    assert len(read_samples([once])) == 1


def test_only_what_is_there_is_offered_as_the_nearest_name(tmp_path):
    write_lines(tmp_path / "rows1.jsonl", ROWS)
    (tmp_path / "rows2.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (tmp_path / "rows3.jsonl").symlink_to(tmp_path / "rows1.jsonl")
    for name in ("rows.jsonl", "rows2.jsonl"):
        with pytest.raises(InvalidValue) as refused:
            read_samples(tmp_path / name)
        offered = str(refused.value).partition("; nearest: ")[2].split(", ")
        assert sorted(offered) == [str(tmp_path / "rows1.jsonl"), str(tmp_path / "rows3.jsonl")]


BROKEN = [
    (
        "a.jsonl",
        b'{"text": "a"}\n{"text": \n',
        "a.jsonl, line 2: not complete JSON: Expecting value at character 9; give one JSON",
    ),
    ("a.jsonl", b'{"text": "a"}\n\xff\xfe\n', "a.jsonl, line 2: not UTF-8; save the file as UTF-8"),
    ("a.csv", "prompt,completion\na,b\n".encode("utf-16"), "a.csv, line 1: not UTF-8; save the file as UTF-8"),
    ("a.csv", b"prompt,completion\na,b\nc,d,e\n", "a.csv, line 3: more fields than the 2 that the first line names; put text"),
    ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: nested too deeply"),
    ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", "a.jsonl, line 1: holds a number that is too long"),
    ("a.jsonl", b"\n \n", "a.jsonl holds no row; give at least one example"),
    ("a.jsonl", b"", "a.jsonl holds no row"),
    ("a.jsonl", b"\xef\xbb\xbf", "a.jsonl holds no row"),
    ("a.jsonl", b"\xef\xbb\xbf\n\xef\xbb\xbf{", "a.jsonl, line 2: not complete JSON"),
    ("a.json", b'[{"text": "a"},\n 3]', "a.json, row 2: a row is an object with named columns, not a number"),
    ("a.json", b'[{"text": "a"},\n', "a.json: not complete JSON"),
    (
        "a.json",
        b'{"answers": {"text": "a"}}',
        f"a.json, line 1: no known column ({known_forms()}); it has: answers",
    ),
    ("a.json", b'{"version": 1, "data": [{"text": "a"}]}', "a.json: one object around the rows, in 'data'; save that list of rows"),
    ("a.json", b'{"data": [\n{"text": "a"}\n]}', "a.json: one object around the rows, in 'data'; save that list of rows"),
    ("a.json", b'{\n"text": "a"\n}', "a.json: one object over several lines; give a list of such objects, or each on one line"),
    ("a.csv", b"prompt,completion\na\n", "a.csv, line 2: column 'completion' holds nothing; fill it, or take the row out"),
    ("a.jsonl", b'{"text": null}', "a.jsonl, line 1: column 'text' holds nothing; fill it, or take the row out"),
    ("a.csv", b"messages\n[]\n", "a.csv, line 2: messages must be a list of messages, not text; save the rows as JSON Lines"),
    ("a.json", b"[]", "a.json holds no row"),
    ("a.csv", b'text\n"a\n', "a.csv, line 2: not readable CSV"),
    ("a.csv", b"text,n\na,1\n\xff,2\n", "a.csv, line 3: text holds characters that are not Unicode text"),
    ("a.csv", b"text\n", "a.csv holds no row"),
    (
        "a.csv",
        b"prompt;completion\na;b\nc;d;e\n",
        "a.csv, line 3: more fields than the 2 that the first line names; put text that holds a semi",
    ),
    ("a.csv", b"prompt,text,prompt\na,b,c\n", "a.csv, line 1: names column 'prompt' twice, and one would be dropped; rename one"),
    ("a.csv", b"n,text\n1\n", "a.csv, line 2: column 'text' holds nothing"),
    ("a.parquet", b"no parquet", "a.parquet: not readable after row 0"),
    ("a.bin", b"", "a.bin is not a kind of file that can be read; data is .jsonl, .json, .csv, .parquet, a folder"),
]


@pytest.mark.parametrize(("name", "content", "said"), BROKEN)
def test_a_broken_file_is_refused_with_its_line(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as refused:
        read_samples(tmp_path / name)
    assert str(refused.value).startswith(f"{tmp_path}/{said}")


def test_what_is_not_there_or_not_one_table_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no file .*none.jsonl; data is .jsonl"):
        read_samples(tmp_path / "none.jsonl")
    write_lines(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"is a folder that datasets did not save; data is .*; in it: rows.jsonl$"):
        read_samples(tmp_path)
    parts = DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS)})
    parts.save_to_disk(str(tmp_path / "parts"))
    with pytest.raises(ValueError, match=r"parts holds several splits \(train, test\); give one of them, as .*parts/train$"):
        read_samples(tmp_path / "parts")
    assert contents(tmp_path / "parts/train") == [row["text"] for row in ROWS]
    with pytest.raises(ValueError, match=r"data has several parts \(train, test\)"):
        read_samples(parts)


def test_without_datasets_parquet_and_saved_datasets_are_refused_with_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    known = util.find_spec
    monkeypatch.setattr("anchorlora.data.sample_files.find_spec", lambda name: None if name == "datasets" else known(name))
    (tmp_path / "state.json").write_text("{}")
    for data in (tmp_path / "a.parquet", tmp_path):
        with pytest.raises(ValueError, match="is read by datasets, which is not installed: pip install datasets, or save the rows"):
            read_samples(data)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "text", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
rows = st.dictionaries(st.sampled_from(["messages", "prompt", "completion", "text", "tools", "other"]), anything, max_size=4)


def read_or_refused(path, **asked):
    """The samples; of a refusal, nothing, once it has said which file is meant."""
    try:
        return read_samples(path, **asked)
    except ValueError as error:
        refusal = error
    assert type(refusal) is InvalidValue, "raised on purpose"
    assert str(path) in str(refusal)
    return []


@settings(deadline=None)
@given(st.lists(rows | anything, max_size=4), st.sampled_from([None, "text", "other", "prompt,completion"]))
def test_rows_of_any_shape_are_read_or_refused_in_one_line(tmp_path_factory, some, column):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    for sample in read_or_refused(path, column=column):
        assert isinstance(sample.content, str) or all(isinstance(message["content"], str) for message in sample.content)


@settings(deadline=None)
@given(st.binary(max_size=60), st.sampled_from([".jsonl", ".json", ".csv"]))
def test_bytes_of_any_kind_are_read_or_refused_in_one_line(tmp_path_factory, content, suffix):
    path = tmp_path_factory.getbasetemp() / f"bytes{suffix}"
    path.write_bytes(content)
    assert all(isinstance(sample.content, str) for sample in read_or_refused(path))
