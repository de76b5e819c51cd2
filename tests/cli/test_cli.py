"""The command line, in process: what it prints, what it refuses, and its exit status."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forked
import records
import small
from anchorlora import audit
from anchorlora.adapters import read_adapter
from anchorlora.cli.app import COMMANDS, app, main
from anchorlora.errors import InvalidValue
from anchorlora.export.source import export_source
from anchorlora.measurement.adapters import compare
from anchorlora.models.cores_from_text import CoreRule, cores_from_data
from anchorlora.store.adapter_config import adapter_sha256
from anchorlora.store.artifact import artifact_in
from anchorlora.store.record import read_record
from anchorlora.store.seal import sha256
from anchorlora.train.request import default_recipe
from anchorlora_lab.suites.measure import target_of
from golden import assert_golden, one_line

FAST = [
    "--set",
    "rank=4",
    "--set",
    "alpha=16",
    "--set",
    "learning_rate=5e-3",
    "--set",
    "max_tokens=96",
    "--set",
    "max_new_tokens=6",
]
FAST += ["--set", "micro_batch=8", "--set", "threads=1", "--order", ",".join(small.ORDER)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_benchmark, small_model):
    out = tmp_path_factory.mktemp("cli") / "sfor"
    status = main(
        [
            "run",
            "standard-cl",
            "--method",
            "sfor",
            *FAST,
            "--model",
            str(small_model),
            "--data",
            str(small_benchmark),
            "--out",
            str(out),
        ]
    )
    assert status == 0
    return out


def masked(text):
    """Numbers in scientific notation by their order of magnitude, seconds away."""
    text = re.sub(r"\d\.\de-(\d\d)", lambda m: "~e-" + m[1], text)
    return re.sub(r"\(\d+ s \+ \d+ s\)", "(seconds)", text)


def test_methods(capsys):
    assert main(["methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["sfor"] == {
        "definition": "Shared() + ProjectGradient('A') + Freeze('B') + ProjectDisplacement('A')",
        "family": "shared",
        "preserves": {"displacement": True, "state": False, "delta_b": True, "response": True, "singular": False},
    }


@pytest.mark.parametrize("method", ["fold-64", "sfor", "rank-split", "lora-fa"])
def test_a_method_is_told_without_the_links_of_the_documentation(method, capsys):
    assert main(["methods", method]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{method} = ")
    assert "](" not in told


def test_nothing_asked_is_answered_by_the_three_things_that_people_do(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    asked = [shlex.split(line) for line in shown.splitlines() if line.startswith("  anchorlora ")]
    assert [words[1] for words in asked] == ["train", "run", "grid", "audit"]
    for _, command, *words in asked:
        # each is a command line that is understood; click keeps the help option of the first context for all later ones
        app.get_command(None, command).make_context(command, words, parent=app.make_context("anchorlora", [command]))
    assert shown.splitlines()[-1] == "anchorlora --help lists all commands; anchorlora COMMAND --help explains one."
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {command} " in listed for command in COMMANDS)
    assert main(["data"]) == 0
    assert "import" in capsys.readouterr().out


OF_LAB = ("grid", "trace", "select", "status", "report", "frontier", "eval")


@pytest.mark.parametrize("library", ["anchorlora_lab", "matplotlib", "tabulate"])
def test_commands_of_the_laboratory_say_in_one_line_how_to_get_it(library, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, library, None)
    for command in OF_LAB:
        assert main([command, "--help"]) == 2
        assert capsys.readouterr().err == (
            f"error: anchorlora {command} is part of the laboratory, which is not installed (no {library}): "
            "pip install 'anchorlora[lab]'\n"
        )
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert [command for command in COMMANDS if f"\n  {command} " not in listed] == list(OF_LAB)


def test_the_library_works_without_what_only_the_laboratory_needs(tmp_path):
    program = (
        "from anchorlora.cli.app import main\n"
        "words = ['run', 'mini', '--method', 'sfor', '--order', 'news,reviews']\n"
        "words += ['--set', 'train_limit=8', '--set', 'test_limit=4']\n"
        f"assert main([*words, '--out', {str(tmp_path / 'run')!r}]) == 0\n"
        "assert main(['methods']) == 0\n"
    )
    said = forked.without(("anchorlora_lab", "matplotlib", "tabulate"), program, said=tmp_path / "said")
    assert "Drift on protected directions" in said


@pytest.mark.parametrize(
    "command",
    [
        *([c] for c in ("train", "ask", "run", "report", "methods", "check", "measure", "cores", "eval", "export")),
        ["data", "import"],
        ["data", "verify"],
    ],
)
def test_every_command_explains_itself(command, capsys):
    assert main([*command, "--help"]) == 0
    assert_golden(f"help-{'-'.join(command)}.txt", capsys.readouterr().out)


@pytest.mark.parametrize("command", [*([c] for c in COMMANDS if c != "data"), ["data", "import"], ["data", "verify"]])
def test_every_help_ends_with_an_example_that_the_command_understands(command, capsys, tmp_path, monkeypatch):
    (tmp_path / "skills").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--help"]) == 0
    *_, heading, line = (line for line in capsys.readouterr().out.splitlines() if line.strip())
    assert heading.strip() == "Example:"
    program, *words = shlex.split(line)
    assert (program, words[: len(command)]) == ("anchorlora", command)
    context = app.make_context("anchorlora", [command[0]])
    found = app.get_command(context, command[0])
    for name in command[1:]:
        found = found.commands[name]
    found.make_context(command[-1], words[len(command) :], parent=context)


def test_the_defaults_that_the_help_of_train_names_are_those_of_its_recipe(capsys):
    assert main(["train", "--help"]) == 0
    shown, recipe = " ".join(capsys.readouterr().out.split()), default_recipe()
    training = recipe.training
    values = {"epochs": training.epochs, "learning-rate": training.learning_rate, "max-length": training.max_tokens}
    for option, value in {**values, "rank": recipe.adapter.rank}.items():
        assert f"[default: {value:g}]" in shown.partition(f"--{option} ")[2].partition(" --")[0], option
    assert f"alpha stays {recipe.adapter.alpha:g}" in shown


def test_options_of_train_are_fields_of_the_recipe(tmp_path, capsys, monkeypatch):
    asked = []

    def refused(request, *_, **__):
        asked.append(request.settings)
        raise InvalidValue("enough")

    monkeypatch.setattr("anchorlora.train.train.train_skill", refused)
    given = ["--epochs", "3", "--learning-rate", "1e-5", "--rank", "8", "--max-length", "2000000", "--set", "alpha=4"]
    words = ["train", "embedded:mini", "--data", "new.jsonl", "--keep", "self", "--out", str(tmp_path / "out"), *given]
    assert main(words) == 2
    assert one_line(capsys) == "error: enough\n"
    recipe = default_recipe().changed(asked[0])
    assert (recipe.training.epochs, recipe.training.learning_rate, recipe.training.max_tokens) == (3, 1e-5, 2_000_000)
    assert (recipe.adapter.rank, recipe.adapter.alpha) == (8, 4)


def test_check_prints_verdicts_and_numbers(capsys):
    assert main(["check", "sfor"]) == 0
    assert_golden("check-sfor.txt", re.sub(r"\d\.\de[-+]\d\d", "#.#e###", capsys.readouterr().out))
    assert main(["check", "projected-lora", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert {f["condition"]: f["preserved"] for f in found["findings"] if f["optimizer"] == "adamw"} == dict.fromkeys(
        ("displacement", "state", "delta_b", "response"), False
    )


def test_a_method_of_ones_own_is_a_file(tmp_path, capsys):
    (tmp_path / "idea.py").write_text(
        "from anchorlora import ProjectDisplacement\nfrom anchorlora.methods.catalog import seq_lora\n"
        "mine = seq_lora.plus(ProjectDisplacement('A'), name='mine')\n"
    )
    assert main(["check", f"{tmp_path}/idea.py:mine"]) == 0
    assert "displacement  |ΔA V| / |ΔA|" in capsys.readouterr().out
    assert main(["check", f"{tmp_path}/idea.py:other"]) == 2
    assert "defines no 'other'; methods in it: seq_lora, mine" in one_line(capsys)
    assert main(["check", f"{tmp_path}/idea.py"]) == 2
    assert "idea.py is a file, and a method is one of its variables, " in (line := one_line(capsys))
    assert "idea.py:NAME; methods in it: seq_lora, mine" in line
    assert main(["check", f"{tmp_path}/no.py:mine"]) == 2
    assert "there is no file" in one_line(capsys)


def test_a_violated_promise_of_ones_own_method_is_one_line_and_exit_status_1(tmp_path, capsys):
    (tmp_path / "idea.py").write_text(
        "from anchorlora import *\nclass Boast(Freeze):\n    closes = ('response',)\nmine = Shared() + Boast('A')\n"
    )
    assert main(["check", f"{tmp_path}/idea.py:mine"]) == 1
    said = r"error: mine promises to preserve response, but under sgd it is \d.*, and float32 storage explains at most \S+\n"
    assert re.fullmatch(said, capsys.readouterr().err)


def test_run_ends_with_the_triangle_and_the_drift(finished, small_model, small_benchmark, capsys):
    again = ["run", "standard-cl", "--method", "sfor", *FAST, "--model", str(small_model), "--data", str(small_benchmark)]
    assert main([*again, "--out", str(finished)]) == 0
    shown = capsys.readouterr().out
    assert "Accuracy (%): sfor, fruit>mood>metal, seed 42" in shown
    assert re.search(r"sfor +42 +metal .* yes", shown)
    record = read_record(finished / "record.json")
    assert f"AA {record.scores.AA:.2f}" in shown
    assert shown.rstrip().endswith(f"\nfinished before, nothing was trained; record: {finished}/record.json")
    assert max(map(len, shown.splitlines()[:-1])) <= 100, "the last line has a path, which is not cut"


def test_the_config_of_a_run_repeats_it(finished, tmp_path, capsys):
    assert main(["run", str(finished / "config.yaml"), "--out", str(tmp_path / "again")]) == 0
    capsys.readouterr()
    assert (tmp_path / "again/config.yaml").read_bytes() == (finished / "config.yaml").read_bytes()
    one, other = (json.loads((d / "record.json").read_text()) for d in (finished, tmp_path / "again"))
    assert one["accuracy"] == other["accuracy"]
    assert one["drift"] == other["drift"]


def test_a_dry_run_prints_configuration_and_steps_and_writes_nothing(small_benchmark, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "standard-cl", "--method", "sfor", *FAST, "--data", str(small_benchmark), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "# mood: 24 training examples, 3 optimizer steps, 6 test examples" in shown
    assert "# 9 optimizer steps in all" in shown
    assert max(len(line) for line in shown.splitlines() if str(small_benchmark) not in line) <= 100
    (tmp_path / "shown.yaml").write_text(shown)
    assert main(["run", "shown.yaml", "--dry-run"]) == 0, "what it prints is a recipe"
    assert capsys.readouterr().out == shown
    assert [p.name for p in tmp_path.iterdir()] == ["shown.yaml"]


@pytest.mark.parametrize("command", [["run", "mini", "--method", "sfor"], ["grid", "mini", "--methods", "sfor"], ["report", "."]])
def test_an_out_at_or_below_a_file_is_a_wrong_request(command, finished, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    for out in (file, file / "run"):
        assert main([str(finished) if word == "." else word for word in command] + ["--out", str(out)]) == 2
        said = one_line(capsys)
        assert f"Not a directory: {out}" in said
        assert "a file is where a folder must be: choose another path" in said
    assert file.read_text() == ""


def test_the_orders_of_a_recipe_are_the_default_whatever_their_names(tmp_path, capsys):
    recipe = tmp_path / "own.yaml"
    recipe.write_text("extends: mini\norders: {forth: [news, reviews], back: [reviews, news]}\n")
    out = str(tmp_path / "out")
    assert main(["run", str(recipe), "--method", "sfor", "--dry-run"]) == 0
    assert "order:\n- news\n- reviews\n" in capsys.readouterr().out
    assert main(["grid", str(recipe), "--methods", "sfor", "--seeds", "1", "--out", out, "--dry-run"]) == 0
    folders = [line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("missing")]
    assert folders == [f"{out}/sfor/forth-1", f"{out}/sfor/back-1"]
    for command in (
        ["run", "--method", "sfor"],
        ["select", "--method", "ewc"],
        ["trace"],
        ["grid", "--methods", "sfor", "--orders", "order1"],
    ):
        asked = [] if command[0] == "grid" else ["--order", "order1"]
        assert main([command[0], str(recipe), *command[1:], *asked, "--out", out]) == 2
        assert "the recipe own has no order 'order1'; it has forth, back" in one_line(capsys)
    recipe.write_text("extends: mini\norders: {}\n")
    for command in (["run", "--method", "sfor"], ["select", "--method", "ewc"], ["trace"], ["grid", "--methods", "sfor"]):
        assert main([command[0], str(recipe), *command[1:], "--out", out]) == 2
        assert "the recipe own has no orders; name tasks, separated by commas" in one_line(capsys)


def test_a_recipe_of_ones_own_extends_another(small_benchmark, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: standard-cl\ntasks: {{data: {small_benchmark}}}\ntraining: {{learning_rate: 1e-3, window: 4}}\n")
    assert main(["run", str(path), "--method", "sfor", "--order", "mood,fruit", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "name: mine" in shown
    assert "learning_rate: 0.001" in shown
    assert "# mood: 24 training examples, 6 optimizer steps" in shown


def test_measure_reads_two_adapters_and_a_core_file(finished, capsys):
    tasks = finished / "tasks"
    command = [
        "measure",
        str(tasks / "1-fruit/adapter"),
        str(tasks / "2-mood/adapter"),
        "--cores",
        str(tasks / "1-fruit/cores.safetensors"),
    ]
    assert main([*command, "--json"]) == 0
    found, recorded = json.loads(capsys.readouterr().out), read_record(finished / "record.json").drift[0]
    for name in ("d_eff", "d_old", "d_new", "rho", "rho_floor", "chance"):
        assert found[name] == pytest.approx(getattr(recorded, name), rel=1e-9), name
    assert found["exact"] is True
    assert set(found["layers"]) == {f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qv"}
    assert main(command) == 0
    assert "protected: rho is no more than rounding explains" in capsys.readouterr().out
    assert main(["measure", str(tasks / "1-fruit/adapter"), str(tasks / "1-fruit/adapter"), "--cores", command[-1]]) == 0
    assert "nothing moved" in capsys.readouterr().out


def test_a_run_a_task_and_an_adapter_are_recognized_everywhere(finished, small_model, tmp_path, monkeypatch):
    """The run stands for its last task, a task for its adapter, relative or not; a copy of the adapter is the same factors."""
    *_, before, last = sorted(finished.glob("tasks/*"))
    copied = shutil.copytree(last / "adapter", tmp_path / "task/adapter")
    monkeypatch.chdir(last)
    cores, text = before / "cores.safetensors", [{"text": "an old pear, of seven in all"}]
    for place in (finished, last, last / "adapter", Path(), Path("adapter"), copied, copied.parent):
        assert compare(before, place, cores=cores).rho == read_record(finished / "record.json").drift[-1].rho
        assert audit(before, place, cores=cores).audited.overall.right.d_eff == pytest.approx(
            compare(before, place, cores=cores).d_eff
        )
        of_the_run = copied not in (place, place / "adapter")
        assert export_source(place).source.kind == ("run" if of_the_run else "adapter")
        assert target_of(place, model="embedded:mini").adapter_sha256 == adapter_sha256(last / "adapter")
        assert (artifact_in(place).number == len(small.ORDER)) is of_the_run
        made = cores_from_data(small_model, place, text, rule=CoreRule(at_least=1), device="cpu")
        assert made.origin["adapter_sha256"] == sha256(last / "adapter/adapter_model.safetensors")


def test_measuring_against_the_bare_model_takes_all_of_the_adapter_as_new(finished, small_model):
    task = finished / "tasks/2-mood"
    found = compare(small_model, task, cores=finished / "tasks/1-fruit/cores.safetensors")
    whole = sum((f.B.double() @ f.A.double() * f.scale).square().sum() for f in read_adapter(task / "adapter").values())
    assert found.d_eff == pytest.approx(float(whole.sqrt()), rel=1e-9)
    with pytest.raises(ValueError, match="holds a model's full weights and no adapter"):
        compare(task, small_model, cores=finished / "tasks/1-fruit/cores.safetensors")


def test_measure_refuses_what_does_not_fit(finished, tmp_path, capsys):
    adapter, cores = str(finished / "tasks/1-fruit/adapter"), finished / "tasks/1-fruit/cores.safetensors"
    assert main(["measure", adapter, str(tmp_path / "none"), "--cores", str(cores)]) == 2
    assert f"there is no folder {tmp_path}/none" in one_line(capsys)
    assert main(["measure", adapter, adapter, "--cores", f"{adapter}/adapter_model.safetensors"]) == 2
    assert "is not a file of cores" in one_line(capsys)
    assert main(["measure", adapter, adapter, "--cores", str(tmp_path / "none")]) == 2
    assert "is missing" in one_line(capsys)


def test_report_writes_tables_figures_and_a_page(tmp_path, capsys):
    records.three_methods(tmp_path / "runs")
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 0
    shown = capsys.readouterr().out
    assert "9 runs; tables and figures in" in shown
    assert (tmp_path / "report/index.html").is_file()
    assert main(["report", str(tmp_path / "nowhere"), "--out", str(tmp_path / "x")]) == 2
    assert "is not a folder" in one_line(capsys)
    assert not (tmp_path / "x").exists()


def test_data_import_and_verify(small_benchmark, tmp_path, capsys):
    assert main(["data", "import", str(small_benchmark), "--out", str(tmp_path / "copy")]) == 0
    assert "10 files in" in capsys.readouterr().out
    assert main(["data", "verify", str(tmp_path / "copy"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    (tmp_path / "copy/TC/fruit/test.json").write_text("[]")
    assert main(["data", "verify", str(tmp_path / "copy")]) == 1
    said = capsys.readouterr()
    assert re.search(r"TC/fruit/test.json +altered: expected SHA-256 [0-9a-f]{64}, found [0-9a-f]{64}", said.out)
    assert said.err == "error: 1 of 10 files differ from the expected ones, first TC/fruit/test.json; fetch them again\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "mini"], "no method given; choose one with --method"),
        (["run", "mini", "--method", "sfro"], "no method called 'sfro'; nearest: sfor"),
        (["run", "minni", "--method", "sfor"], "no recipe called 'minni'; nearest: mini"),
        (["run", "mini", "--method", "sfor"], "no run directory given; choose one with --out"),
        (
            ["run", "mini", "--method", "sfor", "--order", "order4", "--out", "x"],
            "no order 'order4'; nearest: order1, order2, order3|order",
        ),
        (["run", "mini", "--method", "sfor", "--order", "news,reviws", "--out", "x"], "no task called 'reviws' .*nearest: reviews"),
        (
            ["run", "mini", "--method", "sfor", "--set", "learning_rat=1", "--out", "x"],
            "no field 'learning_rat'; nearest: .*learning_rate",
        ),
        (["run", "mini", "--method", "sfor", "--set", "rank=-1", "--out", "x"], "adapter.rank: .*greater than or equal to 1"),
        (["run", "mini", "--method", "sfor", "--set", "rank", "--out", "x"], "--set takes field=value, not 'rank'"),
        (["run", "mini", "--method", "sfor", "--seed", "many"], "'many' is not a whole number"),
        (["run", "mini", "--method", "sfor", "--model", "./nowhere", "--out", "x"], "no model at ./nowhere"),
        (["run", "mini", "--method", "sfor", "--model", "C:\\nowhere\\m", "--out", "x"], "no model at C:.nowhere.m"),
        (["grid", "mini", "--methods", "sfor", "--models", "embedded:mini,./nowhere", "--out", "x"], "no model at ./nowhere"),
        (["trace", "mini", "--methods", "sfor", "--model", "./nowhere", "--out", "x"], "no model at ./nowhere"),
        (
            ["run", "mini", "--method", "sfor", "--data", "./nowhere", "--out", "x"],
            "nowhere is not a folder; give a CL_Benchmark folder",
        ),
        (
            ["run", "mini", "--method", "sfor", "--set", "targets=query", "--out", "x"],
            "has no module called query; its linear layers are: .*q_proj",
        ),
        (["run", "mini", "--method", "sfor", "--set", "model=embedded:maxi", "--out", "x"], "available: embedded:mini"),
        (
            ["run", "standard-cl", "--method", "sfor", "--out", "x"],
            "names no data; give a CL_Benchmark folder or a YAML list of files with --data",
        ),
        (["run", "none.yaml", "--method", "sfor"], "there is no file none.yaml"),
        (["check", "sfr"], "no method called 'sfr'; nearest: sfor"),
        (["check", "runs/new"], "no method called 'runs/new'; there is: seq-lora, "),
        (["data", "import", "nowhere", "--out", "x/y"], "nowhere is neither a folder nor a git URL"),
        (["data", "import", ".", "--out", "x/y"], "holds no <group>/<task>/labels.json"),
        (["trace", "mini", "--method", "sfr", "--out", "x"], "no method called 'sfr'"),
        (["rum"], "there is no command 'rum'; nearest: run"),
        (["run", "mini", "--metod", "sfor"], r"there is no option --metod; nearest: --method \(see anchorlora run --help\)"),
        (["train", "--lr", "1e-4"], "there is no option --lr; nearest: --learning-rate "),
        (["train", "--learning_rate", "1e-4"], "nearest: --learning-rate "),
        (["train", "--lora_r", "8"], "nearest: --rank "),
        (["train", "--max-seq-length", "8"], "nearest: --max-length "),
        (["train", "--num_train_epochs", "3"], "nearest: --epochs "),
        (["train", "--batch_size", "8"], "nearest: --set window=VALUE "),
        (["train", "--all_linear"], "nearest: --targets all-linear "),
        (["run", "--lr", "1e-4"], "nearest: --set learning_rate=VALUE "),
        (["run", "mini", "--method", "sfor", "--set", "lr=1e-4"], "no field 'lr'; nearest: learning_rate$"),
        (["train", "m", "--data", "d", "--out", "o", "--epochs", "2", "--set", "epochs=3"], "--set epochs is set by --epochs, too"),
        (
            ["train", "m", "--data", "d", "--out", "o", "--max-length", "9", "--set", "training.max_tokens=8"],
            "--set training.max_tokens is set by --max-length, too; give one of them",
        ),
        (["report", "--out", "x"], "Missing argument"),
    ],
)
def test_a_wrong_request_gets_one_line_and_status_2_and_writes_nothing(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert re.search(message, one_line(capsys))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_model_is_named_as_what_it_is_and_not_as_the_nearest_to_itself(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, file in (("adapter-one", "adapter_config.json"), ("adapter-two", "notes.txt")):
        Path(folder).mkdir()
        Path(folder, file).write_text("{}")
    asked = ["run", "mini", "--method", "sfor", "--out", "x", "--model"]
    for folder, said in (("adapter-one", "it is an adapter's folder: give the base"), ("adapter-two", "nearest: adapter-one")):
        assert main([*asked, f"./{folder}"]) == 2
        assert one_line(capsys).rstrip().partition("it has no config.json; ")[2].startswith(said)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: standard-cl\ntraining: {speed: 3}\n", "no field 'training.speed'"),
        ("extends: standard-cl\nextends: mini\n", "found duplicate key"),
        ("a: [1\n", "is not readable YAML"),
        ("- 1\n", "holds no recipe"),
        ("x: !!python/object/apply:os.system [echo]\n", "is not readable YAML"),
        ("method: sfor\norder: [a]\nseed: x\nrecipe: {}\n", "seed: .*integer"),
        ("name: only\n", "tasks: Field required"),
        ("extends: standard-cl\ntraining: {learning_rate: on}\n", "training.learning_rate: .*found 'on'"),
    ],
)
def test_a_wrong_recipe_file_is_named_with_its_field(text, message, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert main(["run", str(path), "--method", "sfor", "--dry-run"]) == 2
    assert re.search(message, one_line(capsys))


def test_verbose_shows_the_traceback(capsys):
    assert main(["-v", "check", "sfr"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_crash_of_our_own_is_not_passed_off_as_a_wrong_request(monkeypatch, tmp_path, capsys):
    records.write(tmp_path, records.record())
    monkeypatch.setattr("anchorlora_lab.report.page.all_tables", lambda runs: int("no number"))
    command = ["report", str(tmp_path), "--out", str(tmp_path / "r")]
    assert main(command) == 1
    said = one_line(capsys)
    assert said.startswith("error: ValueError: invalid literal")
    assert said.endswith("; this is a bug in anchorlora: run `anchorlora -v ...` again and report the traceback\n")
    assert main(["-v", *command]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, KeyError, AttributeError, RecursionError, UnicodeError, Exception])
def test_a_crash_of_any_kind_is_one_line_of_words_without_secrets(kind, monkeypatch, tmp_path, capsys):
    def fail(runs):
        raise kind("\x1b]0;owned\x07 at https://me:secret@host/\nhf_ABCDEFGHIJKLMN")

    monkeypatch.setattr("anchorlora_lab.report.page.all_tables", fail)
    records.write(tmp_path, records.record())
    command = ["report", str(tmp_path), "--out", str(tmp_path / "r")]
    assert main(command) == 1
    brief = one_line(capsys)
    assert main(["-v", *command]) == 1
    whole = capsys.readouterr().err
    assert "Traceback" in whole
    assert kind.__name__ in brief
    for said in (brief, whole):
        assert "1b]0;owned" in said
        assert not {"\x1b", "\x07"} & set(said)
        assert "secret" not in said
        assert "hf_ABCD" not in said


def test_too_little_memory_and_too_few_positions_are_no_bugs_of_ours(monkeypatch, tmp_path, capsys):
    def fail(runs):
        raise MemoryError

    def outside(runs):
        torch.nn.Embedding(2, 2)(torch.tensor([2]))

    records.write(tmp_path, records.record())
    for why, said in ((fail, "MemoryError; there is not enough memory: free some"), (outside, "IndexError: index out of range")):
        monkeypatch.setattr("anchorlora_lab.report.page.all_tables", why)
        assert main(["report", str(tmp_path), "--out", str(tmp_path / "r")]) == 1
        line = one_line(capsys)
        assert line.startswith(f"error: {said}")
        assert "bug" not in line
    assert "the model has no position for so long a text: lower max_tokens (--max-length)" in line


def test_a_crash_without_words_is_named_by_its_kind(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("anchorlora_lab.report.page.all_tables", lambda runs: next(iter(())))
    records.write(tmp_path, records.record())
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r")]) == 1
    assert one_line(capsys).startswith("error: StopIteration; this is a bug in anchorlora")


def test_an_interrupted_run_says_that_it_can_go_on(monkeypatch, small_model, small_benchmark, tmp_path, capsys):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("anchorlora.continual.sequence.learning", stop)
    command = ["run", "standard-cl", "--method", "sfor", *FAST, "--model", str(small_model), "--data", str(small_benchmark)]
    assert main([*command, "--out", str(tmp_path / "r")]) == 75
    assert "the same command continues" in capsys.readouterr().err


def test_numbers_that_are_no_numbers_end_with_status_3(small_model, small_benchmark, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    shutil.copytree(small_model, tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"].fill_(3e38)  # behind the last feature rows, whose products overflow
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    command = ["run", "standard-cl", "--method", "sfor", *FAST, "--model", str(tmp_path / "model"), "--data", str(small_benchmark)]
    assert main([*command, "--out", str(tmp_path / "r")]) == 3
    assert "stopped: fruit (task 1): the loss is nan at step 1" in capsys.readouterr().err
    assert not (tmp_path / "r/record.json").exists()
    assert not (tmp_path / "r/tasks").exists()


def test_the_program_runs_as_installed():
    said = subprocess.run([sys.executable, "-m", "anchorlora", "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", said.stdout)
