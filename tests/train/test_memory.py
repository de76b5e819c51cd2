"""`anchorlora train` with methods that read what answers depend on: what they remember of kept text, and what they then protect."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from test_train import change, share, verdict
from transformers import AutoModelForCausalLM, AutoTokenizer

from anchorlora import METHODS
from anchorlora.adapters import lora_layers, read_adapter
from anchorlora.cli.app import main
from anchorlora.config import BaseModelSettings
from anchorlora.constraints.sensitivity import sensitivity
from anchorlora.continual.losses import spread
from anchorlora.data import read_samples
from anchorlora.features.files import read_tensors
from anchorlora.store.seal import sha256
from anchorlora.train.kept import hold_out, row_of
from anchorlora.train.request import SkillRequest, skill_request
from skills import FEW, NARROW, written


@pytest.fixture(scope="module")
def data(less_data, small_model):
    """The files, and the model of random weights."""
    return {**less_data, "model": str(small_model)}


def taught(data, out, method, *, new="news", keep=("reviews",), after=None, old=None, more=()):
    words = ["train", data["model"], "--data", data[new], "--method", method, "--out", str(out), *FEW, *more]
    words += [word for name in keep for word in ("--keep", data.get(name, name))]
    words += ["--after", str(after)] if after else ["--adapter", str(old)] if old else [] if method.startswith("fold-") else NARROW
    return main(words)


@pytest.fixture(scope="module")
def folded(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("folded") / "news"
    assert taught(data, out, "fold-16") == 0
    return out


@pytest.fixture(scope="module")
def narrow(data, tmp_path_factory):
    """The same on two layers of seven in each block."""
    out = tmp_path_factory.mktemp("narrow") / "news"
    assert taught(data, out, "fold-16", more=NARROW) == 0
    return out


def protected(out, method):
    """The core that the method makes of the memory on disk."""
    return {
        layer: c.core for layer, c in METHODS[method].provided_cores(read_tensors(out / "skill/before/memory.safetensors")).items()
    }


def refuse_leak(out, method, *, before=None):
    drift = json.loads((out / "record.json").read_text())["drift"][0]
    assert verdict(out)["protection"]["exact"]
    assert share(change(out, before=before), protected(out, method)) <= max(1e-7, 3 * drift["rho_floor"])
    assert sum(float(d.norm()) for d in change(out, before=before).values()) > 1e-2, "nothing was learned"


def dense_memory(place, samples, adapter=None):
    """C and G of each layer in float64: answers drawn one example after the other, and a zero added to each layer's output."""
    tokenizer = AutoTokenizer.from_pretrained(place)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    if adapter:
        model = PeftModel.from_pretrained(model, adapter)
    layers = lora_layers(model) if adapter else {n: m for n, m in model.named_modules() if n.endswith(("q_proj", "v_proj"))}
    draw, seen, zeros, C, G = torch.Generator().manual_seed(0), {}, {}, {}, {}

    def added(module, args, y, name):
        seen[name] = args[0][0].double().detach()
        zeros[name] = torch.zeros_like(y, requires_grad=True)
        return y + zeros[name]

    for name, module in layers.items():
        module.register_forward_hook(lambda m, args, y, name=name: added(m, args, y, name))
    chosen = spread(len(samples), 64)
    for i in chosen:
        sample = samples[i]
        prompt, answer = sample.content[: sample.given], sample.content[sample.given :]
        asked = tokenizer(prompt).input_ids
        ids = [*asked, *tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        logits = model(input_ids=torch.tensor([ids])).logits[0, len(asked) - 1 : -1].float()
        p = logits.detach().double().softmax(-1).cumsum(-1)
        drawn = (p <= torch.rand(len(p), 1, generator=draw, dtype=torch.float64) * p[:, -1:]).sum(1, keepdim=True)
        found = torch.autograd.grad(logits.log_softmax(-1).gather(1, drawn).sum(), list(zeros.values()))
        for (name, x), g in zip(seen.items(), found, strict=True):
            g = g[0].double()
            C[name] = C.get(name, 0) + (x * g.square().sum(1, keepdim=True)).T @ x / len(chosen)
            G[name] = G.get(name, 0) + g.T @ g / len(chosen)
    return C, G


def refuse_other_memory(file, C, G):
    """The leading directions with their sizes, and the whole trace, as the dense matrices have them."""
    memory = read_tensors(file)
    for layer in C:
        mine = sensitivity(memory, layer, d_in=len(C[layer]), d_out=len(G[layer]))
        for found, right in zip(mine, (C[layer] / G[layer].trace(), G[layer]), strict=True):
            values, vectors = (t.flip(-1) for t in torch.linalg.eigh(right))
            k = len(found.values)
            tail = float(values[k:].clamp(min=0).mean()) if k < len(right) else 0.0
            expected = vectors[:, :k] * (values[:k] - tail) @ vectors[:, :k].T + tail * torch.eye(len(right), dtype=torch.float64)
            assert float((found.times(torch.eye(len(right), dtype=torch.float64)) - expected).norm()) <= 2e-3 * float(right.norm())
            assert found.trace == pytest.approx(float(right.trace()), rel=1e-3)


def test_what_is_remembered_of_kept_text_is_the_dense_sum_over_its_examples(folded, data):
    samples, _ = hold_out(data["reviews"], read_samples(data["reviews"]))
    refuse_other_memory(folded / "skill/before/memory.safetensors", *dense_memory(data["model"], samples))


def test_a_fold_keeps_the_core_exactly_and_the_record_names_the_memory(folded):
    refuse_leak(folded, "fold-16")
    record = json.loads((folded / "record.json").read_text())
    assert record["protocol"]["start"] == {"old_memory": sha256(folded / "skill/before/memory.safetensors")}
    protection = verdict(folded)["protection"]
    assert (protection["memory"]["directions"], protection["penalty"]) == (8, 30)
    assert any("8 directions at each layer" in said for said in verdict(folded)["sentences"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sensitive-core", "fold-8", "rank-split"])
def test_other_methods_keep_their_core_exactly(method, data, tmp_path):
    assert taught(data, tmp_path / "out", method) == 0
    refuse_leak(tmp_path / "out", method)


def refuse_other_memory_of_a_next_skill(out, before, data):
    """The mean of what the skill before remembers and what its own answers depend on, alike in their Fisher information; the skill
    has left rows to be read with its adapter.
    """
    known, learned = read_tensors(before / "skill/after/memory.safetensors"), read_samples(before / "skill/after/unread.jsonl")
    assert float(known["sensitivity/tasks"]) == 1
    C, G = dense_memory(data["model"], learned, before / "adapter")
    earlier = {layer: sensitivity(known, layer, d_in=len(C[layer]), d_out=len(G[layer])) for layer in C}
    alike = sum(outputs.trace * inputs.trace for inputs, outputs in earlier.values()) / sum(float(c.trace()) for c in C.values())
    for layer, (inputs, outputs) in earlier.items():
        C[layer] = (alike * C[layer] + outputs.trace * inputs.times(torch.eye(len(C[layer])))) / 2
        G[layer] = (alike * G[layer] + outputs.times(torch.eye(len(G[layer])))) / 2
    refuse_other_memory(out / "skill/before/memory.safetensors", C, G)


@pytest.mark.slow
def test_a_chain_goes_on_from_the_runs_own_memory_at_constant_rank(folded, data, tmp_path):
    out = tmp_path / "questions"
    assert taught(data, out, "fold-16", new="questions", keep=(), after=folded) == 0
    refuse_leak(out, "fold-16", before=folded / "adapter")
    assert verdict(out)["rank"] == 16
    refuse_other_memory_of_a_next_skill(out, folded, data)
    assert not (out / "skill/after/unread.jsonl").exists()  # the fold that cut 32 to 16 has read it
    assert sha256(out / "skill/after/memory.safetensors") != sha256(out / "skill/before/memory.safetensors")


def test_a_run_is_kept_by_its_memory_without_its_adapter(folded, data, tmp_path):
    out = tmp_path / "questions"
    assert taught(data, out, "fold-16", new="questions", keep=(str(folded),)) == 0
    refuse_leak(out, "fold-16")
    refuse_other_memory_of_a_next_skill(out, folded, data)
    assert len(read_samples(out / "skill/after/unread.jsonl")) == min(64, len(read_samples(data["questions"])) * 9 // 10)


@pytest.mark.slow
def test_an_old_adapter_is_read_as_it_is_and_folded_with_the_new_block_into_one(data, folded, tmp_path):
    """The old adapter is one of rank 16 that another method left; the memory is that of the model with it."""
    out = tmp_path / "out"
    assert taught(data, out, "fold-16", new="questions", old=folded / "adapter") == 0
    samples, _ = hold_out(data["reviews"], read_samples(data["reviews"]))
    refuse_other_memory(out / "skill/before/memory.safetensors", *dense_memory(data["model"], samples, folded / "adapter"))
    refuse_leak(out, "fold-16", before=folded / "adapter")
    assert {f.rank for f in read_adapter(out / "adapter").values()} == {16}


@pytest.mark.slow
def test_an_old_adapter_trained_further_keeps_its_size_and_the_core(data, folded, tmp_path):
    assert taught(data, tmp_path / "out", "rank-split", new="questions", old=folded / "adapter", more=["--same-size"]) == 0
    refuse_leak(tmp_path / "out", "rank-split", before=folded / "adapter")
    assert verdict(tmp_path / "out")["rank"] == 16


@pytest.mark.slow
def test_a_skill_that_lost_its_training_makes_it_again_bitwise_from_the_memory(data, tmp_path):
    out = tmp_path / "out"
    assert taught(data, out, "fold-16") == 0
    before = {file: sha256(file) for file in out.rglob("*.safetensors")}
    for name in ("record.json", "state/1", "state/recorded.json", "tasks", "adapter", "skill/after", "skill/SEAL.json"):
        place = out / name
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    assert taught(data, out, "fold-16") == 0
    assert before == {file: sha256(file) for file in out.rglob("*.safetensors")}


BAD = {
    "ewc": (["reviews"], "ewc: FisherAnchor needs what earlier tasks left, and text leaves none"),
    "brake": ([], "--method brake keeps something, and nothing is named: add --keep self"),
    "snapshot": ([], "--method snapshot keeps something, and nothing is named: add --keep self"),
}


@pytest.mark.parametrize("method", BAD)
def test_what_no_text_can_tell_is_refused_and_leaves_nothing(method, data, tmp_path, capsys):
    keep, said = BAD[method]
    assert taught(data, tmp_path / "out", method, keep=keep) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_memory_and_two_with_one_are_refused(folded, narrow, data, tmp_path, capsys):
    for name in ("other", "bare"):
        shutil.copytree(folded, tmp_path / name)
    (tmp_path / "bare/skill/after/memory.safetensors").unlink()
    assert taught(data, tmp_path / "out", "fold-16", new="questions", keep=(), after=tmp_path / "bare") == 2
    assert "was trained by a method that does not remember it" in capsys.readouterr().err
    assert taught(data, tmp_path / "out", "brake", new="questions", keep=[str(tmp_path / "other")], after=folded) == 2
    assert "brake continues from one memory" in capsys.readouterr().err
    for more in ((), ("--dry-run",)):
        assert taught(data, tmp_path / "out", "fold-16", new="questions", keep=[str(narrow)], more=more) == 2
        assert "at fewer layers than are adapted now; give its --targets" in capsys.readouterr().err
    assert not (folded / "skill/after/cores.safetensors").exists()
    assert taught(data, tmp_path / "out", "inc-lora-hard", new="questions", keep=(), after=folded) == 2
    assert "was trained by a method that leaves none; give its text with --keep FILE" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_after_a_run_without_cores_plain_lora_goes_on_and_leaves_none_either(narrow, data, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    assert taught(data, first, "inc-lora", new="questions", keep=(), after=narrow, more=("--dry-run",)) == 0
    assert taught(data, first, "inc-lora", new="questions", keep=(), after=narrow) == 0
    assert taught(data, second, "seq-lora", keep=(), after=first, more=("--name", "again")) == 0
    assert [part["name"] for part in verdict(second)["kept"]] == ["questions", "news", "reviews"]
    assert not [*first.rglob("skill/*/cores.safetensors"), *second.rglob("skill/*/cores.safetensors")]
    capsys.readouterr()
    for method, lacks in (("inc-lora-hard", "leaves none"), ("fold-16", "does not remember it")):
        assert taught(data, tmp_path / "out", method, keep=(), after=first, more=("--name", "again")) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"{first} was trained by a method that {lacks}; give its text" in said
        assert said.endswith("or continue with --method inc-lora")


def text_left(out, stage):
    return [json.loads(line) for line in (out / f"skill/{stage}/old_text.jsonl").read_text().splitlines()]


def test_replay_trains_on_what_is_kept_and_hands_it_on(data, tmp_path, capsys):
    first, second = tmp_path / "news", tmp_path / "questions"
    assert taught(data, first, "replay") == 0
    samples, _ = hold_out(data["reviews"], read_samples(data["reviews"]))
    assert text_left(first, "before") == [row_of(sample) for sample in samples]
    record = json.loads((first / "record.json").read_text())
    assert record["protocol"]["start"]["old_text"] == sha256(first / "skill/before/old_text.jsonl")
    assert taught(data, tmp_path / "plain", "seq-lora") == 0
    changes = [change(out) for out in (first, tmp_path / "plain")]
    assert all(not torch.equal(mixed, plain) for mixed, plain in zip(*(c.values() for c in changes), strict=True))
    assert taught(data, second, "replay", new="questions", keep=(), after=first) == 0
    learned = {json.dumps(row) for row in text_left(first, "after")[len(samples) :]}
    assert 0 < len(learned) < 40, "a tenth is held out, and nothing comes twice"
    assert text_left(second, "before") == text_left(first, "after")
    capsys.readouterr()
    assert taught(data, tmp_path / "none", "replay", keep=()) == 2
    assert "add --keep self" in " ".join(capsys.readouterr().err.split())


def test_replay_mixes_rows_of_every_form_that_is_kept(data, tmp_path):
    first, second, texts = tmp_path / "news", tmp_path / "questions", ("--self-texts", "12")
    keep = ("self", written(tmp_path / "pages.jsonl", [{"text": f"page {i} of an old book"} for i in range(30)]))
    assert taught(data, first, "replay", keep=keep, more=texts) == 0
    assert taught(data, second, "replay", new="questions", keep=(), after=first) == 0
    columns = [set(row) for row in text_left(second, "before")]
    assert all(form in columns for form in ({"text"}, {"text", "prompt_ids", "completion_ids"}, {"prompt", "completion"}))


def test_replay_on_text_of_the_models_own_and_nothing_to_go_on_from_is_refused(data, folded, tmp_path, capsys):
    assert taught(data, tmp_path / "own", "replay-kl", keep=("self",), more=("--self-texts", "12")) == 0
    assert all("completion_ids" in row for row in text_left(tmp_path / "own", "before"))
    record = json.loads((tmp_path / "own/record.json").read_text())
    assert record["method"]["rehearses"]
    capsys.readouterr()
    assert taught(data, tmp_path / "none", "replay", new="questions", keep=(), after=folded) == 2
    assert "trained by a method that keeps none" in " ".join(capsys.readouterr().err.split())


def test_the_method_that_nobody_named_follows_from_what_is_there(tmp_path):
    """A fold where it can go on; the exact block beside an old adapter, and after a run that remembers nothing."""

    def named(**given):
        fields = {"base_model": {"model": "embedded:mini"}, "data": "new.jsonl", "keep": ("self",), **given}
        return skill_request(fields, same_size=False, method=None, methods=METHODS).method

    for name, left in (("folded", ["memory.safetensors"]), ("exact", [])):
        (tmp_path / name / "skill/after").mkdir(parents=True)
        for file in left:
            (tmp_path / name / "skill/after" / file).touch()
    assert named() == "fold-64"
    assert named(old_adapter="adapters/old") == "inc-lora-hard"
    assert named(after=str(tmp_path / "folded"), keep=()) == named(keep=(str(tmp_path / "folded"),)) == "fold-64"
    assert named(after=str(tmp_path / "exact"), keep=()) == named(keep=("self", str(tmp_path / "exact"))) == "inc-lora-hard"


def test_a_first_skill_is_the_same_whatever_the_rank_of_the_history(narrow, data, tmp_path):
    assert taught(data, tmp_path / "wide", "fold-64", more=NARROW) == 0
    low, wide = (read_adapter(out / "adapter") for out in (narrow, tmp_path / "wide"))
    assert low.keys() == wide.keys()
    for layer, factors in low.items():
        assert torch.equal(factors.A, wide[layer].A)
        assert torch.equal(factors.B, wide[layer].B)


def test_a_fold_keeps_the_size_of_the_adapter_that_it_goes_on_from(narrow, data, tmp_path):
    words = ["train", data["model"], "--data", data["questions"], "--after", str(narrow), *FEW]
    for more, rank in (((), 24), (("--same-size",), 16)):
        assert main([*words, "--set", "rank=8", *more, "--out", str(tmp_path / str(rank))]) == 0
        record = json.loads((tmp_path / str(rank) / "record.json").read_text())
        assert record["method"]["name"] == "fold-64"
        assert {factors.rank for factors in read_adapter(tmp_path / str(rank) / "adapter").values()} == {rank}
    again = ["--data", data["reviews"], "--name", "again", "--after", str(tmp_path / "16"), "--out", str(tmp_path / "then")]
    assert main(["train", data["model"], *again, *FEW, "--set", "rank=8"]) == 0  # what does not say it again may grow again
    assert {factors.rank for factors in read_adapter(tmp_path / "then/adapter").values()} == {24}
    old = ["--keep", data["reviews"], "--method", "fold-64", "--same-size"]  # a run is an adapter, too
    assert main([*words[:4], "--adapter", str(narrow), *old, *FEW, "--out", str(tmp_path / "old")]) == 0
    assert {factors.rank for factors in read_adapter(tmp_path / "old/adapter").values()} == {16}


def test_a_method_of_ones_own_keeps_the_numbers_that_it_is_written_with():
    request = SkillRequest(base_model=BaseModelSettings(model="any"), data="new.jsonl", name="new", method="mine")
    own = METHODS["fold-16"].named("mine")
    assert request.numbers_in({"mine": own}) == {"AnswerSensitivity.alike": 1}


def test_numbers_of_the_method_can_be_set_and_go_on_with_the_next_skill(narrow, data, tmp_path, capsys):
    wide, then = ["--set", "FoldedPerTask.rank=20", "--set", "GradientStart.examples=9"], tmp_path / "then"
    assert {"GradientStart(16)", "KroneckerBrake(30.0)"} <= {*json.loads((narrow / "record.json").read_text())["method"]["parts"]}
    assert taught(data, tmp_path / "first", "fold-16", after=narrow, keep=(), new="questions", more=wide) == 0
    again = {"after": tmp_path / "first", "keep": (), "new": "reviews"}
    assert taught(data, then, "fold-16", **again, more=["--name", "again"]) == 0
    for more in ((), ("--dry-run",)):  # the same command finds its own run
        assert taught(data, then, "fold-16", **again, more=["--name", "again", *more]) == 0
    for out in (tmp_path / "first", then):
        assert {factors.rank for factors in read_adapter(out / "adapter").values()} == {20}
        record = json.loads((out / "record.json").read_text())
        assert {"FoldedPerTask(20)", "GradientStart(9)", "KroneckerBrake(100.0)"} <= {*record["method"]["parts"]}
        refuse_leak(out, "fold-16", before=(narrow if out.name == "first" else tmp_path / "first") / "adapter")
    capsys.readouterr()
    assert taught(data, then, "fold-16", **again, more=["--name", "again", "--set", "FoldedPerTask.rank=24"]) != 0
    assert "--set" in capsys.readouterr().err
    for words, said in (
        ("FoldedPerTask.size=3", "it has: FoldedPerTask.rank"),
        ("FoldedPerTask.rank=12", "cannot keep two cores of 8 directions"),  # before anything is trained
        ("SensitiveCore.at_most=9", "two cores of 9 directions; set FoldedPerTask.rank to at least 18, or SensitiveCore.at_most"),
        ("FoldedPerTask.rank=0", "must be greater than 0"),
    ):
        assert taught(data, tmp_path / "none", "fold-16", more=["--set", words]) != 0
        assert said in capsys.readouterr().err
        assert not (tmp_path / "none").exists()
