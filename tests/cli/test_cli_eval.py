"""`anchorlora eval`: what it prints, when it fails, and what it refuses before anything is written."""

import json
import re
import shutil
import subprocess
import sys

import pytest

import mmlu_folder
from anchorlora import METHODS, run_sequence
from anchorlora.cli.app import main
from anchorlora.schemas.eval import Change, Evaluation, Score
from said import one_line


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return mmlu_folder.write_folder(tmp_path_factory.mktemp("mmlu"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_benchmark, small_model):
    import small

    out = tmp_path_factory.mktemp("eval") / "run"
    run_sequence(small.recipe(small_benchmark, small_model), METHODS["sfor"], order=small.ORDER[:2], seed=1, out=out)
    return out


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def command(data, tmp_path):
    return ["--data", str(data), "--cache", str(tmp_path / "cache"), "--limit", "1"]


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_run_is_measured_with_the_adapter_of_its_last_task(run, command, capfd):
    assert main(["eval", str(run), *command]) == 0
    said = capfd.readouterr()
    assert re.search(r"^mmlu +acc +57 +\d+\.\d\d +\d+\.\d\d +[+-]\d+\.\d\d$", said.out, re.M)
    assert said.out.rstrip().endswith(f"eval: {run}/eval.json")
    assert said.err == "", "no bars and no log lines where stderr is no terminal"
    assert main(["eval", str(run), *command, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found == json.loads((run / "eval.json").read_text())
    last = run / "tasks/2-mood/adapter"
    assert main(["eval", str(last), *command, "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == found, "the last task's adapter alone says the same"


def test_a_drop_fails_when_it_is_larger_than_allowed(run, command, capsys, monkeypatch):
    dropped = Evaluation(
        task="mmlu",
        metric="acc",
        limit=None,
        n=20,
        base=Score(score=60.0, stderr=1.0),
        after=Score(score=57.5, stderr=1.0),
        change=-2.5,
        parts={f"mmlu_{i}": Change(n=2, base=50.0, after=50.0 - i) for i in range(9)},
        few_shot=0,
        cut=3,
        data_sha256=None,
        base_model={"name": "m", "sha256": None, "dtype": "float32"},
        adapter_sha256="a",
        versions={},
    )
    monkeypatch.setattr("anchorlora.capability.measure.evaluate", lambda *args, **kwargs: dropped)
    assert main(["eval", str(run), *command, "--fail-if-drop", "2.5"]) == 0
    shown = capsys.readouterr().out
    assert "60.00 ± 1.00  57.50 ± 1.00  -2.50" in shown
    assert re.findall(r"^mmlu_(\d)", shown, re.M) == ["8", "7", "6", "5", "4"], "the largest five, worst first"
    assert "inputs truncated on the left to fit the model's context: 3" in shown
    assert main(["eval", str(run), *command, "--fail-if-drop", "2.4"]) == 1
    assert capsys.readouterr().err == "error: mmlu fell by 2.50 points, more than the 2.4 allowed\n"


def test_a_drop_leaves_eval_json_all_the_same(small_model, command, tmp_path, capsys):
    adapter = mmlu_folder.write_an_adapter(tmp_path / "adapter", small_model, size=30.0, seed=2)
    status = main(["eval", str(adapter), *command, "--fail-if-drop", "0"])
    found = json.loads((adapter / "eval.json").read_text())
    assert found["change"] != 0
    assert status == (1 if found["change"] < 0 else 0)


def test_what_cannot_be_measured_gets_one_line_and_nothing_is_written(run, command, data, tmp_path, capsys, monkeypatch):
    bare = ["--cache", str(tmp_path / "cache"), "--limit", "1"]
    before = files(tmp_path)
    (violation := shutil.copytree(data, tmp_path / "violation")).joinpath("test/virology_test.csv").write_text("a,b\n")
    shutil.copytree(data, tmp_path / "part").joinpath("dev/virology_dev.csv").unlink()
    before = files(tmp_path)
    for arguments, message in [
        (["--data", str(violation), *bare], "virology_test.csv, line 1: 2 columns"),
        (["--data", str(tmp_path / "part"), *bare], "1 of 114 files are missing: dev/virology_dev.csv"),
        ([*command, "--task", "hellaswag"], "and the task is hellaswag; give one of the two"),
        ([*command, "--model", str(tmp_path)], "no model at"),
        ([*command, "--fail-if-drop", "nan"], "percentage points, not nan"),
        ([*command, "--limit", "0"], "0 is not in the range"),
        ([*bare, "--task", ","], "no task given"),
    ]:
        assert main(["eval", str(run), *arguments]) == 2, message
        assert message in one_line(capsys)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", str(run), *command]) == 2
    assert "not installed: pip install 'anchorlora[eval]'" in one_line(capsys)
    (run / "record.json").unlink()
    before.remove(run / "record.json")
    assert main(["eval", str(run), *command]) == 2
    assert f"{run}/record.json is missing, although the run has finished" in one_line(capsys)
    (run / "state/recorded.json").unlink()
    before.remove(run / "state/recorded.json")
    assert main(["eval", str(run), *command]) == 2
    assert f"is not finished; go on with anchorlora run {run}/config.yaml --out {run}" in one_line(capsys)
    assert files(tmp_path) == before


@pytest.mark.slow
def test_an_unknown_task_offers_its_neighbors(run, tmp_path, capsys):
    """Slow: lm_eval reads thousands of files to know its tasks."""
    assert main(["eval", str(run), "--cache", str(tmp_path / "cache"), "--limit", "1", "--task", "helaswag"]) == 2
    assert "lm_eval has no task 'helaswag'; nearest: hellaswag" in one_line(capsys)


def test_another_model_than_the_runs_own_is_refused(run, command, tmp_path, capsys):
    other = mmlu_folder.write_model(tmp_path / "other")
    assert main(["eval", str(run), *command, "--model", str(other)]) == 2
    assert "is not the one that" in one_line(capsys)
    assert not (run / "eval.json").exists()


def test_help_waits_neither_for_torch_nor_for_lm_eval():
    code = (
        "import sys; from anchorlora.cli.app import main; main(['--help']); assert main(['eval', '--help']) == 0;"
        "assert not {'torch', 'lm_eval', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
