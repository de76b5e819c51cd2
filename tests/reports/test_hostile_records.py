"""Records that nobody's run wrote: what does not fit is refused with its field, what is only odd is left out or cut."""

import json
import os
import time

import made
import pytest

import records
from anchorlora.cli.app import main
from anchorlora.pages.table import Column, Table
from anchorlora.store.record import MOST
from anchorlora_lab.report.comparability import studies_of
from anchorlora_lab.report.figures import style
from anchorlora_lab.report.records import find_runs
from anchorlora_lab.report.tables.energy import step_seconds

DRIFT = ("d_eff", "d_old", "d_new", "d_block", "rho", "rho_floor", "chance", "rho_first", "rho_union")


def with_numbers(value):
    """A record whose every measured number is this one."""
    content = records.record().model_dump(by_alias=True)
    content["scores"] = dict.fromkeys(content["scores"], value)
    content["drift"] = [each | dict.fromkeys(DRIFT, value) for each in content["drift"]]
    content["layers"] = [[layer | {"retained_energy": value} for layer in task] for task in content["layers"]]
    content["cost"] |= {"train_seconds": [value] * len(content["order"]), "evaluate_seconds": value}
    return content


@pytest.mark.parametrize("field", ["scores", "drift", "layers", "cost"])
def test_numbers_that_no_run_measures_are_refused_by_field(field, tmp_path):
    folder = records.edited(tmp_path, **{field: with_numbers(1e308)[field]})
    with pytest.raises(ValueError, match=rf"record\.json: {field}\.\S*: Input should be less than or equal to 1"):
        find_runs([folder])


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("value", [MOST, -MOST])
def test_the_largest_numbers_are_drawn(value, tmp_path):
    folder = records.edited(tmp_path, **{name: with_numbers(value)[name] for name in ("scores", "drift", "layers", "cost")})
    assert main(["report", str(folder), "--out", str(tmp_path / "report")]) == 0


@pytest.mark.slow
def test_a_long_name_is_cut_in_figures_only(tmp_path):
    name, two = "m" * 100_000, " -> ".join(["t" * 64] * 2)
    assert len(style.plain(name)) == style.LONGEST + 1
    assert style.plain(two) == two
    began = time.process_time()
    assert main(["report", str(records.edited(tmp_path, name=name)), "--out", str(tmp_path / "report")]) == 0
    assert time.process_time() - began < 8
    whole = name in (tmp_path / "report/index.html").read_text()
    assert whole


@pytest.mark.parametrize(
    ("training", "examples"),
    [
        ({"window": 0, "epochs": 1}, 5),
        ({"window": -3, "epochs": 1}, 5),
        ({"window": 8, "epochs": "x"}, 10**13),
        ({"window": 8, "epochs": [1]}, 5),
        ({"window": 8.0, "epochs": 1}, 5),
        ({"window": 8, "epochs": 1}, 0),
        ({"window": 8, "epochs": 1}, "x"),
        ([], 5),
    ],
)
def test_a_protocol_without_sense_tells_no_steps(training, examples, tmp_path):
    known = made.protocol(records.ORDER)
    protocol = known | {"training": training, "examples": {task: {"train": examples} for task in records.ORDER}}
    (run,) = find_runs([records.edited(tmp_path, protocol=protocol)])
    assert run.steps("amazon") is None
    assert step_seconds(run) is None


@pytest.mark.parametrize("features", [[], "x", {"energy": "x"}, {"energy": 1e308}, {"energy": [1]}])
def test_a_protocol_without_sense_asks_for_no_energy(features, tmp_path):
    (run,) = find_runs([records.edited(tmp_path, protocol={"features": features})])
    assert run.energy_asked is None


def test_a_start_that_is_no_text_is_none(tmp_path):
    runs = find_runs([records.edited(tmp_path, protocol={"task1_state": [["x"]]})])
    assert runs[0].task1_state is None
    assert len(studies_of(runs)) == 1


def test_a_page_of_many_rows_is_not_searched_for_every_cell():
    table = Table("t", "T", (Column("a"), Column("b")), tuple((str(i), i) for i in range(8_000)))
    began = time.process_time()
    assert [table.is_text(j) for _ in table.rows for j in (0, 1)] == [True, False] * 8_000
    assert time.process_time() - began < 1


def test_a_sealed_record_that_is_no_file_is_refused_at_once(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state/recorded.json").write_text(json.dumps({"sha256": "0" * 64, "content": ""}))
    os.mkfifo(tmp_path / "record.json")
    with pytest.raises(ValueError, match="record.json: not a regular file"):
        find_runs([tmp_path])
