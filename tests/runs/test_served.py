"""Answers by vLLM, with a stand-in that reads the adapter's folder as vLLM does: greedy, at one scale, by number."""

import json
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import small
from anchorlora import METHODS, run_sequence
from anchorlora.cli.app import main
from anchorlora.errors import Failed
from anchorlora.store.record import read_record


class LLM:
    made: list = []  # noqa: RUF012

    def __init__(self, **options):
        self.options, self.asleep, self.adapters = options, False, {}
        LLM.made.append(self)
        assert options["enable_lora"]
        assert options["generation_config"] == "vllm"

    def sleep(self, level):
        self.asleep = True

    def wake_up(self):
        self.asleep = False

    def generate(self, prompts, params, *, lora_request, use_tqdm):
        assert not self.asleep
        if lora_request.number not in self.adapters:  # as in vLLM, where a number stands for what was loaded first
            config = json.loads((lora_request.path / "adapter_config.json").read_text())
            assert not config["rank_pattern"]
            assert not config["alpha_pattern"]
            assert config["r"] <= self.options["max_lora_rank"]
            base = AutoModelForCausalLM.from_pretrained(self.options["model"], dtype=getattr(torch, self.options["dtype"]))
            self.adapters[lora_request.number] = PeftModel.from_pretrained(base, lora_request.path).eval()
        model, outputs = self.adapters[lora_request.number], []
        for prompt in prompts:
            ids = torch.tensor([prompt["prompt_token_ids"]])
            for _ in range(params.max_tokens):
                token = LLM.chosen(model(input_ids=ids).logits[0, -1])
                ids = torch.cat([ids, token.view(1, 1)], 1)
                if int(token) in params.stop_token_ids:
                    break
            answer = ids[0, len(prompt["prompt_token_ids"]) :].tolist()
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer)]))
        return outputs

    chosen = staticmethod(torch.Tensor.argmax)


@pytest.fixture
def vllm(monkeypatch):
    from pathlib import Path

    module, lora, request = (types.ModuleType(name) for name in ("vllm", "vllm.lora", "vllm.lora.request"))
    module.__spec__ = SimpleNamespace(name="vllm")
    module.LLM, module.SamplingParams = LLM, lambda **options: SimpleNamespace(**options)
    request.LoRARequest = lambda name, number, path: SimpleNamespace(name=name, number=number, path=Path(path))
    for each in (module, lora, request):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr(LLM, "made", [])
    return module


@pytest.mark.parametrize("method", ["sfor", "o-lora-hard", "sd-lora"])
def test_the_record_is_the_one_of_transformers(method, vllm, small_recipe, tmp_path, capsys):
    for backend in ("transformers", "vllm"):
        recipe = small_recipe.changed({"backend": backend})
        run_sequence(recipe, METHODS[method], order=small.ORDER[:2], seed=42, out=tmp_path / backend)
    ours, theirs = (read_record(tmp_path / backend / "record.json") for backend in ("transformers", "vllm"))
    assert theirs.accuracy == ours.accuracy
    assert [theirs.protocol["evaluation"].get("backend"), ours.protocol["evaluation"].get("backend")] == ["vllm", None]
    for path in sorted((tmp_path / "vllm").glob("tasks/*/predictions.jsonl")):
        assert path.read_text() == (tmp_path / "transformers" / path.relative_to(tmp_path / "vllm")).read_text()
    assert all(llm.asleep for llm in LLM.made)
    assert sum(len(llm.adapters) for llm in LLM.made) == 3  # one of each task so far


def test_an_engine_that_computes_something_else_stops_the_run(vllm, small_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(LLM, "chosen", staticmethod(lambda logits: logits.argmin()))
    recipe = small_recipe.changed({"backend": "vllm"})
    with pytest.raises(Failed, match="so vLLM does not compute with this adapter; set backend=transformers"):
        run_sequence(recipe, METHODS["sfor"], order=small.ORDER, seed=42, out=tmp_path / "run")


def test_without_vllm_one_line_says_what_to_install(tmp_path, capsys):
    words = ["run", "mini", "--method", "sfor", "--set", "backend=vllm", "--out", str(tmp_path / "run")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pip install vllm, or set backend=transformers" in said
    assert not list(tmp_path.iterdir())
