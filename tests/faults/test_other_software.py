"""A run that was begun under other versions, or on another device, is not gone on with in silence."""

import json

import pytest
import torch

import small
from anchorlora.cli.app import main
from anchorlora.errors import Interrupted
from anchorlora.runs import provenance as origin
from faults.runs import assert_same, command, contents, run

POINT = {"task": 2, "step": 2}
CPU = torch.device("cpu")
COMPUTING = origin.computing(CPU)


@pytest.fixture
def stopped(small_benchmark, small_model, tmp_path):
    recipe = small.recipe(small_benchmark, small_model)
    with pytest.raises(Interrupted):
        run(recipe, tmp_path / "parts", "sfor", point=POINT)
    return recipe, tmp_path / "parts"


def with_other(monkeypatch, name, version):
    found = COMPUTING | {name: version}
    monkeypatch.setattr(origin, "computing", lambda device: found)


@pytest.mark.parametrize("name", ["torch", "transformers", "peft", "anchorlora", "device", "instructions"])
def test_another_version_is_refused_and_named_and_nothing_is_touched(name, stopped, monkeypatch, capsys):
    recipe, out = stopped
    before = contents(out)
    was = COMPUTING[name]
    with_other(monkeypatch, name, "9.9.9")
    assert main(command(recipe, out, "sfor")) == 2
    said = capsys.readouterr().err
    assert f"{out} was begun under other conditions ({name} {was} then and 9.9.9 now)" in said
    assert "--allow-inexact" in said
    assert contents(out) == before


def test_the_record_says_that_it_was_allowed_and_what_changed(stopped, monkeypatch, capsys):
    recipe, out = stopped
    was = COMPUTING["torch"]
    with_other(monkeypatch, "torch", "9.9.9")
    assert main([*command(recipe, out, "sfor"), "--allow-inexact"]) == 0
    assert json.loads((out / "record.json").read_text())["protocol"]["inexact"] == [f"torch {was} then and 9.9.9 now"]


def test_the_change_is_allowed_once_and_the_next_one_is_asked_for_again(stopped, monkeypatch):
    recipe, out = stopped
    with_other(monkeypatch, "torch", "9.9.9")
    with pytest.raises(Interrupted):
        run(recipe, out, "sfor", point={"task": 2, "step": 3}, allow_inexact=True)
    with pytest.raises(Interrupted):
        run(recipe, out, "sfor", point={"task": 3, "step": 1})  # the versions that were allowed are its own now
    with_other(monkeypatch, "torch", "10.0")
    with pytest.raises(ValueError, match=r"torch 9.9.9 then and 10.0 now"):
        run(recipe, out, "sfor")
    record = run(recipe, out, "sfor", allow_inexact=True)
    assert [said.split(" then")[0] for said in record.protocol["inexact"]] == [
        f"torch {COMPUTING['torch']}",
        "torch 9.9.9",
    ]


def test_the_same_software_goes_on_without_a_word(stopped, tmp_path):
    recipe, out = stopped
    record = run(recipe, out, "sfor")
    assert "inexact" not in record.protocol
    run(recipe, tmp_path / "whole", "sfor")
    assert_same(out, tmp_path / "whole")


def test_a_finished_run_is_read_under_any_version(stopped, monkeypatch):
    recipe, out = stopped
    record = run(recipe, out, "sfor")
    with_other(monkeypatch, "torch", "9.9.9")
    assert run(recipe, out, "sfor") == record


def test_it_goes_on_with_as_many_threads_as_it_began_with(stopped, tmp_path):
    """Sums of more threads are rounded in another order."""
    recipe, out = stopped
    torch.set_num_threads(2)
    try:
        assert run(recipe, out, "sfor").threads == 1
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("threads", ["many", "0", "99999999", "-1"])
def test_a_number_of_threads_that_is_none_is_not_taken(threads, stopped):
    recipe, out = stopped
    known = origin.Provenance(out / "state/provenance.json", out / "config.yaml")
    known._write(known._known() | {"threads": threads})
    with pytest.raises(ValueError, match="threads is not what this run began with"):
        run(recipe, out, "sfor")
    assert torch.get_num_threads() == 1
