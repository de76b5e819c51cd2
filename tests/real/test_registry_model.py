"""Known models with nothing but the package registry (tools/smollm2.py, tools/gemma3.py): what is written is that model, and what
we train, test and protect is what transformers reads, says and loses on it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from anchorlora.adapters import write_adapter
from anchorlora.cli.app import main
from anchorlora.config import BaseModelSettings
from anchorlora.continual.evaluate import Scorer
from anchorlora.data import Encoder, ExactMatch, TextTask, TokenF1, examples_of, normalize, samples_of
from anchorlora.data.templates import stop_ids
from anchorlora.geometry import Factors
from anchorlora.models.load import ends_of, load_base_model
from anchorlora.models.packing import unpackable

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.real]


# Gemma's own turns, in our words; the package has the pretrained model, whose tokenizer has no template
TURNS = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + "
    "m.content | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
CHATS = [
    [("user", "What is the capital of France?"), ("assistant", "The capital of France is Paris.")],
    [
        ("system", "Answer in one word."),
        ("user", "  2 + 2?\n"),
        ("assistant", "Four"),
        ("user", "And 3 + 3?"),
        ("assistant", "Six"),
    ],
    [("user", "Say 你好 🙂 twice"), ("assistant", "你好 🙂 你好 🙂\n\ndone")],
    # together longer than the 512 tokens that most of Gemma's layers look back
    *(
        [("user", f"{town} lies by a river. " * 24 + "Where?"), ("assistant", f"{town}.")]
        for town in ("Ulm", "Bonn", "Graz", "Bern")
    ),
]


def made(tool, out):
    """The folder that a tool writes; ANCHORLORA_MODELS names a folder that has it already."""
    there = Path(os.environ.get("ANCHORLORA_MODELS", out)) / tool
    if there.is_dir():
        return there
    done = subprocess.run([sys.executable, ROOT / f"tools/{tool}.py", out], capture_output=True, text=True)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("the package registry cannot be reached, or has the package no more")
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made("smollm2", tmp_path_factory.mktemp("registry") / "smollm2")


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def chatting(request, tmp_path_factory):
    """A loaded model with a chat template, and the settings that loaded it."""
    folder = made(request.param, tmp_path_factory.mktemp("registry") / request.param)
    given = {}
    if request.param == "gemma3":
        template = tmp_path_factory.mktemp("template") / "turns.jinja"
        template.write_text(TURNS)
        given = {"chat_template": str(template)}
    return load_base_model(BaseModelSettings(model=str(folder), dtype="float32", device="cpu", **given))


def rows():
    return [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in CHATS]


def test_the_tokens_that_are_trained_are_those_of_transformers_own_template(chatting):
    tokenizer = chatting.tokenizer
    encoder = Encoder(tokenizer, max_tokens=512, ends=ends_of(chatting.model))
    for row in rows():
        examples = list(TextTask("t").encoded(encoder, examples_of(samples_of([("row", row)], source="rows"))))
        turns = [i for i, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        assert len(examples) == len(turns)
        for e, i in zip(examples, turns, strict=True):
            whole = tokenizer.apply_chat_template(row["messages"][: i + 1], tokenize=True, return_dict=True)["input_ids"]
            asked = tokenizer.apply_chat_template(row["messages"][:i], tokenize=True, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
            assert list(e.prompt) == asked, "what a server would give the model"
            assert list(e.prompt + e.answer) == whole[: len(e.prompt + e.answer)]
            assert not tokenizer.decode(whole[len(e.prompt + e.answer) :]).strip(), "nothing but the turn's end is left out"
            assert e.answer[-1] in encoder.stops
            assert e.answer[-1] in (tokenizer.convert_tokens_to_ids("<end_of_turn>"), tokenizer.convert_tokens_to_ids("<|im_end|>"))
            assert e.example.label == row["messages"][i]["content"].strip()


def test_losses_and_greedy_answers_are_those_of_plain_transformers(chatting):
    model, tokenizer = chatting.model, chatting.tokenizer
    encoder = Encoder(tokenizer, max_tokens=512, ends=ends_of(model))
    task = TextTask("t", metrics=(TokenF1(), ExactMatch()))
    encoded = encoder.encode(task, examples_of(samples_of([("row", row) for row in rows()], source="rows")))
    packed = unpackable(model, [e.prompt + e.answer for e in encoded]) is None
    assert packed
    assert sum(len(e.prompt) for e in encoded) > 600
    answers = Scorer(model, tokenizer, max_new_tokens=24, batch=16, device=torch.device("cpu"), packed=packed).score(task, encoded)
    for e, answer in zip(encoded, answers, strict=True):
        ids = torch.tensor([[*e.prompt, *e.answer]])
        labels = ids.clone()
        labels[0, : len(e.prompt)] = -100
        with torch.no_grad():
            loss = float(model(input_ids=ids, labels=labels).loss)
            said = model.generate(
                input_ids=torch.tensor([e.prompt]),
                attention_mask=torch.ones(1, len(e.prompt), dtype=torch.long),
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=sorted(encoder.stops),
            )[0, len(e.prompt) :]
        assert answer.scores["loss"] == pytest.approx(loss, rel=2e-5)
        text = tokenizer.decode(said, skip_special_tokens=True).strip()
        assert answer.text.strip() == text
        assert answer.scores["exact_match"] == float(normalize(text) == normalize(e.example.label))


@pytest.mark.parametrize("system", [None, "Answer in one word."])
def test_ask_answers_as_transformers_own_template_and_generate_do(system, chatting, tmp_path, capsys):
    """`anchorlora ask`, with an adapter that has the template beside it, and without the adapter."""
    layer, question = "model.layers.1.self_attn.q_proj", "Which city is the capital of France?"
    module, draw = chatting.model.get_submodule(layer), torch.Generator().manual_seed(1)
    A, B = torch.randn(4, module.in_features, generator=draw), torch.randn(module.out_features, 4, generator=draw)
    write_adapter(tmp_path / "adapter", {layer: Factors(A, B, 1.0)}, base=chatting.name)
    chatting.tokenizer.save_pretrained(tmp_path / "adapter")
    messages = [{"role": "user", "content": question}]
    messages = messages if system is None else [{"role": "system", "content": system}, *messages]
    inputs = chatting.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answers = []
    for adapter in (tmp_path / "adapter", None):
        model = AutoModelForCausalLM.from_pretrained(chatting.name, dtype=torch.float32)
        model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
        how = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": sorted(stop_ids(chatting.tokenizer, ends_of(model)))}
        tokens = model.eval().generate(**inputs, **how)[0, inputs["input_ids"].shape[1] :]
        answers.append(chatting.tokenizer.decode(tokens, skip_special_tokens=True))
    words = ["ask", str(tmp_path / "adapter"), question, "--without", "--max-new-tokens", "24"]
    assert main([*words, *(["--system", system] if system else [])]) == 0
    assert capsys.readouterr().out == "with the adapter:\n{}\n\nwithout the adapter:\n{}\n".format(*answers)
    assert answers[0] != answers[1]


def test_it_answers_as_a_trained_model_does_with_plain_weights(folder):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert getattr(model.config, "quantization_config", None) is None
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        said = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(said[0, ids.shape[1] :])
    talk = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True)
    assert talk.endswith("<|im_start|>assistant\n")


def test_gemma_3_writes_text_and_lies_beside_its_terms(tmp_path):
    folder = made("gemma3", tmp_path / "gemma3")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    assert model.config.sliding_window == 512
    ids = tokenizer("Question: What is 2+2?\nAnswer:", return_tensors="pt").input_ids
    with torch.no_grad():
        said = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert "=4" in tokenizer.decode(said[0, ids.shape[1] :])
    assert "Gemma" in (folder / "GEMMA_TERMS.html").read_text()
    assert (folder / "NOTICE.md").is_file()
