"""Expected time of runs: the floating-point operations of their matrix products, at a rate that is stated or measured.

    training     tokens x (4 N + 6 b) + predicted tokens x 4 h, in every epoch: 2 N forward, and 2 N for gradients of activations,
                 since the base model is frozen; adapters have gradients of their own
    evaluation   tokens x (2 N + 2 b) + predicted tokens x 2 h, for a task each time that it is tested

    N  parameters of the layers      h  parameters of the head      b  parameters of one block

Padding, attention scores and what a method adds are not counted, and a product alone runs faster than a model: a small model, or
a small batch on a fast device, takes several times as long.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchorlora.config import Recipe
from anchorlora.data import Encoder, TaskSource, read_examples
from anchorlora.devices import device_name, torch, type_name
from anchorlora.errors import InvalidValue, message_of

if TYPE_CHECKING:
    from anchorlora.runs.sizes import Sizes

SAMPLE = 200  # examples of a part that are tokenized, evenly spaced
LONG_ENOUGH = 0.05  # seconds of a product that says how fast a device is


@dataclass(frozen=True)
class SplitSize:
    """The training or test examples of a task."""

    examples: int
    tokens: float  # mean tokens of prompt and answer
    predicted: float  # mean tokens of the answer


@dataclass(frozen=True)
class Work:
    """Floating-point operations of a run."""

    training: float  # of all tasks and epochs
    evaluation: float  # of all tests after all tasks


def parts_of(recipe: Recipe, source: TaskSource, encoder: Encoder | None, name: str) -> tuple[SplitSize, SplitSize]:
    """Return the amount of a task's training and test examples; without a tokenizer, all are as long as they may be."""
    both, longest = [list(examples) for examples in read_examples(source, recipe.tasks, name)], recipe.training.max_tokens
    if encoder is None:
        return SplitSize(len(both[0]), longest, 1), SplitSize(len(both[1]), longest, 1)
    task, parts = source.task(name), list[SplitSize]()
    for examples in both:
        chosen = examples[:: max(1, len(examples) // SAMPLE)]
        encoded, n = encoder.encode(task, chosen), max(1, len(chosen))
        answers = sum(len(e.answer) for e in encoded) / n
        parts.append(SplitSize(len(examples), sum(len(e.prompt) for e in encoded) / n + answers, answers))
    return parts[0], parts[1]


def work_of(recipe: Recipe, parts: Sequence[tuple[SplitSize, SplitSize]], sizes: Sizes) -> Work:
    """Return the operations of a run."""
    training = evaluation = 0.0
    for number, (train, test) in enumerate(parts):
        a_token, a_predicted = 2 * sizes.multiplied, 2 * sizes.head
        trained = train.tokens * (2 * a_token + 6 * sizes.block) + train.predicted * 2 * a_predicted
        tested = test.tokens * (a_token + 2 * sizes.block) + test.predicted * a_predicted
        training += recipe.training.epochs * train.examples * trained
        evaluation += (len(parts) - number) * test.examples * tested
    return Work(training, evaluation)


def measured_rate(
    device: torch.device, dtype: torch.dtype, product: tuple[int, int], *, rows: int, threads: int | None = None
) -> float:
    """Return the operations per second of a device in one matrix product of a model's; takes less than a second."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        right, taken = torch.ones(product, dtype=dtype, device=device), min(rows, 8)
        while True:
            left = torch.ones(taken, product[0], dtype=dtype, device=device)
            seconds = min(_seconds(left, right) for _ in range(3))
            if taken >= rows or seconds > LONG_ENOUGH:
                return 2 * taken * product[0] * product[1] / seconds
            taken = min(rows, 4 * taken)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        raise InvalidValue(
            f"the device {device} cannot be measured here: {message_of(error)}; state its rate with --flops"
        ) from None
    finally:
        torch.set_num_threads(before)


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    began = time.perf_counter()
    left @ right
    if left.device.type != "cpu":
        torch.accelerator.synchronize(left.device)
    return time.perf_counter() - began


def in_words(works: Sequence[Work], rate: float, how: str, device: torch.device, *, at_a_time: int | None = None) -> list[str]:
    """Return the expected time of runs as lines of text."""
    training, evaluation = sum(w.training for w in works), sum(w.evaluation for w in works)
    seconds = (training + evaluation) / rate
    words = f"about {training:.1e} FLOP of training and {evaluation:.1e} of evaluation; "
    first = words + "padding, attention, and what methods add come on top"
    at = f"at {rate / 1e12:.3g} TFLOP/s ({how})"
    if at_a_time is None:
        return [first, f"at least {_duration(seconds)} {at}"]
    unit, hours = "device-hours" if device.type == "cpu" else "GPU-hours", seconds / 3600
    amount = f"{hours:.1f}" if hours >= 1 else f"{hours:.2g}"
    return [first, f"at least {amount} {unit} {at}, so {_duration(seconds / at_a_time)} with {at_a_time} at a time"]


def measured_in_words(device: torch.device, dtype: torch.dtype) -> str:
    """Return where a measured rate comes from."""
    return f"measured on {device_name(device)} by a product in {type_name(dtype)}; state another with --flops"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
