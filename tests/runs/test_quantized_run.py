"""Runs over quantized bases: quantized on loading, or stored so; what the record says, and what is refused."""

import json
import shutil
import sys

import pytest
import torch

import small
from anchorlora import METHODS, run_sequence
from anchorlora.config import BaseModelSettings
from anchorlora.export.export import Request, export
from anchorlora.export.source import export_source
from anchorlora.models.load import load_base_model
from anchorlora.runs.sizes import sizes
from anchorlora.store.record import read_record


def needs_bitsandbytes():
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def learned(recipe, out, method="o-lora-hard"):
    return run_sequence(recipe, METHODS[method], order=small.ORDER[:2], seed=3, out=out)


@pytest.mark.parametrize(
    "method", ["sfor", "o-lora-hard", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sensitive-core", "fold-16"))]
)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_run_protects_records_and_exports(kind, method, small_benchmark, small_model, tmp_path):
    needs_bitsandbytes()
    recipe = small.recipe(small_benchmark, small_model, quantized=kind)
    record = learned(recipe, tmp_path / "run", method)
    assert record.drift[0].exact
    assert record.drift[0].d_eff > 0.01
    assert record.base_model.dtype == f"float32 over {kind}"
    assert record.protocol["base_model"]["quantized"] == kind
    assert record.base_model.parameters == load_base_model(BaseModelSettings(model=str(small_model))).parameters
    found = export(export_source(tmp_path / "run"), Request(), to=tmp_path / "out", card=lambda found, record: "")
    assert found.error == 0.0
    assert found.protection.rho_exported <= found.protection.bound
    with pytest.raises(
        ValueError, match=rf"is quantized \({kind}\), and its weights take no update .* in full precision with --model"
    ):
        export(export_source(tmp_path / "run"), Request("merged"), to=tmp_path / "merged", card=lambda found, record: "")
    of_full_precision = export_source(tmp_path / "run", model=str(small_model))
    merged = export(of_full_precision, Request("merged"), to=tmp_path / "merged", card=lambda found, record: "")
    assert merged.base.same is False


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(small_benchmark, small_model, tmp_path):
    needs_bitsandbytes()
    recipe = small.recipe(small_benchmark, small_model, quantized="nf4")
    learned(recipe, tmp_path / "whole")
    part = shutil.copytree(tmp_path / "whole", tmp_path / "part")
    (part / "record.json").unlink()
    shutil.rmtree(part / "tasks/2-mood")
    shutil.rmtree(part / "state/2")
    learned(recipe, part)
    one, other = ((tmp_path / name / "tasks/2-mood/adapter/adapter_model.safetensors").read_bytes() for name in ("whole", "part"))
    assert one == other
    assert read_record(part / "record.json").drift == read_record(tmp_path / "whole/record.json").drift


def test_a_model_stored_in_four_bits_is_taken_as_it_is(small_benchmark, small_model, tmp_path):
    needs_bitsandbytes()
    quantized = load_base_model(BaseModelSettings(model=str(small_model), quantized="nf4"))
    quantized.model.generation_config.do_sample = False
    quantized.model.save_pretrained(tmp_path / "nf4")
    quantized.tokenizer.save_pretrained(tmp_path / "nf4")
    found = load_base_model(BaseModelSettings(model=str(tmp_path / "nf4")))
    assert found.dtype == "float32 over nf4"
    assert found.model.model.layers[0].self_attn.q_proj.weight.dtype == torch.uint8
    record = learned(small.recipe(small_benchmark, tmp_path / "nf4"), tmp_path / "run")
    assert record.drift[0].exact
    with pytest.raises(ValueError, match="is stored in nf4 already; leave quantized=int8 out"):
        load_base_model(BaseModelSettings(model=str(tmp_path / "nf4"), quantized="int8"))


def test_a_record_of_full_precision_says_nothing_of_it(small_benchmark, small_model, tmp_path):
    record = learned(small.recipe(small_benchmark, small_model), tmp_path / "run")
    assert "quantized" not in record.protocol["base_model"]
    assert record.base_model.dtype == "float32"


def test_without_bitsandbytes_a_quantized_base_is_refused(small_benchmark, small_model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    message = r"a quantized model needs bitsandbytes, which is not installed: pip install 'anchorlora\[quantized\]'"
    with pytest.raises(ImportError, match=message):
        learned(small.recipe(small_benchmark, small_model, quantized="nf4"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    stored = mark(small_model, tmp_path / "stored", {"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(ImportError, match=message):
        load_base_model(BaseModelSettings(model=str(stored)))


def test_what_another_library_quantized_is_refused(small_model, tmp_path):
    stored = mark(small_model, tmp_path / "stored", {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match="the model is quantized with gptq; only bitsandbytes and full precision are supported"):
        load_base_model(BaseModelSettings(model=str(stored)))


def mark(model, to, quantization):
    shutil.copytree(model, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return to


def test_the_estimate_of_memory_knows_packed_weights(small_benchmark, small_model):
    needs_bitsandbytes()
    bytes_of, packed = {}, {}
    for kind in (None, "nf4", "int8"):
        recipe = small.recipe(small_benchmark, small_model, quantized=kind)
        bytes_of[kind] = sizes(recipe, tasks=2, cumulative=True).memory["base_model"]
        model = load_base_model(BaseModelSettings(model=str(small_model), quantized=kind)).model
        packed[kind] = sum(p.numel() * p.element_size() for p in model.parameters())
    assert bytes_of[None] == packed[None]
    assert bytes_of["nf4"] == pytest.approx(packed["nf4"], rel=0.1)  # scales are no parameters
    assert bytes_of["int8"] == pytest.approx(packed["int8"], rel=0.1)
    assert bytes_of["nf4"] < bytes_of["int8"] < bytes_of[None]
