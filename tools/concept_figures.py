"""Draw the two pictures of docs/rule.md from one small layer: docs/figures/rule-leak.svg and docs/figures/rule-start.svg.

Everything is drawn from one fixed seed and measured with the library; `make docs` runs this, and a test says what they must show.

    learned anchor   A_0, B_0 after 40 steps on an old task, whose inputs span V
    fresh block      B_0 = 0, and A_0 V = 0 after `Retract`
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from anchorlora import Anchor, Freeze, ProjectDisplacement, ProjectGradient, Retract, Subspace, measure
from anchorlora.constraints import Constraint
from anchorlora.constraints.protect import enforcing
from anchorlora_lab.report.figures.style import COLORS, REFERENCE, SMALLEST, as_bytes, logarithmic

FIGURES = Path(__file__).parents[1] / "docs/figures"
STEPS = 60  # optimizer steps of the new task
WIDTH, RANK, K = 64, 8, 12  # of the layer: inputs and outputs, rank of the adapter, protected directions
RATE = 3e-3
Curve = list[tuple[float, float]]  # of each step: rho, and |s dB A_0 V| / |dW|


class OneLayer(nn.Module):
    """A model that is one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def directions(seed: int) -> Tensor:
    """Orthonormal directions that the inputs of a task span.  (WIDTH, K)"""
    return torch.linalg.qr(torch.randn(WIDTH, K, generator=torch.Generator().manual_seed(seed))).Q


def batch(seed: int, *, old: bool) -> tuple[Tensor, Tensor]:
    """Inputs and wanted outputs: an old task's lie in V, a new one's have a part there and a part elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, K, generator=generator) @ directions(0).T
    if not old:
        x = x + torch.randn(32, WIDTH, generator=generator)
    wanted = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(10 + old)) / WIDTH**0.5
    return x, x @ wanted.T


def adapted(*, learned: bool) -> nn.Module:
    """The layer with a LoRA adapter: trained on the old task, or fresh beside what was learned (B = 0)."""
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["layer"], init_lora_weights=True)
    model = get_peft_model(OneLayer(), config)
    if learned:
        optimizer = torch.optim.AdamW(trained(model), lr=RATE)
        for step in range(40):
            take_step(model, optimizer, batch(step, old=True))
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor]) -> None:
    x, wanted = data
    (model(x) - wanted).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def curve(constraints: Sequence[Constraint], *, learned: bool, sgd: bool = False) -> tuple[Curve, float]:
    """What every step of the new task leaves on V, and chance at the end."""
    model = adapted(learned=learned)
    optimizer = torch.optim.SGD(trained(model), lr=0.3) if sgd else torch.optim.AdamW(trained(model), lr=RATE)
    anchor = Anchor.of(model, cores={"layer": Subspace(directions(0))})
    found = []
    with enforcing(optimizer, anchor, constraints):  # most leave something open, to show it
        for step in range(STEPS):
            take_step(model, optimizer, batch(1000 + step, old=False))
            (layer,) = anchor.layers
            _, delta_b, _ = layer.current.paths(layer.start)
            drift = measure(anchor)
            found.append((drift.rho, delta_b.on(layer.core).norm().item() / drift.d_eff))
    return found, drift.chance


STEP, MOVE, FROZEN = ProjectGradient("A"), ProjectDisplacement("A"), Freeze("B")


def curves() -> tuple[dict[str, Curve], dict[str, Curve], float]:
    """Label -> curve of the first picture, then of the second, and the chance level of an unprotected change."""
    leak, start = {}, {}
    leak["projected gradient, AdamW"], chance = curve([STEP, FROZEN], learned=True)
    leak["projected gradient, plain SGD"], _ = curve([STEP, FROZEN], learned=True, sgd=True)
    leak["projected displacement, AdamW"], _ = curve([MOVE, FROZEN], learned=True)
    start["learned anchor, B trains"], _ = curve([MOVE], learned=True)
    start["fresh block with A V = 0, B trains"], _ = curve([Retract("A"), MOVE], learned=False)
    start["learned anchor, B frozen: exactly 0"], _ = curve([MOVE, FROZEN], learned=True)
    return leak, start, chance


def picture(lines: dict[str, list[float]], *, title: str, ylabel: str, chance: float | None = None) -> Figure:
    """Curves over the steps of a task, each with its name at its end, on white paper: a page may be dark around it."""
    figure = Figure(figsize=(8.2, 3.4), layout="constrained", facecolor="white")
    at = figure.subplots()
    told = {"textcoords": "offset points", "va": "center", "fontsize": 9}
    for (label, values), color, style in zip(lines.items(), (COLORS[2], COLORS[1], COLORS[3]), ("-", "--", "-."), strict=True):
        drawn = [max(value, SMALLEST) for value in values]
        at.plot(range(1, len(drawn) + 1), drawn, color=color, linestyle=style, linewidth=2)
        at.annotate(label, (len(drawn), drawn[-1]), xytext=(6, 0), color=color, **told)
    if chance is not None:
        at.plot((0, STEPS), (chance, chance), linestyle=":", color=REFERENCE)
        at.annotate("unaligned change", (STEPS, chance), xytext=(6, 3), color=REFERENCE, **told)
    at.set_ylim(SMALLEST / 3, 5)
    logarithmic(at)
    at.set(xlim=(0, STEPS * 1.55), xticks=range(0, STEPS + 1, 20), ylabel=ylabel, xlabel="optimizer steps of the new task")
    at.set_title(title, fontsize="medium", loc="left")
    at.grid(alpha=0.25)
    at.spines[["top", "right"]].set_visible(False)
    return figure


def figures() -> dict[str, Figure]:
    """File name -> picture."""
    leak, start, chance = curves()
    return {
        "rule-leak": picture(
            {label: [rho for rho, _ in each] for label, each in leak.items()},
            title="The same projected gradient: SGD keeps it, AdamW turns it (B is frozen)",
            ylabel="ρ = ‖ΔW V‖ / ‖ΔW‖",
            chance=chance,
        ),
        "rule-start": picture(
            {label: [term for _, term in each] for label, each in start.items()},
            title="A's displacement is projected: what a change of B adds on V",
            ylabel="‖s ΔB A₀ V‖ / ‖ΔW‖",
        ),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, figure in figures().items():
        (FIGURES / f"{name}.svg").write_bytes(as_bytes(figure, ("svg",))["svg"])
