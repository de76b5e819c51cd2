"""What may not stand in one table, and files that are not what they should be: one line with file and remedy."""

import json
import os
import time

import made
import pytest

import records
from anchorlora.cli.app import main
from anchorlora.pages.table import Column, Table
from anchorlora.store.record import MOST
from anchorlora_lab.report.comparability import footnote, studies_of
from anchorlora_lab.report.figures import style
from anchorlora_lab.report.page import write_report
from anchorlora_lab.report.records import find_runs
from anchorlora_lab.report.tables.settings import step_seconds


def pair(tmp_path, **changes):
    """Two runs of one study, the second with changes."""
    return [made.save(tmp_path / "a", made.run("sfor")), made.save(tmp_path / "b", made.run("o-lora", **changes))]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schema": 9}, "has schema 9, and this version reads schemas 1 to 3"),
        ({"seed": None}, "seed: Input should be a valid integer"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
        ({"accuracy": [[50.0], [1.0]]}, "row 2 of an accuracy triangle has 2 entries, not 1"),
        ({"accuracy": [[150.0]]}, "accuracy.0.0: Input should be less than or equal to 100"),
        ({"scores": {"AA": float("nan"), "LA": 1, "BWT": 1, "FM": 1}}, "holds NaN, which is not a number"),
    ],
)
def test_records_that_are_none_are_refused_with_file_and_field(tmp_path, fields, message):
    with pytest.raises(ValueError, match=rf"record.json:? .*{message}"):
        find_runs([records.edited(tmp_path, **fields)])


def test_records_hold_no_nan():
    with pytest.raises(ValueError, match="finite"):
        records.record(accuracy=[[float("nan")]])


def test_a_cut_record_and_an_empty_folder_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no finished run"):
        find_runs([tmp_path / "empty"])
    path = records.write(tmp_path / "r", records.record()) / "sfor-42/record.json"
    path.write_text(path.read_text()[:200])
    with pytest.raises(ValueError, match="not complete JSON"):
        find_runs([tmp_path / "r"])


def test_the_same_run_named_twice_counts_once(tmp_path):
    root = records.write(tmp_path, records.record())
    assert len(find_runs([root, root / "sfor-42"])) == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"training": {"epochs": 1, "window": 8, "learning_rate": 5e-4}}, "protocol.training.learning_rate is 0.0001 in .* 0.0005"),
        ({"tasks": {"train_limit": 10000, "test_limit": 100}}, "protocol.tasks.test_limit is absent in .* 100 in"),
        ({"own_wording": ["yahoo"]}, "protocol.own_wording"),
    ],
)
def test_runs_that_differ_in_the_protocol_are_refused_with_the_field(tmp_path, changes, field):
    with pytest.raises(ValueError, match=f"cannot share a table: .*{field}"):
        studies_of(find_runs(pair(tmp_path, protocol=made.protocol(made.TASKS, **changes))))


def test_all_differing_fields_are_named_and_the_command_ends_with_status_2(tmp_path, capsys):
    base_model = {"name": "tiny", "revision": None, "sha256": "1" * 64, "parameters": 1000, "dtype": "bfloat16"}
    data = {"TC/agnews/test.json": {"sha256": "b" * 64, "kind": "official bytes"}}
    folders = pair(tmp_path, base_model=base_model, data=data)
    assert main(["report", *map(str, folders), "--out", str(tmp_path / "report")]) == 2
    said = capsys.readouterr().err
    for field in ("base_model.dtype", "base_model.sha256", "data.TC/agnews/test.json"):
        assert field in said
    assert "report them separately" in said
    assert not (tmp_path / "report").exists()


def test_one_method_with_two_definitions_is_refused(tmp_path):
    made.save(tmp_path, made.run("ewc"), made.run("ewc", seed=38, definition="Shared() + FisherAnchor(1.0)"))
    with pytest.raises(ValueError, match=r"definition of ewc is .*FisherAnchor\(1.0\) in .*FisherAnchor\(10000.0\) in"):
        studies_of(find_runs([tmp_path]))


def test_what_a_method_or_a_run_owns_and_the_order_of_keys_are_not_compared(tmp_path):
    own = {"tuned": {"strength": 3}, "selection": {"file": "s.json"}}
    examples = {task: {"test": 640, "train": made.SIZES[task]} for task in reversed(made.TASKS)}
    runs = find_runs(pair(tmp_path, protocol=made.protocol(made.TASKS, examples=examples, **own)))
    (study,) = studies_of(runs)
    assert len(study.runs) == 2
    assert footnote(runs) == ""


def test_host_versions_and_threads_become_a_footnote(tmp_path):
    folders = pair(tmp_path, host={"system": "Darwin"}, versions={"anchorlora": "0.2.0"}, threads=2)
    told = footnote(find_runs(folders))
    assert told == "The runs differ in host.system (Darwin, Linux); threads (1, 2); versions.anchorlora (0.1.0, 0.2.0)."
    assert told in write_report(find_runs(folders), tmp_path / "report").page.read_text()


def test_two_records_of_one_run_are_refused_with_both_folders(tmp_path):
    folders = [made.save(tmp_path / name, made.run("sfor")) for name in ("a", "b")]
    with pytest.raises(ValueError, match=r"a/standard.* and .*b/standard.* are the same run \(sfor, .*, seed 42\); give only one"):
        studies_of(find_runs(folders))
    first = made.run("sfor")
    other = first.model_copy(update={"base_model": first.base_model.model_copy(update={"dtype": "float16"})})
    runs = find_runs([made.save(tmp_path / "c", first), made.save(tmp_path / "d", other)])
    with pytest.raises(ValueError, match=r"base_model.dtype is .* in .*c/.*, float16 in .*d/") as said:
        studies_of(runs)
    assert "the same run" not in str(said.value)


def test_traces_of_one_seed_must_share_their_start(tmp_path):
    made.traced(tmp_path / "a", ("sfor",), (42,))
    tasks = ("dbpedia", "amazon")
    plan = made.protocol(tasks, task1_state="f" * 64, examples={task: {"train": 320, "test": 8} for task in tasks})
    made.traced(tmp_path / "b", ("o-lora",), (42,), protocol=plan)
    with pytest.raises(ValueError, match="protocol.task1_state of seed 42 is 0+42 in .*, f+ in"):
        studies_of(find_runs([tmp_path]))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: lines[:-1], "line 20: the trace ends at step 38 of 40"),
        (lambda lines: [*lines[:-1], {**lines[-1], "step": 39}], "line 21: the trace ends at step 39 of 40"),
        (lambda lines: [*lines[:5], '{"task": 2, "st'], "line 6: not complete JSON"),
        (lambda lines: [*lines[:2], {**lines[2], "rho": float("nan")}], "line 3: holds NaN, which is not a number"),
        (lambda lines: [*lines[:2], {**lines[2], "d_eff": "much"}], "line 3: d_eff: Input should be a valid number"),
        (lambda lines: [lines[0], lines[2], lines[1]], "line 3: step 2 follows step 4"),
        (lambda lines: lines[1:], "line 1: a trace begins at step 0"),
        (lambda lines: [], "line 1: a trace begins at step 0"),
    ],
)
def test_a_trace_that_is_not_whole_is_refused_with_file_and_line(tmp_path, edit, message):
    root = made.traced(tmp_path, ("sfor",), (42,))
    (path,) = root.rglob("trace.jsonl")
    made.write_points(path, edit(made.points("sfor", seed=42)))
    with pytest.raises(ValueError, match=f"trace.jsonl, {message}.*; delete the run directory and trace it again"):
        find_runs([root])


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
