"""A small real language model on the benchmark's real text: protection read in float64 from the saved files, and plain PEFT."""

import json
import os
from pathlib import Path

import pytest
import torch

import saved
from anchorlora import METHODS, run_sequence
from anchorlora.recipes import standard_cl

SHARED = Path(os.environ.get("ANCHORLORA_SHARED", Path(__file__).parents[3] / "shared"))
MODEL, DATA = SHARED / "backbones/mini-en", SHARED / "data/standard_cl"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (MODEL.is_dir() and DATA.is_dir()), reason="no real model and data: set ANCHORLORA_SHARED"),
]
ORDER = ("agnews", "dbpedia")
SMALL = {"train_limit": 64, "test_limit": 6, "learning_rate": 1e-3, "micro_batch": 8, "max_tokens": 256, "max_new_tokens": 12}


LONG = [("sfor", "float32"), ("sfor", "bfloat16"), ("o-lora-hard", "bfloat16")]


@pytest.fixture(scope="module", params=[("o-lora-hard", "float32"), *(pytest.param(each, marks=pytest.mark.slow) for each in LONG)])
def finished(request, tmp_path_factory):
    method, dtype = request.param
    out = tmp_path_factory.mktemp("real") / f"{method}-{dtype}"
    recipe = standard_cl().changed({"model": str(MODEL), "data": str(DATA), "dtype": dtype, "threads": 1} | SMALL)
    return out, run_sequence(recipe, METHODS[method], order=ORDER, seed=42, out=out)


@pytest.mark.slow
def test_the_saved_files_are_protected_exactly(finished):
    out, record = finished
    found, largest_zero = saved.drift(*saved.folders(out, ORDER))
    assert found["rho"] <= largest_zero
    assert found["d_eff"] > 0.05
    assert record.drift[0].bound == pytest.approx(largest_zero, rel=1e-6)
    assert record.data["TC/agnews/train.json"].kind == "official bytes"


@pytest.mark.slow
def test_plain_peft_gives_the_recorded_answers(finished):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from anchorlora.data import Benchmark, Encoder

    out, record = finished
    if record.base_model.dtype != "float32":
        pytest.skip("texts are compared in float32: bfloat16 rounds differently from batch to batch")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    source, encoder = Benchmark(DATA), Encoder(tokenizer, max_tokens=256)
    for number, task in enumerate(ORDER, 1):
        folder = out / f"tasks/{number}-{task}"
        base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, folder / "adapter").eval()
        for line in map(json.loads, (folder / "predictions.jsonl").read_text().splitlines()):
            (example,) = encoder.encode(source.task(line["task"]), [list(source.examples(line["task"], "test"))[line["index"]]])
            ids = torch.tensor([example.prompt])
            assert example.prompt_sha256 == line["prompt_sha256"]
            with torch.no_grad():
                said = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
            assert tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True).strip() == line["text"]
