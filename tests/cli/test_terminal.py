"""On a terminal: tables of at most 100 columns, bars within it, and completion by the shell."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

import records
from anchorlora.cli.app import COMMANDS, main
from anchorlora.cli.audit import lines
from anchorlora.cli.check import LABELS, verdict
from anchorlora.cli.console import WIDTH, fitted, print_json, render_table
from anchorlora.cli.progress import ProgressCallback
from anchorlora.pages.table import Column, Table
from anchorlora_lab.cli.eval import show
from anchorlora_lab.report import writers
from anchorlora_lab.suites.evaluation import Evaluation, Flips, Score, TaskChange
from golden import assert_golden

LONG = "model.language_model.layers.{}.self_attn.q_proj"


def widest(text):
    return max(map(len, text.splitlines()))


def test_methods_fit_a_terminal_and_are_complete(capsys):
    from anchorlora import METHODS

    assert main(["methods"]) == 0
    shown = capsys.readouterr().out
    assert widest(shown) == WIDTH, "as wide as may be, and no wider"
    assert_golden("methods.txt", shown)
    assert all(word in shown for method in METHODS.values() for word in (method.name, *method.definition.split()))


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "data"])
def test_the_help_of_a_command_fits_a_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    assert main([command, "--help"]) == 0
    assert widest(capsys.readouterr().out) <= WIDTH


def reading(kind, by="displacement"):
    return {"kind": kind, "d_eff": 5.1, "rho": 9.4e-9, "bound": 1e-7, "chance": 0.32, "status": "preserved", "preserved_by": by}


@pytest.mark.parametrize("kinds", [("learned anchor",), ("learned anchor", "zero-output block")])
def test_the_audit_of_a_large_model_fits_a_terminal(kinds):
    """Layers of models that see have the longest names; rows that start differently need a column more."""
    rows = {LONG.format(i): reading(kinds[i % len(kinds)], "displacement and state") for i in range(40)}
    conditions = {name: {"value": 1.2e-8, "bound": 5.4e-7, "preserved": True} for name in LABELS}
    overall = reading(kinds[-1]) | {"conditions": conditions, "left": {"rho": 1e-3, "bound": 1e-7}}
    about = dict.fromkeys(("before", "after", "protected", "storage", "verdict", "advice"), "in words")
    shown = "\n".join(lines({"overall": overall, "layers": rows, "notes": [], **about}))
    assert widest(shown) <= WIDTH
    assert shown.count("9.4e-09") == 41
    assert ("starts as  learned anchor" in shown) is (len(kinds) == 1)


@pytest.mark.parametrize("promised", [True, False])
def test_the_longest_verdict_of_check_fits_a_terminal_and_only_a_promise_is_violated(promised):
    from anchorlora.measurement.check import OPTIMIZERS, Finding

    row = [Finding("displacement", name, 0.1 if name == "sgd" else 0.0, 1e-6, promised) for name in OPTIMIZERS]
    said = verdict(row)
    assert said == f"{'violated' if promised else 'not claimed'} (preserved only under adamw, adamw+decay)"
    cells = [[*LABELS["displacement"], *("1.1e-06" for _ in OPTIMIZERS), said]]
    assert widest(fitted(["condition", "measured", *OPTIMIZERS, "verdict"], cells)) <= WIDTH


def test_an_evaluation_of_many_tasks_fits_a_terminal(capsys):
    score, flips = Score(score=62.5, stderr=1.25), Flips(right_to_wrong=1000, wrong_to_right=1000)
    about = {"n": 14042, "base": score, "after": score, "change": -10.25, "change_stderr": 1.25}
    names = ["truthfulqa_mc2", "prompt_level_strict_acc_of_ifeval", "gsm8k_platinum_cot_zeroshot"]
    one = TaskChange.model_construct(**about, flips=flips, metric="exact_match,flexible-extract", interval=(-13.0, -8.0), parts={})
    tasks = [one.model_copy(update={"task": name}) for name in names]
    show(Evaluation.model_construct(**about, tasks=tasks, prompts=None, cut=0))
    shown = capsys.readouterr().out
    assert widest(shown) <= WIDTH
    assert shown.count("62.50 ± 1.25") == 8
    assert "mean of 3 tasks" in " ".join(shown.split())


def test_every_table_of_a_report_fits_a_terminal(tmp_path):
    from anchorlora_lab.report.chapters import chapters_of
    from anchorlora_lab.report.comparability import studies_of
    from anchorlora_lab.report.page import all_tables
    from anchorlora_lab.report.records import find_runs

    records.three_methods(tmp_path / "runs")
    tables = all_tables(chapters_of(studies_of(find_runs([tmp_path / "runs"]))))
    assert max(widest(writers.text(table)) for table in tables) > WIDTH, "as wide as they come"
    for table in tables:
        assert widest(render_table(table)) <= WIDTH, table.name


def test_a_table_of_many_numbers_is_cut_into_parts_that_begin_with_its_first_column():
    tasks = [f"task-{i:02}" for i in range(30)]
    cells = tuple((name, *(float(i) for i in range(30))) for name in tasks)
    shown = render_table(Table("accuracy", "Accuracy (%)", (Column("after"), *map(Column, tasks)), cells))
    assert widest(shown) <= WIDTH
    assert [line.split()[0] for line in shown.splitlines() if line[:5] == "after"] == ["after"] * 3
    assert all(shown.count(f" {i}.00") == 30 for i in range(30))


def test_a_word_longer_than_the_terminal_is_cut_and_a_number_is_not():
    shown = fitted(["task", "file", "bytes"], [["a" * 150, "b/" * 90, "1" * 30]])
    assert widest(shown) <= WIDTH
    assert "1" * 30 in shown
    assert "".join(shown.split()).count("a") == 150 + 1  # and that of task


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The program under its own name, as a shell finds it."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "anchorlora").write_text(f'#!/bin/sh\nexec "{sys.executable}" -X importtime -m anchorlora "$@"\n')
    (folder / "anchorlora").chmod(0o755)
    return folder


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ru"], {"run"}),
        ([""], set(COMMANDS)),
        (["run", "mi"], {"mini", "mistral-7b"}),
        (["run", "mini", "--method", "o-lora-b"], {"o-lora-bsr", "o-lora-bsr-strong"}),
        (["audit", "a", "b", "--fail"], {"--fail-if-unprotected"}),
    ],
)
def test_bash_completes_without_importing_torch(words, offered, program, tmp_path):
    """The line of docs/reference.md, then what bash does when the user presses the tab key."""
    line = 'eval "$(_ANCHORLORA_COMPLETE=bash_source anchorlora)"'
    assert line in (Path(__file__).parents[2] / "docs/reference.md").read_text()
    pressed = [line, f"COMP_WORDS=(anchorlora {shlex.join(words)})", f"COMP_CWORD={len(words)}"]
    pressed += ["_anchorlora_completion anchorlora", 'printf "%s\\n" "${COMPREPLY[@]}"']
    (tmp_path / "pressed.sh").write_text("\n".join(pressed))
    env = os.environ | {"PATH": f"{program}:{os.environ['PATH']}"}
    said = subprocess.run(["bash", tmp_path / "pressed.sh"], capture_output=True, text=True, check=True, env=env)
    assert set(said.stdout.split()) == offered
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in said.stderr.splitlines() if line.startswith("import")}
    assert "click" in imported
    assert not imported & {"torch", "transformers", "matplotlib"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_get_a_script(shell, program):
    page = (Path(__file__).parents[2] / "docs/reference.md").read_text()
    assert f"_ANCHORLORA_COMPLETE={shell}_source anchorlora" in page
    env = os.environ | {"_ANCHORLORA_COMPLETE": f"{shell}_source"}
    said = subprocess.run([program / "anchorlora"], capture_output=True, text=True, check=True, env=env)
    assert f"_ANCHORLORA_COMPLETE={shell}_complete" in said.stdout


@given(
    st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=60), st.sampled_from([60, 80, 200])
)
@settings(max_examples=20)
def test_a_bar_fits_its_terminal_and_shows_how_far_it_is(what, width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, soft_wrap=True)
    with ProgressCallback(console, tasks=None) as bars:
        bars.on_progress(what, 16, 256)
        bars.progress.refresh()
        lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue()).replace("\r", "\n").split("\n")
        bars.on_progress(what, 256, 256)
    shown = [line for line in lines if line.strip()]
    assert " 16/256 " in shown[-1]
    assert max(cell_len(line) for line in shown) <= width


def test_json_is_json_in_an_encoding_that_has_not_every_character(monkeypatch):
    file = io.TextIOWrapper(io.BytesIO(), encoding="cp1252", errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", file)
    print_json({"name": "é Δ 🙂 \x9d"})
    file.flush()
    assert json.loads(file.buffer.getvalue().decode("cp1252")) == {"name": "é Δ 🙂 \x9d"}


def test_without_a_terminal_there_is_no_bar():
    console = Console(file=io.StringIO(), width=80)
    with ProgressCallback(console, tasks=None) as bars:
        bars.on_progress("writing texts of its own", 16, 256)
        bars.on_task_begin(1, "news", 9, 0)
    assert console.file.getvalue() == ""
