"""Audits of saved checkpoints: numbers against dense float64, layouts of PEFT, and what is refused."""

import json
import re
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import models
import oracle
from anchorlora import Subspace
from anchorlora.adapters import read_adapter, write_adapter
from anchorlora.cli.app import main
from anchorlora.features import write_cores
from anchorlora.geometry import Factors
from anchorlora.measurement.adapters import compare
from anchorlora.measurement.checkpoints import audit
from anchorlora.store.tensors import open_weights
from audited import D_OUT, LAYERS, Drawn, edit_config, edit_weights, full_weights, write_pair, write_weights


def dense(before, after, bases):
    then, now = read_adapter(before), read_adapter(after)
    changes = {
        n: f.scale * f.B.double() @ f.A.double() - then[n].scale * then[n].B.double() @ then[n].A.double() for n, f in now.items()
    }
    return oracle.drift([(changes[n], bases[n]) for n in now])


def rho(found):
    return found.audited.overall.right.rho


def test_numbers_on_cores_agree_with_dense_float64(tmp_path):
    drawn = Drawn()
    before, after, cores = write_pair(tmp_path, drawn)
    found = audit(before, after, cores=cores)
    expected = dense(before, after, {n: V.float() for n, V in drawn.V.items()})
    assert rho(found) == pytest.approx(float(expected["rho"]), rel=1e-9)
    assert found.audited.overall.right.d_eff == pytest.approx(float(expected["d_eff"]), rel=1e-9)
    assert set(found.audited.layers) == set(LAYERS)
    assert (found.compared, found.storage) == ("adapters", "float32")


def test_rows_of_before_are_protected_where_nothing_is_named(tmp_path):
    before, after, _ = write_pair(tmp_path)
    bases = {n: torch.linalg.qr(f.A.double().T).Q for n, f in read_adapter(before).items()}
    found = audit(before, after)
    assert found.protected == "the rows of A in BEFORE, as in O-LoRA"
    assert rho(found) == pytest.approx(float(dense(before, after, bases)["rho"]), rel=1e-9)


def saved_by_peft(root, *, seed=0, **config):
    """A model folder and two states of its adapter, as PEFT itself writes them."""
    torch.manual_seed(seed)
    base = models.qwen3()
    base.save_pretrained(root / "base")
    settings = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], **config}
    model = get_peft_model(base, LoraConfig(**settings))
    model.peft_config["default"].base_model_name_or_path = str(root / "base")
    for state in ("before", "after"):
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:
                    p.add_(0.1 * torch.randn(p.shape))
        model.save_pretrained(root / state)
    return root / "before", root / "after"


@pytest.mark.parametrize(
    "config",
    [{}, {"use_rslora": True}, {"rank_pattern": {"layers.0.self_attn.q_proj": 2}, "alpha_pattern": {"v_proj": 3}}],
    ids=["plain", "rslora", "patterns"],
)
def test_singular_vectors_of_the_base_and_scales_agree_with_what_peft_itself_merges(config, tmp_path):
    before, after = saved_by_peft(tmp_path, **config)
    found = audit(before, after, weights=6)
    base = load_file(tmp_path / "base/model.safetensors")
    states = []
    for folder in (before, after):
        model = models.qwen3().double()
        model.load_state_dict(base, strict=False)
        states.append(PeftModel.from_pretrained(model, str(folder)).double().merge_and_unload().state_dict())
    reads, writes = [], []
    for layer in found.audited.layers:
        name = f"{layer}.weight"
        W = base[name]
        dW = states[1][name] - states[0][name]
        U, _, Vt = torch.linalg.svd(W.double())
        reads.append((dW, Vt[:6].T))
        writes.append((dW.T, U[:, :6]))
    assert rho(found) == pytest.approx(float(oracle.drift(reads)["rho"]), rel=1e-6)
    assert found.audited.overall.left.rho == pytest.approx(float(oracle.drift(writes)["rho"]), rel=1e-6)


def test_adapters_of_one_folder_are_summed_and_a_new_one_is_a_zero_output_block(tmp_path):
    drawn, other = Drawn(), Drawn(3)
    before, after, cores = write_pair(tmp_path, drawn)
    write_adapter(after / "second", other.before(), base="tiny")
    found = audit(before, after, cores=cores)
    then, now, new = read_adapter(before), read_adapter(after), read_adapter(after / "second")

    def product(f):
        return f.scale * f.B.double() @ f.A.double()

    layers = [(product(now[n]) - product(then[n]) + product(new[n]), drawn.V[n].float()) for n in now]
    assert rho(found) == pytest.approx(float(oracle.drift(layers)["rho"]), rel=1e-9)
    assert found.audited.overall.kind == "mixed"
    assert any("the adapter 'second' is new" in note for note in found.notes)
    assert any("2 adapters are summed" in note for note in found.notes)


def test_a_block_beside_an_unchanged_one_is_audited_alone(tmp_path):
    before, _, cores = write_pair(tmp_path)
    shutil.copytree(before, tmp_path / "more")
    fresh = Drawn()
    projected = {
        n: Factors((f.A.double() @ oracle.projector(fresh.V[n].float())).float(), f.B, 2.0) for n, f in Drawn(5).before().items()
    }
    write_adapter(tmp_path / "more/second", projected, base="tiny")
    found = audit(before, tmp_path / "more", cores=cores).audited.overall
    assert (found.kind, found.status, found.preserved_by) == ("zero-output block", "preserved", "state")


def test_rows_stacked_behind_unchanged_ones_are_a_new_block(tmp_path):
    drawn, newer = Drawn(), Drawn(4)
    before, _, cores = write_pair(tmp_path, drawn)
    stacked = {
        n: Factors(torch.cat([f.A, newer.before()[n].A]), torch.cat([f.B, newer.before()[n].B], dim=1), 2.0)
        for n, f in drawn.before().items()
    }
    write_adapter(tmp_path / "stacked", stacked, base="tiny")
    found = audit(before, tmp_path / "stacked", cores=cores)
    layers = [(2.0 * f.B.double() @ f.A.double(), drawn.V[n].float()) for n, f in newer.before().items()]
    assert rho(found) == pytest.approx(float(oracle.drift(layers)["rho"]), rel=1e-6)
    assert found.audited.overall.kind == "zero-output block"
    assert found.audited.overall.conditions["displacement"].preserved is None


def test_other_ranks_are_compared_by_their_products(tmp_path):
    drawn = Drawn()
    before, _, cores = write_pair(tmp_path, drawn)
    wider = {n: Factors(torch.randn(6, f.A.shape[1]), torch.randn(D_OUT, 6), 2.0) for n, f in drawn.before().items()}
    write_adapter(tmp_path / "wider", wider, base="tiny")
    found = audit(before, tmp_path / "wider", cores=cores)
    assert rho(found) == pytest.approx(
        float(dense(before, tmp_path / "wider", {n: V.float() for n, V in drawn.V.items()})["rho"]), rel=1e-6
    )
    assert any("so the products are compared" in note for note in found.notes)


def test_checkpoints_of_a_trainer_inside_the_folder_are_no_further_adapters(tmp_path):
    before, after, cores = write_pair(tmp_path)
    alone = audit(before, after, cores=cores)
    shutil.copytree(before, after / "checkpoint-100")
    assert rho(audit(before, after, cores=cores)) == rho(alone)


def test_an_adapter_under_another_prefix_than_the_base_model_is_audited_on_its_weights(tmp_path):
    """As of a text model within one that sees images, by the names of another version of transformers."""
    before, after = saved_by_peft(tmp_path)
    named = audit(before, after, weights=4)
    base = tmp_path / "base/model.safetensors"
    save_file({f"language_model.{name}": tensor for name, tensor in load_file(base).items()}, base)
    for folder in (before, after):
        edit_weights(folder, lambda t: {n.replace("model.layers", "model.language_model.layers"): x for n, x in t.items()})
    found = audit(before, after, weights=4)
    assert rho(found) == rho(named)
    assert all(layer.startswith("model.language_model.layers.") for layer in found.audited.layers)


def test_of_a_base_with_both_orders_of_axes_each_weight_is_read_in_its_own(tmp_path):
    """GPT-2 with a head in the adapter, for which PEFT says fan_in_fan_out false."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"h.0.attn.c_proj": (8, 8), "h.0.mlp.c_fc": (8, 20), "lm_head": (30, 8)}  # the first two (d_in, d_out)
    base = {f"{name}.weight": torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    base |= {f"{name}.bias": torch.zeros(shape[1]) for name, shape in shapes.items() if name != "lm_head"}
    write_weights(tmp_path / "base", base)
    pairs = []
    for name, (rows, columns) in shapes.items():
        d_out, d_in = (rows, columns) if name == "lm_head" else (columns, rows)
        W = base[f"{name}.weight"] if name == "lm_head" else base[f"{name}.weight"].T
        pairs.append((name, W.double(), [Factors(torch.randn(2, d_in), torch.randn(d_out, 2), 2.0) for _ in "01"]))
    for i, state in enumerate(("before", "after")):
        write_adapter(tmp_path / state, {name: factors[i] for name, _, factors in pairs}, base=str(tmp_path / "base"))
    changes = [(_product(one) - _product(zero), torch.linalg.svd(W)[2][:3].T) for _, W, (zero, one) in pairs]
    expected = float(oracle.drift(changes)["rho"])
    assert rho(audit(tmp_path / "before", tmp_path / "after", weights=3)) == pytest.approx(expected, rel=1e-6)


def _product(f):
    return f.scale * f.B.double() @ f.A.double()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_a_quantized_base_has_no_singular_directions(dtype, tmp_path):
    before, after = saved_by_peft(tmp_path)
    base = tmp_path / "base/model.safetensors"
    save_file({name: (100 * t).to(dtype) if "proj" in name else t for name, t in load_file(base).items()}, base)
    refused("q_proj is stored in .*8.*: without its scales, .* give the model in full precision", before, after, weights=4)


def test_an_adapter_against_its_bare_model_is_a_zero_output_block(tmp_path):
    _, after = saved_by_peft(tmp_path)
    found = audit(tmp_path / "base", after, weights=4)
    assert (found.audited.overall.kind, found.audited.overall.status) == ("zero-output block", "violated")
    with pytest.raises(ValueError, match="BEFORE has no trained rows"):
        audit(tmp_path / "base", after)
    edit_config(after, base_model_name_or_path="org/elsewhere")
    (note,) = set(audit(tmp_path / "base", after, weights=4).notes) - set(found.notes)
    assert note.startswith(f"{after} names org/elsewhere as its base model, and {tmp_path}/base was given")


@pytest.mark.parametrize("both", [True, False])
def test_a_bf16_adapter_is_audited_with_its_floor_stated(both, tmp_path):
    """By `measure` too, and where only one of the two was saved so."""
    drawn = Drawn()
    before, after, cores = write_pair(tmp_path, drawn, outside=True, freeze=True)
    for folder in (before, after) if both else (after,):
        edit_weights(folder, lambda tensors: {n: t.bfloat16() for n, t in tensors.items()})
    found = audit(before, after, cores=cores)
    assert found.storage == "bfloat16"
    assert any("training under protection refuses such an adapter" in note for note in found.notes)
    parts = [(f.A, f.B, f.scale, 5) for f in read_adapter(after).values()]
    expected = oracle.floor(parts, found.audited.overall.right.d_eff) * 2**16
    assert found.audited.overall.right.rho_floor == pytest.approx(expected, rel=1e-9)
    assert found.audited.overall.right.bound > 1e-3
    assert found.audited.overall.status == "preserved", "still far below what a random change would have"
    for one, other in ((before, after), (after, before)):
        assert audit(one, other, cores=cores).storage == "bfloat16"
        measured = compare(one, other, cores=cores)
        assert measured.rho_floor == pytest.approx(expected, rel=1e-2)
        assert measured.exact


def test_where_rounding_hides_the_answer_neither_measure_nor_audit_calls_it_protected(tmp_path, capsys):
    before, after, cores = write_pair(tmp_path)
    small = {n: Factors(f.A + 1e-3 * (read_adapter(after)[n].A - f.A), f.B, f.scale) for n, f in read_adapter(before).items()}
    write_adapter(tmp_path / "small", small, base="tiny")
    for folder in (before, tmp_path / "small"):
        edit_weights(folder, lambda tensors: {n: t.bfloat16() for n, t in tensors.items()})
    assert audit(before, tmp_path / "small", cores=cores).audited.overall.status == "unresolved"
    measured = compare(before, tmp_path / "small", cores=cores)
    assert measured.rho > 0.3
    assert not measured.exact
    assert "Rounding hides the answer" in str(measured)
    assert main(["measure", str(before), str(tmp_path / "small"), "--cores", str(cores)]) == 0
    assert "cannot tell: rounding explains a rho of" in capsys.readouterr().out


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_weights_are_read_whole_or_in_shards(shards, dtype, tmp_path):
    one, other = full_weights(dtype=dtype), full_weights(step=0.1, dtype=dtype)
    before, after = write_weights(tmp_path / "a", one, shards=shards), write_weights(tmp_path / "b", other)
    found = audit(before, after, weights=3)
    reads = []
    for name in ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"):
        W0, W = one[f"{name}.weight"].double(), other[f"{name}.weight"].double()
        reads.append((W - W0, torch.linalg.svd(W0)[2][:3].T))
    assert rho(found) == pytest.approx(float(oracle.drift(reads)["rho"]), rel=1e-6)
    assert found.storage == str(dtype).removeprefix("torch.")
    assert found.audited.overall.kind == "full weight"
    assert any("2 other tensors differ and were not audited" in note for note in found.notes)


def test_weights_that_are_stored_with_their_inputs_first_as_in_gpt2_are_read_so(tmp_path):
    draw = torch.Generator().manual_seed(0)
    shapes = {"h.0.attn.c_proj": (8, 8), "h.0.mlp.c_fc": (8, 20), "h.0.mlp.c_proj": (20, 8)}  # (d_in, d_out)
    one = {f"{name}.weight": torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    one |= {f"{name}.bias": torch.zeros(shape[1]) for name, shape in shapes.items()} | {
        "lm_head.weight": torch.randn(30, 8, generator=draw)
    }
    other = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=draw) for name, tensor in one.items()}
    before, after = write_weights(tmp_path / "a", one), write_weights(tmp_path / "b", other)
    cores = {name: Subspace(torch.linalg.qr(torch.randn(shape[0], 3, generator=draw)).Q) for name, shape in shapes.items()}
    write_cores(tmp_path / "cores.safetensors", cores)
    found = audit(before, after, cores=tmp_path / "cores.safetensors")
    pairs = [((other[f"{name}.weight"] - one[f"{name}.weight"]).T.double(), core.basis.double()) for name, core in cores.items()]
    assert rho(found) == pytest.approx(float(oracle.drift(pairs)["rho"]), rel=1e-6)
    assert "3 as (d_in, d_out), as GPT-2 stores them" in found.notes[0]
    head = audit(before, after, weights=3).audited.layers["lm_head"]
    assert (head.d, head.k) == (8, 3)


def test_tensors_that_are_stored_in_another_type_alone_do_not_differ(tmp_path):
    one = full_weights(dtype=torch.bfloat16)
    other = {name: tensor.float() for name, tensor in one.items()}
    other["model.layers.0.mlp.up_proj.weight"] = other["model.layers.0.mlp.up_proj.weight"] + 0.1
    before, after = write_weights(tmp_path / "a", one), write_weights(tmp_path / "b", other)
    assert not any("other tensors differ" in note for note in audit(before, after, weights=3).notes)


def test_the_verdict_says_that_something_else_differs(tmp_path):
    one, other = full_weights(), full_weights()
    other["model.norm.weight"] = other["model.norm.weight"] + 1e-7
    found = audit(write_weights(tmp_path / "a", one), write_weights(tmp_path / "b", other))
    others = "1 other tensor differs and was not audited, first model.norm.weight"
    assert found.verdict == f"Nothing moved in the layers that were audited. {others}."
    assert "check that the other tensors were meant to change" in found.advice
    W0 = one["model.layers.0.mlp.up_proj.weight"].double()
    outside = oracle.projector(torch.linalg.svd(W0)[2][:3].T)
    other["model.layers.0.mlp.up_proj.weight"] = (
        W0 + torch.linalg.svd(W0)[0][:, 3:8] @ torch.ones(5, 12).double() @ outside
    ).float()
    found = audit(write_weights(tmp_path / "c", one), write_weights(tmp_path / "d", other), weights=3)
    assert found.verdict.startswith("Protected: ")
    assert found.verdict.endswith(f" {others}.")


def test_one_bit_of_a_float32_weight_is_not_to_be_saved_in_float32_again(tmp_path):
    one, other = full_weights(), full_weights()
    flipped = other["model.layers.0.mlp.up_proj.weight"].view(torch.int32)
    flipped[0, 0] ^= 1
    found = audit(write_weights(tmp_path / "a", one), write_weights(tmp_path / "b", other))
    assert found.audited.overall.status == "unresolved"
    assert "rounding to float32 explains all of it, and" in found.verdict
    assert found.advice == "A change this small is hidden by rounding to float32; audit a later checkpoint."


@pytest.mark.parametrize("head", [False, True])
def test_layers_of_a_model_with_more_tokens_are_audited_and_its_table_is_named(head, tmp_path):
    one, other = full_weights(), full_weights(step=0.1)
    if head:
        one["lm_head.weight"] = other["lm_head.weight"] = one["model.embed_tokens.weight"].clone()
    same = audit(write_weights(tmp_path / "a", one), write_weights(tmp_path / "b", other), weights=3)
    resized = ["model.embed_tokens.weight", "lm_head.weight"][: 1 + head]
    for name in resized:
        other[name] = torch.cat([other[name], torch.ones(3, other[name].shape[1])])
    found = audit(tmp_path / "a", write_weights(tmp_path / "more", other), weights=3)
    assert rho(found) == rho(same)
    rows = len(one["model.embed_tokens.weight"])
    note = f"the vocabulary had {rows} rows and has {rows + 3}, so these were not audited: "
    (named,) = (said.removeprefix(note) for said in found.notes if said.startswith(note))
    assert set(named.split(", ")) == set(resized)
    assert set(found.beside) == {"model.norm.weight", *resized}


@pytest.mark.parametrize("whole", ["before", "after"])
def test_a_head_that_one_checkpoint_stores_is_the_table_of_embeddings_in_the_other(whole, tmp_path):
    tied = full_weights()
    table = tied["model.embed_tokens.weight"].double()
    change = torch.randn(table.shape, dtype=torch.float64)
    own = {**tied, "lm_head.weight": (table + 0.1 * change).float()}
    one, other = (own, tied) if whole == "before" else (tied, own)
    found = audit(write_weights(tmp_path / "a", one), write_weights(tmp_path / "b", other), weights=3)
    W0 = one.get("lm_head.weight", table).double()
    step = (own["lm_head.weight"].double() - table) * (1 if whole == "after" else -1)
    assert rho(found) == pytest.approx(float(oracle.drift([(step, torch.linalg.svd(W0)[2][:3].T)])["rho"]), rel=1e-5)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        own[name] = torch.cat([own[name], torch.ones(3, own[name].shape[1])])
    wider = write_weights(tmp_path / "c", own)
    found = audit(*(wider, tmp_path / "b") if whole == "before" else (tmp_path / "a", wider), weights=3)
    assert set(found.beside) == {"model.embed_tokens.weight", "lm_head.weight"}


def test_full_weights_preserved_by_projection_are_found_preserved_without_options(tmp_path):
    one = full_weights()
    other = dict(one)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        W0 = one[name].double()
        V = torch.linalg.svd(W0)[2][: min(W0.shape) // 2].T
        other[name] = (W0 + 0.1 * torch.randn(W0.shape, dtype=torch.float64) @ oracle.projector(V)).float()
    found = audit(write_weights(tmp_path / "a", one), write_weights(tmp_path / "b", other))
    assert (found.audited.overall.status, found.audited.overall.preserved_by) == ("preserved", "displacement")
    assert found.protected == "the leading half of the singular directions of each weight in BEFORE, as in OSF"


def refused(message, before, after, **ask):
    with pytest.raises(ValueError, match=message) as said:
        audit(before, after, **ask)
    assert "\n" not in str(said.value)
    return str(said.value)


def test_adapters_that_do_not_fit_each_other_are_refused(tmp_path):
    before, after, cores = write_pair(tmp_path)
    edit_config(after, base_model_name_or_path="org/another")
    refused(
        "was trained on tiny and .* on org/another: a difference between adapters of different bases", before, after, cores=cores
    )
    edit_config(after, base_model_name_or_path="org/tiny")
    audit(before, after, cores=cores)
    assert audit(before, after, cores=cores).notes == ()
    edit_config(after, revision="step1000")
    assert f"different revisions of their base (main ({before}), step1000 ({after}))" in audit(before, after, cores=cores).notes[0]
    edit_config(after, use_dora=True)
    refused("describes a DoRA adapter", before, after, cores=cores)
    edit_config(after, use_dora=False)
    edit_weights(after, lambda t: {n: x for n, x in t.items() if "layers.1" not in n})
    refused("has other targets than before: model.layers.1.* and 1 others", before, after, cores=cores)


def test_other_widths_and_lost_adapters_are_refused(tmp_path):
    before, after, cores = write_pair(tmp_path)
    wide = Drawn(d_in=30)
    write_adapter(tmp_path / "wide", wide.before(), base="tiny")
    refused("has another width than before", before, tmp_path / "wide", cores=cores)
    write_adapter(before / "second", Drawn(3).before(), base="tiny")
    refused("lacks the adapter 'second'", before, after, cores=cores)


def test_adapters_of_different_bases_are_not_measured_without_a_word(tmp_path):
    before, after, cores = write_pair(tmp_path)
    edit_config(after, revision="step1000")
    with pytest.warns(UserWarning, match="name different revisions of their base"):
        compare(before, after, cores=cores)
    edit_config(after, base_model_name_or_path="org/another")
    with pytest.warns(UserWarning, match="was trained on tiny and .* on org/another: a difference .* says nothing"):
        compare(before, after, cores=cores)


def test_cores_of_another_model_or_layer_set_are_refused(tmp_path):
    before, after, _ = write_pair(tmp_path)
    other = write_pair(tmp_path / "other", Drawn(layers=LAYERS[:3]))[2]
    refused(
        "do not fit: .*v_proj and 0 others are in one of them only; these cores were made for another", before, after, cores=other
    )
    wide = write_pair(tmp_path / "wide", Drawn(d_in=30))[2]
    refused("has width 30, but the layer reads 24 inputs", before, after, cores=wide)
    a, b = write_weights(tmp_path / "a", full_weights()), write_weights(tmp_path / "b", full_weights(step=0.1))
    refused("these cores were made for another model", a, b, cores=wide)


def test_pickles_are_refused_with_a_command_that_converts_them(tmp_path):
    before, after, cores = write_pair(tmp_path)
    tensors = load_file(after / "adapter_model.safetensors")
    torch.save(tensors, after / "adapter_model.bin")
    (after / "adapter_model.safetensors").unlink()
    said = refused("adapter_model.bin is a pickle, which is not opened here; convert it: python -c", before, after, cores=cores)
    code = re.search(r'python -c "(.*)"$', said)[1]
    exec(code, {})
    assert load_file(after / "adapter_model.safetensors").keys() == tensors.keys()
    audit(before, after, cores=cores)
    for name in ("pytorch_model.bin", "weights.pt"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        torch.save(full_weights(), folder / name)
        refused(f"{name} is a pickle.*convert it: python -c", folder, folder)
        refused(f"{name} is a pickle.*convert it: python -c", folder / name, folder / name)
    torch.save({}, tmp_path / "weights/more.bin")
    refused("holds pickles, which are not opened here; convert them: .*save_pretrained", tmp_path / "weights", tmp_path / "weights")


def test_shards_are_read_beside_their_index_only(tmp_path):
    a, b = write_weights(tmp_path / "a", full_weights(), shards=2), write_weights(tmp_path / "b", full_weights(step=0.1))
    index = a / "model.safetensors.index.json"
    original = index.read_text()
    save_file({"x": torch.ones(1)}, tmp_path / "secret.safetensors")
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors"), "..\\\\secret.safetensors", "model.bin"):
        index.write_text(original.replace("model-00001-of-00002.safetensors", name))
        refused("which is not a safetensors file next to it", a, b)
    index.write_text("[]")
    refused("is not an index of shards", a, b)
    index.write_text(original.replace("model.norm.weight", "model.other.weight"))
    refused("does not hold model.other.weight, which model.safetensors.index.json expects there", a, b)
    index.write_text(original)
    (a / "model-00002-of-00002.safetensors").unlink()
    refused("model-00002-of-00002.safetensors is missing, and 2 tensors with it", a, b)


def test_a_file_of_factors_is_no_model(tmp_path):
    before, after, _ = write_pair(tmp_path)
    message = "adapter_model.safetensors holds base_model.model.* part of an adapter and no weight of a model; give the adapter's"
    refused(message, before / "adapter_model.safetensors", after / "adapter_model.safetensors")
    for folder in (before, after):
        (folder / "adapter_config.json").rename(folder / "config.json")
    refused(message, before, after)


def test_one_file_comes_before_the_index_of_an_earlier_save(tmp_path):
    a, b = write_weights(tmp_path / "a", full_weights(), shards=2), write_weights(tmp_path / "b", full_weights(step=0.1))
    expected = rho(audit(a, b, weights=3))
    shutil.copy(b / "model.safetensors", write_weights(tmp_path / "c", full_weights(seed=3), shards=2))
    assert rho(audit(a, tmp_path / "c", weights=3)) == expected
    (tmp_path / "c/model-00002-of-00002.safetensors").unlink()
    assert rho(audit(a, tmp_path / "c", weights=3)) == expected


def test_weights_that_do_not_fit_each_other_are_refused(tmp_path):
    a = write_weights(tmp_path / "a", full_weights())
    names = full_weights(step=0.1)
    lost = {n: t for n, t in names.items() if "norm" not in n}
    refused("are different models: model.norm.weight and 0 others", a, write_weights(tmp_path / "lost", lost))
    shaped = {**names, "model.norm.weight": torch.ones(13)}
    refused(r"model.norm.weight is \(12,\) in .* and \(13,\) in", a, write_weights(tmp_path / "shaped", shaped))
    violation = {**names, "model.norm.weight": torch.full((12,), float("nan"))}
    refused("model.norm.weight holds NaN", a, write_weights(tmp_path / "nan", violation))
    coarse = {**names, "model.layers.0.mlp.up_proj.weight": torch.ones(20, 12, dtype=torch.int8)}
    refused("is stored in int8; quantized weights are not audited", a, write_weights(tmp_path / "int8", coarse))


def test_requests_that_mean_nothing_are_refused(tmp_path):
    before, after, cores = write_pair(tmp_path)
    a = write_weights(tmp_path / "a", full_weights())
    refused("--cores and --weights name different directions", before, after, cores=cores, weights=3)
    refused("is an adapter and .* is not", before, a, cores=cores)
    refused("--weights needs the base model's folder, and 'tiny' is not here; give it with --model", before, after, weights=3)
    refused("holds no weight of model.layers.0.self_attn.q_proj", before, after, weights=3, model=str(a))
    refused("there is no folder", tmp_path / "nowhere", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refused("is neither a run directory .*, nor a saved adapter .*, nor a model", tmp_path / "empty", tmp_path / "empty")
    refused("data.jsonl", before, after, data="data.jsonl")
    refused("--data makes cores for an adapter", a, a, data="data.jsonl")
    edit_config(before, layer_replication=[[0, 1], [0, 1]])
    refused("sets layer_replication, so its layers are not those of the base model", before, after, weights=3, model=str(a))
    edit_config(after, init_lora_weights=False)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text("{}")
    refused("init_lora_weights False does not start with B = 0", tmp_path / "base", after, cores=cores)
    edit_config(after, init_lora_weights="eva")
    assert audit(tmp_path / "base", after, cores=cores).audited.overall.kind == "zero-output block"


def test_a_model_that_was_saved_without_its_head_is_found(tmp_path):
    folder = write_weights(tmp_path / "gpt", {"h.0.attn.c_attn.weight": torch.ones(3, 2)})
    assert open_weights(folder).weight_of("transformer.h.0.attn.c_attn").shape == (3, 2)


def test_findings_are_plain_json(tmp_path):
    before, after, cores = write_pair(tmp_path)
    found = json.loads(json.dumps(audit(before, after, cores=cores).as_dict(), allow_nan=False))
    assert found["schema"] == 2
    assert set(found["overall"]["conditions"]) == {"displacement", "state", "delta_b", "response"}
    assert found["layers"][LAYERS[0]]["k"] == 5
