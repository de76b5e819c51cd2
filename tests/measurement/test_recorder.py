"""What the recorder writes, against what a dense reader sees at each step."""

import json

import pytest
import torch
from torch import nn

import oracle
from anchorlora import Anchor, Freeze, ProjectDisplacement, Subspace, protect
from anchorlora.measurement import EarlierRows, FeatureCores, StepRecorder, WeightDirections, record_steps
from anchorlora.measurement.directions import Protected
from toys import anchor_of, optimizer_for, task_loss, train


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_and_layer_says_what_a_dense_reader_would(tmp_path):
    anchor, path, seen = anchor_of(), tmp_path / "audit.jsonl", []
    optimizer = optimizer_for(anchor, "adamw")
    with protect(optimizer, anchor, [ProjectDisplacement("A"), StepRecorder(path)]):
        for _ in range(5):
            before = [layer.factor("A").detach().double().clone() for layer in anchor.layers]
            task_loss(anchor).backward()
            optimizer.step()
            optimizer.zero_grad()
            layers = [(oracle.change(s.current.A, s.current.B, s.start.A, s.start.B, 4.0), s.core.basis) for s in anchor.layers]
            left = [
                float(((s.factor("A").detach().double() - A) @ s.core.basis.double()).norm())
                for s, A in zip(anchor.layers, before, strict=True)
            ]
            seen.append((oracle.drift(layers), [oracle.drift([path]) for path in layers], left))
    lines = lines_of(path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for line, (overall, each, left) in zip(lines, seen, strict=True):
        assert line["rho"] == pytest.approx(float(overall["rho"]), rel=1e-9)
        for row, expected, violation in zip(line["layers"].values(), each, left, strict=True):
            assert row["rho"] == pytest.approx(float(expected["rho"]), rel=1e-9)
            assert row["violation_after"] == pytest.approx(violation, rel=1e-9, abs=1e-15)
            assert row["violation_before"] > 1e3 * row["violation_after"]


def test_a_protected_run_is_recorded_as_kept_at_every_step(tmp_path):
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "adamw")
    with protect(optimizer, anchor, [Freeze("B"), ProjectDisplacement("A"), StepRecorder(tmp_path / "a.jsonl", every=10)]):
        train(anchor, optimizer, 30)
    lines = lines_of(tmp_path / "a.jsonl")
    assert [line["step"] for line in lines] == [10, 20, 30]
    assert all(line["rho"] <= max(1e-7, 3 * line["rho_floor"]) for line in lines)


def test_an_audit_constrains_nothing(tmp_path):
    ends = []
    for extra in ([], [StepRecorder(tmp_path / "a.jsonl")]):
        anchor = anchor_of()
        optimizer = optimizer_for(anchor, "adamw")
        with protect(optimizer, anchor, [ProjectDisplacement("A"), *extra]):
            train(anchor, optimizer, 10)
        ends.append([layer.factor(name).detach().clone() for layer in anchor.layers for name in "AB"])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_rows_of_earlier_blocks_are_a_belief(tmp_path):
    anchor = anchor_of(history=True, fresh=True)
    optimizer = optimizer_for(anchor, "adamw")
    with protect(optimizer, anchor, [StepRecorder(tmp_path / "a.jsonl", EarlierRows())]):
        train(anchor, optimizer, 3)
    dense = []
    for s in anchor.layers:
        basis = torch.linalg.qr(s.history.A.double().T).Q
        dense.append((oracle.change(s.current.A, s.current.B, s.start.A, s.start.B, 4.0), basis))
    assert lines_of(tmp_path / "a.jsonl")[-1]["rho"] == pytest.approx(float(oracle.drift(dense)["rho"]), rel=1e-6)
    with pytest.raises(ValueError, match="layer0 has no frozen rows"):
        StepRecorder(tmp_path / "b.jsonl", EarlierRows()).begin_task(anchor_of())


def test_singular_vectors_of_base_weights_are_a_belief_with_two_sides(tmp_path):
    from peft import LoraConfig, get_peft_model

    import models

    model = get_peft_model(models.qwen3(), LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    anchor = Anchor.of(model)
    with protect(optimizer, anchor, [StepRecorder(tmp_path / "a.jsonl", WeightDirections(8))]):
        for step in range(3):
            ids = models.tokens(4, 8, seed=step)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    line = lines_of(tmp_path / "a.jsonl")[-1]
    reads, writes = [], []
    for layer in anchor.layers:
        W = model.get_submodule(f"base_model.model.{layer.name}").get_base_layer().weight.detach().double()
        U, _, Vt = torch.linalg.svd(W, full_matrices=False)
        dW = oracle.change(layer.current.A, layer.current.B, layer.start.A, layer.start.B, 4.0)
        reads.append((dW, Vt[:8].T))
        writes.append((dW.T, U[:, :8]))
    assert line["rho"] == pytest.approx(float(oracle.drift(reads)["rho"]), rel=1e-6)
    assert line["left_rho"] == pytest.approx(float(oracle.drift(writes)["rho"]), rel=1e-6)
    assert line["left_violation_before"] == line["left_violation_after"] > 0


def full_layers(seed=0):
    torch.manual_seed(seed)
    return nn.ModuleDict({"one": nn.Linear(12, 9), "two": nn.Linear(9, 7)})


def learn(layers, optimizer, steps, *, afterwards=lambda: None):
    x = torch.randn(32, 12)
    y = torch.randn(32, 7)
    for _ in range(steps):
        (layers["two"](torch.tanh(layers["one"](x))) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        afterwards()


@pytest.mark.parametrize("where", ["hook", "loop"])
def test_full_weights_are_audited_in_any_loop_and_a_projection_counts_wherever_it_stands(where, tmp_path):
    layers = full_layers()
    starts = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    cores = {name: Subspace(torch.linalg.qr(torch.randn(layer.in_features, 3)).Q) for name, layer in layers.items()}
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)

    @torch.no_grad()
    def project(*_):
        for name, layer in layers.items():
            W0 = starts[name].double()
            layer.weight.copy_(W0 + cores[name].outside(layer.weight.double() - W0))

    with record_steps(optimizer, dict(layers), FeatureCores(cores), tmp_path / "a.jsonl"):
        hook = optimizer.register_step_post_hook(project) if where == "hook" else None
        learn(layers, optimizer, 6, afterwards=(lambda: None) if hook else project)
    lines = lines_of(tmp_path / "a.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    eps = torch.finfo(torch.float32).eps
    for line in lines:
        assert line["violation_before"] > 1e-3
        assert line["violation_after"] < 4 * eps * sum(float(w.norm()) for w in starts.values())
        assert line["rho"] <= max(1e-7, 3 * line["rho_floor"])


def test_without_projection_full_weights_read_what_dense_algebra_says(tmp_path):
    layers = full_layers()
    starts = {name: layer.weight.detach().double().clone() for name, layer in layers.items()}
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    with record_steps(optimizer, {name: layer.weight for name, layer in layers.items()}, WeightDirections(3), tmp_path / "a.jsonl"):
        learn(layers, optimizer, 4)
    line = lines_of(tmp_path / "a.jsonl")[-1]
    dense = [(layers[n].weight.detach().double() - W, torch.linalg.svd(W)[2][:3].T) for n, W in starts.items()]
    assert line["rho"] == pytest.approx(float(oracle.drift(dense)["rho"]), rel=1e-6)
    assert line["violation_before"] == line["violation_after"]
    learn(layers, optimizer, 1)
    assert len(lines_of(tmp_path / "a.jsonl")) == 4, "hooks are gone after the block"


def test_what_cannot_be_recorded_is_refused(tmp_path):
    layers = full_layers()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="every counts optimizer steps and is at least 1, not 0"):
        StepRecorder(tmp_path / "a", every=0)
    wrong = {name: Protected(Subspace(torch.eye(5)[:, :2])) for name in layers}
    with (
        pytest.raises(ValueError, match="the core of one has width 5, but the layer reads 12"),
        record_steps(optimizer, dict(layers), wrong, tmp_path / "a"),
    ):
        pass
    for belief, message in (
        (FeatureCores(), "no core to audit at one"),
        (EarlierRows(), "have no rows"),
        (WeightDirections(20), "one: .* no 20 leading"),
    ):
        with pytest.raises(ValueError, match=message), record_steps(optimizer, dict(layers), belief, tmp_path / "a"):
            pass
    with (
        pytest.raises(TypeError, match="no torch optimizer"),
        record_steps(object(), dict(layers), WeightDirections(2), tmp_path / "a"),
    ):
        pass
    assert not (tmp_path / "a").exists()
