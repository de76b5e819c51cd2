"""What may not stand in one table, and files that are not what they should be: one line with file and remedy."""

import made
import pytest

import records
from anchorlora.cli.app import main
from anchorlora_lab.report.comparability import footnote, studies_of
from anchorlora_lab.report.page import write_report
from anchorlora_lab.report.records import find_runs


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
