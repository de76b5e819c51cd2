"""Training text as samples and tokens: each form, and each mistake with the place where it stands."""

import copy
import json
from datetime import date

import pytest

import models
from anchorlora.data import Encoder, read_samples, token_ids
from anchorlora.data.forms import known_forms

CHAT = [{"role": "user", "content": "how old is it"}, {"role": "assistant", "content": "very old"}]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
WORDS = ["how old is it", "very old", "some text to learn from"]


@pytest.fixture(scope="module")
def tokenizer():
    return models.tokenizer(WORDS, size=300)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def tokens(rows, tokenizer, *, max_tokens=512, **asked):
    return list(token_ids(read_samples(rows, **asked), tokenizer, max_tokens=max_tokens))


def test_plain_text_ends_with_the_end_of_sequence_once(tokenizer):
    assert tokens([{"text": "very old"}], tokenizer) == [[*ids(tokenizer, "very old"), tokenizer.eos_token_id]]
    assert tokens([{"text": "very old<end>"}], tokenizer) == tokens([{"text": "very old"}], tokenizer)


def test_prompt_and_completion_are_one_text(tokenizer):
    row = {"prompt": "how old is it? ", "completion": "very old"}
    assert tokens([row], tokenizer) == tokens([{"text": "how old is it? very old"}], tokenizer)


def test_chats_are_rendered_by_the_tokenizers_own_template(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    expected = ids(tokenizer, "<user>how old is it<end><assistant>very old<end>")
    assert tokens([{"messages": CHAT}], tokenizer) == [expected]
    assert tokens([{"prompt": CHAT[:1], "completion": CHAT[1:]}], tokenizer) == [expected]
    assert tokens([{"turns": CHAT, "n": 1}], tokenizer, column="turns") == [expected]


def test_tokens_are_those_that_trl_trains_on(tokenizer, monkeypatch, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    forms = [
        [{"text": WORDS[2]}, {"text": WORDS[1]}],
        [{"prompt": WORDS[0], "completion": WORDS[1]}],
        [{"messages": CHAT}],
        [{"prompt": CHAT[:1], "completion": CHAT[1:]}],
    ]
    for rows in forms:
        arguments = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", dataset_num_proc=None)
        model = models.qwen3(vocab=len(tokenizer))
        trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
        assert [list(row["input_ids"]) for row in trainer.train_dataset] == tokens(rows, tokenizer), rows


def test_a_column_of_another_name_and_several_in_a_row(tokenizer):
    row = {"instruction": "how old ", "output": "very old", "text": "not this"}
    assert tokens([row], tokenizer, column="instruction,output") == tokens([{"text": "how old very old"}], tokenizer)
    assert tokens([{"a,b": "very old"}], tokenizer, column="a,b") == tokens([{"text": "very old"}], tokenizer)


def test_long_examples_keep_their_first_tokens_and_only_the_first_examples_are_read(tokenizer):
    rows = [{"text": WORDS[2]}, {"text": WORDS[0]}, {"no": "matter"}]
    assert tokens(rows, tokenizer, max_tokens=3, limit=2) == [row[:3] for row in tokens(rows[:2], tokenizer)]


def test_a_chat_needs_a_template_that_takes_it(tokenizer, monkeypatch):
    with pytest.raises(
        ValueError, match="data, row 1: this is a chat, and the tokenizer has no chat template; name one with --set"
    ):
        tokens([{"messages": CHAT}], tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate; .*chat_template=FILE"):
        tokens([{"messages": CHAT}], tokenizer)


def test_a_tokenizer_that_adds_what_is_no_text_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ '\ud800' }}")
    with pytest.raises(ValueError, match="row 1: the tokenizer's chat template adds characters that are not Unicode text; fetch"):
        tokens([{"messages": CHAT}], tokenizer)
    monkeypatch.setattr(tokenizer, "_special_tokens_map", tokenizer._special_tokens_map | {"eos_token": "\ud800"})
    with pytest.raises(ValueError, match="the tokenizer ends text with characters that are not Unicode text; fetch"):
        tokens([{"text": "a"}], tokenizer)


WRONG = [
    ({"text": 7}, "text must be text, not a number; put it in quotes"),
    ({"text": CHAT}, "text must be text, not a list"),
    ({"messages": "hello"}, "messages must be a list of messages, not text"),
    ({"messages": []}, "messages is an empty list; take the row out"),
    ({"messages": ["hello"]}, "message 1 of messages must be an object with role and content, not text"),
    ({"messages": [{"content": "a"}]}, "role of message 1 of messages must be text, not nothing"),
    (
        {"messages": [*CHAT, {"role": "user", "content": [{"type": "image"}]}]},
        "content of message 3 of messages must be text, not a list",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}, {"type": "text", "text": "b"}]}]},
        "content of message 1 of messages must be text, not a list (image, text); one part of type text is read as its text",
    ),
    ({"messages": CHAT, "tools": "f"}, "tools must be a list of objects, or such a list as JSON text"),
    ({"prompt": "hi", "completion": "ho", "system": "Be kind."}, "column system would not be learned; put its text into prompt"),
    ({"prompt": "hi", "completion": "ho", "tools": [{"name": "f"}]}, "column tools would not be learned"),
    ({"prompt": "a", "completion": CHAT}, "prompt and completion must all be text or all be lists of messages"),
    ({"prompt": True, "completion": "a"}, "prompt must be text or a list of messages, not a truth value"),
    (
        {"instruction": "a", "text": None},
        f"no known column ({known_forms()}); it has: instruction; name",
    ),
    ({"prompt": "a"}, "no known column"),
    (
        {"instruction": "a", "context": "b", "response": "c"},
        f"no known column ({known_forms()}); it has: instruction, context, response; name yours with --columns "
        "instruction=instruction,input=MINE,output=MINE, or",
    ),
    ({"text": "a", "messages": CHAT}, "ambiguous columns, messages or text are possible; name one of them with --columns"),
    ({"text": "a \ud800"}, "text holds characters that are not Unicode text; save the file as UTF-8"),
    ({"messages": [CHAT[0] | {"name": "\ud800"}]}, "messages holds characters that are not Unicode text"),
    ({"messages": [CHAT[0] | {"\ud800": 1}]}, "messages holds characters that are not Unicode text"),
    ({"messages": [*CHAT, CHAT[0] | {"of": [{"tool": "\udcff"}]}]}, "messages holds characters that are not Unicode text"),
    (
        {"prompt": "a", "completion": "b", "label": False},
        "label is true or false, as in rows for KTO, and every answer would",
    ),
    ({"messages": CHAT, "kto_tag": True}, "kto_tag is true or false, as in rows for KTO"),
    ({"text": "a", "weight": 0.5}, "weight is 0.5; text is learned (1) or not (0); take the weight out"),
    ({"text": "a", "loss_weight": "0"}, "loss_weight is 0, and rows are learned with weight 1; take the row"),
    ({"text": "a", "reward": -1}, "reward is -1, and rows are learned with weight 1"),
    ({"text": "a", "train": "maybe"}, "train must be true or false, not maybe"),
    ({"messages": [CHAT[0] | {"train": True}]}, "train is true of message 1 (role 'user'), and only the assistant's are learned"),
    (
        {"messages": [CHAT[0], CHAT[1] | {"weight": 2}]},
        "weight of message 2 (role 'assistant') is 2; text is learned (1) or not (0)",
    ),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "chosen and rejected are a preference pair, for TRL's DPOTrainer"),
    ({"conversations": [{"from": "narrator", "value": "a"}]}, "from 'narrator' of message 1 of conversations is not known; it is"),
    ({"text": "a", "accepted": False}, "column accepted would not be learned"),
    ({"text": "a", "label": "good"}, "label would not be learned; give --columns question=text,answer=label to learn it"),
    ({"text": "a", "labels": 3}, "labels would not be learned; give --columns"),
    (
        {"instruction": "Add.", "input": "2 2", "output": "4", "prose": "Below is"},
        "column prose would not be learned; put its text into instruction, take it out, or name the columns to read with "
        "--columns instruction=instruction,output=output,input=input",
    ),
    (["a"], "a row is an object with named columns, not a list; a file whose one line is a list of rows is called .json"),
    ("a", "a row is an object with named columns, not text"),
]


@pytest.mark.parametrize(("row", "said"), WRONG)
def test_a_row_of_another_kind_is_refused_with_its_line(row, said, tmp_path):
    path = tmp_path / "old.jsonl"
    path.write_text("\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError) as refused:
        read_samples(path)
    assert str(refused.value).startswith(f"{path}, line 2: {said}")


def test_one_part_of_text_is_read_as_its_text():
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in CHAT]
    assert read_samples([{"messages": parts}])[0].content == read_samples([{"messages": CHAT}])[0].content


def test_columns_by_other_names_drop_no_judgment(tmp_path):
    for judged, said in (
        ({"label": False}, "label is true or false"),
        ({"weight": 0.5}, "weight is 0.5"),
        ({"train": 3}, "train must"),
    ):
        with pytest.raises(ValueError, match=f"data, row 1: {said}"):
            read_samples([{"question": "a", "reply": "b"} | judged], column="prompt=question,completion=reply")
    kept = {"text": "a", "weight": 1, "sample_weight": 1.0, "topic": "news", "score": 0.2, "id": True, "train": True, "n": 3}
    assert read_samples([kept])[0].content == "a"


def test_every_row_needs_the_columns_of_the_first(tmp_path):
    path = tmp_path / "old.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b", "messages": []}\n{"text": null}\n')
    with pytest.raises(ValueError, match="line 3: column 'text' holds nothing; fill it, or take the row out"):
        read_samples(path)
    path.write_text('{"text": "a"}\n{"id": 3}\n')
    with pytest.raises(ValueError, match="line 2: no column 'text', which the first row has"):
        read_samples(path)
    path.write_text('{"text": "a"}\n{"prompt": "b", "completion": "c"}\n')
    with pytest.raises(
        ValueError, match="line 2: this row has prompt, completion, and the first one is read as text; give every row"
    ):
        read_samples(path)
    with pytest.raises(ValueError, match="line 1: no column 'body'; it has: text"):
        read_samples(path, column="body")


def test_columns_that_are_named_may_be_null_and_may_be_called_label():
    rows = [{"instruction": "Add.", "input": input, "output": "4", "prose": "Below is"} for input in ("2 2", None)]
    named = read_samples(rows, column="instruction=instruction,input=input,output=output")
    assert [sample.content[0]["content"] for sample in named] == ["Add.\n2 2", "Add."]
    with pytest.raises(ValueError, match="no column 'output'"):
        read_samples([rows[0] | {"output": None}], column="instruction=instruction,input=input,output=output")
    assert read_samples([{"text": "a", "label": 3}], column="text")[0].content == "a"
    judged = read_samples([{"statement": "Water is wet.", "label": "true"}], column="prompt=statement,completion=label")
    assert judged[0].content == "Water is wet.true"
    with pytest.raises(ValueError, match="as in rows for KTO"):
        read_samples([{"statement": "Water is wet.", "reply": "Yes.", "label": "true"}], column="prompt=statement,completion=reply")


@pytest.mark.parametrize(
    ("form", "optional", "beside"),
    [
        ({"instruction": "Add.", "output": "4"}, {"input": ["", "2 2"]}, {"text": "Below is"}),  # as Alpaca's own file
        ({"messages": CHAT}, {"tools": [[], [{"name": "f"}]]}, {"parallel_tool_calls": False}),  # as for OpenAI's tuning
        ({"conversations": CHAT}, {"system": [None, "Be kind."]}, {"note": "a"}),
    ],
)
def test_columns_that_a_refusal_names_drop_nothing_that_their_form_reads(form, optional, beside):
    (name,) = optional
    rows = [form | {name: value} for value in optional[name]]
    with pytest.raises(ValueError, match="would not be learned; put its text into") as refused:
        read_samples([row | beside for row in rows])
    columns = str(refused.value).rpartition("--columns ")[2]
    named = read_samples([row | beside for row in rows], column=columns)
    assert [(s.content, s.tools, s.given) for s in named] == [(s.content, s.tools, s.given) for s in read_samples(rows)]
    fewer = ",".join(f"{column}={column}" for column in form)
    with pytest.raises(ValueError, match=f"row 2: column {name} would not be learned; add {name}={name} to --columns, or take"):
        read_samples(rows, column=fewer)
    assert read_samples(rows[:1], column=fewer) == read_samples([form])


@pytest.mark.parametrize("write", [json.dumps, str, lambda turns: str(turns).replace("}, {", "}\n {")])  # of an array, too
def test_lists_of_messages_as_text_are_not_learned_as_text(write):
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    for asks, says in (("prompt", "completion"), ("prompt", "answer"), ("question", "answer"), ("instruction", "output")):
        for asked, answered in ((CHAT[:1], CHAT[1:]), (turns, turns[1:])):
            with pytest.raises(ValueError, match=f"{asks} and {says} hold lists of messages as text; save the rows as JSON"):
                read_samples([{asks: write(asked), says: write(answered)}])
    with pytest.raises(ValueError, match="row 1: chosen holds a list of messages as text; save the rows as JSON Lines"):
        read_samples([{"chosen": write(CHAT), "rejected": "b"}], column="chosen")
    judged = {"prompt": write(CHAT), "completion": "polite"}
    assert read_samples([judged])[0].content == write(CHAT) + "polite", "a chat may be what is asked about"


@pytest.mark.parametrize(
    ("value", "says"), [(b"\x89PNG", True), (object(), True), (b"", False), (date(2026, 1, 1), False), (2.5, False)]
)
def test_a_column_of_no_text_is_refused_unless_it_is_a_number_or_a_date(value, says):
    row = {"prompt": "a", "completion": "b", "seen": value}
    if says:
        with pytest.raises(ValueError, match="column seen would not be learned"):
            read_samples([row])
    else:
        assert read_samples([row])[0].content == "ab"


def test_a_tokenizer_with_several_templates_has_a_key(tokenizer):
    one, several = (copy.deepcopy(tokenizer) for _ in range(2))
    one.chat_template, several.chat_template = TEMPLATE, {"default": TEMPLATE, "tool_use": TEMPLATE}
    assert len({Encoder(each, max_tokens=9).key for each in (one, several)}) == 2
