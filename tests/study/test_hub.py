"""A dry run of a model on the hub: one quick question, then the estimate or one line."""

import shutil
import time
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from anchorlora.cli.app import main
from anchorlora.config import BaseModelSettings
from anchorlora.models.hub import PATIENCE, cached_folder

NAME = "some-org/some-model"
DRY = ["run", "qwen3-8b", "--model", NAME, "--method", "sfor", "--dry-run"]
SETTINGS = BaseModelSettings(model=NAME)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def answering(monkeypatch, how):
    asked = []

    def answer(url, **settings):
        asked.append(url)
        return how()

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", answer)
    return asked


def refusing(kind, status):
    def refuse():
        error = kind.__new__(kind)  # what it is made of differs between versions
        error.response = SimpleNamespace(status_code=status)
        raise error

    return refuse


def test_without_a_network_one_line_says_so_with_status_2_after_one_attempt(monkeypatch, capsys):
    def unreachable():
        raise OSError("[Errno -2] Name or service not known")

    asked = answering(monkeypatch, unreachable)
    assert main(DRY) == 2
    said = capsys.readouterr()
    assert said.err == (
        f"error: the configuration of the model {NAME} is not in the local cache, and the hub does not answer: [Errno -2] Name or "
        f"service not known; give a folder with --model, or fetch the model where there is a network (hf download {NAME})\n"
    )
    assert f"model: {NAME}" in said.out
    assert "sizes unknown" not in said.out
    assert len(asked) == 1


def test_a_hub_that_says_nothing_is_not_waited_for(monkeypatch):
    answering(monkeypatch, lambda: time.sleep(10))
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"does not answer: nothing within {PATIENCE} seconds"):
        cached_folder(SETTINGS)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(("kind", "status"), [(RepositoryNotFoundError, 404), (HfHubHTTPError, 403)])
def test_a_hub_that_refuses_is_there_and_reading_says_what_is_wrong(kind, status, monkeypatch):
    answering(monkeypatch, refusing(kind, status))
    assert cached_folder(SETTINGS) is None


def test_a_hub_that_is_broken_is_not_there(monkeypatch):
    answering(monkeypatch, refusing(HfHubHTTPError, 503))
    with pytest.raises(ValueError, match="does not answer: status 503"):
        cached_folder(SETTINGS)


def test_a_cached_configuration_is_enough_and_nobody_is_asked(monkeypatch, cache, small_model, capsys):
    asked = answering(monkeypatch, lambda: pytest.fail("the hub was asked"))
    commit, place = "0" * 40, cache / f"models--{NAME.replace('/', '--')}"
    shutil.copytree(small_model, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs/main").write_text(commit)
    assert cached_folder(SETTINGS) == place / "snapshots" / commit
    assert main(DRY) == 0
    assert "parameters of the base model" in capsys.readouterr().out
    assert not asked


@pytest.mark.parametrize("name", ["./model", "a/b/c", "not a name"])
def test_what_is_no_name_on_the_hub_is_not_asked_for(name, monkeypatch):
    answering(monkeypatch, lambda: pytest.fail("the hub was asked"))
    assert cached_folder(BaseModelSettings(model=name)) is None
