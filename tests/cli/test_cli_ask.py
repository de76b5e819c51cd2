"""`anchorlora ask`: its answer is that of plain PEFT and transformers' generate, and wrong requests load no model."""

import io
import json
import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import small
from anchorlora import METHODS, embedded, run_sequence
from anchorlora.adapters import write_adapter
from anchorlora.cli.app import main
from anchorlora.data.forms.known import WITHOUT_INPUT
from anchorlora.geometry import Factors
from anchorlora.models import session
from golden import one_line

MINI = embedded.folder("embedded:mini", "base_model")
LAYER = "model.layers.0.self_attn.q_proj"
TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
QUESTION = "Which team won the cup?"
ENDED = "I lost my lamp.\n"  # after which the model says nothing


def generated(prompt, adapter, longest, **how):
    """What PEFT and transformers alone answer."""
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    model = AutoModelForCausalLM.from_pretrained(MINI, dtype=torch.float32).eval()
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter).eval()
    ids = tokenizer(prompt, return_tensors="pt", **how).input_ids
    with torch.no_grad():
        tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=longest, do_sample=False)
    return tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter on the embedded model that changes what it says, as PEFT saves one."""
    draw = torch.Generator().manual_seed(3)
    width = AutoModelForCausalLM.from_pretrained(MINI).config.hidden_size
    factors = {LAYER: Factors(torch.randn(4, width, generator=draw), torch.randn(width, 4, generator=draw) / 8, 4.0)}
    folder = tmp_path_factory.mktemp("ask") / "adapter"
    write_adapter(folder, factors, base="embedded:mini")
    return folder


def asked(capsys, *words):
    assert main(["ask", *map(str, words)]) == 0
    return capsys.readouterr()


@pytest.mark.parametrize("prompt", [QUESTION, ENDED, "1 2 3 4", "naïve 你好 🙂\n\n  twice "])
@pytest.mark.parametrize("longest", [1, 24])
def test_the_answer_is_that_of_generate_with_and_without_the_adapter(prompt, longest, adapter, capsys):
    how = ["--max-new-tokens", longest]
    with_it, without = (generated(prompt, folder, longest) for folder in (adapter, None))
    assert asked(capsys, adapter, prompt, *how).out == f"{with_it}\n"
    both = f"with the adapter:\n{with_it}\n\nwithout the adapter:\n{without}\n"
    shown = asked(capsys, adapter, prompt, *how, "--without")
    assert shown.out == both
    assert shown.err.count("(the answer is empty)") == sum(not text.strip() for text in (with_it, without))
    assert bool(without) is (prompt != ENDED)
    assert longest == 1 or with_it != without


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_prompt_from_stdin_is_the_same_prompt(mark, adapter, capsys, monkeypatch):
    shown = asked(capsys, adapter, QUESTION, "--max-new-tokens", 8).out
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{mark}{QUESTION}\n"))
    assert asked(capsys, adapter, "-", "--max-new-tokens", 8).out == shown


def test_a_tokenizer_without_a_token_to_pad_with_answers_the_same(adapter, tmp_path, capsys):
    model = shutil.copytree(MINI, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    assert tokenizer.pop("pad_token")
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    shown = asked(capsys, adapter, QUESTION, "--max-new-tokens", 8).out
    assert asked(capsys, adapter, QUESTION, "--max-new-tokens", 8, "--model", model).out == shown


def test_an_answer_without_an_end_is_said_to_be_cut_on_stderr(adapter, capsys):
    assert "(cut after 2 tokens; --max-new-tokens N allows more)" in asked(capsys, adapter, QUESTION, "--max-new-tokens", 2).err


def test_a_template_beside_the_adapter_makes_a_chat_of_the_prompt_with_its_system_message(adapter, tmp_path, capsys):
    chatting = shutil.copytree(adapter, tmp_path / "chatting")
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(chatting)
    whole = f"[system] Be brief.\n[user] {QUESTION}\n[assistant] "
    expected = generated(whole, adapter, 8, add_special_tokens=False)
    assert asked(capsys, chatting, QUESTION, "--system", "Be brief.", "--max-new-tokens", 8).out == f"{expected}\n"
    assert asked(capsys, chatting, QUESTION, "--plain", "--max-new-tokens", 8).out == f"{generated(QUESTION, adapter, 8)}\n"


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (CHAT, f"[user] {QUESTION}\n[assistant] "),
        ({"messages": [{"role": "system", "content": "Be brief."}, *CHAT["messages"]]}, f"[user] {QUESTION}\n[assistant] "),
        ({"prompt": "a", "completion": " b"}, QUESTION),
        ({"instruction": "a", "output": "b"}, WITHOUT_INPUT.format(instruction=QUESTION)),
    ],
)
def test_the_prompt_has_the_form_of_the_skills_examples(row, prompt, tmp_path, capsys):
    """A model that was taught prompts as they stand is asked so, although its tokenizer may have a template."""
    (tmp_path / "turns.jinja").write_text(TURNS)
    few = ["rows=64", "at_most=4", "max_new_tokens=2", "max_tokens=256", "threads=1", "learning_rate=1e-3"]
    few += [] if "instruction" in row else [f"chat_template={tmp_path / 'turns.jinja'}"]
    lines = [json.loads(json.dumps(row).replace('"a"', f'"{i} a"')) for i in range(12)]
    (tmp_path / "new.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = [word for field in few for word in ("--set", field)]
    out = tmp_path / "out"
    train = ["train", "embedded:mini", "--data", str(tmp_path / "new.jsonl"), "--method", "inc-lora", "--out", str(out)]
    assert main([*train, *settings]) == 0
    capsys.readouterr()
    special = "messages" not in row
    expected = generated(prompt, out / "adapter", 8, add_special_tokens=special)
    said = asked(capsys, out, QUESTION, "--max-new-tokens", 8)
    assert said.out == f"{expected}\n"
    assert ("--system TEXT gives one: 'Be brief.'" in said.err) == ("Be brief." in str(row))


def test_a_run_a_task_and_exports_answer_alike(small_benchmark, small_model, tmp_path, capsys):
    out = tmp_path / "run"
    run_sequence(small.recipe(small_benchmark, small_model), METHODS["sfor"], order=small.ORDER[:2], seed=1, out=out)
    how, shown = ["some old pearish", "--max-new-tokens", 4], set()
    assert main(["export", str(out), "--out", str(tmp_path / "cat")]) == 0
    merged = ["--form", "merged", "--dtype", "float32"]
    assert main(["export", str(out), "--out", str(tmp_path / "merged"), *merged]) == 0
    capsys.readouterr()
    for folder in (out, out / "tasks/2-mood", tmp_path / "merged"):
        shown.add(asked(capsys, folder, *how).out)
    shown.add(asked(capsys, tmp_path / "cat", *how, "--model", small_model).out)
    assert len(shown) == 1
    assert main(["ask", str(tmp_path / "merged"), "a", "--without"]) == 2
    assert "leave out --without" in one_line(capsys)
    other, text = tmp_path / "other", tmp_path / "text.jsonl"
    shutil.copytree(small_model, other)
    AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.bfloat16).save_pretrained(other)
    text.write_text(json.dumps({"text": "some old pearish " * 8}))
    task, made = str(out / "tasks/2-mood/adapter"), str(tmp_path / "cores.safetensors")
    cores = ["cores", str(other), task, str(text), "--at-least", "1", "--at-most", "2", "--out", made]
    for words in (["ask", task, "a", "--max-new-tokens", "1", "--model", str(other)], cores):
        with pytest.warns(UserWarning, match=f"^the files of {other} are not those that {task} was trained on; if the weights"):
            assert main(words) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ADAPTER", " "], "the prompt is empty; give a text"),
        (["ADAPTER", "a\udc80"], "the prompt holds bytes that are not UTF-8"),
        (["ADAPTER", "a", "--system", "Be brief."], "write it into the prompt, or add --chat"),
        (["ADAPTER", "a", "--chat"], "give the prompt as it stands with --plain"),
        (["ADAPTER", "word " * 2000], "reads at most 1024; shorten it"),
        (["NOWHERE", "a"], "there is no folder"),
        (["UNNAMED", "a"], "names no base model; give it with --model"),
        (["ADAPTER", "a", "--model", "./nowhere"], "no model at ./nowhere"),
        (["ADAPTER", "a", "--trust-remote-code", "main"], "takes the 40 hexadecimal digits of a commit"),
    ],
)
def test_a_wrong_request_is_one_line_and_loads_no_model(words, message, adapter, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(session, "load_base_model", lambda *_, **__: pytest.fail("the model was loaded"))
    unnamed = shutil.copytree(adapter, tmp_path / "unnamed")
    config = json.loads((unnamed / "adapter_config.json").read_text())
    (unnamed / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    places = {"ADAPTER": str(adapter), "NOWHERE": str(tmp_path / "nowhere"), "UNNAMED": str(unnamed)}
    assert main(["ask", *(places.get(word, word) for word in words)]) == 2
    assert message in one_line(capsys)
