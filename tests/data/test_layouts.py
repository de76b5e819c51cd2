"""Folders in the layouts of TRACE, SAPT and LLaMA-Factory are read as their own code reads them."""

import json

import pytest

import layouts
from anchorlora.config import TaskSettings
from anchorlora.data import Benchmark, TextFiles, examples_of
from anchorlora.data.layouts import TRACE, sources_in
from anchorlora.data.sources import source_of
from anchorlora.errors import InvalidValue

BOTH = ("train", "test")


def source(place, **settings):
    return source_of(TaskSettings(data=str(place), **settings))


def pairs(found, task, split):
    return [(example.sentence, example.label) for example in found.examples(task, split)]


def test_trace_has_the_papers_order_metrics_and_answer_length(tmp_path):
    found = source(layouts.trace(tmp_path, tasks=[*sorted(TRACE, reverse=True), "Papyrus-f"]))
    assert found.names == [*TRACE, "Papyrus-f"]
    metrics = {name: [metric.name for metric in found.sources[name].metrics] for name in TRACE}
    assert metrics["20Minuten"][0] == "sari"
    assert metrics["Py150"] == ["code_similarity"]
    assert metrics["MeetingBank"] == ["rouge_l"]
    assert metrics["NumGLUE-cm"] == ["verbatim_match"]
    assert found.task("C-STANCE").max_new_tokens == 512


def test_trace_trains_and_tests_on_its_own_splits_and_never_opens_eval(tmp_path):
    layouts.trace(tmp_path)
    (tmp_path / "C-STANCE/eval.json").write_text("broken")
    found = source(tmp_path)
    assert found.task("C-STANCE").labels == ("A", "B")
    assert pairs(found, "C-STANCE", "train")[1] == ("train of C-STANCE: 1\nAnswer:", "B")
    assert [len(pairs(found, "C-STANCE", split)) for split in BOTH] == [16, 4]
    assert {place.rsplit("/")[-1] for place in found.opened} == {"train.json", "test.json"}


@pytest.mark.usefixtures("extra_metrics")
def test_sapt_has_the_prompts_of_its_own_code(tmp_path):
    found = source(layouts.sapt(tmp_path))
    assert found.names == ["boolq", "task002_quoref"]
    assert pairs(found, "boolq", "test")[1] == ("What is {it} in boolq?\ntest 1 {0}\nOutput: ", "1")
    superni = "Definition: What is {it} in task002_quoref?\n\nNow complete the following example -\nInput: test 1 {0}\nOutput: "
    assert pairs(found, "task002_quoref", "test")[1] == (superni, "1")
    assert [m.name for m in found.task("task002_quoref").metrics] == ["rouge_l", "exact_match"]
    assert [m.name for m in found.task("boolq").metrics] == ["exact_match"]
    assert found.task("boolq").max_new_tokens == 50


@pytest.mark.parametrize(("group", "tasks"), [("SuperNI", ["task002_quoref"]), ("Long_Sequence", ["boolq"])])
def test_one_group_of_sapt_is_a_folder_of_its_own(tmp_path, group, tasks):
    found = source(layouts.sapt(tmp_path) / group)
    assert found.names == tasks
    assert pairs(found, tasks[0], "test")[0][0].startswith("Definition: ") is (group == "SuperNI")


def test_of_several_right_answers_of_sapt_the_first_is_learned(tmp_path):
    layouts.sapt(tmp_path)
    path = tmp_path / "SuperNI/task002_quoref/train.json"
    content = json.loads(path.read_text())
    content["Instances"][0]["output"] = ["yes", "yeah"]
    path.write_text(json.dumps(content))
    assert pairs(source(tmp_path), "task002_quoref", "train")[0][1] == "yes"


def test_llama_factory_reads_alpaca_as_instructions_and_sharegpt_as_chats(tmp_path):
    found = source(layouts.llama_factory(tmp_path))
    assert found.names == ["alpaca", "chats"]
    assert source(tmp_path / "dataset_info.json").names == found.names, "the file or its folder"
    alpaca, chat = (next(iter(found.examples(name, "train"))) for name in found.names)
    assert alpaca.messages == ({"role": "user", "content": f"Say {alpaca.label}"},)
    assert chat.messages[0] == {"role": "system", "content": "Be brief."}
    assert [message["role"] for message in chat.messages] == ["system", "user"]
    assert chat.label.startswith("so ")


def described(tmp_path, rows, **entry):
    layouts.write_json(tmp_path / "rows.json", rows)
    layouts.write_json(tmp_path / "dataset_info.json", {"mine": {"file_name": "rows.json", **entry}})
    return list(sources_in(tmp_path)["mine"].samples(str(tmp_path / "rows.json")))


def test_columns_of_alpaca_may_have_any_names(tmp_path):
    rows = [{"q": "2 + 2?", "more": "In words.", "a": "four", "sys": "Be exact.", "before": [["1 + 1?", "two"]]}]
    columns = {"prompt": "q", "query": "more", "response": "a", "system": "sys", "history": "before"}
    (sample,) = described(tmp_path, rows, columns=columns)
    said = [(message["role"], message["content"]) for message in sample.content]
    asked = [
        ("system", "Be exact."),
        ("user", "1 + 1?"),
        ("assistant", "two"),
        ("user", "2 + 2?\nIn words."),
        ("assistant", "four"),
    ]
    assert said == asked
    assert [example.label for example in examples_of([sample])] == ["two", "four"], "earlier responses are learned, too"


def test_a_column_that_is_not_named_is_not_read(tmp_path):
    (sample,) = described(tmp_path, [{"q": "Why?", "input": "no", "a": "So."}], columns={"prompt": "q", "response": "a"})
    assert [message["content"] for message in sample.content] == ["Why?", "So."]


def test_alpaca_without_responses_is_plain_text(tmp_path):
    (sample,) = described(tmp_path, [{"text": "A day."}], columns={"prompt": "text"})
    assert sample.content == "A day."


def test_plain_text_with_weight_zero_is_not_learned(tmp_path):
    rows = [{"text": "A day.", "weight": 0}, {"text": "A night."}]
    samples = described(tmp_path, rows, columns={"prompt": "text"})
    assert [example.label for example in examples_of(samples)] == ["A night."]


def test_sharegpt_in_openais_names(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}] * 3
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    samples = described(tmp_path, rows, formatting="sharegpt", columns={"messages": "messages"}, tags=tags, num_samples=2)
    assert [message["content"] for message in samples[0].content] == ["Hi", "Ho"]
    assert len(samples) == 2


@pytest.mark.parametrize("words", [{"content": None}, {}])
def test_a_call_without_words_is_read_in_openais_names(tmp_path, words):
    calls = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", **words, "tool_calls": calls}]}]
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    (sample,) = described(tmp_path, rows, formatting="openai", columns={"messages": "messages"}, tags=tags)
    assert sample.content[1] == {"role": "assistant", "content": "", "tool_calls": calls}


def test_a_data_set_of_the_hub_has_its_split(tmp_path):
    layouts.write_json(tmp_path / "dataset_info.json", {"a": {"hf_hub_url": "org/name", "split": "dev"}})
    assert sources_in(tmp_path)["a"].train == "org/name:dev"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"file_name": "rows.json", "ranking": True}, "preferences"),
        ({"file_name": "rows.json", "columns": {"images": "images"}}, "column of images"),
        ({"file_name": "rows.json", "columns": {"kto_tag": "good"}}, "column of kto"),
        ({"file_name": "rows.json", "formatting": "other"}, "none of alpaca, sharegpt, openai"),
        ({"ms_hub_url": "org/name"}, "it names neither file_name nor hf_hub_url"),
        ({"hf_hub_url": "org/name", "subset": "en"}, "a subset of a data set of the hub"),
        ({}, "neither file_name nor hf_hub_url"),
    ],
)
def test_what_llama_factory_has_and_no_run_learns_is_refused_when_it_is_asked_for(tmp_path, entry, said):
    layouts.llama_factory(tmp_path)
    info = json.loads((tmp_path / "dataset_info.json").read_text())
    layouts.write_json(tmp_path / "dataset_info.json", info | {"other": entry})
    found = source(tmp_path)
    assert found.task("alpaca").name == "alpaca"
    with pytest.raises(InvalidValue, match=f"dataset_info.json: other cannot be learned: .*{said}.*--order"):
        found.task("other")


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ("none", "conversations must be a list of messages"),
        (
            [{"from": "function_call", "value": "{}"}],
            r"message 1 of conversations must be a call as JSON, {\"name\": .., \"arguments\"",
        ),
        ([{"from": "narrator", "value": "a"}], "from 'narrator' is none of human, gpt, observation, function_call, system"),
        ([{"from": "gpt"}], "value of message 1 of conversations must be text, not nothing"),
    ],
)
def test_a_broken_chat_is_one_line_with_its_place(tmp_path, turns, said):
    with pytest.raises(InvalidValue, match=f"rows.json, row 1: .*{said}"):
        described(tmp_path, [{"conversations": turns}], formatting="sharegpt")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"Instances": 3}', "is not a SAPT task"),
        ('{"Definition": ["d"], "Instances": [{"input": "i"}]}', "instance 1: a definition"),
        ('{"Instances": [{"input": "i", "output": "o"}]}', "instance 1: a definition"),
        ('{"Definition": ["d"], "Instances": [', "fetch it again"),
        ('{"Definition": ["d"], "Instances": []}', "holds no row"),
    ],
)
def test_a_broken_task_of_sapt_is_one_line(tmp_path, content, said):
    (layouts.sapt(tmp_path) / "SuperNI/task002_quoref/train.json").write_text(content)
    with pytest.raises(InvalidValue, match=said):
        source(tmp_path / "SuperNI").task("task002_quoref")


def test_a_task_without_test_json_is_refused(tmp_path):
    (layouts.trace(tmp_path) / "C-STANCE/test.json").unlink()
    with pytest.raises(InvalidValue, match=r"C-STANCE has a train.json and no test.json"):
        source(tmp_path)


def test_layouts_of_others_are_not_taken_for_these(tmp_path, small_benchmark):
    assert isinstance(source(small_benchmark), Benchmark)
    assert isinstance(source("embedded:mini"), Benchmark)
    for name, content in (("dataset_info.json", {"features": {}}), ("state.json", {})):  # what save_to_disk of datasets writes
        layouts.write_json(tmp_path / "saved" / name, content)
    group = next(path.parent.parent for path in small_benchmark.glob("*/*/labels.json"))  # one group of CL_Benchmark
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}')
    for unknown in (tmp_path / "saved", group, tmp_path / "rows.jsonl"):
        with pytest.raises(
            InvalidValue, match=r"holds no tasks in a layout that is read: CL_Benchmark .*TRACE.*SAPT.*LLaMA-Factory.*YAML"
        ):
            source(unknown)


def test_tested_on_a_holdout_no_test_file_is_opened(tmp_path):
    found = source(layouts.trace(tmp_path), tested_on="holdout")
    assert isinstance(found, TextFiles)
    with pytest.raises(InvalidValue, match="may not be opened"):
        list(found.examples("C-STANCE", "test"))
