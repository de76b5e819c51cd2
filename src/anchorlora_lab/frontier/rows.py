"""The rows of the frontier, as data: a method of the catalog with what is added to it, and the curve that it is measured on.

A row is trained once at each rate. Each epoch's end is a point of its curve, and so is each scale of the last epoch's update.
Named, not run here: mini_trainer's OSFT (a CUDA build of its own), and DG-Hard (it removes noise of the size of the median
singular value, 0 for an update of LoRA).
"""

from __future__ import annotations

from dataclasses import dataclass

PLAIN = "seq-lora"  # the catalog's name of plain LoRA
OSF = "osf"  # PEFT's, which trains full weights
SDFT = "sdft"  # TRL's self-distillation: what the model writes itself, as it would write it with the example before it
RATES = (1e-4, 2e-4, 5e-4, 1e-3)


@dataclass(frozen=True)
class Row:
    """One row of the table: what is trained, with what beside it, and at which settings."""

    name: str  # its name in tables
    method: str = PLAIN  # a method of the catalog, whose constraints hold while the block trains, "osf", or "sdft"
    rates: tuple[float, ...] = (2e-4, 5e-4)  # each a run
    scales: tuple[float, ...] = (0.7,)  # of the last epoch's update; 1 is tested after every epoch
    tier: int = 2  # a lower tier runs first
    qv: bool = False  # adapt q_proj and v_proj alone
    own: float = 0.0  # share of the model's own chats in the mix
    human: float = 0.0  # share of chats that people wrote, the old data
    old: bool = False  # protect what these old chats show, in the place of the model's own
    kl: float = 0.0  # weight of the KL divergence to the model before, on its own chats
    token_weights: str | None = None  # the recipe's setting of this name
    weight_decay: float = 0.0  # AdamW's
    repair: bool = False  # test only what PEFT's reduce_intruder_dimension makes of the last epoch

    @property
    def data(self) -> str:
        """Data that the row needs beside the new skill: "none", "own text" or "old data"."""
        from anchorlora.methods import METHODS

        if self.human or self.old:
            return "old data"
        asks = self.method in METHODS and (METHODS[self.method].reads_past or "core" in METHODS[self.method].requires)
        return "own text" if self.own or self.kl or asks else "none"


ROWS = (
    Row("plain", rates=RATES, scales=(0.85, 0.7, 0.5, 0.3), tier=1),
    Row("fold-16", "fold-16", tier=1),
    Row("own-10", own=0.10, scales=(0.7, 0.5), tier=1),
    Row("brake", "brake", tier=1),
    Row("sensitive-core", "sensitive-core", rates=(5e-4, 1e-3), tier=1),
    Row("own-25", own=0.25, scales=(0.7, 0.5)),
    Row("fold-16 own-10", "fold-16", own=0.10),
    Row("brake own-10", "brake", own=0.10),
    Row("sensitive-core own-10", "sensitive-core", rates=(5e-4, 1e-3), own=0.10),
    Row("kl-own", kl=1.0),
    Row("human-25", human=0.25),
    Row("human-5", human=0.05),
    Row("hard-core", "inc-lora-hard", rates=(5e-4, 1e-3)),
    Row("plain repaired", rates=(5e-4,), scales=(), repair=True),
    Row("osf", OSF, rates=(1e-4, 5e-4), scales=()),
    Row("sdft", SDFT, rates=(2e-5, 5e-4)),  # the rate of TRL's page and of the authors' code, and that of the other rows
    Row("eaft", token_weights="eaft"),
    Row("dft", token_weights="dft"),
    Row("hard-core own-10", "inc-lora-hard", rates=(5e-4, 1e-3), own=0.10, tier=3),
    Row("fold-16 old", "fold-16", old=True, tier=3),
    Row("brake old", "brake", old=True, tier=3),
    Row("sensitive-core old", "sensitive-core", rates=(5e-4, 1e-3), old=True, tier=3),
    Row("hard-core old", "inc-lora-hard", rates=(5e-4, 1e-3), old=True, tier=3),
    Row("plain q,v", rates=(5e-4, 1e-3, 2e-3), qv=True, tier=3),
    Row("fold-16 q,v", "fold-16", rates=(5e-4, 1e-3), qv=True, tier=3),
    Row("brake q,v", "brake", rates=(5e-4, 1e-3), qv=True, tier=3),
    Row("sensitive-core q,v", "sensitive-core", rates=(1e-3, 2e-3), qv=True, tier=3),
    Row("oplora", "oplora", tier=3),
    Row("weight-decay", weight_decay=10.0, tier=3),
)
