"""`anchorlora export`: what it prints, what it refuses in one line, and that nothing is written then."""

import json
import re
import shutil

import huggingface_hub
import pytest
import torch

import models
import small
from anchorlora import METHODS, run_sequence
from anchorlora.adapters import write_adapter
from anchorlora.cli.app import main
from anchorlora.geometry import Factors
from golden import assert_golden, one_line


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_benchmark, small_model):
    out = tmp_path_factory.mktemp("export") / "run"
    run_sequence(small.recipe(small_benchmark, small_model), METHODS["sfor"], order=small.ORDER[:2], seed=1, out=out)
    return out


@pytest.fixture
def plain(tmp_path):
    layers = {"model.layers.0.self_attn.q_proj": Factors(torch.randn(4, 64), torch.randn(64, 4), 2.0)}
    write_adapter(tmp_path / "plain", layers, base=None)
    return tmp_path / "plain"


def masked(text):
    return re.sub(r"\d\.\de[-+]\d\d", "#.#e###", re.sub(r"\d+\.\d\d%", "#.##%", text))


@pytest.mark.parametrize(("form", "more"), [("cat", []), ("svd", ["--rank", "2"]), ("merged", ["--dtype", "bfloat16"])])
def test_what_is_printed_and_what_it_cost(form, more, finished, small_model, tmp_path, capfd):
    to = tmp_path / "out"
    assert main(["export", str(finished), "--out", str(to), "--form", form, *more]) == 0
    said = capfd.readouterr()
    assert_golden(f"export-{form}.txt", masked(said.out).replace(str(to), "OUT").replace(str(small_model), "MODEL"))
    assert said.err == "", "no bars and no log lines where stderr is no terminal"
    assert (to / "README.md").read_text().startswith("---\nlibrary_name: ")
    assert "# sfor: LoRA after task 2, mood" in (to / "README.md").read_text()


def test_json_is_the_file(finished, tmp_path, capsys):
    assert main(["export", str(finished), "--out", str(tmp_path / "out"), "--json"]) == 0
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "out/export.json").read_text()
    assert json.loads(printed)["source"]["task"] == "mood"


def test_an_export_is_an_adapter_like_any_other(finished, tmp_path, capsys):
    assert main(["export", str(finished), "--out", str(tmp_path / "one")]) == 0
    assert main(["export", str(tmp_path / "one"), "--out", str(tmp_path / "two")]) == 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    cores = finished / "tasks/1-fruit/cores.safetensors"
    capsys.readouterr()
    assert main(["measure", str(finished / "tasks/1-fruit/adapter"), str(tmp_path / "two"), "--cores", str(cores)]) == 0
    assert "protected: rho is no more than rounding explains" in capsys.readouterr().out


def test_an_unfinished_run_is_said_to_be_one(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "record.json").unlink()
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 2
    assert f"{run}/record.json is missing, although the run has finished" in one_line(capsys)
    assert not (tmp_path / "out").exists()
    (run / "state/recorded.json").unlink()
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    assert "the run is not finished: the model card has no scores" in capsys.readouterr().out
    assert "The run was not finished when this was exported (task 2 of 2)." in (tmp_path / "out/README.md").read_text()


def test_what_cannot_be_exported_gets_one_line_and_nothing_is_written(finished, plain, tmp_path, capsys):
    to, empty, full, wide = tmp_path / "out", tmp_path / "empty", tmp_path / "full", tmp_path / "wide"
    empty.mkdir()
    models.qwen3().save_pretrained(full)
    write_adapter(wide, {"model.layers.0.self_attn.q_proj": Factors(torch.ones(513, 4), torch.ones(4, 513), 1.0)}, base=None)
    dora, pickled = shutil.copytree(plain, tmp_path / "dora"), shutil.copytree(plain, tmp_path / "pickled")
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    copies = shutil.copytree(plain, tmp_path / "copies")
    (copies / "adapter_config.json").write_text(json.dumps(config | {"layer_replication": [[0, 1], [0, 2]]}))
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    bare = shutil.copytree(plain, tmp_path / "bare")
    (bare / "adapter_config.json").unlink()
    capsys.readouterr()
    for source, arguments, message in [
        (
            tmp_path / "no",
            [],
            f"there is no folder {tmp_path}/no; give a run directory, one of its tasks, a saved PEFT adapter, or a model",
        ),
        (
            empty,
            [],
            f"{empty} is neither a run directory (config.yaml), nor a task of one, nor a saved adapter (adapter_config.json)",
        ),
        (bare, [], f"{bare}/adapter_model.safetensors lies there without its adapter_config.json, which says what it adapts"),
        (dora / "adapter_config.json", [], "adapter_config.json is neither a run directory (config.yaml), nor a task of one, nor"),
        (full, [], f"{full} holds a model's full weights and no adapter; give a run, a task, or an adapter"),
        (dora, [], "describes a DoRA adapter, whose update is not a product s B A; merge it into its base with PEFT"),
        (copies, [], "sets layer_replication, so its layers are not those of the base model; merge it into its base with PEFT"),
        (pickled, [], "adapter_model.bin is a pickle, which is not opened here; convert it: python -c"),
        (finished, ["--form", "svd"], "--form svd needs the rank to reduce to; give it with --rank"),
        (finished, ["--form", "svd", "--rank", "0"], "0 is not in the range x>=1"),
        (finished, ["--rank", "4"], "--rank is for --form svd, and the form is cat"),
        (finished, ["--form", "gguf"], "'gguf' is not one of 'cat', 'svd', 'merged'"),
        (finished, ["--push", "name"], "--push takes ORG/NAME, a repository of yours on the hub, not 'name'"),
        (finished, ["--push", "a/b/c"], "--push takes ORG/NAME, a repository of yours on the hub, not 'a/b/c'"),
        (
            wide,
            [],
            "the adapter has rank 513, and vLLM serves ranks up to 512; reduce it with --form svd --rank R, or use --form merged",
        ),
        (finished, ["--form", "merged", "--model", str(empty)], "no model at"),
        (plain, ["--form", "merged"], f"{plain} names no base model to merge into; give one with --model"),
    ]:
        assert main(["export", str(source), "--out", str(to), *arguments]) == 2, message
        assert message in one_line(capsys)
        assert not to.exists()
    to.mkdir()
    assert main(["export", str(finished), "--out", str(to)]) == 2
    assert f"{to} exists already; an export is written once, choose another --out" in one_line(capsys)
    assert not list(to.iterdir())
    assert not list(tmp_path.glob(".*"))


def test_half_precision_is_told_before_and_after(finished, tmp_path, capsys):
    assert main(["export", str(finished), "--out", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    kept = json.loads((tmp_path / "out/export.json").read_text())["protection"]
    assert "exported as cat, bfloat16, rank 4" in said
    assert f"rho of task mood: {kept['rho']:.1e} as trained, {kept['rho_exported']:.1e} as exported" in said
    assert (
        f"to {kept['served']['float16']:.1e} in float16 and {kept['served']['bfloat16']:.1e} in bfloat16; serve in float16" in said
    )


def test_without_cores_only_the_cast_is_told_and_what_is_missing(plain, tmp_path, capsys):
    assert main(["export", str(plain), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "bfloat16 moves a value by up to 2^-8 of it, float16 by 2^-11; serve in float16" in said
    assert "rho" not in said
    assert "there is no tokenizer next to the adapter: the base model cannot be read here; give its folder with --model" in said
    assert "vllm serve BASE_MODEL --enable-lora --max-lora-rank 8 --lora-modules out=" in said


class Hub:
    """Stands for the hub's client."""

    calls, refuses = [], None

    def create_repo(self, repo_id, *, repo_type, exist_ok):
        self.calls.append(("create", repo_id, repo_type, exist_ok))
        if self.refuses is not None:
            raise self.refuses
        return f"https://hub/{repo_id}"

    def upload_folder(self, *, repo_id, repo_type, folder_path, commit_message):
        self.calls.append(("upload", repo_id, repo_type, sorted(path.name for path in folder_path.iterdir())))


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    return Hub


def test_the_whole_folder_is_pushed_and_stays(hub, finished, tmp_path, capsys):
    to = tmp_path / "out"
    assert main(["export", str(finished), "--out", str(to), "--push", "org/name"]) == 0
    files = sorted(path.name for path in to.iterdir())
    assert "README.md" in files
    assert hub.calls == [("create", "org/name", "model", True), ("upload", "org/name", "model", files)]
    assert "\npushed: https://hub/org/name\n" in capsys.readouterr().out


def test_nothing_is_pushed_if_the_export_failed(hub, finished, tmp_path, capsys):
    to = tmp_path / "out"
    to.mkdir()
    assert main(["export", str(finished), "--out", str(to), "--push", "org/name"]) == 2
    assert "exists already" in one_line(capsys)
    assert hub.calls == []


def test_a_refused_push_is_one_line_and_the_folder_stays(hub, monkeypatch, finished, tmp_path, capsys):
    monkeypatch.setattr(hub, "refuses", ConnectionError("no route\nto the hub hf_abcdefghijkl"))
    to = tmp_path / "out"
    assert main(["export", str(finished), "--out", str(to), "--push", "org/name"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {to} is written, but was not pushed to org/name: no route to the hub hf_...; log in with")
    assert line.endswith(f"hf upload org/name {to}")
    assert (to / "adapter_model.safetensors").exists()


def test_without_a_network_the_hub_itself_refuses_in_one_line(finished, tmp_path, capsys):
    assert main(["export", str(finished), "--out", str(tmp_path / "out"), "--push", "org/name"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "was not pushed to org/name: " in line
    assert (tmp_path / "out/README.md").exists()
