"""Tasks of free text: which rows become which prompts, answers and tokens, and what is held out."""

import copy
import json
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import models
from anchorlora.config import TaskSettings
from anchorlora.continual.data import TaskData
from anchorlora.data import Encoder, Example, TextFiles, TextSource
from anchorlora.data.metrics import METRICS, Answer, metric_named
from anchorlora.data.sample_files import samples_in
from anchorlora.errors import AnchorloraError, InvalidValue

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "and now"},
    {"role": "assistant", "content": "goodbye"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return models.tokenizer(["hi hello and now goodbye [user] [assistant] 2 + 2 = 4 the old mill Below is an instruction"])


def files(folder, rows, name="rows.jsonl", **how):
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return TextFiles({"t": TextSource(str(folder / name), **how)})


def encoded(source, tokenizer, split="train", **how):
    return list(Encoder(tokenizer, max_tokens=how.get("max_tokens", 64)).encode(source.task("t"), source.examples("t", split)))


def test_every_answer_of_a_chat_is_learned_after_what_the_template_makes_of_the_messages_before_it(tokenizer, tmp_path):
    tokenizer.chat_template = TEMPLATE
    try:
        source = files(tmp_path, [{"messages": CHAT}] * 2, test=str(tmp_path / "rows.jsonl"))
        first, second = encoded(source, tokenizer, "test")[:2]
    finally:
        tokenizer.chat_template = None
    end = tokenizer.eos_token
    assert first.text == f"[user] hi{end}\n[assistant] "
    assert second.text == f"[user] hi{end}\n[assistant] hello{end}\n[user] and now{end}\n[assistant] "
    for e, said in ((first, "hello"), (second, "goodbye")):
        alone = [tuple(tokenizer(part, add_special_tokens=False).input_ids) for part in (e.text, f"{said}{end}")]
        assert [e.prompt, e.answer] == alone, "the prompt as a server reads it, and nothing after the end"
        assert tokenizer.decode(e.answer).strip() == said + end
        assert e.example.label == said


def test_a_template_that_writes_an_answered_chat_otherwise_is_refused(tokenizer, tmp_path):
    tokenizer.chat_template = "{{ messages | length }}{{ messages[-1].content }}{% if add_generation_prompt %}>{% endif %}"
    try:
        source = files(tmp_path, [{"messages": CHAT[:2]}] * 2, test=str(tmp_path / "rows.jsonl"))
        with pytest.raises(InvalidValue, match=r"line 1: .*ends a prompt with '1hi>', which it does not write before an answer"):
            encoded(source, tokenizer, "test")
    finally:
        tokenizer.chat_template = None


def test_a_chat_without_a_template_is_refused_with_its_line_and_instructions_take_alpacas_prompt(tokenizer, tmp_path):
    with pytest.raises(InvalidValue, match=r"rows.jsonl, line 1: this is a chat, and the tokenizer has no chat template"):
        encoded(files(tmp_path, [{"messages": CHAT}] * 4, test=str(tmp_path / "rows.jsonl")), tokenizer, "test")
    row = {"instruction": "2 + 2 =", "input": "the old mill", "output": "4"}
    found = encoded(files(tmp_path, [row] * 2, test=str(tmp_path / "rows.jsonl")), tokenizer, "test", max_tokens=1000)[0]
    assert found.text.startswith("Below is an instruction that describes a task, paired with an input")
    assert found.text.endswith("### Instruction:\n2 + 2 =\n\n### Input:\nthe old mill\n\n### Response:\n")


def test_plain_text_is_one_answer_and_loses_its_end_where_a_prompt_loses_its_beginning(tokenizer, tmp_path):
    long = "the old mill " * 40
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": long + "hi", "completion": " hello"}))
    text = encoded(files(tmp_path, [{"text": long}] * 2, test=str(tmp_path / "rows.jsonl")), tokenizer, "test", max_tokens=20)[0]
    whole = (*tokenizer(long).input_ids, tokenizer.eos_token_id)
    assert text.prompt + text.answer == whole[:20]
    assert text.cut
    pair = files(tmp_path, [{"prompt": long + "hi", "completion": " hello"}] * 2, test=str(tmp_path / "rows.jsonl"))
    cut = encoded(pair, tokenizer, "test", max_tokens=20)[0]
    assert len(cut.prompt + cut.answer) == 20
    assert cut.prompt == tuple(tokenizer(long + "hi").input_ids[-len(cut.prompt) :])
    with pytest.raises(InvalidValue, match=r"line 1: the answer takes \d+ tokens, and max_tokens is 20 .* raise max_tokens"):
        encoded(
            files(tmp_path, [{"prompt": "hi", "completion": long}] * 2, test=str(tmp_path / "rows.jsonl")),
            tokenizer,
            "test",
            max_tokens=20,
        )


def test_what_is_tokenized_keeps_its_line_for_messages(tokenizer, tmp_path):
    source = files(tmp_path, [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(20)])
    examples = list(source.examples("t", "train"))
    encoded = Encoder(tokenizer, max_tokens=64).encode(source.task("t"), examples)
    assert [e.example.place for e in encoded] == [e.place for e in examples]
    assert encoded[0].example.place == f"{tmp_path / 'rows.jsonl'}, line {encoded[0].example.label.strip()}"


def test_the_holdout_is_a_tenth_whatever_the_order_of_rows_and_a_chat_is_never_divided(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"q{i}"}, *CHAT[1:]]} for i in range(30)]
    source, turned = files(tmp_path, rows), files(tmp_path, rows[::-1], name="turned.jsonl")

    def asked(each, split):
        return {e.messages[0]["content"] for e in each.examples("t", split)}

    assert len(asked(source, "test")) == 3
    assert asked(source, "test") == asked(turned, "test")
    assert not asked(source, "test") & asked(source, "train")
    assert len(list(source.examples("t", "train"))) == 54, "two answers of 27 chats"
    assert source.opened[str(tmp_path / "rows.jsonl")].sha256


@pytest.mark.parametrize(
    ("rows", "metrics", "labels"),
    [
        ([{"prompt": f"p{i}", "completion": ["yes", "no"][i % 2]} for i in range(20)], ["exact_match"], ("yes", "no")),
        ([{"prompt": f"p{i}", "completion": f"answer {i}"} for i in range(20)], ["token_f1", "exact_match"], ()),
        ([{"text": "the old mill"}] * 20, [], ()),
        ([{"text": ["yes", "no"][i % 2]} for i in range(20)], [], ()),
        ([{"prompt": f"p{i}" if i else "", "completion": f"answer {i}"} for i in range(20)], ["token_f1", "exact_match"], ()),
        ([{"prompt": f"p{i}", "completion": ["-1", "0", "1"][i % 3]} for i in range(20)], ["verbatim_match"], ("-1", "0", "1")),
        ([{"prompt": f"p{i}", "completion": ["+", "-"][i % 2]} for i in range(20)], ["verbatim_match"], ("+", "-")),
        ([{"prompt": f"p{i}", "completion": ["C", "c++"][i % 2]} for i in range(20)], ["verbatim_match"], ("C", "c++")),
        ([{"prompt": f"p{i}", "completion": ["1", "2."][i % 2]} for i in range(20)], ["exact_match"], ("1", "2.")),
        (
            [{"prompt": f"p{i}", "completion": ["No", "yes", "no."][i % 3]} for i in range(20)],
            ["exact_match"],
            ("No", "yes", "no."),
        ),
        ([{"prompt": f"p{i}", "completion": f"{i * 7}" if i < 60 else "-1.5"} for i in range(61)], ["verbatim_match"], ()),
        ([{"prompt": f"p{i}", "completion": f"{i * 7}"} for i in range(61)], ["token_f1", "exact_match"], ()),
        ([{"prompt": f"p{i}", "completion": f"-{i}" if i < 60 else "none"} for i in range(61)], ["token_f1", "exact_match"], ()),
    ],
    ids=[
        *("labels", "answers", "text", "short texts", "a first prompt that is empty", "signs", "marks", "names", "points", "cases"),
        *("numbers", "counts", "not all numbers"),
    ],
)
def test_the_answers_decide_the_metrics(rows, metrics, labels, tmp_path):
    task = files(tmp_path, rows).task("t")
    assert [metric.name for metric in task.metrics] == metrics
    assert task.labels == labels
    assert task.answered is bool(metrics)


def chat_of(asked, **said):
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", **said}]}


CALLS = [{"type": "function", "function": {"name": "hi", "arguments": {}}}]
BEGUN = {"role": "assistant", "content": "now "}


@pytest.mark.parametrize(
    ("row", "labels"),
    [
        (lambda asked, said: {"prompt": asked, "completion": f" {said}<end>"}, ("hi", "hello")),
        (lambda asked, said: chat_of(asked, content=f"{said}<end>"), ("hi", "hello")),
        (
            lambda asked, said: {
                "prompt": [{"role": "user", "content": asked}, BEGUN],
                "completion": [{"role": "assistant", "content": said}],
            },
            ("hi", "hello"),
        ),
        (lambda asked, said: chat_of(asked, content="" if said == "hi" else said, tool_calls=CALLS), ()),
    ],
    ids=["end", "end-of-chat", "begun", "calls"],
)
def test_labels_are_what_answers_are_compared_with(row, labels, tokenizer, tmp_path):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE.replace("m.content }}", "m.content }}{{ (m.tool_calls or '') | string }}")
    source = files(tmp_path, [row(f"{i} + 2", ["hi", "hello"][i % 2]) for i in range(20)])
    encoder = Encoder(tokenizer, max_tokens=400)
    task = TaskData.of(source, encoder, TaskSettings(), ["t"], 0).tasks["t"]
    assert sorted(task.labels) == sorted(labels)
    for e in source.encoded("t", "train", encoder):
        answer = task.answer(tokenizer.decode(e.answer[:-1], skip_special_tokens=True), e.example)
        assert (answer.label, answer.scores["exact_match"]) == (e.example.label, 1.0)


def test_rows_are_read_one_by_one_whatever_the_size_of_the_file(tmp_path):
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i in range(3000):
            file.write(json.dumps({"prompt": f"p{i}", "completion": f"{i} " + "x" * 5000}) + "\n")
    size = (tmp_path / "rows.jsonl").stat().st_size
    source = TextFiles({"t": TextSource(str(tmp_path / "rows.jsonl"))})
    tracemalloc.start()
    try:
        counts = [sum(1 for _ in source.examples("t", split)) for split in ("train", "test")]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert counts == [2700, 300]
    assert peak < size / 4, (peak, size)


@pytest.mark.parametrize(
    ("row", "chat", "apart"),
    [({"text": "word {i} and the words that follow it"}, False, apart) for apart in (True, False)]
    + [({"messages": [{"role": "user", "content": "{i}"}, {"role": "assistant", "content": "{i} 1 2 3 4 5 6"}] * 2}, True, False)],
)
def test_progress_takes_no_further_pass_over_a_file(row, chat, apart, tokenizer, tmp_path):
    tokenizer.chat_template = TEMPLATE
    path, passes, told = tmp_path / "rows.jsonl", [], []
    path.write_text("".join(json.dumps(row).replace("{i}", str(i)) + "\n" for i in range(40)))

    def reader(file):
        passes.append(file)
        yield from samples_in(file)

    source = TextFiles({"t": TextSource(str(path), str(path) if apart else None, reader=reader)})
    source.task("t")
    first = len(passes)
    encoded = source.encoded("t", "train", Encoder(tokenizer, max_tokens=64), tell=lambda done, total: told.append((done, total)))
    assert len(passes) == first + 1
    assert len(encoded) == (40 if apart else 36) * (2 if chat else 1)
    assert told[-1] == (40, 40)


BAD = {
    "": "holds no row",
    '{"prompt": "a", "completion": 4}': "line 1: completion must be text or a list of messages, not a number",
    '{"question": "a", "reply": "b"}': "no known column",
    '{"text": "a"}': "has one row, and none can be held out",
    '{"messages": [{"role": "user", "content": "a"}]}\n' * 3: "has no answer to learn; a chat needs a message of the assistant",
}


ASKED = st.lists(st.tuples(st.sampled_from(["one", "two", "three four"]), st.integers(1, 3)), min_size=4, max_size=14)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ASKED, ASKED, st.booleans(), st.sampled_from([None, 1, 3]))
def test_what_was_counted_is_what_is_read(tokenizer, tmp_path, learned, tested, apart, limit):
    tokenizer.chat_template = TEMPLATE

    def chat(number, words, turns):
        said = [{"role": role, "content": f"{words} {number} {i}"} for i in range(turns) for role in ("user", "assistant")]
        return {"messages": said}

    def place(name, asked):
        path = tmp_path / name
        path.write_text("".join(json.dumps(chat(i, *each)) + "\n" for i, each in enumerate(asked)))
        return str(path)

    source = TextSource(place("learned.jsonl", learned), place("tested.jsonl", tested) if apart else None)
    encoder, counted, anew = Encoder(tokenizer, max_tokens=64), TextFiles({"t": source}), TextFiles({"t": source})
    for split in ("train", "test") if apart else ("train",):
        found = counted.counted("t", split, encoder, test_limit=limit, tell=lambda done, total: None)
        assert found["read"] == len(learned if split == "train" else tested)
    for split, most in (("train", None), ("test", limit)):
        kept = counted.encoded("t", split, encoder, limit=most)
        assert kept is counted.encoded("t", split, encoder, limit=most)
        read = encoder.encode(anew.task("t"), anew.examples("t", split, limit=most))
        assert kept == read
        assert (kept.labels, kept.lengths, kept.begins, kept.cut) == (read.labels, read.lengths, read.begins, read.cut)
    other = Encoder(tokenizer, max_tokens=63)
    assert counted.encoded("t", "train", other) is not counted.encoded("t", "train", encoder)


@pytest.mark.parametrize("text", BAD)
def test_a_file_that_teaches_nothing_is_refused_in_one_line(text, tmp_path):
    (tmp_path / "rows.jsonl").write_text(text)
    source = TextFiles({"t": TextSource(str(tmp_path / "rows.jsonl"))})
    with pytest.raises(InvalidValue, match=BAD[text]) as refused:
        list(source.examples("t", "test"))
    assert "\n" not in str(refused.value)


def test_rows_that_teach_nothing_are_not_held_out(tokenizer, tmp_path):
    asked = [{"messages": [{"role": "user", "content": f"q{i}"}]} for i in range(18)]
    muted = [{"messages": [*row["messages"], {"role": "assistant", "content": "a", "weight": 0}]} for row in asked]
    answered = [{"messages": [{"role": "user", "content": f"r{i}"}, {"role": "assistant", "content": "a"}]} for i in range(4)]
    for rows in (asked + answered, muted + answered):
        source = files(tmp_path, rows)
        held = [e.messages[0]["content"] for e in source.examples("t", "test")]
        assert len(held) == source.held_out("t") == 2
        assert {*held} < {f"r{i}" for i in range(4)}
    empty = [{"text": ""}] * 12
    source = files(tmp_path, [*empty, *({"text": f"the old mill {i}"} for i in range(4))])
    assert all(e.prompt and e.example.label for split in ("train", "test") for e in encoded(source, tokenizer, split))
    assert source.counted("t", "train", Encoder(tokenizer, max_tokens=9), test_limit=None, tell=lambda *_: None)["skipped"] == 12


def test_columns_of_other_names_and_unknown_ones(tokenizer, tmp_path):
    rows = [{"question": f"q{i}", "reply": f"r{i}", "other": None} for i in range(20)]
    named = files(tmp_path, rows, columns="prompt=question,completion=reply")
    assert next(named.examples("t", "train")).label.startswith("r")
    commas = [{"So, what?": row["question"], "a,b": row["reply"]} for row in rows]
    with_commas = files(tmp_path, commas, columns="question=So, what?, answer=a,b")
    assert next(with_commas.examples("t", "train")).label.startswith("r")
    for columns, said in (
        ("prompt=question,completion=nothing", "no column 'nothing'"),
        ("ask=question", "is not a known column"),
        ("prompt=question,prompt=reply", "names one column twice"),
        ("prompt=question", r"line 1: prompt alone is no form of rows \(.*\); .*; it has: question, reply$"),
    ):
        with pytest.raises(InvalidValue, match=said):
            next(files(tmp_path, rows, columns=columns).examples("t", "train"))


def test_a_hub_id_that_cannot_be_fetched_is_one_line(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load(*args, **how):
        raise ConnectionError("no network\nand a long report")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        InvalidValue, match=r"^org/name:train: not readable .* no network; check the name, the split and the network"
    ):
        list(TextFiles({"t": TextSource("org/name:train")}).examples("t", "train"))


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_one_for_the_right_answer_and_small_for_another(name):
    metric, example = metric_named(name), Example(0, "", "the old stone mill stands")
    if getattr(metric, "library", None):
        pytest.importorskip(metric.library[0], reason=f"{name} is computed by {metric.library[1]}, which is not installed")
    right = metric.score(Answer(example.label, example.label, example.label), example)
    wrong = metric.score(Answer("7 x", None, example.label), example)
    assert right == pytest.approx(1.0)
    assert wrong < (0.3 if name != "sari" else 0.7), "SARI counts what is rightly deleted, too"
    with pytest.raises(AnchorloraError, match="nearest: "):
        metric_named(name + "s")
