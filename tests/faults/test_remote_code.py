"""Code that comes with a model is not run unless it is asked for as of one commit; a branch of the hub is read as of one commit."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file

import records
import small
from anchorlora.adapters import write_adapter
from anchorlora.cli.app import main
from anchorlora.config import BaseModelSettings, RunConfig, Start
from anchorlora.errors import Interrupted
from anchorlora.geometry import Factors
from anchorlora.models.load import load_base_model, source_of
from anchorlora.models.trust import asked_for
from anchorlora.recipes import mini
from anchorlora.runs.directory import RunDirectory
from anchorlora.runs.provenance import Provenance
from anchorlora_lab.grid.scheduler import command_line
from anchorlora_lab.suites.measure import target_of
from faults.runs import run

COMMIT, LATER = "0123456789abcdef0123456789abcdef01234567", "f" * 40
LAYER = "model.layers.0.self_attn.q_proj"
CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
Path({canary!r}).touch()
from transformers import PretrainedConfig
class Own(PretrainedConfig):
    model_type = "qwen3"
"""


@pytest.fixture
def coded(tmp_path, small_model):
    """A model folder with code of its own that leaves a canary when it is run."""
    place = tmp_path / "model"
    shutil.copytree(small_model, place)
    (place / "own.py").write_text(CODE.format(canary=str(tmp_path / "canary")))
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "own.Own"}}))
    return place


@pytest.fixture
def asking(coded, small_benchmark, small_recipe, tmp_path):
    """The run directory of somebody, whose configuration asks for the code of such a folder."""
    settings = small_recipe.changed({"model": str(coded), "trust_remote_code": COMMIT})
    out = tmp_path / "run"
    RunDirectory(out).claim(RunConfig(method="sfor", order=tuple(records.ORDER), seed=1, recipe=settings))
    write_adapter(
        out / f"tasks/4-{records.ORDER[-1]}/adapter", {LAYER: Factors(torch.ones(1, 64), torch.ones(64, 1), 0.1)}, base=None
    )
    (out / "record.json").write_text(records.record().as_json())
    return out


COMMANDS = {"general": ["eval", "RUN"], "merged": ["export", "RUN", "--form", "merged", "--out", "OUT"]}


def command(name, run, *more):
    places = {"RUN": str(run), "OUT": str(run.parent / "out")}
    return main([*(places.get(word, word) for word in COMMANDS[name]), *more])


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("more", [[], ["--trust-remote-code", LATER], ["--trust-remote-code", "main"]])
def test_a_run_directory_that_asks_for_code_allows_nothing(name, more, asking, tmp_path, capsys):
    assert command(name, asking, *more) == 2
    said = capsys.readouterr().err
    if more[1:] == ["main"]:
        assert "--trust-remote-code takes the 40 hexadecimal digits of a commit, not 'main'" in said
    else:
        assert f"{asking / 'config.yaml'} asks to run code that comes with its model, as of commit {COMMIT}" in said
        assert f"if you trust it give --trust-remote-code {COMMIT}" in said
    assert not (tmp_path / "canary").exists()
    assert not (tmp_path / "out").exists()


def test_another_model_for_a_run_is_not_trusted_with_it(asking, coded, tmp_path, capsys):
    other = shutil.copytree(coded, tmp_path / "other")
    assert target_of(asking, model=str(other)).base_model.trust_remote_code is None
    assert command("merged", asking, "--model", str(other)) == 2
    assert "names its own code (auto_map), which is not run" in capsys.readouterr().err
    assert not (tmp_path / "canary").exists()


def test_code_is_run_where_the_command_line_names_its_commit(asking, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    assert target_of(asking, trust_remote_code=COMMIT).base_model.trust_remote_code == COMMIT
    command("merged", asking, "--trust-remote-code", COMMIT)  # the code makes no model
    assert (tmp_path / "canary").exists()


def test_forms_that_load_no_model_are_exported_and_take_no_commit(asking, tmp_path, capsys):
    assert main(["export", str(asking), "--out", str(tmp_path / "out")]) == 0
    assert main(["export", str(asking), "--out", str(tmp_path / "two"), "--trust-remote-code", COMMIT]) == 2
    assert "--trust-remote-code is for --form merged" in capsys.readouterr().err
    assert not (tmp_path / "canary").exists()


def test_what_the_command_line_asks_for_is_in_the_settings():
    plain, asks = BaseModelSettings(model="org/m"), BaseModelSettings(model="org/m", trust_remote_code=COMMIT)
    assert asked_for(plain, None, where="x") == plain
    assert asked_for(plain, COMMIT, where="x") == asks
    assert asked_for(asks, COMMIT, where="x") == asks
    with pytest.raises(ValueError, match=f"give --set trust_remote_code={COMMIT}$"):
        asked_for(asks, None, where="x", option="--set trust_remote_code=COMMIT")
    with pytest.raises(ValueError, match=r"^trust_remote_code takes the 40"):
        asked_for(asks, "hf_0123456789", where="x", option="trust_remote_code=COMMIT")


def test_a_folder_with_code_of_its_own_is_refused_and_its_code_is_not_run(coded, small_benchmark, tmp_path, capsys):
    arguments = [
        "run",
        "standard-cl",
        "--method",
        "sfor",
        "--model",
        str(coded),
        "--data",
        str(small_benchmark),
        "--order",
        "fruit,mood",
    ]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert "names its own code (auto_map), which is not run" in capsys.readouterr().err
    assert not (tmp_path / "canary").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", ["true", "True", "main", "1", "v1.0", COMMIT[:39], COMMIT + "0", COMMIT.upper(), COMMIT + "\n"])
def test_anything_but_a_whole_commit_is_refused(given, tmp_path, capsys):
    (tmp_path / "own.yaml").write_text(json.dumps({"extends": "mini", "trust_remote_code": given}))
    assert main(["run", str(tmp_path / "own.yaml"), "--method", "sfor", "--out", str(tmp_path / "out")]) == 2
    assert "base_model.trust_remote_code: String should match pattern" in capsys.readouterr().err


def test_the_commit_is_told_to_every_loader_and_no_other_revision_beside_it():
    assert source_of(BaseModelSettings(model="org/m")) == {"revision": None, "trust_remote_code": False}
    assert source_of(BaseModelSettings(model="org/m", revision="main"))["trust_remote_code"] is False
    asked = source_of(BaseModelSettings(model="org/m", trust_remote_code=COMMIT))
    assert asked == {"revision": COMMIT, "code_revision": COMMIT, "trust_remote_code": True}
    with pytest.raises(ValueError, match="are different commits"):
        source_of(BaseModelSettings(model="org/m", revision="main", trust_remote_code=COMMIT))


def test_the_commit_stands_in_the_configuration():
    assert mini().changed({"trust_remote_code": COMMIT}).model_dump(mode="json")["base_model"]["trust_remote_code"] == COMMIT


def test_a_branch_that_moves_while_it_is_read_is_read_as_of_one_commit(small_model, tmp_path, monkeypatch):
    """A hub's cache with a branch; it moves as soon as the configuration is read."""
    hub = tmp_path / "hub"
    cache = hub / "models--org--m"
    for commit in (COMMIT, LATER):
        shutil.copytree(small_model, cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    seen = []
    for kind in (transformers.AutoConfig, transformers.AutoTokenizer, transformers.AutoModelForCausalLM):

        def moving(*args, read=kind.from_pretrained, **kwargs):
            seen.append(kwargs["revision"])
            found = read(*args, **kwargs)
            (cache / "refs/main").write_text(LATER)
            return found

        monkeypatch.setattr(kind, "from_pretrained", moving)
    base_model = load_base_model(BaseModelSettings(model="org/m", device="cpu"))
    assert base_model.revision == COMMIT
    assert set(seen) == {COMMIT}
    assert len(seen) >= 3
    assert base_model.sha256 == COMMIT


def test_a_run_goes_on_with_the_commit_that_it_began_with(small_model, small_benchmark, tmp_path, monkeypatch):
    """A branch that has moved between two calls; its newer commit is another model."""
    cache = tmp_path / "hub/models--org--m"
    for commit in (COMMIT, LATER):
        shutil.copytree(small_model, cache / "snapshots" / commit)
    (cache / "snapshots" / LATER / "model.safetensors").unlink()
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    recipe = small.recipe(small_benchmark, small_model).changed({"model": "org/m"})
    with pytest.raises(Interrupted):
        run(recipe, tmp_path / "parts", "sfor", point={"task": 1, "step": 1})
    (cache / "refs/main").write_text(LATER)
    record = run(recipe, tmp_path / "parts", "sfor")
    assert record.base_model.revision == record.base_model.sha256 == COMMIT


def test_a_run_is_not_gone_on_with_on_another_commit(tmp_path):
    """As where the cache of the hub was changed by hand."""
    (tmp_path / "config.yaml").write_text("{}")
    origin = Provenance(tmp_path / "state/provenance.json", tmp_path / "config.yaml")
    benchmark = SimpleNamespace(root=tmp_path / "data", opened={})
    known = {"name": "org/m", "files": {}, "device": torch.device("cpu"), "tokenizer": SimpleNamespace(chat_template=None)}
    for _ in range(2):
        origin.keep(SimpleNamespace(**known, sha256=COMMIT), benchmark, Start())
    with pytest.raises(ValueError, match="org/m is not what this run began with: its hash differs"):
        origin.keep(SimpleNamespace(**known, sha256=LATER), benchmark, Start())


def test_a_model_whose_weights_are_a_pickle_is_refused(small_model, tmp_path):
    place = tmp_path / "model"
    shutil.copytree(small_model, place)
    torch.save(load_file(place / "model.safetensors"), place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cannot be loaded: .*safetensors"):
        load_base_model(BaseModelSettings(model=str(place), device="cpu"))


COMMANDS_OF_FILES = {
    "run": ["run", "FILE", "--method", "sfor", "--out", "OUT"],
    "dry": ["run", "FILE", "--method", "sfor", "--dry-run"],
    "grid": ["grid", "FILE", "--methods", "sfor", "--orders", "order1", "--seeds", "1", "--out", "OUT"],
    "trace": ["trace", "FILE", "--out", "OUT"],
    "select": ["select", "FILE", "--method", "ewc", "--out", "OUT"],
}


@pytest.mark.parametrize("name", COMMANDS_OF_FILES)
@pytest.mark.parametrize("more", [[], ["--set", f"trust_remote_code={LATER}"]], ids=["not asked", "another commit"])
def test_a_recipe_that_asks_for_code_allows_nothing(name, more, coded, tmp_path, capsys):
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps({"extends": "mini", "model": str(coded), "trust_remote_code": COMMIT}))
    places = {"FILE": str(path), "OUT": str(tmp_path / "out")}
    assert main([*(places.get(word, word) for word in COMMANDS_OF_FILES[name]), *more]) == 2
    said = capsys.readouterr().err
    assert f"{path} asks to run code that comes with its model, as of commit {COMMIT}" in said
    assert f"--set trust_remote_code={COMMIT}" in said
    assert not (tmp_path / "canary").exists()
    assert not (tmp_path / "out").exists()


METHOD = """
from pathlib import Path
Path({canary!r}).touch()
from anchorlora import METHODS
method = METHODS["sfor"].plus(name="own")
"""


def test_a_configuration_that_names_a_python_file_runs_nothing_of_it_unasked(small_recipe, tmp_path, capsys):
    (tmp_path / "own.py").write_text(METHOD.format(canary=str(tmp_path / "canary")))
    method = f"{tmp_path / 'own.py'}:method"
    out = tmp_path / "run"
    RunDirectory(out).claim(RunConfig(method=method, order=("fruit", "mood"), seed=1, recipe=small_recipe))
    words = ["run", str(out / "config.yaml"), "--dry-run"]
    assert main(words) == 2
    assert f"add --method {method}" in capsys.readouterr().err
    assert not (tmp_path / "canary").exists()
    assert main([*words, "--method", method]) == 0
    assert (tmp_path / "canary").exists()


def test_a_grid_says_again_to_its_runs_what_it_was_asked_to_trust(small_recipe, tmp_path):
    cell = RunConfig(method="own.py:method", order=("fruit",), seed=1, recipe=small_recipe.changed({"trust_remote_code": COMMIT}))
    words = command_line(tmp_path, cell)
    assert words[words.index("--method") + 1] == "own.py:method"
    assert words[words.index("--set") + 1] == f"trust_remote_code={COMMIT}"
    assert "--set" not in command_line(tmp_path, cell.model_copy(update={"recipe": small_recipe}))
