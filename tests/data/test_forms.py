"""Forms of rows: one law for all of them, and a new form that every command reads without being told."""

import copy
import json

import pytest

from anchorlora.cli.app import main
from anchorlora.data import Encoder, examples_of, read_samples, samples_of, token_ids
from anchorlora.data.forms import FORMS, known_columns
from anchorlora.data.forms.base import Form
from anchorlora.data.rows import row_of
from anchorlora.data.text import count_rows
from anchorlora_lab.suites.prompts import read_prompts
from built_pages import table_of_forms
from skills import EXACT
from text_law import families, forms

RIDDLES = [{"riddle": f"what is {i} and one", "solution": f"it is {i + 1}"} for i in range(20)]
FEW = ["--set", "max_tokens=96", "--set", "rows=64", "--set", "at_most=4", "--set", "max_new_tokens=2", "--set", "train_limit=8"]
FEW += ["--set", "test_limit=2"]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.fixture
def tokenizer():
    made = copy.deepcopy(families.tokenizer("bytes"))
    made.chat_template = families.FAMILIES["default-system"]  # as SmolLM2's
    return made


def test_one_chat_is_the_same_tokens_and_labels_in_every_form(tokenizer):
    forms.one_chat_is_the_same_in_every_form(tokenizer)


def test_nothing_of_a_row_goes_unsaid(tokenizer):
    forms.nothing_of_a_row_goes_unsaid(tokenizer)


def test_the_law_writes_every_form_that_can_be_learned_as_a_chat():
    written = {frozenset(row) for row, _ in forms.forms_of([{"role": "system", "content": "s"}, *CHAT])}
    chats = [form for form in FORMS if form.read and form.name not in ("text", "tokens", "prompt-answer")]
    assert [form.name for form in chats if not any(columns >= set(form.columns) for columns in written)] == []


def test_a_row_with_weight_zero_teaches_protects_and_tests_nothing(tokenizer, tmp_path):
    rows = [{"messages": CHAT, "weight": i % 2} for i in range(4)]
    samples = read_samples(rows)
    assert len(list(examples_of(samples))) == len(list(token_ids(samples, tokenizer, max_tokens=99))) == 2
    found, unfit = count_rows("t", samples, Encoder(tokenizer, max_tokens=99), measured=True)
    assert (found["read"], found["skipped"], list(unfit)) == (4, 2, [0, 2])
    (tmp_path / "csv.csv").write_text("text,weight,train\na,1,True\nb,0,\nc,,False\n")
    assert [example.label for example in examples_of(read_samples(tmp_path / "csv.csv"))] == ["a"]


def test_calls_and_their_results_in_the_words_of_sharegpt_are_messages():
    turns = [
        {"from": "human", "value": "2 + 2?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 2, "y": 2}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "It is 4."},
    ]
    (sample,) = read_samples([{"conversations": turns, "tools": '[{"name": "add"}]'}])
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 2, "y": 2}}}
    assert [message["role"] for message in sample.content] == ["user", "assistant", "tool", "assistant"]
    assert sample.content[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert (sample.learned, sample.tools) == ((1, 3), ({"name": "add"},))


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"instruction": "a", "input": "b", "output": "c"}, {"instruction", "input", "output"}),
        ({"input": "b", "output": "c"}, {"input", "output"}),
        ({"prompt": "a", "answer": "b"}, {"prompt", "answer"}),
    ],
)
def test_the_form_that_reads_most_of_a_row_wins(row, columns):
    (sample,) = read_samples([row])
    text = sample.content if isinstance(sample.content, str) else " ".join(m["content"] for m in sample.content)
    assert [row[name] for name in columns if row[name] not in text] == []


def test_the_last_message_is_a_question_with_its_thought_and_not_if_it_is_muted(tmp_path):
    thought = CHAT[1] | {"reasoning_content": "so be it"}
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [*CHAT, CHAT[0], thought]}) + '\n{"question": "q", "answer": "a"}\n')
    first, second = read_prompts(tmp_path / "a.jsonl").questions
    assert (first.messages, first.reply, first.label) == ((*CHAT, CHAT[0]), thought, "ho")
    assert (second.messages, second.label) == (({"role": "user", "content": "q"},), "a")
    assert second.sentence.startswith("Below is an instruction"), "for a tokenizer without a template"


def test_the_table_has_every_form_and_every_column():
    table = table_of_forms()
    assert table.count("\n") == len(FORMS) + 1
    assert [column for column in known_columns() if f"`{column}`" not in table] == []


@pytest.mark.parametrize("further", ["2 2", "", None, "2\n\n### Input:\n2", "### Input:\n\n2"])
@pytest.mark.parametrize("asked", ["Add.", "Add:\none", "Add\n\n### Input:\n"])
def test_an_instruction_that_is_kept_is_asked_as_the_file_asks_it_also_without_a_template(asked, further):
    """What was measured of kept rows, mixed in by replay and read by a later skill was another prompt where there is an input."""
    for columns in ({"instruction": asked, "input": further, "output": "4"}, {"question": asked, "answer": "4"}):
        sample = read_samples([columns])[0]
        again = samples_of([("data, row 1", json.loads(json.dumps(row_of(sample))))], source="d", mixed=True)[0]
        assert (again.plain, again.content, again.given) == (sample.plain, sample.content, sample.given)
        assert [e.sentence for e in examples_of([again])] == [sample.plain]


@pytest.fixture
def riddles(monkeypatch, tmp_path):
    """A form from outside, and rows of it."""

    def read(row):
        asked = row.text("riddle") + "? "
        return row.plain(asked + row.text("solution"), given=len(asked))

    FORMS.append(Form("riddle", ("riddle", "solution"), "the solution", read))
    (tmp_path / "riddles.jsonl").write_text("\n".join(map(json.dumps, RIDDLES)))
    yield str(tmp_path / "riddles.jsonl")
    del FORMS[-1]


def test_every_command_reads_a_form_that_is_registered_from_outside(riddles, tmp_path, capsys):
    taught = ["train", "embedded:mini", "--data", riddles, "--name", "new", "--keep", riddles, "--out", str(tmp_path / "new")]
    assert main([*taught, *FEW, *EXACT]) == 0
    verdict = json.loads((tmp_path / "new/skill/verdict.json").read_text())
    assert [(part["use"], part["read"]) for part in verdict["rows"]] == [("learned", 20), ("kept", 20)]
    (tmp_path / "tasks.yaml").write_text("tasks:\n  riddles: {train: riddles.jsonl}\n")
    asked = ["run", "mini", "--data", str(tmp_path / "tasks.yaml"), "--method", "seq-lora", "--out", str(tmp_path / "run"), *FEW]
    assert main(asked) == 0
    cores = ["--out", str(tmp_path / "cores.safetensors"), "--rows", "64", "--at-most", "4"]
    assert main(["cores", "embedded:mini", riddles, *cores]) == 0
    assert main(["eval", str(tmp_path / "run"), "--prompts", riddles, "--cache", str(tmp_path / "cache")]) == 0
    found = json.loads((tmp_path / "run/eval.json").read_text())
    assert found["tasks"][0]["n"] == 20
    capsys.readouterr()
    for command in ("train", "cores", "eval"):
        assert main([command, "--help"]) == 0
        assert "riddle and solution" in " ".join(capsys.readouterr().out.split()), command
