"""Small adapted layers without a language model: two linear layers with LoRA factors, a core each, and a loss to train on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from anchorlora import AdaptedLayer, Anchor, Subspace
from anchorlora.geometry import Factors

# every stock optimizer that steps without a closure, with settings that move the factors well above rounding
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 5e-3}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.0}),
    "adamw-decay": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2}),
    "adadelta": (torch.optim.Adadelta, {"lr": 5.0}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "asgd": (torch.optim.ASGD, {"lr": 5e-3, "lambd": 0.0}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "muon": (getattr(torch.optim, "Muon", None), {"lr": 1e-2}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-1}),
}
# with a fixed core these combine feasible gradients with one scale for all coordinates, so projecting gradients is enough
SCALE_ALL_COORDINATES_ALIKE = {"sgd", "sgd-momentum", "asgd"}


def anchor_of(*, fresh=False, dtype=torch.float32, history=False, wide=None, sizes=((24, 16), (20, 28)), r=4, k=5, seed=0):
    """Sites of layers (d_in, d_out) at a learned anchor, or with a fresh zero-output block; their own generator."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    layers = []
    for number, (d_in, d_out) in enumerate(sizes):
        A = nn.Parameter((normal(r, d_in) / d_in**0.5).to(dtype))
        B = nn.Parameter((torch.zeros(d_out, r, dtype=torch.float64) if fresh else normal(d_out, r) / r**0.5).to(dtype))
        stored = torch.float64 if dtype == torch.float64 else torch.float32
        core = Subspace(torch.linalg.qr(normal(d_in, k)).Q.to(stored))
        broad = Subspace(torch.linalg.qr(normal(d_in, wide)).Q.to(stored)) if wide else None
        frozen = Factors(normal(2 * r, d_in).to(dtype), normal(d_out, 2 * r).to(dtype), 4.0) if history else None
        current = Factors(A, B, 4.0)
        layers.append(AdaptedLayer(f"layer{number}", current, current.copy(), frozen, core, broad))
    return Anchor(tuple(layers))


def anchored(anchor):
    """The same sites with their present values as anchor."""
    return Anchor(tuple(replace(layer, start=layer.current.copy()) for layer in anchor.layers))


def parameters(anchor):
    return [layer.factor(name) for layer in anchor.layers for name in ("A", "B")]


def optimizer_for(anchor, name):
    make, settings = OPTIMIZERS[name]
    if make is None:
        pytest.skip(f"this torch has no {name}; 2.9 has")
    return make(parameters(anchor), **settings)


def task_loss(anchor, seed=1):
    """Regression of each layer's update onto a random target, with coordinates of very unlike scale, as real features have."""
    draw = torch.Generator().manual_seed(seed)
    total = 0.0
    for layer in anchor.layers:
        A, B = layer.factor("A"), layer.factor("B")
        x = torch.randn(64, A.shape[1], generator=draw) * torch.logspace(-0.7, 0.3, A.shape[1])
        target = torch.randn(64, B.shape[0], generator=draw)
        total = total + ((x.to(A) @ A.T @ B.T) * layer.current.scale - target.to(A)).square().mean()
    return total


def train(anchor, optimizer, steps, seed=1):
    losses = []
    for _ in range(steps):
        loss = task_loss(anchor, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def displacement(layer, name="A"):
    return layer.factor(name).detach().double() - layer.start_factor(name).double()


def on_core(layer, rows):
    """|rows V|, dense."""
    return float((rows.double() @ layer.core.basis.double()).norm())


def norm(x):
    """Frobenius norm as a number."""
    return float(x.detach().double().norm())
