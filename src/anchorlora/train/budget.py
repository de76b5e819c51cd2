"""The keep budget: the largest scale of what was learned at which the loss of kept text rises by no more than it may.

    W + c dW, c = 1, 0.95, .. 0     the first c at which, for everything that is kept, the upper 95 % bound of the mean rise over
                                    every second held-out row is within the budget; the other rows then say how it went

The factors are scaled when the last step is done, before anything is made of them, so cores, scores and the adapter are of what
is kept.  skill/budget.json has every scale that was tried.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from statistics import mean
from typing import Any

import torch

from anchorlora.adapters import Anchor
from anchorlora.continual.callback import RunCallback
from anchorlora.continual.data import longest_first
from anchorlora.continual.evaluate import Scorer
from anchorlora.data import LOSS, TOKEN_ACCURACY, Encoder
from anchorlora.errors import InvalidValue
from anchorlora.geometry import Factors, scaled_change
from anchorlora.models.load import ends_of
from anchorlora.models.packing import unpackable
from anchorlora.scores import Paired
from anchorlora.store.files import write_text
from anchorlora.train.folder import BUDGET, facts_in, probes_in, scores_in
from anchorlora.train.judge import by_row, rows_of
from anchorlora.train.stages import Teaching

STEPS = 20  # scales are tried from 1 down, by 1 / STEPS
FEWEST = 12  # held-out rows, half of which choose: fewer than six have no interval
BATCH = 16  # examples of a forward pass, or as many tokens


def refuse_few(held_out: Mapping[str, int]) -> None:
    """Refuse a budget that too few held-out rows would decide on."""
    for name, rows in held_out.items():
        if rows < FEWEST:
            raise InvalidValue(
                f"--budget needs {FEWEST} held-out rows of everything that is kept, and {name} has {rows}; "
                "keep more text of it, or leave --budget out"
            )


class WithinBudget(RunCallback):
    """Scale what one skill has learned until what is kept is within the budget, which too few held-out rows cannot decide on."""

    def __init__(self, teaching: Teaching) -> None:
        self.teaching, self.request, self.folder = teaching, teaching.request, teaching.folder
        scores = scores_in(self.folder, "before")  # a chat is one row, since its turns are alike, and so is a prompt
        refuse_few({part["name"]: len({*rows_of(scores.get(part["name"], ()))}) for part in facts_in(self.folder)["kept"]})

    def on_steps_end(self, number: int, anchor: Anchor) -> None:
        """Find the scale, and leave the factors at it."""
        assert self.request.budget is not None
        self.teaching.say(f"looking for the scale at which the loss of what is kept rises by {self.request.budget:g} at most")
        model: Any = anchor.model
        training = model.training
        tokenizer = self.teaching.session.tokenizer
        recipe = self.request.asked
        encoder, limit = Encoder(tokenizer, max_tokens=recipe.training.max_tokens, ends=ends_of(model)), recipe.tasks.test_limit
        names = [part["name"] for part in facts_in(self.folder)["kept"]]
        tests = {name: probes_in(self.folder / "before", name).encoded(name, "test", encoder, limit=limit) for name in names}
        scores = scores_in(self.folder, "before")
        rows = {name: rows_of(scores[name]) for name in names}
        before = {name: [row["metrics"][LOSS] for row in scores[name]] for name in names}
        tests[self.request.name] = self.teaching.files.encoded(self.request.name, "test", encoder, limit=limit)
        trained = {layer.name: layer.current.copy() for layer in anchor.layers}
        packed = {name: unpackable(model, longest_first(examples)) is None for name, examples in tests.items()}

        def losses(name: str) -> list[dict[str, float]]:
            scorer = Scorer(model, tokenizer, 1, BATCH, self.teaching.session.loaded.device, packed=packed[name])
            return scorer.losses(tests[name])

        learned = {1.0: losses(self.request.name)}
        curve: list[dict[str, Any]] = []
        for step in range(STEPS, -1, -1):
            scale = step / STEPS
            self.teaching.tell("looking for the scale", STEPS - step, STEPS + 1)
            leave_at(anchor, trained, scale)
            now = {name: [row[LOSS] for row in losses(name)] for name in names}
            curve.append({"scale": scale, "kept": {name: rise(before[name], now[name], rows[name], half=0) for name in names}})
            if all(loss["most"] <= self.request.budget for loss in curve[-1]["kept"].values()):
                break
        self.teaching.tell("looking for the scale", STEPS + 1, STEPS + 1)
        learned[scale] = losses(self.request.name) if scale != 1 else learned[1.0]
        model.train(training)
        budget = {
            "allowed": self.request.budget,
            "scale": scale,
            "kept": {name: rise(before[name], now[name], rows[name], half=1) for name in names},
            "skill": {
                way: {key: mean(row[key] for row in rows) for key in (LOSS, TOKEN_ACCURACY)}
                for way, rows in (("trained", learned[1.0]), ("scaled", learned[scale]))
            },
            "tried": curve,
        }
        write_text(self.folder / BUDGET, json.dumps(budget, indent=1) + "\n")


def leave_at(anchor: Anchor, trained: Mapping[str, Factors], scale: float) -> None:
    """Set the factors to the start of the task plus `scale` times what was learned."""
    for layer in anchor.layers:
        then = trained[layer.name]
        start = layer.start if bool(layer.start.B.any()) else None
        factors = scaled_change(then, start, scale) if scale != 1 else then
        with torch.no_grad():
            layer.factor("A").copy_(factors.A)
            layer.factor("B").copy_(factors.B)


def rise(before: Sequence[float], after: Sequence[float], rows: Sequence[Hashable], *, half: int) -> dict[str, float]:
    """Return the mean rise of a loss over every second row, and its upper 95 % bound; no chat both chooses the scale and judges."""
    some = {*[*dict.fromkeys(rows)][half::2]}
    chosen = [i for i, row in enumerate(rows) if row in some]
    pairs = Paired(*(by_row([side[i] for i in chosen], [rows[i] for i in chosen]) for side in (before, after)))
    return {"n": pairs.n, "mean": mean(pairs.changes), "most": pairs.t_interval(level=0.9)[1]}
