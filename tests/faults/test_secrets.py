"""A canary in the environment and in addresses: it is in nothing that is written, and in nothing that is printed."""

import json
import subprocess

import pytest
import torch
from pydantic import ValidationError

import small
from anchorlora.adapters import write_adapter
from anchorlora.cli.app import main
from anchorlora.cli.console import Terminal
from anchorlora.config import BaseModelSettings, base_model_of
from anchorlora.data.importing import import_benchmark
from anchorlora.geometry import Factors
from anchorlora.recipes import mini
from anchorlora.runs.directory import RunDirectory
from anchorlora.text import without_secrets

CANARY = "hf_CANARY0123456789abcdefghijklmnop"
ODD = "canary-that-looks-like-nothing-42"
ADDRESS = f"https://user:{CANARY}@host.invalid/repo.git"
LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", ODD)
    monkeypatch.setenv("ANCHORLORA_CANARY", CANARY)


def assert_absent(root, *said):
    for text in said:
        assert "CANARY" not in text
        assert ODD not in text
    seen = 0
    for path in root.rglob("*"):
        if path.is_file():
            seen += 1
            content = path.read_bytes()
            assert b"CANARY" not in content, path
            assert ODD.encode() not in content, path
    return seen


def test_a_run_and_its_report_hold_no_token(tmp_path, small_benchmark, small_model, capfd):
    fast = ["--model", str(small_model), "--data", str(small_benchmark), "--order", "fruit,mood", "--set", "max_tokens=96"]
    fast += ["--set", "rank=4", "--set", "max_new_tokens=6", "--set", "threads=1"]
    assert main(["run", "standard-cl", "--method", "sfor", *fast, "--dry-run"]) == 0
    assert main(["run", "standard-cl", "--method", "sfor", *fast, "--out", str(tmp_path / "runs/one")]) == 0
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 0
    said = capfd.readouterr()
    assert assert_absent(tmp_path, said.out, said.err) > 50
    assert "record:" in said.out


@pytest.mark.parametrize("before", [[], ["--verbose"]])
def test_a_password_in_an_address_of_data_is_not_repeated(before, tmp_path, capfd):
    assert main([*before, "data", "import", ADDRESS.replace("https://", "nosuch://"), "--out", str(tmp_path / "to")]) == 2
    said = capfd.readouterr()
    assert "git could not clone nosuch://host.invalid/repo.git" in said.err
    assert_absent(tmp_path, said.out, said.err)


def test_the_manifest_of_a_clone_names_its_origin_without_the_password(tmp_path):
    clone = small.write_benchmark(tmp_path / "clone/CL_Benchmark").parent
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "data"], ["remote", "add", "origin", ADDRESS]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    manifest = import_benchmark(str(clone), tmp_path / "to")
    assert manifest["source"]["url"] == "https://host.invalid/repo.git"
    assert assert_absent(tmp_path / "to") > 5


@pytest.mark.parametrize("field", ["model", "data"])
def test_a_configuration_holds_no_password(field, tmp_path, capfd):
    assert main(["run", "mini", "--method", "sfor", "--set", f"{field}={ADDRESS}", "--out", str(tmp_path / "out")]) == 2
    (tmp_path / "own.yaml").write_text(json.dumps({"extends": "mini", field: ADDRESS}))
    assert main(["run", str(tmp_path / "own.yaml"), "--method", "sfor", "--out", str(tmp_path / "out")]) == 2
    (tmp_path / "own.yaml").unlink()
    said = capfd.readouterr()
    assert said.err.count("contains a password or a token") == 2
    assert_absent(tmp_path, said.out, said.err)


def write_told(folder, **said):
    """An adapter whose configuration says this too."""
    write_adapter(folder, {LAYER: Factors(torch.ones(1, 4), torch.ones(4, 1), 1.0)}, base=None)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    return path


WORDS_OF = {
    "cores": "cores {it} ADAPTER DATA --out TO",
    "eval": "eval ADAPTER",
    "eval --model": "eval ADAPTER --model {it}",
    "export": "export ADAPTER --out TO",
    "merged": "export ADAPTER --form merged --out TO",
    "export --model": "export ADAPTER --model {it} --out TO",
    "audit": "audit ADAPTER ADAPTER --data DATA",
    "audit --model": "audit ADAPTER ADAPTER --data DATA --model {it}",
}


@pytest.mark.parametrize("it", [ADDRESS, CANARY, ODD])
@pytest.mark.parametrize("command", WORDS_OF)
def test_the_base_of_an_adapter_is_named_without_a_password(command, it, tmp_path, capfd):
    config = write_told(tmp_path / "adapter", base_model_name_or_path=it)
    (tmp_path / "old.jsonl").write_text('{"text": "a b"}\n')
    places = {"ADAPTER": config.parent, "DATA": tmp_path / "old.jsonl", "TO": tmp_path / "to"}
    words = WORDS_OF[command].split()
    assert main([str(places.get(word, word)).format(it=it) for word in words]) == 2
    config.unlink()
    said = capfd.readouterr()
    assert "model: contains a password or a token" in said.err
    assert said.err.count("\n") == 1
    assert_absent(tmp_path, said.out, said.err)


def test_a_token_is_no_revision(tmp_path, capfd):
    config = write_told(tmp_path / "adapter", base_model_name_or_path="org/m", revision=CANARY)
    assert main(["export", str(config.parent), "--out", str(tmp_path / "to")]) == 2
    assert main(["run", "mini", "--method", "sfor", "--set", f"revision={CANARY}", "--out", str(tmp_path / "out")]) == 2
    config.unlink()
    said = capfd.readouterr()
    assert said.err.count("revision: contains a password or a token") == 2
    assert_absent(tmp_path, said.out, said.err)


PLACES = [
    "data verify {}",
    "data import nosuch:{} --out t",
    "data import none --out {}",
    "measure {} b --cores c",
    "measure a b --cores {}",
    "audit {} b",
    "audit a b --cores {}",
    "audit a b --data {}",
    "audit a b --weights 2 --model {}",
    "audit a b --html {}",
    "cores {} a d --out c",
    "cores m {} d --out c",
    "cores m a {} --out c",
    "cores m a d --out {}",
    "eval {}",
    "eval a --model {}",
    "eval a --data {}",
    "eval a --cache {}",
    "export {} --out t",
    "export a --out {}",
    "export a --out t --form merged --model {}",
    "report {} --out t",
    "report a --out {}",
    "run {} --method sfor --order order1 --seed 1 --out o",
    "run mini --method {} --order order1 --seed 1 --out o",
    "run mini --method {}/m.py:mine --order order1 --seed 1 --out o",
    "run mini --method sfor --order {} --seed 1 --out o",
    "run mini --method sfor --order order1 --seed {} --out o",
    "run mini --method sfor --order order1 --seed 1 --out o --model {}",
    "run mini --method sfor --order order1 --seed 1 --out o --data {}",
    "run mini --method sfor --order order1 --seed 1 --out o --selection {}",
    "run mini --method sfor --order order1 --seed 1 --out o --set model={}",
    "run mini --method sfor --order order1 --seed 1 --out o --set {}",
    "grid {} --methods sfor --orders order1 --seeds 1 --out o",
    "grid mini --methods sfor --orders order1 --seeds 1 --out o --models {}",
    "grid mini --methods sfor --orders order1 --seeds 1 --out o --selection {}",
    "trace {} --out o",
    "select {} --method ewc --out o",
    "check {}",
    "{}",
]


@pytest.mark.parametrize("words", PLACES)
def test_a_password_in_an_address_is_repeated_by_no_command_wherever_it_was_given(words, tmp_path, monkeypatch, capfd):
    """Also where a command takes a path, of which an address keeps one slash."""
    monkeypatch.chdir(tmp_path)
    assert main(words.format("https://user:pw-CANARY@host.invalid/repo").split()) == 2
    said = capfd.readouterr()
    assert_absent(tmp_path, said.out, said.err)
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("field", ["model", "revision", "dtype", "trust_remote_code", "threads", "no_field"])
def test_what_is_wrong_with_settings_is_said_without_what_was_given(field):
    for it in (ADDRESS, CANARY, ODD):
        with pytest.raises(ValidationError) as raised:
            BaseModelSettings.model_validate({field: it})
        assert it not in str(raised.value)
        with pytest.raises(ValueError, match=f"^here: {field}: ") as raised:
            base_model_of("here", **{field: it})
        assert it not in str(raised.value)
        assert CANARY not in str(raised.value)


def test_logs_and_terminals_cut_what_slips_into_a_sentence(tmp_path, capsys):
    sentence = f"cannot read {ADDRESS} with Authorization: Bearer abc.def-CANARY== or {CANARY} or {ODD}"
    RunDirectory(tmp_path).log.write({"event": "damaged", "said": sentence})
    Terminal().print(sentence)
    Terminal(stderr=True).print(sentence)
    said = capsys.readouterr()
    assert "cannot read https://host.invalid/repo.git with Authorization: Bearer ..." in said.out
    assert assert_absent(tmp_path, said.out, said.err) == 1
    assert json.loads((tmp_path / "log.jsonl").read_text())["event"] == "damaged"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("of nobody's environment: hf_0123456789abcdefghij.", "of nobody's environment: hf_...."),
        ("Authorization: Bearer abc.def-0123==", "Authorization: Bearer ..."),
        ("authorization: bearer 0123456789", "authorization: bearer ..."),
        ("https://user:word@host.invalid/repo", "https://host.invalid/repo"),
        ("ssh://token@host.invalid", "ssh://host.invalid"),
        ("there is nothing at https:/user:word@host.invalid/repo", "there is nothing at https:/host.invalid/repo"),
    ],
)
def test_what_is_a_secret_is_cut(text, left):
    assert without_secrets(text) == left


@pytest.mark.parametrize(
    "text", ["hf_hub", "org/hf_model", "a@b.org", "https://host/path@v1", "git@host:org/repo", "C:/a@b", "bearer of it"]
)
def test_what_is_no_secret_stays(text):
    assert without_secrets(text) == text


def test_a_model_named_on_the_hub_is_no_secret():
    assert BaseModelSettings(model="org/hf_model").model == "org/hf_model"
    assert mini().base_model.model == "embedded:mini"
