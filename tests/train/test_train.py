"""`anchorlora train` on the embedded model: what it keeps, what it leaves behind, and what a later skill goes on from."""

import json
import re
import shutil
from pathlib import Path
from statistics import mean

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

import models
from anchorlora import audit, embedded
from anchorlora.adapters import read_adapter
from anchorlora.cli.app import main
from anchorlora.config import BaseModelSettings
from anchorlora.data import Encoder, examples_of, read_samples, sample_files
from anchorlora.data import text as text_data
from anchorlora.data.holdout import RowHashes
from anchorlora.features import read_cores
from anchorlora.methods import METHODS
from anchorlora.models import session
from anchorlora.models.load import tokenizer_of
from anchorlora.store.files import write_lines
from anchorlora.text import amount
from anchorlora.train import price
from anchorlora.train.folder import probes_in
from anchorlora.train.kept import count_kept, hold_out
from anchorlora.train.request import skill_request
from anchorlora.train.stages import files_of
from anchorlora.train.train import _count_rows
from architectures.cases import LFM2, SEES
from skills import EXACT, FEW, NARROW, rows, written

MINI = embedded.folder("embedded:mini", "base_model")


def verdict(out):
    return json.loads((out / "skill/verdict.json").read_text())


def change(out, before=None):
    factors = read_adapter(out / "adapter")
    old = read_adapter(before) if before else {}

    def dense(f):
        return f.scale * f.B.double() @ f.A.double()

    return {layer: dense(f) - (dense(old[layer]) if old else 0) for layer, f in factors.items()}


def share(delta, cores):
    """|dW V| / |dW| over all layers, dense, in float64."""
    inside = sum(float(torch.linalg.norm(d @ cores[layer].basis.double())) ** 2 for layer, d in delta.items())
    return (inside / sum(float(torch.linalg.norm(d)) ** 2 for d in delta.values())) ** 0.5


def test_what_was_to_be_kept_is_protected_in_the_adapter_on_disk_and_in_the_twin_it_is_not(taught):
    cores = read_cores(taught / "skill/before/cores.safetensors")
    assert share(change(taught), cores) < 1e-7
    twin = read_adapter(taught / "skill/unprotected/tasks/1-news/adapter")
    delta = {layer: f.scale * f.B.double() @ f.A.double() for layer, f in twin.items()}
    assert share(delta, cores) > 0.1


def test_snapshot_is_the_mean_of_the_base_model_and_of_what_was_trained(data, tmp_path):
    out = tmp_path / "out"
    named = ["--method", "snapshot", "--keep", data["reviews"], "--compare", "--out", str(out), *NARROW]
    assert main(["train", "embedded:mini", "--data", data["news"], *named, *FEW]) == 0
    twin = read_adapter(out / "skill/unprotected/tasks/1-news/adapter")
    for layer, half in change(out).items():
        whole = twin[layer].scale * twin[layer].B.double() @ twin[layer].A.double()
        assert float(whole.norm()) > 1e-3
        assert float((half - whole / 2).norm()) < 1e-6 * float(whole.norm())
    found = verdict(out)
    assert not found["protection"]["exact"]
    rho = share(change(out), read_cores(out / "skill/before/cores.safetensors"))
    said = f"snapshot protects nothing exactly: {100 * rho:.0f} % of the change touches what was to be kept"
    assert said in str(found["sentences"])
    assert "Any answer may change" in (out / "index.html").read_text()


@pytest.fixture(scope="module")
def beside(taught, data, tmp_path_factory):
    """Questions, beside the adapter of the news and without protection."""
    out = tmp_path_factory.mktemp("beside") / "out"
    named = ["--method", "inc-lora", "--adapter", str(taught / "adapter"), "--out", str(out)]
    assert main(["train", "embedded:mini", "--data", data["questions"], *named, *FEW]) == 0
    return out


def test_beside_an_old_adapter_snapshot_needs_nothing_named_and_adds_half_of_the_new_block(taught, beside, data, tmp_path):
    old, out = taught / "adapter", tmp_path / "out"
    named = ["--method", "snapshot", "--adapter", str(old), "--out", str(out)]
    assert main(["train", "embedded:mini", "--data", data["questions"], *named, *FEW]) == 0
    halves = change(out, before=old)
    for layer, whole in change(beside, before=old).items():
        assert float((halves[layer] - whole / 2).norm()) < 1e-6 * float(whole.norm())


def test_the_verdict_says_what_the_files_say(taught):
    found = verdict(taught)
    assert found["skill"]["loss"]["interval"][1] < 0, "learned"
    assert found["protection"]["exact"]
    assert found["protection"]["penalty"] is None
    assert found["unprotected"]["skill"]["loss"]["after"] < found["skill"]["loss"]["before"]
    (kept,) = found["kept"]
    assert (kept["name"], kept["n"]) == ("reviews", 16)
    assert kept["verdict"] in ("worse", "cannot tell (n = 16)"), "too few to be called kept"
    assert found["schema"] == 2
    lines = [json.loads(line) for line in (taught / "tasks/1-news/predictions.jsonl").read_text().splitlines()]
    mean = sum(line["metrics"]["loss"] for line in lines) / len(lines)
    assert found["skill"]["loss"]["after"] == pytest.approx(mean)
    assert found["skill"]["n"] == len(lines) == 8
    record = json.loads((taught / "record.json").read_text())
    assert record["metrics"]["loss"] == [[pytest.approx(mean)]]


def test_a_finished_one_called_again_trains_nothing_and_says_so_in_one_line(taught, data, capsys):
    record = (taught / "record.json").read_bytes()
    command = ["train", "embedded:mini", "--data", data["news"], "--keep", data["reviews"], "--compare", "--out", str(taught)]
    assert main([*command, *FEW, *EXACT]) == 0
    said = capsys.readouterr()
    assert f"\nfinished before, nothing was trained; record: {taught}/record.json\n" in said.out
    assert "training" not in said.err
    assert "changed" not in said.err
    assert (taught / "record.json").read_bytes() == record
    kept = Path(data["reviews"])
    before = kept.read_bytes()
    try:
        kept.write_bytes(before + before.partition(b"\n")[0] + b"\n")
        assert main([*command, *FEW, *EXACT]) == 0
        assert f"{kept} was changed since, and this is the verdict on what it held" in " ".join(capsys.readouterr().err.split())
        kept.unlink()
        assert main([*command, *FEW, *EXACT]) == 0, "what is gone is not missed"
    finally:
        kept.write_bytes(before)


def test_the_margin_of_a_finished_one_can_be_set(taught, data, capsys):
    command = ["train", "embedded:mini", "--data", data["news"], "--keep", data["reviews"], "--compare", "--out", str(taught), *FEW]
    command += EXACT
    assert main([*command, "--margin", "60", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["margin"], found["kept"][0]["margin"]) == ({"points": 60, "nats": 0.05},) * 2
    assert "60 points of answers or 0.05 of loss" in (taught / "index.html").read_text()
    assert main([*command, "--margin", "0"]) == 2
    assert main(command) == 0, "and back"


def test_rows_that_repeat_others_are_cut_or_too_long_to_measure_are_counted_in_the_verdict(data, tmp_path):
    lines = Path(data["news"]).read_text().splitlines()
    (tmp_path / "twice.jsonl").write_text("\n".join([*lines, *lines[:7]]))
    once = [json.loads(line) for line in Path(data["reviews"]).read_text().splitlines()]
    long, cut = {"prompt": "It is", "completion": " so" * 300}, {"prompt": "well " * 300, "completion": " good"}
    mixed = written(tmp_path / "mixed.jsonl", [*once, *once[:5], *[{**long, "prompt": f"{i} is"} for i in range(20)], cut])
    words = ["--data", str(tmp_path / "twice.jsonl"), "--keep", mixed, "--out", str(tmp_path / "out"), "--set", "max_tokens=150"]
    assert main(["train", "embedded:mini", *words, *FEW, *EXACT]) == 0
    found, page = verdict(tmp_path / "out"), (tmp_path / "out/index.html").read_text()
    said, (learned, kept) = "\n".join(found["sentences"]), found["rows"]
    assert found["together"] == len(lines) + 7 - len({json.loads(line)["prompt"] for line in lines}) == learned["together"]
    assert f"{found['together']} rows repeat the text" in said
    assert (learned["read"], learned["held_out"], learned["repeated"]) == (len(lines) + 7, 9, len(lines) + 7 - len({*lines}))
    assert f"<td>{len(lines) + 7}</td><td>9</td><td>{learned['repeated']}</td>" in page
    assert (kept["name"], kept["use"], kept["read"], kept["long"]) == ("mixed", "kept", 106, 20)
    assert kept["repeated"] == 85 - len({row["prompt"] + row["completion"] for row in once})
    assert kept["cut"] >= 21
    assert f"mixed: {kept['together']} rows repeat the text, prompt or beginning of another" in said
    assert f"mixed: {kept['cut']} rows are longer than --max-length" in said
    assert "mixed: 20 rows have an answer that takes --max-length alone, and are not measured" in said
    probes = (tmp_path / "out/skill/before/probes/mixed.jsonl").read_text().splitlines()
    assert len(probes) == kept["held_out"]
    assert found["kept"][0]["n"] == len({*probes}), "copies say no more than one of them"
    assert not any(" so so" in line for line in probes)
    assert f"<td>{kept['cut']}</td><td>0</td><td>20</td>" in page


def test_prompts_that_end_in_the_answers_first_token_are_in_verdict_page_and_record(tmp_path):
    blank = written(tmp_path / "blank.jsonl", [{"prompt": f"Say it again, {i}: ", "completion": "the river"} for i in range(30)])
    out = tmp_path / "out"
    assert main(["train", "embedded:mini", "--data", blank, "--method", "inc-lora", "--out", str(out), *FEW, *NARROW]) == 0
    found, record = verdict(out), json.loads((out / "record.json").read_text())
    assert found["rows"][0]["split"] == {"blank": 30}
    assert record["protocol"]["prompts_inside_a_token"] == {"blank": 30}
    assert "unknown_in_prompts" not in record["protocol"]
    why = "the prompt ends in a blank that belongs to the answer's first token"
    remedy = "move it to the beginning of the answer, or serve the prompt without it"
    assert f"blank: 30 of 30 rows are served other tokens than are trained on: {why}; {remedy}" in found["sentences"]
    assert "<td>30</td></tr>" in (out / "index.html").read_text()


@pytest.mark.parametrize("method", ["inc-lora", "inc-lora-hard"])
def test_kept_text_is_called_protected_in_part_only_where_the_method_protects_it(method, data, tmp_path):
    few = ["--set", "at_most=4", "--set", "wide=4"]
    asked = ["--data", data["news"], "--keep", data["reviews"], "--method", method, "--out", str(tmp_path / "out")]
    assert main(["train", "embedded:mini", *asked, *few, *FEW, *NARROW]) == 0
    found = verdict(tmp_path / "out")
    in_part = [sentence for sentence in found["sentences"] if "protected in part" in sentence]
    assert in_part == found["warnings"]
    assert len(in_part) == (method == "inc-lora-hard")


def test_kept_text_of_which_no_row_can_be_measured_is_refused_before_any_model_is_loaded(taught, tmp_path, capsys):
    rows_of = [{"prompt": f"{i} is", "completion": " so" * 300} for i in range(9)]
    long = written(tmp_path / "long.jsonl", rows_of)
    for what, room, named in ((["--keep", long], 150, f"{long}, line 1"), (["--after", str(taught)], 2, "line 1")):
        short = written(tmp_path / "short.jsonl", [{"text": f"{i} and {i}"} for i in range(30)])
        words = ["--data", short, *what, "--out", str(tmp_path / "out"), "--set", f"max_tokens={room}"]
        assert main(["train", "embedded:mini", *words, *FEW]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert named in line
        assert f"max_tokens is {room} for prompt and answer together; raise max_tokens, which is --max-length of train" in line
        assert "leave the row out; without it none of" in line
        assert ".skill" not in line
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "row",
    [
        lambda i: {"instruction": f"say {i}", "output": f"it is {i}", "system": "be brief" if i % 2 else ""},
        lambda i: {"prompt": f"say {i}" if i % 2 else "", "completion": f"it is {i}"},
    ],
)
def test_rows_of_one_file_are_read_again_where_they_are_left_in_several_forms(row, tmp_path):
    """A system message makes a chat of an instruction, and a row without a prompt is plain text."""
    samples = read_samples([row(i) for i in range(40)])
    _, probes = hold_out("old", samples)
    (tmp_path / "skill/after/probes").mkdir(parents=True)
    write_lines(tmp_path / "skill/after/probes/old.jsonl", probes)
    assert len({frozenset(probe) for probe in probes}) == 2
    again = list(probes_in(tmp_path / "skill/after", "old").examples("old", "test"))
    assert [example.label for example in again] == [e.label for probe in probes for e in examples_of(read_samples([probe]))]
    tokenizer = tokenizer_of(BaseModelSettings(model="embedded:mini"))
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (counts,) = count_kept(str(tmp_path), None, Encoder(tokenizer, max_tokens=100), RowHashes("new"))
    assert counts["held_out"] == counts["read"] == len(probes)


def test_rows_that_measure_what_is_kept_and_are_trained_on_are_counted(tmp_path):
    """As of a file that has grown since, and of a skill that is taught again."""
    old = [{"prompt": f"{i} is", "completion": f" {i + 1}"} for i in range(40)]
    kept = written(tmp_path / "old.jsonl", old)
    _, probes = hold_out(kept, read_samples(old))
    run = tmp_path / "run/skill/after/probes"
    run.mkdir(parents=True)
    write_lines(run / "earlier.jsonl", probes)
    new = [{"prompt": f"{i} was", "completion": f" {i - 1}"} for i in range(40)]
    for data, places, shared in ((new, [kept], False), (new + probes[:3], [kept, str(tmp_path / "run")], True)):
        given = {"base_model": {"model": "embedded:mini"}, "data": written(tmp_path / "new.jsonl", data), "keep": places}
        request = skill_request(given, same_size=False, method="inc-lora", methods=METHODS)
        files = files_of(request)
        learned = {sample.content for sample in files.rows_of(request.name, "train")}
        expected = sum(probe["prompt"] + probe["completion"] in learned for probe in probes)
        assert [row["also_learned"] for row in _count_rows(request, files) if row["use"] != "learned"] == [expected] * len(places)
        assert bool(expected) == shared, "one that is held out of both is not trained on"


def test_answers_that_are_longer_than_what_is_generated_are_told(tmp_path):
    rows_of = [{"prompt": f"{i} is", "completion": " so" * (9 if i else 60)} for i in range(9)]
    given = {"base_model": {"model": "embedded:mini"}, "data": written(tmp_path / "new.jsonl", rows_of)}
    for most in (20, 400):
        request = skill_request(
            given | {"settings": {"max_new_tokens": str(most)}}, same_size=False, method="inc-lora", methods=METHODS
        )
        (counts,) = _count_rows(request, files_of(request))
        assert 21 < counts["longest"] <= 400
        assert counts.get("generated") == (20 if most == 20 else None)


def test_places_mean_the_same_from_every_folder(tmp_path, monkeypatch):
    (tmp_path / "models/base").mkdir(parents=True)
    (tmp_path / "models/turns.jinja").write_text("")
    monkeypatch.chdir(tmp_path / "models")
    for model, meant in (("base", tmp_path / "models/base"), ("org/base", "org/base"), ("embedded:mini", "embedded:mini")):
        given = {"base_model": {"model": model, "chat_template": "turns.jinja"}, "data": "../new.jsonl"}
        request = skill_request(given, same_size=False, method="inc-lora", methods=METHODS)
        assert request.data == str(tmp_path / "new.jsonl")
        assert request.base_model.model == str(meant)
        assert request.base_model.chat_template == str(tmp_path / "models/turns.jinja")


def test_the_losses_are_those_of_plain_peft_and_transformers(taught):
    """The probes of what is kept, one by one, with the model's own loss."""
    tokenizer = AutoTokenizer.from_pretrained(taught / "adapter")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(MINI, dtype=torch.float32), taught / "adapter").eval()
    found = json.loads((taught / "skill/after/scores.json").read_text())["reviews"]
    probes = [json.loads(line) for line in (taught / "skill/before/probes/reviews.jsonl").read_text().splitlines()]
    assert len(found) == len(probes) == 16
    for row, score in zip(probes, found, strict=True):
        prompt = tokenizer(row["prompt"]).input_ids
        answer = [*tokenizer(row["completion"]).input_ids, tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(prompt) + answer])
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([prompt + answer]), labels=labels).loss
        assert score["metrics"]["loss"] == pytest.approx(float(loss), abs=2e-5)


def test_measure_says_the_same_loss_of_data(taught, capsys):
    probes, cores = (taught / "skill/before" / name for name in ("probes/reviews.jsonl", "cores.safetensors"))
    assert main(["measure", "embedded:mini", str(taught), "--cores", str(cores), "--data", str(probes), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (kept,) = verdict(taught)["kept"]
    assert found["exact"]
    for stage in ("before", "after"):
        assert found["data"]["loss"][stage] == pytest.approx(kept["loss"][stage], rel=1e-5)
    assert main(["measure", str(MINI), str(taught), "--cores", str(cores), "--data", str(probes)]) == 0
    assert "loss on 16 examples: " in capsys.readouterr().out
    assert main(["audit", "embedded:mini", str(taught), "--weights", "2"]) == 0
    assert "2 leading singular directions" in capsys.readouterr().out


def test_a_chain_keeps_all_earlier_skills_without_their_data(taught, data, tmp_path, capsys):
    out = tmp_path / "questions"
    assert main(["train", "embedded:mini", "--data", data["questions"], "--after", str(taught), "--out", str(out), *FEW]) == 0
    found = verdict(out)
    assert sorted(kept["name"] for kept in found["kept"]) == ["news", "reviews"]
    earlier, mine = read_cores(taught / "skill/after/cores.safetensors"), read_cores(out / "skill/after/cores.safetensors")
    assert share(change(out, before=taught / "adapter"), earlier) < 1e-7
    for layer, core in earlier.items():  # what is kept only grows
        inside = mine[layer].basis.double().T @ core.basis.double()
        assert torch.linalg.norm(inside) ** 2 == pytest.approx(core.k, rel=1e-5)
    assert found["rank"] == 32
    assert "questions=" in capsys.readouterr().out
    cores = out / "skill/before/cores.safetensors"
    note = f"{out} has cores of what came before: --cores {cores} measures on these"
    assert note in audit(taught, out).notes
    of_cores = audit(taught, out, cores=cores)
    assert of_cores.audited.overall.status == "preserved"
    assert note not in of_cores.notes


def test_the_same_size_trains_the_old_adapter_further(taught, data, tmp_path):
    out = tmp_path / "same"
    words = ["train", "embedded:mini", "--data", data["questions"], "--after", str(taught), "--same-size", "--out", str(out), *FEW]
    assert main(words) == 0
    found = verdict(out)
    assert (found["rank"], found["protection"]["method"], found["protection"]["exact"]) == (16, "sfor", True)
    assert share(change(out, before=taught / "adapter"), read_cores(taught / "skill/after/cores.safetensors")) < 1e-7


def test_an_old_adapter_that_has_learned_nothing_is_not_trained_further_with_its_b_frozen(taught, data, tmp_path, capsys):
    old = Path(shutil.copytree(taught / "adapter", tmp_path / "old"))
    tensors = load_file(old / "adapter_model.safetensors")
    save_file({n: t * 0 if "lora_B" in n else t for n, t in tensors.items()}, old / "adapter_model.safetensors")
    words = ["--data", data["questions"], "--keep", data["reviews"], "--same-size", "--out", str(tmp_path / "out"), *FEW]
    assert main(["train", "embedded:mini", "--adapter", str(old), *words]) == 2
    assert f"B of {old} is zero, so nothing would be learned; leave --same-size out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_chat_teaches_a_model_that_gets_its_template_from_a_file(tmp_path):
    template = tmp_path / "template.jinja"
    asking = "{% if add_generation_prompt %}assistant: {% endif %}"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}" + asking)
    chats = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
        for row in rows("news", "train", 40)
    ]
    out = tmp_path / "out"
    words = [
        "--data",
        written(tmp_path / "chat.jsonl", chats),
        "--keep",
        "self",
        "--set",
        f"chat_template={template}",
        "--out",
        str(out),
    ]
    assert main(["train", "embedded:mini", *words, *FEW, *EXACT]) == 0
    assert verdict(out)["skill"]["loss"]["interval"][1] < 0
    assert AutoTokenizer.from_pretrained(out / "adapter").chat_template == template.read_text()
    assert '"text"' in (out / "skill/before/probes/self.jsonl").read_text(), "the model does not know the template"


def test_the_page_shows_the_verdict_first_and_escapes_what_files_hold(taught, data, tmp_path):
    page = (taught / "index.html").read_text()
    assert page.index("new skill: news") < page.index("to be kept: reviews") < page.index("Before and after")
    assert "unprotected" in page
    assert f"vllm serve {MINI} --enable-lora --max-lora-rank 16" in page
    assert "  # vLLM computes in half precision by default, and the verdict is of float32: some answers may differ" in page
    assert re.search(r"\.next pre {[^}]*white-space: pre-wrap", page), "a long command, and what is said after it, is read whole"
    assert not re.search(r"https?:|src=|<link|<script", page), "the page loads nothing"
    from anchorlora.pages.verdict import render

    assert "<script>" not in render(verdict(taught) | {"name": "<script>alert(1)</script>"})


BAD = {
    "nothing to keep": (["--data", "news"], "nothing is named: add --keep self"),
    "no file": (["--data", "none.jsonl", "--keep", "self"], "there is no file"),
    "a device": (["--data", "/dev/null", "--keep", "self"], "/dev/null is a device or a pipe; data is"),
    "a name near that of a file": (["--data", "od.jsonl", "--keep", "self"], "nearest: "),
    "a misspelled self": (["--data", "news", "--keep", "selff"], "is kept with --keep self"),
    "an adapter to keep": (["--data", "news", "--keep", "adapter"], "give the adapter with --adapter, and"),
    "no columns": (["--data", "odd", "--keep", "self"], "no known column"),
    "same size of nothing": (["--data", "news", "--keep", "self", "--same-size"], "--same-size trains an old adapter further"),
    "two beginnings": (["--data", "news", "--after", "news", "--adapter", "news"], "--adapter does not fit"),
    "no earlier run": (["--data", "news", "--after", "news"], "is not the --out of an earlier anchorlora train"),
    "unknown metric": (["--data", "news", "--keep", "self", "--metric", "rouge"], "no metric called 'rouge'; nearest: rouge_l"),
    "unknown field": (["--data", "news", "--keep", "self", "--set", "ranks=3"], "no field 'ranks'"),
    "a chat without a template": (["--data", "chat", "--keep", "self"], "the tokenizer has no chat template"),
    "an answer that does not fit": (["--data", "news", "--keep", "self", "--set", "max_tokens=2"], "raise max_tokens"),
    "other columns to keep": (["--data", "news", "--keep", "odd"], "name yours with --keep-columns"),
    "one name for both": (["--data", "news", "--keep", "news"], "both called news; name the skill with --name"),
    "one row to keep": (["--data", "news", "--keep", "one"], "has one row"),
    "a target that is not there": (["--data", "news", "--keep", "self", "--targets", "c_attn"], "no module called c_attn"),
    "no target": (["--data", "news", "--keep", "self", "--targets", ""], "--targets: '' is not the name of a module"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_wrong_request_is_one_line_and_leaves_nothing(what, data, tmp_path, capsys):
    places = {
        "news": data["news"],
        "od.jsonl": str(tmp_path / "od.jsonl"),
        "adapter": str(tmp_path / "adapter"),
        "odd": written(tmp_path / "odd.jsonl", [{"question": "a"}] * 3),
        "one": written(tmp_path / "one.jsonl", [{"text": "a"}]),
        "chat": written(
            tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 9
        ),
    }
    (tmp_path / "adapter").mkdir()
    written(tmp_path / "adapter/adapter_config.json", [{}])
    words, said = BAD[what]
    words = [places.get(word, word) for word in words]
    assert main(["train", "embedded:mini", *words, *FEW, "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_a_chain_says_how_much_is_protected_and_cuts_by_energy_instead_of_filling_a_layer(data, tmp_path):
    wide, before = ["--set", "at_most=90", "--set", "wide=90", "--set", "energy=0.9999", "--set", "rows=512"], None
    third = written(tmp_path / "third.jsonl", [{"prompt": f"{i} and one is", "completion": f" {i + 1}"} for i in range(100)])
    found, outs = [], [tmp_path / name for name in ("first", "second", "third")]
    for out, text in zip(outs, (data["news"], data["questions"], third), strict=True):
        what = ["--after", str(before)] if before else ["--keep", data["reviews"]]
        assert (
            main(["train", "embedded:mini", "--data", text, *what, "--out", str(out), *FEW, *wide, *EXACT[: 2 if before else 4]])
            == 0
        )
        cores = read_cores(out / "skill/after/cores.safetensors")
        assert all(core.k <= core.d // 2 for core in cores.values())
        assert share(change(out, before=before and before / "adapter"), read_cores(out / "skill/before/cores.safetensors")) < 1e-6
        found.append(verdict(out))
        before = out
    said = "\n".join(found[1]["sentences"])
    assert "room: the fullest layer protects 96 of its 192 directions; half stay free to learn in" in said
    assert re.search("reviews is protected in part: to leave room, . of . layers gave up directions of it", said)
    page = (outs[1] / "index.html").read_text()
    assert "the fullest layer protects 96 of its 192 directions" in page
    assert '<p class="warning">warning: reviews is protected in part: to leave room' in page
    assert found[2]["skill"]["loss"]["change"] < -0.05, "the third still learns"
    for first, last, name in ((0, 1, "reviews"), (0, 2, "reviews"), (1, 2, "news")):  # from before the run that kept it first
        stages = (outs[first] / "skill/before/scores.json", outs[last] / "skill/after/scores.json")
        then, now = ([row["metrics"]["loss"] for row in json.loads(stage.read_text())[name]] for stage in stages)
        (kept,) = (kept for kept in found[last]["kept"] if kept["name"] == name)
        assert kept["over_chain"]["loss"]["change"] == pytest.approx(mean(now) - mean(then), abs=1e-12)
        assert f"{name}, over the chain: {kept['over_chain']['verdict']}" in "\n".join(found[last]["sentences"])
        assert f"over the chain: {name}" in (outs[last] / "index.html").read_text()
    assert [kept["name"] for one in found for kept in one["kept"] if not kept["over_chain"]] == ["reviews", "news", "questions"]


def test_a_full_layer_is_refused_before_training_and_nothing_is_left(taught, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("anchorlora.geometry.room.LEAST", 1.01)  # so that whatever is kept has given up too much
    out = tmp_path / "out"
    assert main(["train", "embedded:mini", "--data", data["questions"], "--after", str(taught), "--out", str(out), *FEW]) == 2
    said = capsys.readouterr().err
    assert "q_proj is full: " in said
    assert "--method fold-64, --adapter and --keep FILE instead of --after" in said
    assert "training" not in said
    assert not out.exists()


def test_a_chain_that_fits_says_for_how_many_more_there_is_room(taught):
    capacity = verdict(taught)["protection"]["capacity"]
    cores = read_cores(taught / "skill/after/cores.safetensors")
    assert capacity["used"] == cores[capacity["layer"]].k
    assert capacity["inputs"][capacity["layer"]] == [capacity["used"], capacity["width"] - capacity["used"]]
    assert any("room: the fullest layer protects" in sentence for sentence in verdict(taught)["sentences"])


def test_an_old_adapter_whose_targets_are_a_regular_expression_is_gone_on_from(taught, beside, data, tmp_path):
    old, out = shutil.copytree(taught / "adapter", tmp_path / "old"), tmp_path / "out"
    config = json.loads((old / "adapter_config.json").read_text())
    (old / "adapter_config.json").write_text(json.dumps(config | {"target_modules": r".*\.self_attn\.(q|v)_proj"}))
    named = ["--method", "inc-lora", "--adapter", str(old), "--out", str(out)]
    assert main(["train", "embedded:mini", "--data", data["questions"], *named, *FEW]) == 0
    found = read_adapter(out / "adapter")
    assert all(torch.equal(f.B, found[layer].B) for layer, f in read_adapter(beside / "adapter").items())


def window_of_64(kind, words):
    cut = {"vocab_size": words, "head_dim": 16, "sliding_window": 64, "max_position_embeddings": 512, **models.SMALL}
    if kind == "mistral":
        return models.MistralForCausalLM(models.MistralConfig(**cut))
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**cut, layer_types=layers, query_pre_attn_scalar=16))


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_rows_longer_than_a_sliding_window_are_tested_as_plain_transformers_reads_them(kind, tmp_path):
    torch.manual_seed(0)
    words = [f"word{i}" for i in range(40)]

    def row(i, length):
        return {"prompt": " ".join(words[(i * 7 + j * j) % 40] for j in range(length)) + " is", "completion": f" word{i}"}

    texts = [row(i, 5 if i < 5 else 150) for i in range(10)]
    tokenizer = models.tokenizer([r["prompt"] for r in texts])
    model = window_of_64(kind, len(tokenizer)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)  # so that far tokens matter
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 1, 0
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    short = written(tmp_path / "short.jsonl", [row(i, 5) for i in range(12)])
    test = written(tmp_path / "test.jsonl", texts)
    named = ["--data", short, "--test", test, "--method", "inc-lora", "--out", str(tmp_path / "out"), *FEW]
    assert main(["train", str(tmp_path / "model"), *named]) == 0
    found = json.loads((tmp_path / "out/skill/before/scores.json").read_text())["short"]
    for text, score in zip(texts, found, strict=True):
        prompt = tokenizer(text["prompt"]).input_ids
        ids = torch.tensor([[*prompt, *tokenizer(text["completion"]).input_ids, tokenizer.eos_token_id]])
        labels = ids.clone()
        labels[0, : len(prompt)] = -100
        with torch.no_grad():
            assert score["metrics"]["loss"] == pytest.approx(float(model(ids, labels=labels).loss), rel=1e-4)
            said = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0, len(prompt) :]
        assert score["text"] == tokenizer.decode(said, skip_special_tokens=True).strip()


@pytest.fixture(scope="module")
def budgeted(data, tmp_path_factory):
    """News without protection, as trained, and scaled until the model's own text loses little."""
    places = {name: tmp_path_factory.mktemp("budget") / name for name in ("whole", "scaled")}
    for name, place in places.items():
        named = ["--method", "inc-lora", "--keep", "self", "--self-texts", "48", "--targets", "all-linear", "--out", str(place)]
        named += ["--set", "test_limit=15"]
        named += ["--budget", "0.05"] if name == "scaled" else []
        assert main(["train", "embedded:mini", "--data", data["news"], *FEW, *named]) == 0
    return places


def test_a_budget_scales_what_was_learned_and_nothing_else(budgeted):
    scale = json.loads((budgeted["scaled"] / "skill/budget.json").read_text())["scale"]
    assert 0 < scale < 1, "a budget that does nothing, or leaves nothing, tests nothing"
    whole, scaled = (change(budgeted[name]) for name in ("whole", "scaled"))
    for layer, delta in whole.items():
        assert float((scaled[layer] - scale * delta).norm()) <= 1e-6 * float(delta.norm())


def test_the_scale_is_the_largest_at_which_transformers_finds_the_loss_of_kept_rows_within_the_budget(budgeted):
    """Losses by transformers' own loss of each row, with the weights merged by hand, at each scale that was tried."""
    found = json.loads((budgeted["scaled"] / "skill/budget.json").read_text())
    probes = list(map(json.loads, (budgeted["scaled"] / "skill/before/probes/self.jsonl").read_text().splitlines()))[:15]
    delta = change(budgeted["whole"])

    def losses(scale):
        model = AutoModelForCausalLM.from_pretrained(MINI, dtype=torch.float32)
        for layer, part in delta.items():
            model.get_submodule(layer).weight.data += (scale * part).float()
        said = []
        for row in probes:
            ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
            labels = torch.tensor([[-100] * len(row["prompt_ids"]) + row["completion_ids"]])
            with torch.no_grad():
                said.append(float(model(input_ids=ids, labels=labels).loss))
        return said

    before = losses(0)
    for place in (0, -2, -1):
        tried = found["tried"][place]
        rises = [b - a for a, b in zip(before, losses(tried["scale"]), strict=True)]
        for part, those in ((tried["kept"]["self"], rises[::2]), *([(found["kept"]["self"], rises[1::2])] if place == -1 else [])):
            assert part["n"] == len(those) >= 7
            assert part["mean"] == pytest.approx(sum(those) / len(those), abs=1e-4)
            assert part["mean"] < part["most"] <= max(those)
    fits = [tried["kept"]["self"]["most"] <= 0.05 for tried in found["tried"]]
    assert fits == [False] * (len(fits) - 1) + [True]
    assert [tried["scale"] for tried in found["tried"]] == [step / 20 for step in range(20, 20 - len(fits), -1)]
    assert verdict(budgeted["scaled"])["budget"] == found


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (["--method", "inc-lora"], "nothing is named: add --keep"),
        (["--method", "projected-lora", "--keep", "OLD", "--adapter", "ADAPTER"], "trains both factors of the old adapter"),
        (["--method", "snapshot", "--keep", "OLD"], "weighs or merges its blocks itself"),
        (["--keep", "FEW"], "needs 12 held-out rows"),
        (["--keep", "OLD", "--budget", "-1"], "not in the range"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused_in_one_line(named, said, taught, data, tmp_path, capsys):
    places = {
        "OLD": data["reviews"],
        "ADAPTER": str(taught / "adapter"),
        "FEW": written(tmp_path / "few.jsonl", rows("reviews", "train", 12)),
    }
    named = ["--budget", "0.02", *(places.get(word, word) for word in named)]
    assert main(["train", "embedded:mini", "--data", data["news"], "--out", str(tmp_path / "out"), *named, *FEW]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in error
    assert not (tmp_path / "out/tasks").exists()


def test_a_skill_needs_no_data_loads_the_model_once_with_its_twin_is_read_when_finished_and_goes_on(
    less_data, small_model, tmp_path, capsys, monkeypatch
):
    data, loads, load, out = less_data, [], session.load_base_model, tmp_path / "out"
    monkeypatch.setattr(session, "load_base_model", lambda *args, **named: loads.append(args) or load(*args, **named))
    command = ["train", str(small_model), "--data", data["news"], "--keep", "self", "--compare", "--out", str(out), *FEW, *NARROW]
    assert main(command) == 0
    assert len(loads) == 1
    probes = (out / "skill/before/probes/self.jsonl").read_text()
    assert all(json.loads(line)["text"].strip() for line in probes.splitlines())
    capsys.readouterr()
    times = {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == verdict(out)
    assert times == {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}
    assert main([*command[:4], "--keep", data["reviews"], *command[6:]]) == 2
    assert "belongs to another request (--keep:" in capsys.readouterr().err
    for words, changed in (
        (["--rank", "8"], "--rank: not given -> 8"),
        (["--max-length", "64"], "--max-length: not given -> 64"),
        (["--set", "threads=3"], "--set threads: 1 -> 3"),
        (["--set", "window=4"], "--set window: not given -> 4"),
        (["--margin", "1", "--seed", "7"], "--seed: 42 -> 7"),
    ):
        assert main([*command, *words]) == 2
        assert f"belongs to another request ({changed}); choose another --out" in capsys.readouterr().err
    assert len(loads) == 1
    trained = ("adapter/adapter_model.safetensors", "skill/unprotected/tasks/1-news/adapter/adapter_model.safetensors")
    files = [*trained, "skill/after/scores.json", "skill/after/memory.safetensors", "skill/unprotected/skill/after/scores.json"]
    whole = {file: (out / file).read_bytes() for file in files}
    for folder in ("adapter", "skill/after", "skill/unprotected"):
        shutil.rmtree(out / folder)
    (out / "skill/verdict.json").unlink()
    assert main(command) == 0
    assert len(loads) == 2
    assert {file: (out / file).read_bytes() for file in files} == whole


PHASES = {
    "writing texts of its own",
    "reading what answers depend on in self",
    "testing news",
    "testing self",
}


def test_a_dry_run_writes_nothing_and_names_every_phase_which_all_reach_their_end(
    less_data, small_model, tmp_path, capsys, monkeypatch
):
    words = ["train", str(small_model), "--data", less_data["news"], "--keep", "self", *FEW, *NARROW]
    words += ["--out", str(tmp_path / "out")]
    assert main([*words, "--dry-run", "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "out").exists()
    named = {phase["what"].removesuffix(" before").removesuffix(" after") for phase in estimate["phases"]}
    assert named >= PHASES | {"training"}
    assert all(phase["seconds"] >= 0 for phase in estimate["phases"])
    assert estimate["seconds"] == pytest.approx(sum(phase["seconds"] for phase in estimate["phases"]))
    assert main([*words, "--dry-run"]) == 0
    assert f"{amount(estimate['steps'], 'step')}; about " in capsys.readouterr().out
    told = {}

    def tell(self, what, done, total):
        assert told.get(what, (0, total))[1] == total
        told[what] = (done, total)

    monkeypatch.setattr("anchorlora.cli.progress.ProgressCallback.on_progress", tell)
    tokens, turn_of, lines, of_lines = [], text_data.turn_of, [], sample_files._json_lines
    monkeypatch.setattr(text_data, "turn_of", lambda example, encoder: tokens.append(example.place) or turn_of(example, encoder))
    monkeypatch.setattr(sample_files, "_json_lines", lambda path: (lines.append(row[0]) or row for row in of_lines(path)))
    assert main(words) == 0
    assert set(told) == PHASES | {"looking through rows of news", "reading rows of news: learned"}
    rows = [f"{less_data['news']}, line {n}" for n in range(1, len(Path(less_data["news"]).read_text().splitlines()) + 1)]
    assert sorted(place for place in tokens if place in rows) == sorted(rows)  # each is made tokens once
    # once for what is held out, once for tokens, once for each of two files that a later skill reads, and some at the beginning
    assert set(rows) <= set(lines)
    assert len([line for line in lines if line in rows]) <= 5 * len(rows)
    assert all(done == total for done, total in told.values())
    steps = [event for event in map(json.loads, (tmp_path / "out/log.jsonl").read_text().splitlines()) if event["event"] == "step"]
    assert len(steps) == estimate["steps"]


def test_a_dry_run_reads_as_few_tokens_of_a_large_step_as_of_a_small_one(data, tmp_path, capsys, monkeypatch):
    embed, read = torch.nn.Embedding.forward, []

    def counting(self, ids):
        read[-1] += ids.numel()
        return embed(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", counting)
    for window in ("8", "40"):
        words = ["train", "embedded:mini", "--data", data["news"], "--keep", "self", "--out", str(tmp_path / "out"), *FEW]
        read.append(0)
        assert main([*words, "--set", f"window={window}", "--dry-run"]) == 0
    few, many = read
    # two passes each without and with gradients, three beginnings, steps of 8 and 32 rows twice, packed rows alone and together
    assert few <= many <= 4 * (price.MEASURED + 96) + 3 * price.CONTEXT + 2 * 40 * (1 + price.DRAWN) + 9 * price.SHORT + 40


@pytest.mark.parametrize("architecture", [SEES, LFM2], ids=str)
def test_a_dry_run_measures_a_model_that_sees_images_and_one_whose_cache_cannot_be_repeated(architecture, less_data, tmp_path):
    words = ["train", str(architecture.write(tmp_path / "model")), "--data", less_data["news"], "--keep", less_data["reviews"]]
    assert main([*words, "--out", str(tmp_path / "out"), *FEW, "--dry-run"]) == 0
    assert not (tmp_path / "out").exists()


def test_a_dry_run_refuses_what_the_command_would(data, tmp_path, capsys):
    words = ["train", "embedded:mini", "--data", data["news"], "--keep", "self", "--out", str(tmp_path / "out"), *FEW, "--dry-run"]
    for wrong, said in (
        (["--targets", "c_attn"], "no module called c_attn"),
        (["--self-texts", "20", "--budget", "0.05"], "--budget needs 12 held-out rows"),
        (["--keep", data["news"]], "both called news"),
        (["--method", "sfor"], "B of a new adapter is zero, so nothing would be learned"),
        (["--adapter", str(tmp_path), "--targets", "q_proj"], "--targets is for a new adapter"),
        (["--self-texts", "60", "--set", "test_limit=10", "--budget", "0.05"], "--budget needs 12 held-out rows"),
    ):
        assert main([*words, *wrong]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
