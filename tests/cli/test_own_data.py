"""`run` and `grid` on data in every layout that is read, on the embedded model."""

import json

import pytest

import layouts
from anchorlora.cli.app import main
from anchorlora.runs.provenance import _file
from anchorlora.store.record import read_record
from golden import one_line

FEW = ["--method", "sfor", "--set", "max_tokens=96", "--set", "rows=8", "--set", "held_out_rows=0", "--set", "train_limit=8"]
FEW += ["--set", "test_limit=2", "--set", "rank=2"]


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Answers of a few tokens: what the projects allow is read in tests/data."""
    monkeypatch.setattr("anchorlora.data.layouts.TRACE_TOKENS", 4)
    monkeypatch.setattr("anchorlora.data.layouts.SAPT_TOKENS", 4)


def written(layout, folder):
    return ["--data", str(getattr(layouts, layout)(folder))]


@pytest.mark.usefixtures("extra_metrics")
@pytest.mark.parametrize(
    ("layout", "tasks", "metrics"),
    [
        ("trace", ["C-STANCE", "20Minuten"], [{"verbatim_match"}, {"sari", "rouge_l"}]),
        ("sapt", ["boolq", "task002_quoref"], [{"exact_match"}, {"rouge_l", "exact_match"}]),
        ("llama_factory", ["alpaca", "chats"], [{"token_f1", "exact_match"}] * 2),
    ],
)
def test_all_tasks_of_a_layout_are_learned_in_their_order_and_scored_by_their_metrics(tmp_path, layout, tasks, metrics):
    model = ["--model", str(layouts.chat_model(tmp_path / "model"))] if layout == "llama_factory" else []
    (tmp_path / "data").mkdir()
    asked = ["run", "mini", *FEW, *model, *written(layout, tmp_path / "data")]
    assert main([*asked, "--out", str(tmp_path / "out")]) == 0
    record = read_record(tmp_path / "out/record.json")
    assert record.order == tasks
    for i, names in enumerate(metrics):
        measured = {name for name, rows in record.metrics.items() if rows[-1][i] is not None}
        assert measured == names | {"loss"}
    lines = (tmp_path / f"out/tasks/2-{tasks[1]}/predictions.jsonl").read_text().splitlines()
    assert {json.loads(line)["task"] for line in lines} == set(tasks)


@pytest.mark.usefixtures("extra_metrics")
def test_a_dry_run_counts_the_examples_of_every_task(tmp_path, capsys):
    assert main(["run", "mini", *FEW, *written("trace", tmp_path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "C-STANCE: 8 training examples, 1 optimizer step, 2 test examples" in out
    assert "20Minuten: 8 training examples" in out


@pytest.mark.usefixtures("extra_metrics")
def test_a_grid_has_one_order_of_all_tasks_and_single_tasks_if_they_are_named(tmp_path, capsys):
    data = written("trace", tmp_path / "data")
    grid = ["grid", "mini", "--methods", "sfor", "--seeds", "42", *data, "--dry-run", "--out", str(tmp_path / "grid")]
    assert main(grid) == 0
    assert [line.rsplit("/")[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("missing")] == ["all-42"]
    assert main([*grid, "--orders", "all,C-STANCE,20Minuten"]) == 0
    folders = [line.rsplit("/")[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("missing")]
    assert folders == ["all-42", "C-STANCE-42", "20Minuten-42"]


def test_without_data_of_ones_own_the_recipes_orders_hold(tmp_path, capsys):
    grid = ["grid", "mini", "--methods", "sfor", "--seeds", "42", "--dry-run", "--out", str(tmp_path / "grid")]
    assert main(grid) == 0
    assert capsys.readouterr().out.count("missing  ") == 3


def test_a_run_on_a_relative_place_goes_on_unless_a_file_was_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    layouts.trace(tmp_path / "data", tasks=["C-STANCE"])
    asked = ["run", "mini", *FEW, "--data", "data", "--order", "C-STANCE", "--out", "out"]
    assert main(asked) == 0
    record = read_record(tmp_path / "out/record.json")
    assert record.scores.BWT is None
    assert record.accuracy == [[record.scores.AA]]
    (tmp_path / "out/record.json").unlink()  # as if it had been stopped before its last file
    absolute = [str(tmp_path / "data") if word == "data" else word for word in asked]
    assert main(absolute) == 0
    path = tmp_path / "data/C-STANCE/train.json"
    path.write_text(path.read_text() + "\n")
    for again in (asked, absolute):
        assert main(again) == 0
        assert "data/C-STANCE/train.json was changed since, and this is the record" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "out/record.json").unlink()
    assert main(asked) == 2
    assert "data/C-STANCE/train.json is not what this run began with" in one_line(capsys)
    path.write_text(path.read_text().removesuffix("\n"))
    monkeypatch.chdir(tmp_path / "data/C-STANCE")
    asked[-1] = absolute[-1] = str(tmp_path / "out")
    told = {
        "is not what this run began with: it is missing; ": asked,
        "belongs to another configuration (recipe.tasks.data: 'data' -> ": absolute,
        "data is not a folder; ": [*asked[:-1], str(tmp_path / "another")],
    }
    for reason, words in told.items():
        assert main(words) == 2
        assert reason in (said := one_line(capsys))
        assert said.endswith(f"; relative paths begin at the working folder, {tmp_path / 'data/C-STANCE'}\n")


def test_a_finished_run_names_a_saved_data_set_that_was_changed_since(tmp_path, capsys):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"What comes after {i}?", "completion": str(i + 1)} for i in range(20)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "tasks.yaml").write_text("tasks: {sums: {train: saved}}")
    asked = ["run", "mini", *FEW, "--data", str(tmp_path / "tasks.yaml"), "--set", "epochs=1", "--out", str(tmp_path / "out")]
    for changed in (False, False, True):
        if changed:
            datasets.Dataset.from_list(rows[1:]).save_to_disk(str(tmp_path / "saved"))
        assert main(asked) == 0
        assert (f"{tmp_path}/saved was changed since" in " ".join(capsys.readouterr().err.split())) is changed


def test_places_of_data_are_found_where_they_were_read(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}")
    place = str(tmp_path / "rows.jsonl")
    assert _file(tmp_path / "tasks.yaml", place, of_data=True) == tmp_path / "rows.jsonl"
    assert _file(tmp_path / "tasks.yaml", "org/name:train", of_data=True) is None, "rows of the hub are compared when they are read"
    assert _file(tmp_path, "gone.json", of_data=True) == tmp_path / "gone.json", "a missing file is refused"


def test_an_unknown_layout_is_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["run", "mini", "--method", "sfor", "--data", str(tmp_path / "empty"), "--out", str(tmp_path / "out")]) == 2
    assert "holds no tasks in a layout that is read" in one_line(capsys)
    assert not (tmp_path / "out").exists()
