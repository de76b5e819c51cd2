"""Selection of one number of a method among declared candidates, on a holdout of the training data   (paper, appendix B.2).

The best mean accuracy over the tasks at the end wins (AA on the holdout); within 0.1 percentage points of it, the smallest value.
The manifest is written before any test file is opened: candidate runs work on a view of the data that cannot open one.

Each tunable method has four candidates, declared before any run. Where a penalty's strength means something only beside the size of
gradients, another base model has them times a power of ten, measured before any candidate runs: after the first task (plain LoRA,
training data without the holdout), on the examples of the first ten optimizer steps of the second, without dropout:

    example_gradient   g = rms over examples and factor entries of d l_n / d theta
    step_gradient      rms over B's entries of the mean gradient of a step, over ten steps
    sparsity_gradient  rms over B's entries of d |s B A|_1 / d B

    EWC balances the task loss where lambda g^2 d = g, with displacements d in proportion to the learning rate:  1 / (g lr)
    N-LoRA where lambda times the penalty's gradient equals the step's:  step_gradient / sparsity_gradient
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from anchorlora.adapters import Anchor
from anchorlora.config import Recipe, RunConfig
from anchorlora.constraints import EffectiveSparsity, protect
from anchorlora.continual.sequence import TaskSequence
from anchorlora.devices import in_float64
from anchorlora.errors import InvalidValue
from anchorlora.methods import METHODS
from anchorlora.methods.entry import Scaled, Tunable
from anchorlora.store.files import write_text
from anchorlora.store.json import read_file
from anchorlora.store.record import Record
from anchorlora.store.run_folder import RunFolder
from anchorlora.store.selection import Candidate, Selection
from anchorlora_lab.grid.scheduler import Planned

TIE = 0.1  # percentage points
ROUNDING = 1e-9


def candidate_runs(
    recipe: Recipe, method: str, tunable: Tunable, values: Sequence[float], order: Sequence[str], seed: int, out: Path
) -> list[Planned]:
    """Return one run per candidate, tested on the holdout of the training data."""
    held_out = recipe.changed({"tested_on": "holdout"})
    shared: dict[str, Any] = {"method": method, "order": tuple(order), "seed": seed, "recipe": held_out}
    return [Planned(out / f"{value:g}", RunConfig(settings={tunable.parameter: value}, **shared)) for value in values]


def choose(
    planned: Sequence[Planned], tunable: Tunable, declared: Sequence[float], scale: dict[str, float] | None, errors: dict[Path, str]
) -> Selection:
    """Choose a candidate: the best mean accuracy, and within 0.1 percentage points of it the smallest value."""
    records: dict[float, Record] = {}
    candidates = []
    for run in planned:
        value = run.config.settings[tunable.parameter]
        if run.done:
            record = records[value] = RunFolder(run.folder).read_record()
            candidates.append(Candidate(value=value, AA=record.scores.AA, accuracy=record.accuracy[-1]))
        else:
            candidates.append(Candidate(value=value, AA=None, accuracy=None, error=errors.get(run.folder, "not run")))
    if not records:
        raise InvalidValue(f"no candidate finished; the first one: {candidates[0].error}")
    best = max(record.scores.AA for record in records.values())
    selected = min(value for value, record in records.items() if best - TIE <= record.scores.AA + ROUNDING)
    record = records[selected]
    protocol = {name: value for name, value in record.protocol.items() if name not in ("tuned", "selection", "holdout_sha256")}
    return Selection(
        method=record.method.name,
        parameter=tunable.parameter,
        declared=list(declared),
        scale=scale,
        candidates=candidates,
        selected=selected,
        recipe=record.recipe,
        base_model=record.base_model.model_dump(),
        order=record.order,
        seed=record.seed,
        protocol=protocol,
        holdout_sha256=record.protocol["holdout_sha256"],
        data={path: file.model_dump() for path, file in record.data.items()},
    )


REFERENCE = {  # the gradients and the learning rate for which the strengths were declared (an 8B base model)
    "example_gradient": 5.5e-4,  # root mean square of a factor entry's gradient, one example
    "step_gradient": 3.6e-4,  # the same of B, mean over the examples of an optimizer step
    "sparsity_gradient": 42.0,  # the same of the sparsity penalty at strength 1
    "learning_rate": 1e-4,
}
TUNABLE = {name: method.entry.tunable for name, method in METHODS.items() if method.entry.tunable}
STEPS = 10


def factor(scaled: Scaled, gradients: dict[str, float], *, learning_rate: float) -> float:
    """Return the power of ten by which declared strengths are multiplied."""
    if learning_rate == 0:
        raise InvalidValue("learning_rate is 0, which trains nothing, so no strength can be chosen; set a learning rate")
    if scaled == "fisher":
        raw = REFERENCE["example_gradient"] * REFERENCE["learning_rate"] / (gradients["example_gradient"] * learning_rate)
    else:
        here, there = (of["step_gradient"] / of["sparsity_gradient"] for of in (gradients, REFERENCE))
        raw = here / there
    return 10.0 ** round(math.log10(raw))


def scale_of(recipe: Recipe, tunable: Tunable, tasks: Sequence[str], seed: int, out: Path) -> dict[str, float] | None:
    """Return the measured gradients and their factor, kept beside the candidates; None if candidates are used as declared."""
    if tunable.scaled == "as declared":
        return None
    if len(tasks) < 2:
        raise InvalidValue(f"{tunable.parameter} is scaled by gradients of a second task; give --order two, or --values")
    kept = out / "scale.json"
    if not kept.exists():
        from anchorlora.runs.run import load_inputs  # with all that a run needs

        logging.disable_progress_bar()  # while weights load
        plain = METHODS.baseline("shared")
        config = RunConfig(method=plain.name, order=tuple(tasks[:2]), seed=seed, recipe=recipe.changed({"tested_on": "holdout"}))
        gradients = measure_gradients(TaskSequence(load_inputs(config), plain))
        scale = gradients | {"factor": factor(tunable.scaled, gradients, learning_rate=recipe.training.learning_rate)}
        out.mkdir(parents=True, exist_ok=True)
        write_text(kept, json.dumps(scale) + "\n")
    return read_file(kept, dict[str, float], remedy="delete it; it is measured again")


def measure_gradients(sequence: TaskSequence) -> dict[str, float]:
    """Measure the three gradients that strengths are scaled by."""
    next(iter(sequence.run()))
    anchor, examples = sequence.blocks.anchor(), len(sequence.data.train[sequence.order[1]])
    window = min(sequence.recipe.training.window, examples)  # a step on fewer examples is one on all of them
    factors = [layer.factor(name) for layer in anchor.layers for name in ("A", "B")]
    losses = sequence.inputs.losses(sequence.order[1])(window * STEPS)
    squares, steps, sums = 0.0, 0.0, [torch.zeros_like(p) for p in factors]
    count = min(window * STEPS, examples)
    for number, loss in enumerate(islice(losses, count), 1):
        gradients = torch.autograd.grad(loss, factors)
        squares += _mean_square(gradients)
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient / window
        if number % window == 0:
            steps += _mean_square(sums[1::2])
            sums = [torch.zeros_like(p) for p in factors]
    return {
        "example_gradient": math.sqrt(squares / count),
        "step_gradient": math.sqrt(steps / (count // window)),
        "sparsity_gradient": _sparsity(anchor, factors),
    }


def _sparsity(anchor: Anchor, parameters: Sequence[torch.Tensor]) -> float:
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    with protect(optimizer, anchor, [EffectiveSparsity(1.0)]):
        optimizer.step()
    gradients = [layer.factor("B").grad for layer in anchor.layers]
    optimizer.zero_grad()
    return math.sqrt(_mean_square([g for g in gradients if g is not None]))


def _mean_square(parts: Sequence[torch.Tensor]) -> float:
    """Mean over all entries of all parts."""
    return sum(float(in_float64(p).square().sum()) for p in parts) / sum(p.numel() for p in parts)
