"""`anchorlora eval`: what it prints, when it fails, and what it refuses before anything is written."""

import json
import re
import shutil
import sys

import pytest

import mmlu_folder
import own_tasks
from anchorlora import METHODS, run_sequence
from anchorlora.cli.app import main
from anchorlora_lab.suites.evaluation import Evaluation, FlippedPrompts
from anchorlora_lab.suites.questions import SUITES
from golden import one_line
from reports import made


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


@pytest.mark.usefixtures("extra_eval")
def test_a_run_is_measured_with_the_adapter_of_its_last_task(run, command, capfd):
    assert main(["eval", str(run), *command]) == 0
    said = capfd.readouterr()
    assert re.search(r"^mmlu +acc +57 +\d+\.\d\d +\d+\.\d\d +[+-]\d+\.\d\d +\d+ +\d+$", said.out, re.M)
    assert said.out.rstrip().endswith(f"eval: {run}/eval.json")
    assert said.err == "", "no bars and no log lines where stderr is no terminal"
    assert main(["eval", str(run), *command, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found == json.loads((run / "eval.json").read_text())
    last = run / "tasks/2-mood/adapter"
    assert main(["eval", str(last), *command, "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == found, "the last task's adapter alone says the same"


def evaluation(*, parts=None, cut=0, **tasks):
    """An evaluation of tasks, each given as its scores before and after and the standard error of the change."""
    content = json.loads(made.evaluation(after=0.0, cut=cut))
    (one,) = content["tasks"]
    content["tasks"] = []
    for name, (base, after, error) in tasks.items():
        scores = {"base": {"score": base, "stderr": 1.0}, "after": {"score": after, "stderr": 1.0}}
        content["tasks"].append(one | scores | {"task": name, "change": after - base, "change_stderr": error, "parts": parts or {}})
    return Evaluation.model_validate(content)


def test_a_drop_fails_when_it_is_larger_than_allowed(run, command, capsys, monkeypatch):
    parts = {f"mmlu_{i}": {"n": 2, "base": 50.0, "after": 50.0 - i} for i in range(9)}
    dropped = evaluation(mmlu=(60.0, 57.5, 1.0), parts=parts, cut=3)
    monkeypatch.setattr("anchorlora_lab.suites.measure.evaluate", lambda *args, **kwargs: dropped)
    assert main(["eval", str(run), *command, "--fail-if-drop", "2.5"]) == 0
    shown = capsys.readouterr().out
    assert "60.00 ± 1.00  57.50 ± 1.00  -2.50 ± 1.00" in shown
    assert re.findall(r"^mmlu_(\d)", shown, re.M) == ["8", "7", "6", "5", "4"], "the largest five, worst first"
    assert "inputs truncated on the left to fit the model's context: 3" in shown
    assert main(["eval", str(run), *command, "--fail-if-drop", "2.4"]) == 1
    interval = "(95 % interval of the change: -4.46 to -0.54)"
    assert capsys.readouterr().err == f"error: mmlu fell by 2.50 points {interval}: more than the 2.4 allowed\n"


@pytest.fixture
def gated(run, command, capsys, monkeypatch):
    """Exit status and what is said of an evaluation, with a drop of two points allowed."""

    def gated(found, points="2"):
        monkeypatch.setattr("anchorlora_lab.suites.measure.evaluate", lambda *args, **kwargs: found)
        status = main(["eval", str(run), *command, "--fail-if-drop", points])
        return status, capsys.readouterr()

    return gated


def test_a_drop_that_may_be_chance_does_not_pass_and_says_so(gated):
    status, said = gated(evaluation(gsm8k=(60.0, 57.0, 1.6), ifeval=(50.0, 49.0, 0.1)))
    assert status == 1
    interval = "(95 % interval of the change: -6.14 to +0.14)"
    assert said.err == (
        f"error: gsm8k shows nothing: it fell by 3.00 points {interval}, which may be chance: n = 14042 is too small to tell\n"
    )


@pytest.mark.parametrize("name", ["gsm8k", "prompts"])
def test_a_gate_whose_base_score_cannot_fall_that_far_does_not_pass_and_says_so(gated, name):
    for base in (0.0, 2.0):
        status, said = gated(evaluation(**{name: (base, base, 0.0)}))
        assert status == 1
        assert said.err == (
            f"error: {name} shows nothing: its base score is {base:.2f}, so that it cannot fall by more than 2 points\n"
        )
    assert gated(evaluation(**{name: (2.1, 2.1, 0.0)}))[0] == 0


@pytest.mark.parametrize(("n", "status"), [(3, 1), (182, 1), (183, 0)])
def test_a_gate_of_too_few_questions_does_not_pass_though_no_answer_changed(gated, n, status):
    found = evaluation(gsm8k=(60.0, 60.0, 0.0))
    found.tasks[0] = found.tasks[0].model_copy(update={"n": n})
    got, said = gated(found)
    assert got == status
    assert (f"gsm8k shows nothing: n = {n} is too small to show a fall of 2 points" in said.err) is bool(status)


@pytest.mark.parametrize(("n", "status"), [(5, 1), (6, 0)])
def test_a_gate_of_a_few_prompts_does_not_pass(gated, n, status):
    found = evaluation(prompts=(100.0, 100.0, 0.0))
    found.tasks[0] = found.tasks[0].model_copy(update={"n": n})
    got, said = gated(found)
    assert got == status
    assert (f"prompts shows nothing: n = {n} is too small" in said.err) is bool(status)


def test_each_task_that_dropped_is_named_in_one_line(gated):
    status, said = gated(evaluation(mmlu=(60.0, 57.0, 0.5), gsm8k=(40.0, 45.0, 0.5), ifeval=(50.0, 40.0, None)))
    assert status == 1
    assert said.err == (
        "error: mmlu fell by 3.00 points (95 % interval of the change: -3.98 to -2.02); ifeval fell by 10.00 points: "
        "more than the 2 allowed\n"
    ), "a rise of another task makes up for nothing, and without an error the drop alone counts"


def test_a_drop_of_the_users_own_prompts_fails_whatever_the_interval(gated):
    status, said = gated(evaluation(prompts=(100.0, 95.0, 5.0)))
    assert status == 1
    assert said.err == "error: prompts fell by 5.00 points: more than the 2 allowed\n"


@pytest.mark.usefixtures("extra_eval")
def test_tasks_of_one_call_are_one_table_with_their_mean(run, command, tmp_path, capfd):
    quiz, mine = own_tasks.write(tmp_path / "own"), tmp_path / "mine.jsonl"
    mine.write_text('{"prompt": "Which bone?", "answer": "acid"}\n')
    words = ["eval", str(run), *command[2:], "--task", str(quiz), "--prompts", str(mine)]
    assert main(words) == 0
    said = capfd.readouterr()
    lines = [line.split() for line in said.out.splitlines() if line]
    assert " ".join(lines[0]) == "task metric n base after change right to wrong wrong to right"
    assert [line[:3] for line in lines[2:4]] == [["quiz", "acc", "1"], ["prompts", "exact_match", "1"]]
    assert lines[4][:5] == ["mean", "of", "2", "tasks", "2"]
    assert said.err == ""
    assert main([*words, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [task["task"] for task in found["tasks"]] == ["quiz", "prompts"]
    assert found == json.loads((run / "eval.json").read_text())


def test_prompts_that_turned_wrong_are_shown(run, command, capsys, monkeypatch):
    flip = {"place": "mine.jsonl, line 7", "prompt": "Who?", "answer": "Ada", "base": "ada", "after": "no\none " + "x" * 99}
    found = evaluation(prompts=(100.0, 0.0, None))
    found = found.model_copy(update={"prompts": FlippedPrompts(right_to_wrong=[flip], wrong_to_right=[])})
    monkeypatch.setattr("anchorlora_lab.suites.measure.evaluate", lambda *args, **kwargs: found)
    assert main(["eval", str(run), *command]) == 0
    assert re.search(r"^mine\.jsonl, line 7 +Ada +ada +no one x{33}$", capsys.readouterr().out, re.M)


def test_a_suite_is_a_list_of_tasks_and_an_unknown_one_offers_its_neighbors(run, command, capsys, monkeypatch):
    asked = []
    found = evaluation(mmlu=(50.0, 50.0, 1.0))
    monkeypatch.setattr("anchorlora_lab.suites.measure.evaluate", lambda folder, questions, **how: asked.append(questions) or found)
    several = (["--suite", "reasoning,knowledge"], ["--suite", "reasoning", "--suite", "knowledge", "--task", "gsm8k"])
    for words in (
        ["--suite", "forgetting"],
        ["--suite", "forgetting", "--task", "arc_easy,gsm8k", "--task", "boolq"],
        [],
        *several,
    ):
        assert main(["eval", str(run), *command, *words]) == 0
    suite = ("mmlu", "arc_challenge", "hellaswag", "winogrande", "truthfulqa_mc2", "gsm8k", "ifeval")
    both = ("hellaswag", "winogrande", "gsm8k", "mmlu", "arc_challenge", "truthfulqa_mc2")
    assert [questions.tasks for questions in asked] == [suite, (*suite, "arc_easy", "boolq"), ("mmlu",), *[both] * 2]
    capsys.readouterr()
    assert main(["eval", str(run), *command, "--suite", "forgeting"]) == 2
    assert "there is no suite 'forgeting'; nearest: forgetting" in one_line(capsys)
    assert main(["eval", str(run), *command, "--suite", ","]) == 2
    assert "no suite given; --suite takes forgetting" in one_line(capsys)


@pytest.mark.slow
@pytest.mark.usefixtures("extra_eval")
def test_lm_eval_has_every_task_of_every_suite():
    """Slow: lm_eval reads thousands of files to know its tasks."""
    from lm_eval.tasks import TaskManager

    known = TaskManager().task_index
    assert [name for suite in SUITES.values() for name in suite if name not in known] == []


@pytest.mark.usefixtures("extra_eval")
def test_a_drop_leaves_eval_json_all_the_same(small_model, command, tmp_path, capsys):
    adapter = mmlu_folder.write_an_adapter(tmp_path / "adapter", small_model, size=30.0, seed=2)
    status = main(["eval", str(adapter), *command, "--fail-if-drop", "0"])
    found = json.loads((adapter / "eval.json").read_text())
    assert found["change"] != 0
    assert status == (1 if found["change"] < 0 or found["base"]["score"] == 0 else 0)


@pytest.mark.usefixtures("extra_eval")
def test_what_cannot_be_measured_gets_one_line_and_nothing_is_written(run, command, data, tmp_path, capsys, monkeypatch):
    bare = ["--cache", str(tmp_path / "cache"), "--limit", "1"]
    quiz = own_tasks.write(tmp_path / "own")
    (violation := shutil.copytree(data, tmp_path / "violation")).joinpath("test/virology_test.csv").write_text("a,b\n")
    shutil.copytree(data, tmp_path / "part").joinpath("dev/virology_dev.csv").unlink()
    before = files(tmp_path)
    for arguments, message in [
        (["--data", str(violation), *bare], "virology_test.csv, line 1: 2 columns"),
        (["--data", str(tmp_path / "part"), *bare], "1 of 114 files are missing: dev/virology_dev.csv"),
        ([*command, "--task", "hellaswag"], "and the task is hellaswag; add mmlu, or leave out --data"),
        ([*command, "--model", str(tmp_path)], "no model at"),
        ([*command, "--fail-if-drop", "nan"], "percentage points, not nan"),
        ([*command, "--limit", "0"], "0 is not in the range"),
        ([*bare, "--task", ","], "no task given"),
        ([*bare, "--task", "own/none.yaml"], "there is no task file own/none.yaml"),
        ([*bare, "--prompts", "none.jsonl"], "there is no file none.jsonl"),
        ([*bare, "--task", str(quiz), "--apply-chat-template"], "has no chat template, and --apply-chat-template needs one"),
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
    assert f"is not finished; continue with anchorlora run {run}/config.yaml --out {run}" in one_line(capsys)
    assert files(tmp_path) == before


@pytest.mark.slow
@pytest.mark.usefixtures("extra_eval")
def test_an_unknown_task_offers_its_neighbors(run, tmp_path, capsys):
    """Slow: lm_eval reads thousands of files to know its tasks."""
    assert main(["eval", str(run), "--cache", str(tmp_path / "cache"), "--limit", "1", "--task", "helaswag"]) == 2
    assert "lm_eval has no task 'helaswag'; nearest: hellaswag" in one_line(capsys)


@pytest.mark.usefixtures("extra_eval")
def test_another_model_than_the_runs_own_is_refused(run, command, tmp_path, capsys):
    other = mmlu_folder.write_model(tmp_path / "other")
    assert main(["eval", str(run), *command, "--model", str(other)]) == 2
    assert "is not the one that" in one_line(capsys)
    assert not (run / "eval.json").exists()
