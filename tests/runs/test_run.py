"""A whole run on a real model class, real files and a real tokenizer: what it writes, that it resumes, that it repeats."""

import json
import shutil
from itertools import pairwise

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import oracle
import saved
import small
from anchorlora import METHODS, Method, ProjectDisplacement, Shared, run_sequence
from anchorlora.adapters import read_adapter
from anchorlora.constraints import ActiveConstraint
from anchorlora.continual.callback import RunCallback
from anchorlora.data import Benchmark, normalize
from anchorlora.errors import InvalidValue, NotFinite, ProtectionLost, UnknownName
from anchorlora.features.files import read_cores
from anchorlora.models.session import Session
from anchorlora.store.record import read_record
from records import VOLATILE

FAMILIES = ("sfor", "o-lora-hard", "fold-8")


def run(recipe, out, method="sfor", **kwargs):
    return run_sequence(recipe, METHODS[method], order=small.ORDER, seed=42, out=out, **kwargs)


@pytest.fixture(scope="module", params=FAMILIES)
def finished(request, tmp_path_factory, small_benchmark, small_model):
    out = tmp_path_factory.mktemp("runs") / request.param
    record = run(small.recipe(small_benchmark, small_model), out, request.param)
    return out, record


def steady(path):
    """A record without what may differ between two runs."""
    content = json.loads(path.read_text())
    return {name: value for name, value in content.items() if name not in VOLATILE}


def test_the_directory_holds_what_the_contract_promises(finished):
    out, record = finished
    assert {"record.json", "config.yaml", "log.jsonl", "tasks", "state"} <= {p.name for p in out.iterdir()}
    for number, task in enumerate(small.ORDER, 1):
        folder = out / "tasks" / f"{number}-{task}"
        assert {p.name for p in folder.iterdir()} == {"adapter", "cores.safetensors", "predictions.jsonl"}
        assert {p.name for p in (folder / "adapter").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert read_record(out / "record.json") == record


def test_a_run_on_an_open_model_is_bitwise_the_same_whatever_ran_on_it_before(finished, tmp_path, small_benchmark, small_model):
    out, record = finished
    recipe = small.recipe(small_benchmark, small_model)
    session = Session(recipe.base_model)
    other = recipe.changed({"rank": 2, "train_limit": 4, "gradient_checkpointing": True})
    run(other, tmp_path / "other", "o-lora", session=session)
    session.adapted(next(out.glob("tasks/1-*/adapter")))
    run(recipe, tmp_path / "again", record.method.name, session=session)
    assert steady(tmp_path / "again/record.json") == steady(out / "record.json")
    for adapter in out.glob("tasks/*/adapter/adapter_model.safetensors"):
        assert adapter.read_bytes() == (tmp_path / "again" / adapter.relative_to(out)).read_bytes()


def test_a_recipe_of_another_model_than_the_open_one_is_refused(tmp_path, small_benchmark, small_model):
    recipe = small.recipe(small_benchmark, small_model)
    with pytest.raises(InvalidValue, match="other settings"):
        run(recipe, tmp_path / "run", session=Session(recipe.changed({"dtype": "bfloat16"}).base_model))
    assert not (tmp_path / "run").exists()


def test_at_learning_rate_0_the_base_model_is_tested(tmp_path, small_benchmark, small_model):
    recipe = small.recipe(small_benchmark, small_model).changed({"learning_rate": 0, "train_limit": 4})
    record = run(recipe, tmp_path / "run", "seq-lora")
    assert not any(d.d_eff for d in record.drift)
    assert all(row == record.accuracy[-1][: len(row)] for row in record.accuracy)


def test_the_record_is_complete_and_consistent(finished, small_model):
    _, record = finished
    assert [len(row) for row in record.accuracy] == [1, 2, 3]
    assert record.scores.model_dump() == pytest.approx(oracle.scores(record.accuracy))
    assert [d.task for d in record.drift] == [2, 3]
    counted = {
        t: {part: sum(getattr(n, part) for n in of.values()) for part in ("train", "test")} for t, of in record.labels.items()
    }
    assert counted == record.protocol["examples"]
    assert [len(layers) for layers in record.layers] == [4, 4, 4]
    assert [layers[0].rows for layers in record.layers[:2]] == ([128, 256] if record.method.name != "fold-8" else [52, 63])
    assert record.threads == 1
    assert record.protocol["training"]["loss"] == "example_mean"
    assert record.protocol["examples"]["mood"] == {"train": 24, "test": 6}
    assert {f.kind for f in record.data.values()} == {"own"}
    assert set(record.data) == {f"{path}/{part}.json" for path in small.TASKS for part in ("labels", "train", "test")} | {
        "instruction_config.json"
    }
    assert record.base_model.dtype == "float32"
    assert len(record.base_model.sha256) == 64
    assert record.base_model.parameters == sum(t.numel() for t in load_file(small_model / "model.safetensors").values())
    assert len(record.cost.train_seconds) == 3


def test_predictions_are_one_line_an_example_and_add_up_to_the_accuracies(finished, small_benchmark):
    out, record = finished
    source = Benchmark(small_benchmark)
    for number, task in enumerate(small.ORDER, 1):
        lines = [json.loads(line) for line in (out / f"tasks/{number}-{task}/predictions.jsonl").read_text().splitlines()]
        assert len(lines) == 6 * number
        for i, name in enumerate(small.ORDER[:number]):
            mine = [line for line in lines if line["task"] == name]
            assert [line["index"] for line in mine] == list(range(6))
            assert [line["gold"] for line in mine] == [e.label for e in source.examples(name, "test")]
            right = sum(normalize(line["text"]) == normalize(line["gold"]) for line in mine)
            assert 100 * right / 6 == pytest.approx(record.accuracy[number - 1][i])
            invalid = sum(line["label"] is None for line in mine)
            assert 100 * invalid / 6 == pytest.approx(record.invalid[number - 1][i])


def test_the_drift_on_record_is_what_dense_float64_reads_from_the_saved_files(finished):
    out, record = finished
    folders = saved.folders(out, small.ORDER)
    for t in (2, 3):
        expected, largest_zero = saved.drift(folders[t - 2], folders[t - 1])
        drift = record.drift[t - 2]
        for name in ("d_eff", "d_new", "chance"):
            assert getattr(drift, name) == pytest.approx(expected[name], rel=1e-5), name
        assert drift.bound == pytest.approx(largest_zero, rel=1e-5)
        assert expected["rho"] <= largest_zero
        assert drift.rho <= drift.bound
        assert drift.exact


def test_cores_of_the_first_task_and_of_all_past_ones_are_measured_on(finished):
    out, record = finished
    first, second, third = saved.folders(out, small.ORDER)
    on_first, _ = saved.drift(second, third, cores=first)
    assert record.drift[1].rho_first == pytest.approx(on_first["rho"], rel=1e-4)
    on_union = []
    bases = [read_cores(folder / "cores.safetensors") for folder in (first, second)]
    for layer, dW in saved.changes(second, third).items():
        both = torch.cat([cores[layer].basis for cores in bases], dim=1).double()
        left, sigma, _ = torch.linalg.svd(both, full_matrices=False)
        on_union.append((dW, left[:, sigma > 1e-6]))
    assert record.drift[1].rho_union == pytest.approx(float(oracle.drift(on_union)["rho"]), rel=1e-4)
    assert record.drift[1].held_out.total > 0
    remembers = record.method.name == "fold-8"
    assert [bool(drift.predicted_kl) for drift in record.drift] == [remembers, remembers]


def test_core_files_say_which_layer_uses_which_tensor(finished):
    out, record = finished
    path = out / "tasks/1-fruit/cores.safetensors"
    with safe_open(path, framework="pt") as file:
        stores = json.loads(file.metadata()["layers"])
    assert set(stores) == {f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qv"}
    own = record.method.name == "fold-8"  # whose cores are of what each layer's answers depend on, not of what it reads
    assert stores["model.layers.0.self_attn.v_proj"] == f"model.layers.0.self_attn.{'v' if own else 'q'}_proj"
    for tensor in load_file(path).values():
        assert tensor.dtype == torch.float32
        assert tensor.shape[0] == 64
        assert tensor.shape[1] == 2 if own else 4 <= tensor.shape[1] <= 20


def test_every_adapter_loads_in_plain_peft_and_gives_the_recorded_answers(finished, small_model, small_benchmark):
    """All of them, one prompt at a time, with nothing of ours in the way of the model."""
    out, _ = finished
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    source = Benchmark(small_benchmark)
    for number, task in enumerate(small.ORDER, 1):
        folder = out / f"tasks/{number}-{task}"
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small_model), folder / "adapter").eval()
        for line in map(json.loads, (folder / "predictions.jsonl").read_text().splitlines()):
            prompt = source.task(line["task"]).prompt(list(source.examples(line["task"], "test"))[line["index"]].sentence)
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            with torch.no_grad():
                said = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
            assert tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True).strip() == line["text"]


def test_the_cumulative_adapter_grows_by_a_block_and_keeps_the_old_ones_bitwise(finished):
    out, record = finished
    states = [read_adapter(out / f"tasks/{number}-{task}/adapter") for number, task in enumerate(small.ORDER, 1)]
    ranks = [next(iter(state.values())).rank for state in states]
    assert ranks == {"sfor": [4, 4, 4], "o-lora-hard": [4, 8, 12], "fold-8": [4, 8, 8]}[record.method.name]
    if record.method.name == "o-lora-hard":
        for then, now in pairwise(states):
            assert all(now[layer].grown_from(earlier) is not None for layer, earlier in then.items())
    assert record.cost.stored_parameters == sum(f.A.numel() + f.B.numel() for f in states[-1].values())
    trained = record.cost.stored_parameters // (ranks[-1] // 4)
    assert record.cost.trained_parameters == (
        trained if record.method.name != "sfor" else sum(f.A.numel() for f in states[-1].values())
    )


@pytest.mark.parametrize("method", ["seq-lora", "o-lora-bsr"])
def test_the_same_command_twice_gives_the_same_adapters_bitwise_and_the_same_record(method, small_recipe, tmp_path):
    for name in ("a", "b"):
        run(small_recipe, tmp_path / name, method)
        torch.rand(5)
    assert steady(tmp_path / "a/record.json") == steady(tmp_path / "b/record.json")
    for path in sorted((tmp_path / "a/tasks").rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes(), path


class Interrupt(RunCallback):
    def __init__(self, task, step):
        self.task, self.step, self.now = task, step, 0

    def on_task_begin(self, number, task, steps, done):
        self.now = number

    def on_step_end(self, event):
        if (self.now, event["step"]) == (self.task, self.step):
            raise KeyboardInterrupt


def test_a_stopped_run_on_packed_rows_ends_the_same(small_recipe, tmp_path):
    """With dropout, remembered examples in rows of their own, and a window of several rows."""
    stopped_often(small_recipe.changed({"batching": "packed", "row_tokens": 100}), "replay", tmp_path)


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_gradient_checkpointing_changes_no_row_and_no_step(batching, small_recipe, tmp_path):
    """The forward passes that it repeats draw the same dropout, read the same packed rows, and give no feature rows."""
    recipe = small_recipe.changed({"batching": batching})
    run(recipe, tmp_path / "stored", "sfor")
    run(recipe.changed({"gradient_checkpointing": True}), tmp_path / "repeated", "sfor")
    for path in sorted((tmp_path / "stored").glob("state/*/rows.safetensors")):
        assert path.read_bytes() == (tmp_path / "repeated" / path.relative_to(tmp_path / "stored")).read_bytes()
    for path in sorted((tmp_path / "stored").glob("tasks/*/adapter/*.safetensors")):
        stored, repeated = load_file(path), load_file(tmp_path / "repeated" / path.relative_to(tmp_path / "stored"))
        assert all(torch.equal(stored[name], repeated[name]) for name in stored)
    protocols = [read_record(tmp_path / name / "record.json").protocol for name in ("stored", "repeated")]
    assert [p["training"].get("gradient_checkpointing") for p in protocols] == [None, True]


def test_a_forecast_of_earlier_answers_changes_nothing_else(small_recipe, tmp_path):
    stopped_often(small_recipe.changed({"predicted_kl": True}), "ewc", tmp_path)
    plain, known = run(small_recipe, tmp_path / "plain", "ewc"), read_record(tmp_path / "whole/record.json")
    assert all(drift.predicted_kl > 0 for drift in known.drift)
    assert [drift.model_copy(update={"predicted_kl": None}) for drift in known.drift] == plain.drift
    assert (known.accuracy, known.protocol) == (plain.accuracy, plain.protocol)
    assert known.cost.history_bytes == plain.cost.history_bytes
    for path in sorted((tmp_path / "plain/tasks").glob("*/adapter/*")):
        assert path.read_bytes() == (tmp_path / "whole" / path.relative_to(tmp_path / "plain")).read_bytes(), path


@pytest.mark.slow
@pytest.mark.drawn(6)
@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_run_goes_on_at_the_first_unfinished_task_and_ends_the_same(method, small_recipe, tmp_path):
    stopped_often(small.roomy(small_recipe, method), method, tmp_path)


def stopped_often(small_recipe, method, tmp_path):
    run(small_recipe, tmp_path / "whole", method)
    for task, step in ((1, 2), (2, 1), (3, 3)):
        with pytest.raises(KeyboardInterrupt):
            run(small_recipe, tmp_path / "parts", method, callbacks=[Interrupt(task, step)])
        assert not (tmp_path / "parts/record.json").exists()
        assert len(list((tmp_path / "parts").glob("tasks/*"))) == task - 1
    run(small_recipe, tmp_path / "parts", method)
    assert steady(tmp_path / "parts/record.json") == steady(tmp_path / "whole/record.json")
    for path in sorted((tmp_path / "whole/tasks").rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "parts" / path.relative_to(tmp_path / "whole")).read_bytes(), path
    log = [json.loads(line) for line in (tmp_path / "parts/log.jsonl").read_text().splitlines()]
    assert [(e["task"], e["step"]) for e in log if e["event"] == "step"] == [(t, s) for t in (1, 2, 3) for s in (1, 2, 3)]


@pytest.mark.slow
def test_methods_that_freeze_a_save_what_they_promise(small_recipe, tmp_path):
    """Read from the saved adapters, in float64: LoRA-FA's A is the one that was drawn, InfLoRA's blocks are off the core."""
    saved = {}
    for method in ("lora-fa", "inf-lora"):
        run(small_recipe, tmp_path / method, method)
        folders = [tmp_path / method / "tasks" / f"{number}-{task}" for number, task in enumerate(small.ORDER, 1)]
        saved[method] = [(read_adapter(folder / "adapter"), read_cores(folder / "cores.safetensors")) for folder in folders]
    (first, _), *later = saved["lora-fa"]
    for adapter, _ in later:
        assert all(torch.equal(f.A, first[layer].A) and not torch.equal(f.B, first[layer].B) for layer, f in adapter.items())
    rank = small_recipe.adapter.rank
    for number, (adapter, _) in enumerate(saved["inf-lora"], 1):
        for layer, f in adapter.items():
            A, B = f.A[-rank:].double(), f.B[:, -rank:].double()
            assert len(f.A) == rank * number
            assert torch.allclose(3 * A @ A.T, torch.eye(rank, dtype=torch.float64), atol=1e-5)
            assert float(B.norm()) > 1e-3
            if number > 1:
                V = saved["inf-lora"][number - 2][1][layer].basis.double()
                assert float((B @ A @ V).norm()) <= 1e-6 * float(B.norm() * A.norm())


def test_oplora_leaves_the_leading_singular_triples_of_the_base_weights_after_every_task(small_recipe, small_model, tmp_path):
    """Read from the saved adapters, in dense float64; the first task included, and its cores play no part."""
    run(small_recipe, tmp_path / "r", "oplora")
    base = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    for number, task in enumerate(small.ORDER, 1):
        for layer, factors in read_adapter(tmp_path / "r" / "tasks" / f"{number}-{task}" / "adapter").items():
            W, dW = base.get_submodule(layer).weight.detach().double(), factors.scale * factors.B.double() @ factors.A.double()
            U, S, right = torch.linalg.svd(W, full_matrices=False)
            U, S, V = U[:, :16], S[:16], right[:16].T
            assert float(dW.norm()) > 1e-3
            assert float(((W + dW) @ V - U * S).norm()) < 1e-6 * float(factors.scale * factors.B.norm() * factors.A.norm())
            assert float((U.T @ (W + dW) - (V * S).T).norm()) < 1e-6 * float(factors.scale * factors.B.norm() * factors.A.norm())


def test_a_finished_run_is_read_and_not_repeated(small_recipe, tmp_path):
    run(small_recipe, tmp_path / "r")
    before = (tmp_path / "r/record.json").read_bytes()
    shutil.rmtree(tmp_path / "r/state")  # may be deleted once the record exists
    run(small_recipe, tmp_path / "r")
    assert (tmp_path / "r/record.json").read_bytes() == before


def test_an_order_may_be_one_of_the_recipes_and_a_folder_a_string(small_recipe, tmp_path):
    tasks = small_recipe.tasks.model_copy(update={"orders": {"mine": tuple(small.ORDER[:1])}})
    recipe = small_recipe.model_copy(update={"tasks": tasks})
    record = run_sequence(recipe, METHODS["seq-lora"], order="mine", seed=42, out=str(tmp_path / "r"))
    assert (tuple(record.order), (tmp_path / "r/record.json").is_file()) == (tuple(small.ORDER[:1]), True)
    with pytest.raises(UnknownName, match="has no order 'ordre1'; give a list of tasks, or: mine"):
        run_sequence(recipe, METHODS["seq-lora"], order="ordre1", seed=42, out=tmp_path / "other")


def test_a_directory_of_another_configuration_is_refused_and_not_touched(small_recipe, tmp_path):
    run(small_recipe, tmp_path / "r")
    before = {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()}
    other = small_recipe.changed({"learning_rate": 1e-4, "rank": 2})
    with pytest.raises(
        ValueError,
        match=r"belongs to another configuration \(recipe.adapter.rank: 4 -> 2; recipe.training.learning_rate: 0.005 -> 0.0001",
    ):
        run(other, tmp_path / "r")
    assert {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()} == before


def test_a_folder_that_is_no_run_directory_is_refused(small_recipe, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r/thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="is not empty and is not a run directory"):
        run(small_recipe, tmp_path / "r")


def test_bad_data_of_a_later_task_stops_the_run_before_anything_is_written(small_recipe, small_benchmark, tmp_path):
    shutil.copytree(small_benchmark, tmp_path / "data")
    (tmp_path / "data/TC/metal/train.json").write_text('[{"label": "tin", "sentence": "x"}]')
    with pytest.raises(ValueError, match=r"metal/train.json, line 1: the label 'tin' is not in labels.json"):
        run(small_recipe.changed({"data": str(tmp_path / "data")}), tmp_path / "r")
    assert not (tmp_path / "r").exists()


class Poison(RunCallback):
    """Makes a base weight NaN in the middle of the second task."""

    model = None

    def on_task_begin(self, number, task, steps, done):
        self.now = number

    def on_step_end(self, event):
        if (self.now, event["step"]) == (2, 2):
            import gc

            from transformers import Qwen3ForCausalLM

            for model in (o for o in gc.get_objects() if type(o) is Qwen3ForCausalLM):
                with torch.no_grad():
                    model.lm_head.weight.fill_(float("nan"))


def test_a_loss_that_is_no_number_names_step_and_task_and_keeps_the_last_good_state(small_recipe, tmp_path):
    with pytest.raises(NotFinite, match=r"mood \(task 2\): the loss is nan at step 3.*the state after task 1 is kept"):
        run(small_recipe, tmp_path / "r", callbacks=[Poison()])
    assert [p.name for p in (tmp_path / "r/tasks").iterdir()] == ["1-fruit"]
    run(small_recipe, tmp_path / "r")
    run(small_recipe, tmp_path / "whole")
    assert steady(tmp_path / "r/record.json") == steady(tmp_path / "whole/record.json")


class Meddle(RunCallback):
    """Writes to a protected factor after every step, behind the optimizer's back."""

    def on_step_end(self, event):
        import gc

        for layer in (o for o in gc.get_objects() if type(o).__module__ == "peft.tuners.lora.layer" and hasattr(o, "lora_A")):
            if "default" in layer.lora_A:
                with torch.no_grad():
                    layer.lora_A["default"].weight.add_(1e-3)


def test_a_protection_that_was_lost_stops_the_run_and_the_task_is_not_saved(small_recipe, tmp_path):
    lost = r"mood \(task 2\): protection was lost by step 3: \|dA V\| at model.*moves it; the state after task 1"
    with pytest.raises(ProtectionLost, match=lost):
        run(small_recipe, tmp_path / "r", callbacks=[Meddle()])
    assert [p.name for p in (tmp_path / "r/tasks").iterdir()] == ["1-fruit"]
    assert not (tmp_path / "r/record.json").exists()


def test_a_task_that_touched_its_core_is_not_saved_even_if_nobody_saw_it_happen(small_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(ProjectDisplacement, "begin_task", lambda self, anchor: ActiveConstraint())
    with pytest.raises(ProtectionLost, match="sfor preserves the response on the core, but rho is"):
        run(small_recipe, tmp_path / "r")
    assert [p.name for p in (tmp_path / "r/tasks").iterdir()] == ["1-fruit"]


def test_a_method_of_ones_own_is_held_to_what_its_parts_preserve_and_not_to_its_name(small_recipe, tmp_path, monkeypatch):
    here = {"order": small.ORDER[:2], "seed": 42}
    run_sequence(small_recipe, Method("sfor", Shared()), out=tmp_path / "named", **here)
    assert [d.exact for d in read_record(tmp_path / "named/record.json").drift] == [False]
    monkeypatch.setattr(ProjectDisplacement, "begin_task", lambda self, anchor: ActiveConstraint())
    with pytest.raises(ProtectionLost, match="mine preserves the response on the core, but rho is"):
        run_sequence(small_recipe, METHODS["o-lora-hard"].named("mine"), out=tmp_path / "mine", **here)


def test_all_rows_of_a_seed_share_the_first_task(small_recipe, tmp_path):
    """Constraints begin with task 2, so what differs later does not come from the first task."""
    files = []
    for method in ("seq-lora", "sfor", "o-lora", "o-lora-hard"):
        run_sequence(small_recipe, METHODS[method], order=small.ORDER[:1], seed=42, out=tmp_path / method)
        files.append((tmp_path / method / "tasks/1-fruit/adapter/adapter_model.safetensors").read_bytes())
    assert len(set(files)) == 1


def test_undefined_values_are_null(small_recipe, tmp_path):
    record = run_sequence(small_recipe, METHODS["sfor"], order=("fruit",), seed=1, out=tmp_path / "one")
    assert (record.scores.BWT, record.scores.FM, record.drift) == (None, None, [])


def test_history_bytes_count_only_what_the_method_needs(small_recipe, tmp_path):
    counted = {m: run(small_recipe, tmp_path / m, m).cost.history_bytes for m in ("seq-lora", "sfor", "o-lora", "o-lora-bsr")}
    assert counted["seq-lora"] == counted["o-lora"] == 0
    rows = 2 * 2 * 128 * 64 * 4  # stores x finished tasks x rows x width x bytes
    assert counted["sfor"] > rows
    assert counted["o-lora-bsr"] > counted["sfor"] - 2 * 20 * 64 * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_protection_is_exact_over_a_half_precision_base(dtype, small_recipe, tmp_path):
    for method in FAMILIES:
        record = run(small_recipe.changed({"dtype": dtype, "train_limit": 8, "test_limit": 1}), tmp_path / method, method)
        assert record.base_model.dtype == dtype
        assert all(d.exact for d in record.drift), [(d.rho, d.bound) for d in record.drift]
        assert all(d.d_eff > 1e-3 for d in record.drift)


def test_a_repeated_task_is_refused(small_recipe, tmp_path):
    with pytest.raises(ValueError, match="names fruit twice"):
        run_sequence(small_recipe, METHODS["sfor"], order=("fruit", "mood", "fruit"), seed=1, out=tmp_path / "r")
