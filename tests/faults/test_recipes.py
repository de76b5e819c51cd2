"""Fields of a recipe that nobody means are refused before anything is loaded, in one line that names the field."""

import json
import time

import pytest

from anchorlora.cli.app import main
from anchorlora.config import RunConfig
from anchorlora.errors import InvalidValue
from anchorlora.export.source import export_source
from anchorlora.recipes import mini
from anchorlora_lab.suites.measure import target_of

WRONG = {
    "an expression without an end": ("adapter.targets", "([a-z0-9_.]+)+!"),
    "an expression that is none": ("adapter.targets", "("),
    "an expression in a list": ("adapter.targets", ["q_proj", ".*"]),
    "no targets": ("adapter.targets", []),
    "no name": ("adapter.targets", ""),
    "a rank": ("adapter.rank", 10**12),
    "an alpha": ("adapter.alpha", 1e308),
    "a device": ("base_model.device", "meta"),
    "threads": ("base_model.threads", 2**100),
    "a model of nobody": ("base_model.model", "~nosuchuser/x"),
    "a model with NUL": ("base_model.model", "a\0b"),
    "data of nobody": ("tasks.data", "~nosuchuser"),
    "a long place": ("tasks.data", "/" + "a" * 5000),
    "an empty order among others": ("tasks.orders", {"order1": []}),
    "rows": ("features.rows", 10**15),
    "held-out rows": ("features.held_out_rows", 10**15),
    "directions": ("features.wide", 10**14),
    "epochs": ("training.epochs", 2**100),
    "a window": ("training.window", 10**12),
    "a micro-batch": ("training.micro_batch", 10**12),
    "a learning rate": ("training.learning_rate", 1e308),
    "decay": ("training.weight_decay", 1e308),
    "tokens": ("training.max_tokens", 2**100),
    "new tokens": ("evaluation.max_new_tokens", 10**12),
    "questions at once": ("evaluation.eval_batch", 10**12),
    "points of a trace": ("trace.trace_points", 10**12),
    "an order": ("order", []),
}


def written(path, field, value):
    content = RunConfig(method="sfor", order=("entities", "news"), seed=1, recipe=mini()).model_dump(mode="json")
    if field == "order":
        content["order"] = value
    else:
        part, name = field.split(".")
        content["recipe"][part][name] = value
    path.write_text(json.dumps(content))  # JSON is YAML
    return path


@pytest.mark.parametrize(("field", "value"), WRONG.values(), ids=WRONG)
def test_a_field_that_nobody_means_is_refused_by_name(field, value, tmp_path, capsys):
    path, began = written(tmp_path / "own.yaml", field, value), time.process_time()
    assert main(["run", str(path), "--method", "sfor", "--dry-run"]) == 2
    assert time.process_time() - began < 1
    said = " ".join(capsys.readouterr().err.split())
    assert "own.yaml: " in said
    assert f"{field}" in said
    assert len(said) < 400


@pytest.mark.parametrize(
    ("targets", "taken"),
    [
        ("all-linear", "all-linear"),
        (["all-linear"], "all-linear"),
        ("q_proj, v_proj", ("q_proj", "v_proj")),
        (["model.layers.0.self_attn.q_proj"], ("model.layers.0.self_attn.q_proj",)),
        (r"model\.layers\.(0|1)\.self_attn\.[qkv]_proj", r"model\.layers\.(0|1)\.self_attn\.[qkv]_proj"),
    ],
)
def test_names_of_modules_are_taken_in_every_way_that_they_are_written(targets, taken):
    content = mini().model_dump(mode="json")
    content["adapter"]["targets"] = targets
    assert type(mini()).model_validate(content).adapter.targets == taken
    text = ",".join(targets) if isinstance(targets, list) else targets.replace(" ", "")
    assert mini().changed({"targets": "all-linear"}).changed({"targets": text}).adapter.targets == taken


@pytest.mark.parametrize("read", [target_of, export_source])
def test_a_base_model_that_an_adapter_names_is_read_as_strictly(read, tmp_path):
    import torch

    from anchorlora.adapters import write_adapter
    from anchorlora.geometry import Factors

    write_adapter(tmp_path / "a", {"q": Factors(torch.ones(1, 2), torch.ones(2, 1), 1.0)}, base="~nosuchuser/x")
    with pytest.raises(
        ValueError, match=r"adapter_config.json: model: .* begins with the home folder of an unknown user"
    ) as refused:
        read(tmp_path / "a")
    assert type(refused.value) is InvalidValue
