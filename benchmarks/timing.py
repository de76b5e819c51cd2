"""Side-by-side timing: variants take turns, so that a slow minute of the machine hits them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def seconds(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of one call, on the device too: wall time, or what another clock says."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = clock()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - began


def side_by_side(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each variant in each round; the variants alternate, in turned order every other round."""
    for _ in range(warm):
        for call in variants.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        names = list(variants) if number % 2 else list(variants)[::-1]
        for name in names:
            times[name].append(seconds(variants[name], clock))
    return times


def ratio(times: Mapping[str, list[float]], one: str, other: str) -> float:
    """Median over the rounds of one variant's time over the other's in the same round."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def report(what: str, value: float, aim: str, detail: str = "") -> None:
    print(f"{what:68} {value:8.3f}   aim {aim:8} {detail}", flush=True)
