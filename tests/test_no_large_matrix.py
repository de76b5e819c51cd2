"""Nothing of size d_out x d_in or d_in x d_in is ever allocated by us: every tensor that torch makes is watched."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anchorlora import (
    EffectiveResponse,
    EffectiveSparsity,
    FeatureStore,
    FisherAnchor,
    Freeze,
    KroneckerBrake,
    ProjectDisplacement,
    ProjectGradient,
    ProjectStep,
    Retract,
    RoutingOverlap,
    Subspace,
    Trace,
    measure,
    protect,
)
from anchorlora.geometry import Factors, Spectrum, SpikedCovariance, folded, truncated
from anchorlora.measurement import held_out_drift
from toys import anchor_of, optimizer_for, parameters

D_IN, D_OUT = 1500, 1100  # r = 8, k = 20, 64 wide directions, 512 rows: everything thin is far below D_OUT x D_IN


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.size, self.where = 0, ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.numel() > self.size:
                self.size, self.where = tensor.numel(), f"{function} -> {tuple(tensor.shape)}"
        return result


@pytest.fixture
def anchor():
    return anchor_of(sizes=((D_IN, D_OUT),), r=8, k=20, wide=64, history=True, fresh=True)


def assert_thin(watch):
    assert watch.size < min(D_OUT * D_IN, D_IN * D_IN) / 2, watch.where


def test_the_watch_sees_a_large_matrix():
    with LargestTensor() as watch:
        torch.zeros(D_OUT, 1) @ torch.zeros(1, D_IN)
    assert watch.size == D_OUT * D_IN


def test_constraints_penalties_and_trace_stay_thin(anchor, tmp_path):
    parts = [
        RoutingOverlap(0.5),
        Retract("A"),
        ProjectGradient("A"),
        ProjectDisplacement("A"),
        ProjectStep("A"),
        EffectiveResponse(1.0),
        EffectiveSparsity(1.0),
        FisherAnchor(1.0),
        KroneckerBrake(1.0),
    ]
    parts += [Trace(tmp_path / "t.jsonl", steps=2, points=3)]
    optimizer = optimizer_for(anchor, "adamw")
    seen = replace(anchor, losses=lambda count: (sum(p.square().sum() for p in parameters(anchor)) for _ in range(2)))
    with LargestTensor() as watch:
        past = FisherAnchor(1.0).end_task(seen)
    assert_thin(watch)
    past |= {f"sensitivity/inputs/{layer.name}": torch.eye(D_IN)[:, :64] for layer in anchor.layers}
    past |= {f"sensitivity/outputs/{layer.name}": torch.eye(D_OUT)[:, :32] for layer in anchor.layers}
    past |= {f"{place}/tail": torch.tensor(0.1) for place in list(past) if place.startswith("sensitivity")}
    anchor = replace(anchor, past=past)
    with LargestTensor() as watch, protect(optimizer, anchor, parts):
        for _ in range(2):
            for p in parameters(anchor):
                p.grad = torch.ones_like(p)
            optimizer.step()
    assert_thin(watch)


def test_freezing_stays_thin():
    anchor = anchor_of(sizes=((D_IN, D_OUT),), r=8, k=20, wide=64, history=True)
    with LargestTensor() as watch, protect(optimizer_for(anchor, "adamw"), anchor, [Freeze("B")]):
        pass
    assert_thin(watch)


def test_measuring_stays_thin(anchor):
    with torch.no_grad():
        anchor.layers[0].factor("B").add_(1.0)
    rows = {"layer0": torch.randn(64, D_IN)}
    with LargestTensor() as watch:
        measure(anchor)
        held_out_drift(anchor, rows)
    assert_thin(watch)


def test_reducing_the_rank_stays_thin():
    block = Factors(torch.randn(24, D_IN), torch.randn(D_OUT, 24), 2.0)
    with LargestTensor() as watch:
        truncated(block, 8)
    assert_thin(watch)


def test_folding_stays_thin():
    block, core = Factors(torch.randn(24, D_IN), torch.randn(D_OUT, 24), 2.0), Subspace(torch.linalg.qr(torch.randn(D_IN, 4)).Q)
    metrics = [SpikedCovariance.read(torch.eye(d)[:, :32], torch.tensor(0.1)) for d in (D_IN, D_OUT)]
    with LargestTensor() as watch:
        folded(block, 8, keep=core, inputs=metrics[0], outputs=metrics[1])
    assert_thin(watch)


def test_making_cores_stays_thin():
    store = FeatureStore(stores={"layer": "layer"})
    store.restore_task({"core/layer": torch.randn(512, D_IN)})
    with LargestTensor() as watch:
        store.decompose(energy=0.93, at_least=4, at_most=20, wide=64)
    assert_thin(watch)
    with LargestTensor() as watch:
        Subspace.joining([Spectrum.of(torch.randn(64, D_IN), at_most=20).leading(20) for _ in range(14)])
    assert_thin(watch)
