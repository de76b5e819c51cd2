"""Code that comes with a model is not run unless it is asked for as of one commit; a branch of the hub is read as of one commit."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from anchorlora.cli.app import main
from anchorlora.continual.backbone import load_backbone, source_of
from anchorlora.continual.recipe import Backbone
from anchorlora.experiments.origin import Origin
from anchorlora.recipes import mini

COMMIT, LATER = "0123456789abcdef0123456789abcdef01234567", "f" * 40
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
    assert "names code of its own (auto_map), which is not run" in capsys.readouterr().err
    assert not (tmp_path / "canary").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", ["true", "True", "main", "1", "v1.0", COMMIT[:39], COMMIT + "0", COMMIT.upper(), COMMIT + "\n"])
def test_anything_but_a_whole_commit_is_refused(given, tmp_path, capsys):
    (tmp_path / "own.yaml").write_text(json.dumps({"extends": "mini", "trust_remote_code": given}))
    assert main(["run", str(tmp_path / "own.yaml"), "--method", "sfor", "--out", str(tmp_path / "out")]) == 2
    assert "backbone.trust_remote_code: String should match pattern" in capsys.readouterr().err


def test_the_commit_is_told_to_every_loader_and_no_other_revision_beside_it():
    assert source_of(Backbone(model="org/m")) == {"revision": None, "trust_remote_code": False}
    assert source_of(Backbone(model="org/m", revision="main"))["trust_remote_code"] is False
    asked = source_of(Backbone(model="org/m", trust_remote_code=COMMIT))
    assert asked == {"revision": COMMIT, "code_revision": COMMIT, "trust_remote_code": True}
    with pytest.raises(ValueError, match="are not one commit"):
        source_of(Backbone(model="org/m", revision="main", trust_remote_code=COMMIT))


def test_the_commit_stands_in_the_configuration():
    assert mini().changed({"trust_remote_code": COMMIT}).model_dump(mode="json")["backbone"]["trust_remote_code"] == COMMIT


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
    backbone = load_backbone(Backbone(model="org/m", device="cpu"))
    assert backbone.revision == COMMIT
    assert set(seen) == {COMMIT}
    assert len(seen) >= 3
    assert backbone.sha256 == COMMIT


def test_a_run_is_not_gone_on_with_on_another_commit(tmp_path):
    """A branch that has moved between two calls."""
    (tmp_path / "config.yaml").write_text("{}")
    origin = Origin(tmp_path / "state/origin.json", tmp_path / "config.yaml")
    benchmark = SimpleNamespace(root=tmp_path / "data", opened={})
    for _ in range(2):
        origin.keep(SimpleNamespace(name="org/m", files={}, sha256=COMMIT), benchmark)
    with pytest.raises(ValueError, match="org/m is not what this run began with: its hash differs"):
        origin.keep(SimpleNamespace(name="org/m", files={}, sha256=LATER), benchmark)


def test_a_model_whose_weights_are_a_pickle_is_refused(small_model, tmp_path):
    place = tmp_path / "model"
    shutil.copytree(small_model, place)
    torch.save(load_file(place / "model.safetensors"), place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cannot be loaded: .*safetensors"):
        load_backbone(Backbone(model=str(place), device="cpu"))
