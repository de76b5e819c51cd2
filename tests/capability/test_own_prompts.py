"""The user's own prompts: answers compared by hand, flips in both directions, no lm_eval needed, malformed files refused."""

import copy
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, PretrainedConfig

import mmlu_folder
from anchorlora.adapters import attach
from anchorlora.config import BaseModelSettings
from anchorlora.continual.evaluate import Scorer
from anchorlora.data import normalize
from anchorlora.models.load import load_base_model
from anchorlora_lab.suites import prompts
from anchorlora_lab.suites.measure import Questions, evaluate
from anchorlora_lab.suites.prompts import ROOM, is_right, read_prompts
from anchorlora_lab.suites.questions import EvalProgress
from text_law import families

PROMPTS = [f"Which {word}, and why?" for word in mmlu_folder.WORDS]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = mmlu_folder.write_model(tmp_path_factory.mktemp("model") / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, model):
    return mmlu_folder.write_an_adapter(tmp_path_factory.mktemp("trained") / "adapter", model, size=0.5)


@pytest.fixture(scope="module")
def said(model, trained):
    """What the model says to each prompt alone, before and after: its first line, as far as anything there counts."""
    loaded = load_base_model(BaseModelSettings(model=str(model)))
    prompts = [loaded.tokenizer(prompt).input_ids for prompt in PROMPTS]
    how = {"max_new_tokens": 4, "batch": 1, "device": loaded.device}
    before = Scorer(loaded.model, loaded.tokenizer, **how).texts(prompts)
    after = Scorer(attach(loaded.model, trained), loaded.tokenizer, **how).texts(prompts)
    pairs = {prompt: (old.strip(), new.strip()) for prompt, old, new in zip(PROMPTS, before, after, strict=True)}
    useful = {prompt: pair for prompt, pair in pairs.items() if all(map(normalize, pair)) and "\n" not in "".join(pair)}
    assert sum(old != new for old, new in useful.values()) >= 4, "the adapter changes answers"
    return useful


@pytest.fixture
def adapter(tmp_path, model):
    return mmlu_folder.write_an_adapter(tmp_path / "adapter", model, size=0.5)


@pytest.fixture
def ask(tmp_path):
    """Ask prompts, as rows, with a cache of the test's own."""

    def ask(folder, rows, *, tasks=(), **changes):
        path = tmp_path / "mine.jsonl"
        path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
        settings = {"force": True, **{name: changes.pop(name) for name in ("force", "watch", "model") if name in changes}}
        return evaluate(folder, Questions(tasks, prompts=path, **changes), cache=tmp_path / "cache", **settings)

    return ask


@pytest.fixture
def ends_after(monkeypatch):
    """Let answers have four tokens, so that each is one of those by hand."""

    monkeypatch.setattr(prompts, "Scorer", lambda *given, **how: Scorer(*given, **{**how, "max_new_tokens": 4}))


def test_answers_that_turned_wrong_and_right_are_counted_and_listed(adapter, ask, said, ends_after, tmp_path):
    moved = [prompt for prompt, (old, new) in said.items() if normalize(old) != normalize(new)]
    rows = [{"prompt": prompt, "answer": said[prompt][0]} for prompt in moved[:3]]
    rows += [{"prompt": prompt, "completion": f" {said[prompt][1].upper()}"} for prompt in moved[3:4]]
    rows += [{"prompt": moved[0], "answer": "neither of these"}]
    found = ask(adapter, rows)
    (task,) = found.tasks
    assert (task.task, task.metric, task.n) == ("prompts", "exact_match", 5)
    assert (task.base.score, task.after.score, task.change) == (60, 20, -40)
    assert (task.flips.right_to_wrong, task.flips.wrong_to_right) == (3, 1)
    lost, won = found.prompts.right_to_wrong, found.prompts.wrong_to_right
    assert [(each.place, each.prompt) for each in lost] == [(f"{tmp_path}/mine.jsonl, line {i + 1}", moved[i]) for i in range(3)]
    assert (lost[0].answer, lost[0].base, lost[0].after) == (said[moved[0]][0], *said[moved[0]])
    assert (won[0].prompt, won[0].base, won[0].after) == (moved[3], *said[moved[3]])
    assert json.loads((adapter / "eval.json").read_text())["prompts"]["wrong_to_right"][0]["answer"] == rows[3]["completion"]
    assert ask(adapter, rows, batch=1).prompts == found.prompts


def test_a_fall_of_the_users_own_prompts_counts_however_few_they_are(adapter, ask, said, ends_after):
    moved = next(prompt for prompt, (old, new) in said.items() if normalize(old) != normalize(new))
    same = {"prompt": moved, "answer": "neither of these"}
    found = ask(adapter, [{"prompt": moved, "answer": said[moved][0]}, *[same] * 9])
    assert found.tasks[0].interval[1] > 0, "as a sample it would show nothing"
    assert [task.task for task in found.dropped(9)] == ["prompts"]
    assert found.dropped(10) == []


def test_prompts_need_no_lm_eval(adapter, ask, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "anchorlora_lab.suites.harness", None)
    found = ask(adapter, [{"prompt": "Which bone?", "answer": "acid"}])
    assert (found.task, found.tasks[0].change_stderr) == ("prompts", None)
    assert set(found.versions) == {"transformers", "torch", "anchorlora"}
    with pytest.raises(ImportError, match="pip install 'anchorlora\\[eval\\]'; --prompts do not"):
        ask(adapter, [{"prompt": "Which bone?", "answer": "acid"}], tasks=("mmlu",))


def test_base_answers_are_kept_and_asked_again_when_a_prompt_or_an_answer_is_another(adapter, ask, tmp_path, model):
    measured = []
    watch = type("Watch", (), {"measures": lambda self, what: measured.append(what), "note": print})()
    watch.begins = watch.advance = lambda inputs: None
    rows = [{"prompt": "Which bone?", "answer": "acid"}]
    both = ["prompts without the adapter", "prompts with the adapter"]
    first = ask(adapter, rows, watch=watch)
    other = mmlu_folder.write_an_adapter(tmp_path / "other", model, size=0.5, seed=1)
    assert ask(other, rows, watch=watch).base == first.base
    assert measured == [*both, both[1]]
    for change in ({"prompt": "Which acid?"}, {"answer": "a bone"}):
        ask(adapter, [rows[0] | change], watch=watch)
    ask(adapter, rows, watch=watch, apply_chat_template=True)
    assert measured[3:] == both * 3
    with pytest.raises(ValueError, match="answers another request .*the file "):
        ask(adapter, [rows[0] | {"answer": "a bone"}], force=False, apply_chat_template=True)
    (tmp_path / "moved").mkdir()
    assert (tmp_path / "mine.jsonl").rename(tmp_path / "moved/mine.jsonl")
    assert ask(adapter, rows, force=False, apply_chat_template=True).n == 1


def test_another_template_beside_the_adapter_or_the_model_is_another_request(adapter, ask, tmp_path, model):
    mine = shutil.copytree(model, tmp_path / "mine")
    given = {"model": str(mine), "force": False}
    for folder in (adapter, mine):
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    assert ask(adapter, [CHAT], **given) == ask(adapter, [CHAT], **given)
    for folder, which in ((adapter, "the file adapter/chat_template.jinja: "), (mine, "files of the model: ")):
        template = folder / "chat_template.jinja"
        before = template.read_text()
        template.write_text(f"{before}!")
        with pytest.raises(ValueError, match=f"answers another request .*{which}"):
            ask(adapter, [CHAT], **given)
        template.write_text(before)
    assert ask(adapter, [CHAT], **given).n == 1


def test_chats_go_through_the_template_and_plain_prompts_only_if_asked(adapter, ask, monkeypatch):
    from anchorlora_lab.suites import prompts

    read = []

    class Reader(Scorer):
        def texts(self, prompts, **how):
            read.append(self.tokenizer.decode(prompts[0]))
            return super().texts(prompts, **how)

    monkeypatch.setattr(prompts, "Scorer", Reader)
    chat = [{"role": "user", "content": "Which bone?"}, {"role": "assistant", "content": "acid"}]
    ask(adapter, [{"messages": chat}])
    ask(adapter, [{"prompt": chat[:1], "completion": chat[1:]}])
    ask(adapter, [{"prompt": "Which bone?", "answer": "acid"}], apply_chat_template=True)
    assert set(read) == {"<user>Which bone?<answer>"}
    ask(adapter, [{"prompt": "Which bone?", "answer": "acid"}])
    assert read[-1] == "Which bone?"


def test_chats_are_refused_without_a_template_before_the_model_is_loaded(ask, tmp_path, monkeypatch):
    plain = mmlu_folder.write_model(tmp_path / "plain")
    adapter = mmlu_folder.write_an_adapter(tmp_path / "adapter", plain, size=0.5)
    monkeypatch.setattr("anchorlora_lab.suites.measure.load_base_model", None)
    chat = [{"role": "user", "content": "Which bone?"}, {"role": "assistant", "content": "acid"}]
    with pytest.raises(
        ValueError, match="has no chat template, and the prompts are chats; give prompts as plain text, or choose a chat"
    ):
        ask(adapter, [{"messages": chat}])
    assert not (adapter / "eval.json").exists()


CHAT = {"messages": [{"role": "user", "content": "Which bone?"}, {"role": "assistant", "content": "acid"}]}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks a bone up.", "parameters": {"type": "object"}}}


def test_a_prompt_with_other_tools_is_another_request(tmp_path):
    hashes = set()
    for tools in ([], [TOOL]):
        (tmp_path / "mine.jsonl").write_text(json.dumps({**CHAT, "tools": tools}) + "\n")
        hashes.add(read_prompts(tmp_path / "mine.jsonl").sha256)
    assert len(hashes) == 2


LONG = " ".join(f"word{i}" for i in range(100))
BEGUN = "<s><start_of_turn>user\nBe kind.\n\n"  # of families.FOLDED


@pytest.mark.parametrize(
    ("row", "head"),
    [
        ({"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": LONG}]}, BEGUN),
        ({"prompt": LONG}, "<s>"),
        ({"prompt": f"{BEGUN}{LONG}"}, "<s>"),
        ({"tokens": f"{BEGUN}{LONG}"}, "<s>"),
    ],
)
def test_a_prompt_longer_than_the_model_keeps_its_head_and_its_end(row, head, monkeypatch, tmp_path):
    tokenizer, path, read = copy.deepcopy(families.tokenizer("bytes-bos")), tmp_path / "mine.jsonl", []
    tokenizer.chat_template = families.FOLDED

    def rows(row):
        if "messages" in row:
            return {"messages": [*row["messages"], {"role": "assistant", "content": "acid"}]}
        if "prompt" in row:
            return row | {"answer": "acid"}
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in (row["tokens"], "acid")]
        return {"text": f"{row['tokens']}acid", "prompt_ids": ids[0], "completion_ids": ids[1]}

    class Answering:
        def __init__(self, *given, **how): ...

        def texts(self, asked, watch):
            read.extend(asked)
            return ["acid"] * len(asked)

    monkeypatch.setattr(prompts, "Scorer", Answering)
    path.write_text(json.dumps(rows(row)))
    longest = len(tokenizer(BEGUN).input_ids) + 60 + ROOM
    model = SimpleNamespace(config=PretrainedConfig(max_position_embeddings=longest), generation_config=None, device="cpu")
    found = prompts.read_prompts(path).score(model, tokenizer, Questions((), prompts=path), watch=EvalProgress())
    assert (found.cut, found.metrics["exact_match"].score) == (1, 1)
    (ids,) = read
    text = tokenizer.decode(ids)
    assert text.startswith(head)
    assert "word99" in text
    assert "word9 " not in text
    assert longest - ROOM - 12 <= len(ids) <= longest - ROOM


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "mine.jsonl holds no row; give at least one"),
        (
            '{"prompt": "a"}',
            "line 1: no known column .messages; .*; it has: prompt",
        ),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": ""}', "line 2: the answer is empty"),
        ('{"prompt": "", "answer": "b"}', "line 1: the prompt is empty"),
        (
            '{"prompt": "a", "answer": 4}',
            "line 1: answer must be text or a list of messages, not a number|line 1: answer must be text",
        ),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 1: the last message must be the assistant's"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 1: the prompt is empty"),
        (
            '{"prompt": "a", "completion": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "prompt and completion must all be text or all be lists of messages",
        ),
        ('{"prompt": "a", "answer": "b", "label": false}', "line 1: label is true or false, as in rows for KTO"),
        (
            '{"prompt": "a", "answer": "b", "weight": 0}',
            "line 1: the row is not learned .weight or train., so its answer is not right",
        ),
        ('{"prompt": "a", "answer": "b", "context": "c"}', "line 1: column context would not be learned"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "train": false}]}',
            "line 1: the last message is not learned .weight or train., so it is not the right answer",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}',
            "line 1: the last message is not learned .weight or train., so it is not the right answer",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{"a": 1}]}]}',
            "line 1: the last message calls tools, and answers are compared as text",
        ),
        ('{"text": "a"}', "line 1: the prompt is empty"),
        ('{"chosen": "a", "rejected": "b"}', "line 1: chosen and rejected are a preference pair"),
        ("[1]", "line 1|row 1: a row is an object"),
        ("{", "line 1: not complete JSON"),
    ],
)
def test_a_malformed_file_of_prompts_is_named_with_its_line(rows, message, adapter, ask, monkeypatch):
    monkeypatch.setattr("anchorlora_lab.suites.measure.load_base_model", None)
    with pytest.raises(ValueError, match=message) as refused:
        ask(adapter, rows)
    assert "\n" not in str(refused.value)
    assert not (adapter / "eval.json").exists()


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("Paris", "paris.", True),
        ("\n Paris \nQuestion: and Rome?", "Paris", True),
        ("Paris, France", "Paris", False),
        ("one\ntwo\nthree", "One.\nTwo.", True),
        ("one", "one\ntwo", False),
        ("?!", "!!", False),
        ("!!", "!!", True),
        ("", "!!", False),
        ("5", "-5", False),
        ("15", "1.5", False),
        ("**-5**.", "-5", True),
        ("1,000", "1000", True),
        ("7", "007", False),
        ("about 15 m", "about 1.5 m", False),
        ("about 1,500 m.", "about 1500 m", True),
        ("+5", "5", True),
        (".5", "5", False),
        ("C", "C++", False),
        ("C#", "C", False),
        ("**C++**.", "C++", True),
        ("# Paris", "Paris", True),
        ("a < b", "a > b", False),
        ("x", "-x", False),
        ("O", "O-", False),
        ("1030", "10:30", False),
        ("1914\N{EN DASH}1918", "1914-1918", True),
        ("max_length", "maxlength", False),
        ('"Don\'t"', "dont", True),
        ("co-operate", "Cooperate", True),
        ("USA", "U.S.A.", True),
        ("50", "50%", True),
    ],
)
def test_an_answer_is_right_if_it_is_equal_once_normalized(text, answer, right):
    assert is_right(text, answer) is right


def test_a_thought_of_the_models_own_before_its_answer_does_not_count(adapter, ask, monkeypatch):
    monkeypatch.setattr(Scorer, "texts", lambda self, prompts, **how: ["<think>\nwell\n</think>\n\nfour"] * len(prompts))
    (task,) = ask(adapter, [{"prompt": PROMPTS[0], "answer": "four"}]).tasks
    assert (task.base.score, task.after.score) == (100, 100)
