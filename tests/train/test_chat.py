"""`anchorlora train` on chats: the template of the adapter's folder counts, and a template's date is that of the first day."""

import json

import pytest
from transformers import AutoTokenizer

from anchorlora import METHODS
from anchorlora.errors import Interrupted, InvalidValue
from anchorlora.models.load import tokenizer_of
from anchorlora.runs import run
from anchorlora.runs.autosave import Stop
from anchorlora.store.artifact import artifact_in
from anchorlora.train import sealed
from anchorlora.train import train as module
from anchorlora.train.request import skill_request
from anchorlora.train.stages import change_on
from anchorlora.train.train import train_skill

ASKING = "{% if add_generation_prompt %}[assistant]\n{% endif %}"
TURNS = "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}{{ eos_token }}{% endfor %}" + ASKING
FEW = {"rows": "64", "at_most": "8", "max_new_tokens": "4", "max_tokens": "96", "test_limit": "4"}


@pytest.fixture(scope="module")
def asked(small_model):
    def request(data, chat_template=None, **given):
        base = {"model": str(small_model), "chat_template": chat_template, "threads": 1}
        fields = {"base_model": base, "data": str(data), "own": 10, "settings": FEW, **given}
        return skill_request(fields, same_size=False, method=given.pop("method", "inc-lora"), methods=METHODS)

    return request


@pytest.fixture
def data(tmp_path):
    chats = [
        {"messages": [{"role": "user", "content": f"{i} and one?"}, {"role": "assistant", "content": str(i + 1)}]}
        for i in range(40)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return tmp_path / "chats.jsonl"


def template(path, text):
    path.write_text(text)
    return str(path)


def prompts(out):
    lines = (out / "tasks/1-chats/predictions.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt_sha256"] for line in lines]


def test_a_template_sees_the_day_on_which_the_run_began_also_when_it_goes_on_another_day(asked, data, tmp_path, monkeypatch):
    dated = template(tmp_path / "dated.jinja", "{{ strftime_now('%d %b %Y') }} " + TURNS)
    request = asked(data, dated)

    def on(day):
        for place in (sealed, run):
            monkeypatch.setattr(place, "now", lambda: f"{day}T12:00:00+00:00")

    on("2026-11-25")
    train_skill(request, tmp_path / "whole", methods=METHODS)
    stop = Stop()
    stop.ask("out of time")
    with pytest.raises(Interrupted):
        train_skill(request, tmp_path / "stopped", methods=METHODS, stop=stop)
    on("2026-11-26")
    train_skill(request, tmp_path / "stopped", methods=METHODS)
    assert prompts(tmp_path / "stopped") == prompts(tmp_path / "whole")
    one, other = (tmp_path / name / "adapter/adapter_model.safetensors" for name in ("whole", "stopped"))
    assert one.read_bytes() == other.read_bytes()
    train_skill(request, tmp_path / "later", methods=METHODS)
    assert prompts(tmp_path / "later") != prompts(tmp_path / "whole"), "a run that begins later sees its own day"


def test_no_chat_both_chooses_the_scale_of_a_budget_and_tells_how_it_went(asked, data, tmp_path):
    turns = [
        [("user", f"{i} and two?"), ("assistant", str(i + 2)), ("user", "And one?"), ("assistant", str(i + 3))] for i in range(60)
    ]
    chats = [{"messages": [{"role": role, "content": words} for role, words in turn]} for turn in turns]
    (tmp_path / "old.jsonl").write_text("\n".join(map(json.dumps, chats)))
    settings = {"budget": 1.0, "settings": FEW | {"test_limit": "24"}}
    request = asked(data, template(tmp_path / "turns.jinja", TURNS), keep=[str(tmp_path / "old.jsonl")], **settings)
    kept = train_skill(request, tmp_path / "run", methods=METHODS)
    assert kept.kept[0].n == 12, "held-out chats, each with two answers"
    found = json.loads((tmp_path / "run/skill/budget.json").read_text())
    assert [found["kept"]["old"]["n"], found["tried"][0]["kept"]["old"]["n"]] == [6, 6], "half of the chats, and the other half"
    few = asked(
        data, request.base_model.chat_template, keep=[str(tmp_path / "old.jsonl")], budget=1.0, settings=FEW | {"test_limit": "12"}
    )
    with pytest.raises(InvalidValue, match="--budget needs 12 held-out rows of everything that is kept, and old has 6"):
        train_skill(few, tmp_path / "few", methods=METHODS)


def test_what_follows_uses_the_template_beside_the_adapter_whose_tokenizer_is_the_models(asked, data, small_model, tmp_path):
    turns = template(tmp_path / "turns.jinja", TURNS)
    first = train_skill(asked(data, turns), tmp_path / "first", methods=METHODS)
    assert first.name == "chats"
    more = tmp_path / "more.jsonl"
    more.write_text(data.read_text().replace("and one?", "plus one?"))
    train_skill(asked(more, after=str(tmp_path / "first")), tmp_path / "second", methods=METHODS)
    saved = AutoTokenizer.from_pretrained(tmp_path / "second/adapter")
    assert saved.chat_template == TURNS
    for folder in (tmp_path / "second", tmp_path / "second/tasks/1-more"):
        artifact = artifact_in(folder)
        assert tokenizer_of(artifact.base_model(), adapter=artifact.adapter).chat_template == TURNS
    assert change_on(more, small_model, tmp_path / "second")["n"] == 40, "by the adapter's template, before it as well"
    other = template(tmp_path / "other.jinja", "{{ '' }}" + TURNS)
    with pytest.raises(InvalidValue, match=r"adapter has a chat template of its own, and .*other.jinja is another; leave it out"):
        train_skill(asked(more, other, after=str(tmp_path / "first")), tmp_path / "third", methods=METHODS)
    assert not (tmp_path / "third").exists()
    place = tmp_path / "first/adapter/tokenizer.json"
    content = json.loads(place.read_text())
    vocab = content["model"]["vocab"]
    one, other = list(vocab)[300:302]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    place.write_text(json.dumps(content))
    (tmp_path / "copy").mkdir()
    for file in (tmp_path / "first/adapter").iterdir():
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(InvalidValue, match="the tokenizer in .*copy is not that of .*: they differ at"):
        train_skill(asked(data, old_adapter=str(tmp_path / "copy")), tmp_path / "other", methods=METHODS)


def test_chats_without_any_template_are_refused_at_once_by_the_option_that_names_one(asked, data, tmp_path, monkeypatch):
    monkeypatch.setattr(module.stages, "before", lambda *_: pytest.fail("no model is loaded for what cannot be"))
    with pytest.raises(InvalidValue, match=r"chats.jsonl, line 1: .* has no chat template; name one with --set chat_template=FILE"):
        train_skill(asked(data, keep=("self",), method="inc-lora-hard"), tmp_path / "out", methods=METHODS)
    assert not (tmp_path / "out").exists()
