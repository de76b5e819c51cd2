"""DistributedDataParallel and FSDP2 (fully_shard), two processes over gloo; started once for all rows."""

import json
import os
from pathlib import Path

import pytest
from filelock import FileLock

import forked
from loops.cases import TWO, TWO_REFUSED


@pytest.fixture(scope="session")
def results(request, tmp_path_factory):
    """rank -> what each row that is asked for came to; the workers of one test run share one launch."""
    mine = [item for item in request.session.items if item.path == Path(__file__) and "row" in item.fixturenames]
    rows = [str(item.callspec.params["row"]) for item in mine]
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "two-processes"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            folder.mkdir()
            forked.pair(try_rows, folder, rows, folder=folder)
            (folder / "done").touch()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def try_rows(folder, rows):
    from loops.two_processes import main  # in the process alone: torch warns of what it imports

    main(folder, rows)


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize("row", TWO, ids=str)
def test_protection_is_kept_and_both_processes_hold_the_same_bits(row, note, results):
    for of_rank in results:
        found = of_rank[str(row)]
        assert isinstance(found, dict), found
        assert all(alike for *_, alike in found.values())
    note(row, {setting: (rho, bound) for setting, (rho, bound, _) in results[0][str(row)].items()})


@pytest.mark.drawn(1)
@pytest.mark.parametrize("row", TWO_REFUSED, ids=str)
def test_what_cannot_be_kept_is_refused_in_both_processes(row, note, results):
    for of_rank in results:
        assert row.says in of_rank[str(row)]
    note(row, results[0][str(row)])


@pytest.mark.parametrize("penalty", ["RoutingOverlap", "EffectiveSparsity", "EffectiveResponse", "FisherAnchor", "KroneckerBrake"])
def test_a_penalty_on_split_factors_has_the_gradient_of_one_on_whole_ones(results, penalty):
    for of_rank in results:
        assert isinstance(of_rank["penalties"], dict), of_rank["penalties"]
        difference, size = of_rank["penalties"][penalty]
        assert size > 1e-3
        assert difference <= 8 * 2.0**-23


@pytest.mark.parametrize("setting", ["sfor", "hard"])
def test_twenty_float64_steps_on_one_global_batch_agree_with_and_without_ddp(results, setting):
    difference, moved, alike = results[0]["agreement"][setting]
    assert moved > 1e-3
    assert difference <= 1e-10
    assert alike


def test_what_changes_outside_the_adapter_is_named_under_fsdp2(results):
    for of_rank in results:
        assert isinstance(of_rank["beside"], list), of_rank["beside"]
        clean, norm, base = of_rank["beside"]
        assert clean == []
        assert "model.norm.weight" in norm[0]
        assert "q_proj.base_layer.weight" in base[0]
