import json

import pytest
import torch

import oracle
from anchorlora import ProjectDisplacement, ProjectGradient, RoutingOverlap, Trace, protect
from toys import anchor_of, displacement, norm, optimizer_for, task_loss


def traced(path, constraints, *, steps=10, points=4, **kind):
    """Train under a trace and keep what a reader could have computed densely at each step."""
    anchor = anchor_of(history=True, **kind)
    optimizer = optimizer_for(anchor, "adamw")
    seen = []
    with protect(optimizer, anchor, [*constraints, Trace(path, steps=steps, points=points)]):
        for _ in range(steps):
            before = [layer.factor("A").detach().clone() for layer in anchor.layers]
            task_loss(anchor).backward()
            overlaps = [0.5 * (s.factor("A") @ s.history.A.T).sign() @ s.history.A for s in anchor.layers]  # of RoutingOverlap(0.5)
            penalty = sum(float(each.detach().double().square().sum()) for each in overlaps) ** 0.5
            gradient = sum(float(layer.factor(f).grad.double().square().sum()) for layer in anchor.layers for f in "AB") ** 0.5
            optimizer.step()
            optimizer.zero_grad()
            step = [layer.factor("A").detach() - old for layer, old in zip(anchor.layers, before, strict=True)]
            on = sum(float((d.double() @ s.core.basis.double()).square().sum()) for d, s in zip(step, anchor.layers, strict=True))
            layers = [(oracle.change(s.current.A, s.current.B, s.start.A, s.start.B, 4.0), s.core.basis) for s in anchor.layers]
            seen.append({"grad": gradient, "penalty": penalty, "wrp_after": on**0.5, "rho": float(oracle.drift(layers)["rho"])})
    return [json.loads(line) for line in path.read_text().splitlines()], seen, anchor


def test_points_stand_evenly_over_the_steps_with_both_ends(tmp_path):
    lines, _, _ = traced(tmp_path / "trace.jsonl", [])
    assert [line["step"] for line in lines] == [0, 3, 7, 10]
    assert Trace(tmp_path, steps=625, points=64).recorded()[:3] == [0, 10, 20]
    assert len(Trace(tmp_path, steps=625, points=64).recorded()) == 64
    assert len(Trace(tmp_path, steps=20, points=64).recorded()) == 21, "no step twice"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_point_says_what_a_dense_reader_would(tmp_path, dtype):
    constraints = [RoutingOverlap(0.5), ProjectGradient("A"), ProjectDisplacement("A")]
    lines, seen, _ = traced(tmp_path / "trace.jsonl", constraints, dtype=dtype)
    for line in lines[1:]:
        expected = seen[line["step"] - 1]
        assert line["rho"] == pytest.approx(expected["rho"], rel=1e-9)
        assert line["grad_norms"]["task"] == pytest.approx(expected["grad"], rel=1e-6)
        assert line["grad_norms"]["penalties"] == pytest.approx(expected["penalty"], rel=1e-6)
        assert line["penalties"]["overlap"] > 0


def test_violation_is_large_before_projection_and_rounding_after_it(tmp_path):
    lines, _, anchor = traced(tmp_path / "trace.jsonl", [ProjectDisplacement("A")])
    for line in lines[1:]:
        assert line["wrp_before"] > 1e-3
        assert line["wrp_after"] < 4 * torch.finfo(torch.float32).eps * sum(norm(s.factor("A")) for s in anchor.layers)
    assert norm(displacement(anchor.layers[0])) > 1e-2


def test_without_projection_both_violations_are_the_same_number(tmp_path):
    lines, seen, _ = traced(tmp_path / "trace.jsonl", [])
    for line in lines[1:]:
        assert line["wrp_before"] == line["wrp_after"] == pytest.approx(seen[line["step"] - 1]["wrp_after"], rel=1e-5)


def test_ratios_of_step_zero_are_null(tmp_path):
    lines, _, _ = traced(tmp_path / "trace.jsonl", [])
    assert (lines[0]["rho"], lines[0]["chance"], lines[0]["wrp_before"]) == (None, None, None)


def test_a_trace_constrains_nothing(tmp_path):
    ends = []
    for extra in ([], [Trace(tmp_path / "t.jsonl", steps=10, points=11)]):
        anchor = anchor_of()
        optimizer = optimizer_for(anchor, "adamw")
        with protect(optimizer, anchor, [ProjectGradient("A"), *extra]):
            for _ in range(10):
                task_loss(anchor).backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append([layer.factor("A").detach().clone() for layer in anchor.layers])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_layers_are_written_on_request(tmp_path):
    anchor = anchor_of()
    with protect(optimizer_for(anchor, "sgd"), anchor, [Trace(tmp_path / "t.jsonl", steps=1, points=2, per_layer=True)]):
        pass
    assert set(json.loads((tmp_path / "t.jsonl").read_text())["layers"]) == {"layer0", "layer1"}


def test_where_the_check_refuses_nothing_is_written(tmp_path):
    def refuse():
        raise PermissionError

    anchor, path = anchor_of(), tmp_path / "t.jsonl"
    optimizer = optimizer_for(anchor, "sgd")
    with pytest.raises(PermissionError), protect(optimizer, anchor, [Trace(path, steps=1, points=2, check=refuse)]):
        pass
    assert not path.exists()


def test_a_resumed_task_is_recorded_from_its_step_on(tmp_path):
    anchor, path = anchor_of(), tmp_path / "t.jsonl"
    optimizer = optimizer_for(anchor, "adamw")
    with protect(optimizer, anchor, [Trace(path, steps=10, points=6)], step=5):
        for _ in range(5):
            task_loss(anchor).backward()
            optimizer.step()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [6, 8, 10]


def test_a_trace_says_how_far_each_factor_has_moved(tmp_path):
    lines, _, anchor = traced(tmp_path / "trace.jsonl", [])
    assert lines[0]["moves"] == {"A": 0.0, "B": 0.0}
    for name in "AB":
        dense = sum(float(displacement(layer, name).square().sum()) for layer in anchor.layers) ** 0.5
        assert lines[-1]["moves"][name] == pytest.approx(dense, rel=1e-9)
        assert dense > 0


def test_a_factor_that_only_a_penalty_reaches_is_recorded(tmp_path):
    """As of an expert that no token of the step was sent to."""
    anchor = anchor_of(history=True)
    optimizer = optimizer_for(anchor, "sgd")
    with protect(optimizer, anchor, [RoutingOverlap(strength=0.5), Trace(tmp_path / "trace.jsonl", steps=1, points=2)]):
        task_loss(anchor).backward()
        for name in ("A", "B"):
            anchor.layers[0].factor(name).grad = None
        optimizer.step()
    added = norm(anchor.layers[0].factor("A").grad)
    line = json.loads((tmp_path / "trace.jsonl").read_text().splitlines()[-1])
    assert line["grad_norms"]["task"] > 0
    assert 0 < added <= line["grad_norms"]["penalties"]
