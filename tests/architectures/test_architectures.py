"""Every architecture of docs/supported.md: protected, cores made, run and exported, or refused in one line."""

import re

import pytest
from transformers import CONFIG_MAPPING

from anchorlora.adapters import target_layers
from anchorlora.cli.app import main
from anchorlora.export.export import Request, export
from anchorlora.export.source import export_source
from anchorlora.models.cores_from_text import CoreRule, cores_from_data
from anchorlora.pages.card import card
from architectures.cases import CASES, GEMMA4, REFUSED
from architectures.trials import CHANGES, TASKS, cores, exports, protection, run, saved_adapter
from golden import note_row

TAKEN = [case for case in CASES if not case.of.refused]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", TAKEN, ids=str)
def test_an_architecture_is_protected_and_run_and_its_adapter_is_loaded_by_plain_peft(case, tmp_path):
    layers = sorted({name.rsplit(".", 1)[-1] for name in target_layers(case.of.model(), case.targets)})
    rho, folder = protection(case.of.model(), case.targets), case.of.write(tmp_path / "model")
    made = cores(folder, case.targets, tmp_path)
    of_the_run = run(folder, case.targets, tmp_path / "run")
    forms = exports(folder, tmp_path / "run", tmp_path / "exports")
    found = {"adapted": layers, "protect": f"rho {rho:.1e}", "cores": made, "run": f"rho {of_the_run:.1e}", "export": forms}
    note_row("architectures", of=case.of.name, type=case.of.model_type, layers=case.layers, **found)


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="this transformers has no Gemma 4")
def test_layers_that_a_model_runs_on_kept_positions_alone_are_read_whole(tmp_path, monkeypatch):
    folder = GEMMA4.write(tmp_path / "model")
    monkeypatch.setitem(CHANGES, "batching", "packed")  # padded ones are refused
    assert run(folder, "all-linear", tmp_path / "run") < 1e-6
    layers = sorted({name.rsplit(".", 1)[-1] for name in target_layers(GEMMA4.model(), "all-linear")})
    text = [{"text": "The bridge crosses the river near the old mill."}, {"text": "Nobody has mended it since the flood."}]
    for spread in (True, False):
        made = cores_from_data(folder, None, text, rule=CoreRule(rows=12, spread=spread), targets=layers, device="cpu")
        assert {core.rows for core in made.layers.values()} == {12}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("case", [case for case in CASES if case.of.refused and case.layers == "attention"], ids=str)
def test_an_encoder_decoder_model_is_refused_in_one_line(case, tmp_path, capsys):
    folder, adapter = case.of.write(tmp_path / "model"), tmp_path / "adapter"
    saved_adapter(folder, case.targets, adapter)
    (tmp_path / "text.jsonl").write_text('{"text": "The bridge crosses the river."}\n')
    with pytest.raises(ValueError, match=REFUSED):
        protection(case.of.model(), case.targets)
    with pytest.raises(ValueError, match=REFUSED):
        export(export_source(adapter, model=str(folder)), Request("merged"), to=tmp_path / "merged", card=card)
    of_a_run = [*("mini", "--method", "sfor", "--order", ",".join(TASKS), "--seed", "42"), "--model", str(folder)]
    for command in (
        ["run", *of_a_run, "--out", str(tmp_path / "run")],
        ["cores", str(folder), str(adapter), str(tmp_path / "text.jsonl"), "--out", str(tmp_path / "cores.safetensors")],
    ):
        capsys.readouterr()
        assert main(command) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1
        assert re.search(REFUSED, said[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model", "text.jsonl"]
    note_row("architectures", of=case.of.name, type=case.of.model_type, layers="any", refused=REFUSED)
