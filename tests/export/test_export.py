"""Exports against dense matrices in float64, and round trips through PEFT, transformers and lm_eval."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import models
import oracle
import saved
import small
from anchorlora import METHODS, run_sequence
from anchorlora.adapters import AdapterStack, read_adapter, write_adapter
from anchorlora.adapters.files import fitted
from anchorlora.errors import InvalidValue
from anchorlora.export.export import Request, export, logits_of
from anchorlora.export.source import export_source
from anchorlora.geometry import Factors, scaled_change
from anchorlora.store import files
from anchorlora.store.export import Export
from anchorlora.store.json import read_file
from architectures.cases import SEES

EPS = torch.finfo(torch.float32).eps
ORDER = small.ORDER[:2]


def no_card(found, record):
    return f"{found.form}\n"


@pytest.fixture(scope="module", params=["sfor", "o-lora-hard"])
def run(request, tmp_path_factory, small_benchmark, small_model):
    out = tmp_path_factory.mktemp("export") / request.param
    run_sequence(small.recipe(small_benchmark, small_model), METHODS[request.param], order=ORDER, seed=3, out=out)
    return out


@pytest.fixture(scope="module")
def half_model(tmp_path_factory, small_model):
    """The small model stored in bfloat16."""
    root = shutil.copytree(small_model, tmp_path_factory.mktemp("half") / "half")
    AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.bfloat16).save_pretrained(root)
    return root


def last(run) -> Path:
    return saved.folders(run, ORDER)[-1] / "adapter"


def ask(source, to, form="cat", model=None, **changes):
    return export(export_source(source, model=model), Request(form, **changes), to=to, card=no_card)


def base(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=models.tokens()).logits.float()


def assert_alike(found, expected):
    assert torch.allclose(found, expected, rtol=0, atol=50 * EPS * float(expected.abs().max())), float(
        (found - expected).abs().max()
    )


def dense(factors):
    return {layer: f.scale * f.B.double() @ f.A.double() for layer, f in factors.items()}


def before(run) -> Path:
    return saved.folders(run, ORDER)[-2] / "adapter"


@pytest.mark.parametrize("form", ["cat", "merged"])
@pytest.mark.parametrize("scale", [0.0, 0.37, 2.0])
def test_a_scaled_export_changes_by_that_share_of_the_last_task(form, scale, run, small_model, tmp_path):
    """Against dense float64; a shared adapter keeps its rank where B did not move, and a fresh block its history bitwise."""
    start, end = dense(read_adapter(before(run))), dense(read_adapter(last(run)))
    goal = {name: start[name] + scale * (end[name] - start[name]) for name in end}
    found = ask(run, tmp_path / "out", form=form, scale=scale, **({"dtype": "float32"} if form == "merged" else {}))
    assert read_file(tmp_path / "out/export.json", Export, remedy="export again").scale == found.scale == scale
    if form == "cat":
        written = read_adapter(tmp_path / "out")
        made = dense(written)
        assert found.rank == max(f.rank for f in read_adapter(last(run)).values())
    else:
        weights = [dict(m.named_parameters()) for m in (base(tmp_path / "out"), base(small_model))]
        made = {
            name: weights[0][f"{name}.weight"].detach().double() - weights[1][f"{name}.weight"].detach().double() for name in goal
        }
    for name, expected in goal.items():
        sizes = float(end[name].norm() + start[name].norm()) * max(1.0, scale)
        allowed = 4 * EPS * (sizes if form == "cat" else sizes + float(weights[1][f"{name}.weight"].detach().norm()))
        assert float((made[name] - expected).norm()) <= allowed
    assert found.protection is not None
    assert found.protection.rho is None or found.protection.rho <= found.protection.bound


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(0, 4), moves=st.sampled_from(["", "A", "B", "AB", "rank", "scale", "grown"]))
def test_scaled_factors_are_the_dense_combination(seed, scale, moves):
    torch.manual_seed(seed)
    start = Factors(torch.randn(3, 9), torch.randn(7, 3), 2.0)
    end = start.copy()
    if moves == "rank":
        end = Factors(torch.randn(5, 9), torch.randn(7, 5), 2.0)
    elif moves == "scale":
        end = Factors(torch.randn(3, 9), torch.randn(7, 3), 0.5)
    elif moves == "grown":
        end = Factors(torch.cat([start.A, torch.randn(2, 9)]), torch.cat([start.B, torch.randn(7, 2)], dim=1), 2.0)
    else:
        end.A.add_(torch.randn(3, 9) * ("A" in moves))
        end.B.add_(torch.randn(7, 3) * ("B" in moves))
    (one,), (other,) = dense({"": start}).values(), dense({"": end}).values()
    made = scaled_change(end, start, scale)
    assert torch.allclose(dense({"": made})[""], one + scale * (other - one), rtol=0, atol=1e-12 * float(one.norm() + other.norm()))
    assert made.rank == (end.rank if moves in ("", "A", "B", "grown") else start.rank + end.rank)
    assert torch.allclose(dense({"": scaled_change(end, None, scale)})[""], scale * other, rtol=0, atol=1e-12 * float(other.norm()))


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_number_of_0_or_more_is_refused(scale):
    with pytest.raises(InvalidValue, match="--scale takes a number of 0 or more"):
        Request(scale=scale)


def bases(run):
    from anchorlora.features.files import read_cores

    return {layer: core.basis for layer, core in read_cores(saved.folders(run, ORDER)[0] / "cores.safetensors").items()}


def rho(run, after):
    """rho of the last task's change on the first task's cores, every matrix formed; after: layer -> (d_out, d_in)."""
    before, V = dense(read_adapter(saved.folders(run, ORDER)[0] / "adapter")), bases(run)
    return float(oracle.drift([(after[layer] - before[layer], V[layer]) for layer in after])["rho"])


class TestCat:
    def test_every_factor_is_bitwise_the_runs_own(self, run, tmp_path):
        found = ask(run, tmp_path / "out")
        theirs, ours = load_file(last(run) / "adapter_model.safetensors"), load_file(tmp_path / "out/adapter_model.safetensors")
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(t, ours[k]) and ours[k].dtype == torch.float32 for k, t in theirs.items())
        assert found.error == 0.0
        assert {layer.error for layer in found.layers} == {0.0}
        assert found.rank == (4 if run.name == "sfor" else 8)
        assert found == read_file(tmp_path / "out/export.json", Export, remedy="export again")
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
            "export.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]

    def test_a_task_its_adapter_and_the_run_are_the_same_export(self, run, tmp_path):
        for number, source in enumerate((run, last(run).parent, last(run))):
            ask(source, tmp_path / str(number))
        for name in ("adapter_config.json", "adapter_model.safetensors", "export.json"):
            assert len({(tmp_path / str(number) / name).read_bytes() for number in range(3)}) == 1, name

    def test_what_it_says_of_protection_is_the_records_drift(self, run, tmp_path):
        record = json.loads((run / "record.json").read_text())
        kept = ask(run, tmp_path / "out").protection
        assert kept.rho == kept.rho_exported == pytest.approx(record["drift"][0]["rho"], rel=1e-6)
        assert kept.rho <= kept.bound
        assert kept.rho == pytest.approx(rho(run, dense(read_adapter(last(run)))), rel=0.2)  # of size 1e-8: rounding of the oracle

    def test_the_first_task_has_no_protected_past(self, run, tmp_path):
        found = ask(saved.folders(run, ORDER)[0], tmp_path / "out")
        assert found.protection is None
        assert (found.source.number, found.source.task, found.source.tasks) == (1, "fruit", 2)

    def test_peft_gives_the_logits_of_the_run(self, run, small_model, tmp_path):
        ask(run, tmp_path / "out")
        expected = logits(PeftModel.from_pretrained(base(small_model), last(run)))
        assert torch.equal(logits(PeftModel.from_pretrained(base(small_model), tmp_path / "out")), expected)

    def test_no_path_of_this_machine_is_in_any_file(self, run, small_model, tmp_path):
        ask(run, tmp_path / "out")
        for path in (tmp_path / "out").iterdir():
            assert str(small_model.parent).encode() not in path.read_bytes(), path.name
            assert str(tmp_path).encode() not in path.read_bytes(), path.name
        assert json.loads((tmp_path / "out/adapter_config.json").read_text())["base_model_name_or_path"] is None

    def test_an_unfinished_run_gives_its_last_finished_task(self, run, tmp_path):
        part = shutil.copytree(run, tmp_path / "part")
        for name in ("record.json", "state/recorded.json"):
            (part / name).unlink()
        for name in ("tasks/2-mood", "state/2"):
            shutil.rmtree(part / name)
        found = ask(part, tmp_path / "out")
        assert (found.source.number, found.source.finished) == (1, False)
        for name in ("tasks/1-fruit", "state/1"):
            shutil.rmtree(part / name)
        with pytest.raises(ValueError, match=r"has finished no task; continue with anchorlora run .*config.yaml --out"):
            ask(part, tmp_path / "again")


@pytest.mark.usefixtures("extra_eval")
def test_lm_eval_reads_the_same_loglikelihoods_from_the_run_and_from_its_export(run, small_model, tmp_path):
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    ask(run, tmp_path / "out")
    texts = [("Choose.\nappleish test 1", " apple"), ("Choose.\nsome old irons", " gold"), ("a", " calm sad")]

    def read(peft):
        arguments = f"pretrained={small_model},dtype=float32" + (f",peft={peft}" if peft else "")
        reader = get_model("hf").create_from_arg_string(arguments, {"batch_size": 1, "device": "cpu"})
        requests = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i) for i, pair in enumerate(texts)]
        return reader.loglikelihood(requests, disable_tqdm=True)

    found = read(tmp_path / "out")
    assert found == read(last(run))
    assert found != read(None), "the adapter does something"


class TestSvd:
    @pytest.mark.parametrize("rank", [1, 3])
    def test_each_layers_error_is_that_of_the_best_dense_approximation(self, run, rank, tmp_path):
        found = ask(run, tmp_path / "out", "svd", rank=rank)
        whole, less = 0.0, 0.0
        written = dense(read_adapter(tmp_path / "out"))
        for (layer, W), told in zip(dense(read_adapter(last(run))).items(), found.layers, strict=True):
            values = torch.linalg.svdvals(W)
            whole, less = whole + float(values.square().sum()), less + float(values[rank:].square().sum())
            assert (told.module, told.rank) == (layer, rank)
            assert told.error == pytest.approx(float(values[rank:].norm() / values.norm()), rel=1e-5)
            assert told.error == pytest.approx(float((written[layer] - W).norm() / W.norm()), rel=1e-6)
        assert found.error == pytest.approx((less / whole) ** 0.5, rel=1e-5)
        assert found.rank == rank

    def test_what_is_cut_off_is_told_as_protection_lost(self, run, tmp_path):
        found = ask(run, tmp_path / "out", "svd", rank=1)
        assert found.protection.rho_exported == pytest.approx(rho(run, dense(read_adapter(tmp_path / "out"))), rel=1e-6)
        assert found.protection.rho_exported > 1e4 * found.protection.rho

    @pytest.mark.parametrize("rank", [8, 100])
    def test_a_rank_that_holds_everything_is_exact_and_goes_no_higher(self, run, rank, small_model, tmp_path):
        found = ask(run, tmp_path / "out", "svd", rank=rank)
        needed = read_adapter(last(run)).popitem()[1].rank
        assert (found.rank, found.asked_rank) == (needed, rank)
        assert found.error <= 4 * EPS
        expected = logits(PeftModel.from_pretrained(base(small_model), last(run)))
        assert_alike(logits(PeftModel.from_pretrained(base(small_model), tmp_path / "out")), expected)

    def test_layers_narrower_than_the_rank_are_filled_with_zeros(self, small_model, tmp_path):
        wide = {f"model.layers.0.self_attn.{n}": Factors(torch.randn(48, 64), torch.randn(d, 48), 2.0) for n, d in WIDTHS.items()}
        write_adapter(tmp_path / "a", wide, base=None)
        found = ask(tmp_path / "a", tmp_path / "out", "svd", rank=40)
        written = read_adapter(tmp_path / "out")
        assert {f.rank for f in written.values()} == {40}
        assert not written["model.layers.0.self_attn.v_proj"].A[32:].any()
        assert {layer.module[-6:]: layer.error < 1e-6 for layer in found.layers} == {"q_proj": False, "v_proj": True}


WIDTHS = {"q_proj": 64, "v_proj": 32}


class TestMerged:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_every_weight_is_the_dense_sum_rounded_once(self, run, dtype, small_model, tmp_path):
        found = ask(run, tmp_path / "out", "merged", dtype=dtype)
        stored, kind = load_file(tmp_path / "out/model.safetensors"), getattr(torch, dtype)
        then, updates = load_file(small_model / "model.safetensors"), dense(read_adapter(last(run)))
        errors, after = {}, {}
        for name, weight in then.items():
            layer = name.removesuffix(".weight")
            exact = weight.double() + updates.get(layer, 0.0)
            assert stored[name].dtype == kind
            assert torch.equal(stored[name], exact.to(kind)), name
            if layer in updates:
                errors[layer] = (float((stored[name].double() - exact).norm()), float(updates[layer].norm()))
                after[layer] = stored[name].double() - weight.double()
        for told in found.layers:
            error, update = errors[told.module]
            assert told.error == pytest.approx(error / update, rel=1e-6)
        assert found.error == pytest.approx(total(errors, 0) / total(errors, 1), rel=1e-6)
        assert found.protection.rho_exported == pytest.approx(rho(run, after), rel=1e-6)
        assert (found.dtype, found.rank) == (dtype, None)

    def test_float32_gives_the_logits_of_the_adapter_on_its_base(self, run, small_model, tmp_path):
        found = ask(run, tmp_path / "out", "merged")
        assert found.dtype == "float32", "the base's own"
        expected = logits(PeftModel.from_pretrained(base(small_model), last(run)))
        assert_alike(logits(base(tmp_path / "out")), expected)
        assert found.logits.changed == 0.0
        assert found.logits.largest < 1e-4 * found.logits.typical
        assert found.base.same is True
        AutoTokenizer.from_pretrained(tmp_path / "out")

    def test_a_bfloat16_base_stays_bfloat16_and_its_loss_of_protection_is_stated(self, run, half_model, tmp_path):
        found = ask(run, tmp_path / "out", "merged", model=str(half_model))
        assert found.dtype == "bfloat16"
        assert found.base.same is False
        assert found.protection.rho <= found.protection.bound
        assert found.protection.rho_exported > 1e3 * found.protection.rho
        assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
        live = logits_of(PeftModel.from_pretrained(base(half_model), last(run)).eval())
        written = logits_of(base(tmp_path / "out"))
        bare = logits_of(base(half_model))
        assert found.logits.largest == pytest.approx(float((written - live).abs().max()), rel=1e-3)
        assert found.logits.mean == pytest.approx(float((written - live).abs().mean()), rel=1e-3)
        assert found.logits.typical == pytest.approx(float((live - bare).square().mean().sqrt()), rel=1e-3)
        assert found.logits.changed == float((written.argmax(-1) != live.argmax(-1)).double().mean())
        assert found.logits.tokens == 8 * 32

    def test_a_weight_that_two_layers_share_is_not_merged_into(self, tmp_path):
        model = models.qwen3(tie_word_embeddings=True)
        model.save_pretrained(tmp_path / "tied")
        models.tokenizer(["a b"], size=300).save_pretrained(tmp_path / "tied")
        write_adapter(
            tmp_path / "a", {"lm_head": Factors(torch.randn(2, 64), torch.randn(64, 2), 1.0)}, base=str(tmp_path / "tied")
        )
        with pytest.raises(
            ValueError, match="lm_head shares its weight with model.embed_tokens.weight, which a merge would change too"
        ):
            ask(tmp_path / "a", tmp_path / "out", "merged")
        assert not (tmp_path / "out").exists()

    def test_an_update_that_overflows_the_type_is_refused(self, small_model, tmp_path):
        huge = {"model.layers.0.self_attn.q_proj": Factors(torch.ones(1, 64), torch.full((64, 1), 1e6), 1.0)}
        write_adapter(tmp_path / "a", huge, base=str(small_model))
        with pytest.raises(ValueError, match=r"q_proj.weight does not fit in float16; choose another --dtype"):
            ask(tmp_path / "a", tmp_path / "out", "merged", dtype="float16")

    def test_an_adapter_of_another_model_is_refused(self, run, tmp_path):
        models.qwen3(hidden_size=32).save_pretrained(tmp_path / "other")
        models.tokenizer(["a b"], size=300).save_pretrained(tmp_path / "other")
        with pytest.raises(ValueError, match="belongs to another model"):
            ask(run, tmp_path / "out", "merged", model=str(tmp_path / "other"))

    def test_a_quantized_base_takes_no_update(self, run, small_model, tmp_path):
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
        quantized = shutil.copytree(small_model, tmp_path / "quantized")
        config = json.loads((quantized / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        (quantized / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=r"is quantized \(nf4\), and its weights take no update .* --form cat or svd, or give"):
            ask(run, tmp_path / "out", "merged", model=str(quantized))


def total(pairs, which):
    return sum(pair[which] ** 2 for pair in pairs.values()) ** 0.5


@pytest.mark.parametrize(("form", "more"), [("cat", {}), ("svd", {"rank": 12}), ("merged", {})])
def test_a_live_stack_comes_back_from_every_form(form, more, small_model, tmp_path):
    blocks = AdapterStack(base(small_model), targets=("q_proj", "v_proj"), rank=4, alpha=16)
    for task in range(3):
        blocks.open(torch.Generator().manual_seed(task))
        optimizer = torch.optim.AdamW(blocks.trainable(), lr=1e-2)
        blocks.model.train()
        for step in range(3):
            ids = models.tokens(seed=10 * task + step)
            blocks.model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        blocks.fold()
    write_adapter(tmp_path / "a", blocks.factors(), base=str(small_model))
    ask(tmp_path / "a", tmp_path / "out", form, **more)
    loaded = base(tmp_path / "out") if form == "merged" else PeftModel.from_pretrained(base(small_model), tmp_path / "out")
    assert_alike(logits(loaded), logits(blocks.model))


def test_half_precision_factors_are_written_as_float32_and_said_so(small_model, tmp_path):
    write_adapter(
        tmp_path / "a", {"model.layers.0.self_attn.q_proj": Factors(torch.randn(4, 64), torch.randn(64, 4), 2.0)}, base="org/name"
    )
    file = tmp_path / "a/adapter_model.safetensors"
    save_file({k: t.bfloat16() for k, t in load_file(file).items()}, file)
    found = ask(tmp_path / "a", tmp_path / "out")
    assert (found.source.dtype, found.dtype, found.error) == ("BF16", "float32", 0.0)
    ours, theirs = load_file(tmp_path / "out/adapter_model.safetensors"), load_file(file)
    assert all(torch.equal(ours[k], t.float()) for k, t in theirs.items())
    assert (found.base.name, found.base.hub, found.source.kind) == ("org/name", "org/name", "adapter")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"form": "svd"}, "--form svd needs the rank to reduce to; give it with --rank"),
        ({"rank": 4}, "--rank is for --form svd, and the form is cat"),
    ],
)
def test_requests_that_make_no_sense_are_refused(request_, message):
    with pytest.raises(ValueError, match=message):
        Request(**request_)


def test_an_export_appears_whole_or_not_at_all(run, tmp_path):
    def violation(found, record):
        raise RuntimeError("no ink")

    with pytest.raises(RuntimeError, match="no ink"):
        export(export_source(run), Request(), to=tmp_path / "out", card=violation)
    assert list(tmp_path.iterdir()) == []
    ask(run, tmp_path / "out")
    with pytest.raises(ValueError, match="out exists already; an export is written once, choose another --out"):
        ask(run, tmp_path / "out")


@pytest.mark.parametrize("moment", ["while it fills its folder", "once it has filled it"])
def test_of_two_exports_at_once_the_second_ends_in_one_line_and_spoils_nothing(moment, run, tmp_path, monkeypatch):
    """The other one comes and goes before the first one's card is written, or after."""
    flush = files.flush

    def another():
        monkeypatch.setattr(files, "flush", flush)
        ask(run, tmp_path / "out", form="svd", rank=1)

    if moment == "once it has filled it":
        monkeypatch.setattr(files, "flush", lambda folder: (another(), flush(folder)))
    card = no_card if moment == "once it has filled it" else lambda found, record: another() or ""
    with pytest.raises(InvalidValue, match="out exists already; an export is written once, choose another --out"):
        export(export_source(run), Request(), to=tmp_path / "out", card=card)
    assert read_file(tmp_path / "out/export.json", Export, remedy="export again").form == "svd"
    assert (tmp_path / "out/adapter_model.safetensors").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


INSIDE = {
    "inside a larger model": lambda layer: layer.replace("model.", "model.language_model.", 1),
    "beside its vision": lambda layer: f"language_model.{layer}",
    "compiled": lambda layer: f"_orig_mod.{layer}",
    "with compiled layers": lambda layer: layer.replace("self_attn.", "self_attn._orig_mod."),
}


@pytest.mark.parametrize("renamed", INSIDE.values(), ids=INSIDE)
def test_layers_under_another_prefix_are_exported_under_that_of_the_base_model(renamed, small_model, tmp_path):
    layers = [f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in ("q_proj", "v_proj")]
    widths = {layer: base(small_model).get_submodule(layer).weight.shape for layer in layers}
    factors = {layer: Factors(torch.randn(2, i), torch.randn(o, 2), 0.5) for layer, (o, i) in widths.items()}
    write_adapter(tmp_path / "plain", factors, base=str(small_model), targets=["q_proj", "v_proj"])
    write_adapter(
        tmp_path / "old", {renamed(layer): f for layer, f in factors.items()}, base=str(small_model), targets=["q_proj", "v_proj"]
    )
    ask(tmp_path / "old", tmp_path / "out")
    loaded = PeftModel.from_pretrained(base(small_model), tmp_path / "out")
    plain = PeftModel.from_pretrained(base(small_model), tmp_path / "plain")
    assert torch.equal(logits(loaded), logits(plain))
    assert set(read_adapter(tmp_path / "out")) == set(layers)
    ask(tmp_path / "old", tmp_path / "merged", "merged")


def test_a_merged_model_that_sees_images_has_the_files_by_which_servers_show_it_some(tmp_path):
    (SEES.write(tmp_path / "model") / "preprocessor_config.json").write_text('{"size": 28}')
    factors = {"model.language_model.layers.0.self_attn.q_proj": Factors(torch.randn(2, 32), torch.randn(32, 2), 1.0)}
    write_adapter(tmp_path / "adapter", factors, base=str(tmp_path / "model"))
    ask(tmp_path / "adapter", tmp_path / "out", "merged")
    assert (tmp_path / "out/preprocessor_config.json").read_text() == '{"size": 28}'
    merged, before = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "model"))
    changed = [name for name, p in merged.named_parameters() if not torch.equal(p, before.get_parameter(name))]
    assert changed == [f"{next(iter(factors))}.weight"]


def test_layers_that_the_base_model_has_under_no_one_prefix_are_refused_in_one_line(small_model, tmp_path):
    factors = {"model.vision.layers.0.self_attn.out": Factors(torch.randn(2, 64), torch.randn(64, 2), 1.0)}
    write_adapter(tmp_path / "old", factors, base=str(small_model))
    with pytest.raises(ValueError, match="which the model does not have; the adapter belongs to another model$"):
        ask(tmp_path / "old", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_of_two_prefixes_that_fit_none_is_chosen():
    names = ["a.layers.0.q", "b.layers.0.q"]
    with pytest.raises(ValueError, match="adapts c.layers.0.q, which the model does not have; 2 prefixes would fit"):
        fitted({"c.layers.0.q": Factors(torch.randn(2, 8), torch.randn(8, 2), 1.0)}, names, where="adapter")
