"""Names of tasks, methods and orders, from every place where one enters: refused in one line, or a folder of their own."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import small
from anchorlora import METHODS, run_sequence
from anchorlora.adapters.files import write_adapter
from anchorlora.cli.app import main
from anchorlora.config import RunConfig
from anchorlora.data import Benchmark
from anchorlora.data.importing import import_benchmark
from anchorlora.paths import is_name, name_of_task
from anchorlora.recipes import mini
from anchorlora.runs.directory import RunDirectory
from anchorlora.text import file_name
from anchorlora_lab.grid.plan import GridAxes, plan, slug
from golden import one_line

NAMES = [
    "../up",
    "..",
    ".",
    "/etc",
    "a/b",
    "a\\b",
    "CON",
    "con.txt",
    "LPT1",
    "nul",
    "",
    " ",
    "-rf",
    ".hidden",
    "a..b",
    "end.",
    "x" * 300,
]
NAMES += ["a\0b", "a\nb", "é", "ａ", "a b", "\u202ex", "~", "$(touch x)", "`touch x`", "'; touch x", "a:b", "con\x1b"]


def files(root):
    return {path.relative_to(root).as_posix() for path in root.rglob("*")}


@given(st.one_of(st.text(), st.sampled_from(NAMES)))
@settings(max_examples=500, deadline=None)
def test_whatever_is_a_name_is_one_part_of_a_path_on_every_system(text):
    if is_name(text):
        assert name_of_task(text) == text
        assert text.isascii()
        assert len(text) <= 64
        assert not set(text) & set("/\\:*?\"<>|'$` \0\n")
        assert text.strip(". -") == text.rstrip("-")
    for made in (slug(text), file_name(text)):
        assert "/" not in made
        assert "\0" not in made
        assert len(made) <= 120
    assert slug(text) not in ("", ".", "..")
    assert slug(text).split(".")[0].lower() != "con"


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_no_hostile_name_is_a_name(name):
    with pytest.raises(ValueError, match="cannot be the name of a task"):
        name_of_task(name)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_orders_of_files_and_of_the_command_line_are_refused_and_nothing_is_written(name, tmp_path, capsys):
    cell = RunConfig(method="sfor", order=("news", "reviews"), seed=1, recipe=mini()).model_dump(mode="json")
    cell["order"] = ["news", name]
    (tmp_path / "config.yaml").write_text(json.dumps(cell))
    (tmp_path / "orders.yaml").write_text(json.dumps({"extends": "mini", "tasks": {"orders": {"order1": ["news", name]}}}))
    before = files(tmp_path)
    tried = [["config.yaml"], ["orders.yaml", "--method", "sfor"]]
    tried = [[str(tmp_path / file), *rest] for file, *rest in tried]
    if name.strip() and "," not in name:
        tried.append(["mini", "--method", "sfor", "--order", f"news,{name}"])
    for arguments in tried:
        assert main(["run", *arguments, "--out", str(tmp_path / "out")]) == 2
        assert "cannot be the name of a task" in one_line(capsys)
    assert files(tmp_path) == before


@pytest.mark.parametrize("name", [n for n in NAMES if n.strip(". ") and not set(n) & set("/\0") and len(n) < 200], ids=ascii)
def test_folders_of_a_benchmark_with_such_names_are_not_run(name, tmp_path, small_benchmark, small_model):
    data = small.write_benchmark(tmp_path / "data")
    (data / "TC/fruit").rename(data / "TC" / name)
    assert name in Benchmark(data).names
    with pytest.raises(ValueError, match="cannot be the name of a task"):
        Benchmark(data).task(name)
    with pytest.raises(ValueError, match="cannot be the name of a task"):
        run_sequence(small.recipe(data, small_model), METHODS["sfor"], order=(name,), seed=1, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_methods_models_and_orders_of_a_grid_stay_in_its_folder(name, tmp_path):
    models = [name or "m", "other"] if "\0" not in name else ["m", "other"]  # no folder and no repository has a NUL in its name
    axes = GridAxes([name, "sfor"], {name or "o": ("news",)}, [1], models)
    for planned in plan(mini(), axes, tmp_path, settings={}):
        assert planned.folder.resolve().is_relative_to(tmp_path.resolve())
        assert len(planned.folder.relative_to(tmp_path).parts) == 3


@pytest.mark.parametrize("name", ["../../up", "/etc/x", "a\0b", "<script>"], ids=ascii)
def test_a_method_of_a_file_may_be_called_anything_and_writes_into_its_folder_alone(name, tmp_path, small_benchmark, small_model):
    method = METHODS["seq-lora"].plus(name=name)
    recipe = small.recipe(small_benchmark, small_model)
    (tmp_path / "runs").mkdir()
    record = run_sequence(recipe, method, order=("fruit",), seed=1, out=tmp_path / "runs/out", name="file.py:it")
    assert record.method.name == name
    assert {path.split("/")[0] for path in files(tmp_path)} == {"runs"}
    assert {path.split("/")[0] for path in files(tmp_path / "runs")} == {"out"}


@pytest.mark.parametrize("part", ["tasks", "state", "tasks/1-fruit", "state/1", "state/1-begun"])
def test_links_in_a_run_directory_are_not_followed_when_it_is_written_again(part, tmp_path, small_recipe):
    precious = tmp_path / "elsewhere"
    for folder in ("1-fruit", "1", "1-begun/step-00000001", "step-00000001", "trained"):
        (precious / folder).mkdir(parents=True)
        (precious / folder / "precious").write_text("kept")
    before = files(precious)
    out = tmp_path / "out"
    cell = RunConfig(method="seq-lora", order=("fruit",), seed=1, recipe=small_recipe)
    RunDirectory(out).claim(cell)
    (out / part).parent.mkdir(parents=True, exist_ok=True)
    (out / part).symlink_to(precious)
    with pytest.raises(ValueError, match="is a link, which is not followed"):
        run_sequence(small_recipe, METHODS["seq-lora"], order=("fruit",), seed=1, out=out)
    assert files(precious) == before


@pytest.mark.parametrize("name", ["trace.jsonl", "log.jsonl", "record.json", ".log.jsonl.tmp", ".record.json.tmp"])
def test_a_link_beside_them_is_not_written_through(name, tmp_path, small_recipe):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    out = tmp_path / "out"
    RunDirectory(out).claim(RunConfig(method="seq-lora", order=("fruit",), seed=1, recipe=small_recipe))
    (out / name).symlink_to(precious)
    with pytest.raises(ValueError, match=f"{name} is a link, which is not followed"):
        run_sequence(small_recipe, METHODS["seq-lora"], order=("fruit",), seed=1, out=out)
    assert precious.read_text() == "kept"


def test_links_in_a_source_of_data_are_not_imported(tmp_path):
    small.write_benchmark(tmp_path / "private")
    small.write_benchmark(tmp_path / "source")
    (tmp_path / "source/TC/other").symlink_to(tmp_path / "private/TC/fruit")
    with pytest.raises(ValueError, match="is a link"):
        import_benchmark(str(tmp_path / "source"), tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_what_is_embedded_is_a_name_and_no_path(tmp_path):
    for name in ("embedded:../../../../tmp", "embedded:/", "embedded:", "embedded:mini/../mini"):
        with pytest.raises(LookupError, match="nothing embedded is called"):
            run_sequence(mini().changed({"data": name}), METHODS["sfor"], order=("news",), seed=1, out=tmp_path / "out")


def test_an_adapter_has_no_name_that_could_lead_out_of_its_folder(tmp_path):
    """PEFT's save_pretrained writes to an adapter's name; what is written here has none."""
    import torch

    from anchorlora.geometry import Factors

    write_adapter(tmp_path / "out/adapter", {"../../up": Factors(torch.ones(1, 2), torch.ones(2, 1), 1.0)}, base="/etc")
    assert files(tmp_path) == {"out", "out/adapter", "out/adapter/adapter_config.json", "out/adapter/adapter_model.safetensors"}
