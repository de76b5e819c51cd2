"""Randomness is named and passed: one independent stream for each purpose of a seed; nothing draws from the global one."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from anchorlora.devices import forked_generators


def number(seed: int, purpose: str) -> int:
    """Return a 63-bit number for one purpose of a seed, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:8], "big") >> 1


def stream(seed: int, purpose: str) -> torch.Generator:
    """Return an independent, reproducible CPU generator for one purpose of a seed."""
    return torch.Generator().manual_seed(number(seed, purpose))


def draws(seed: int, purpose: str) -> random.Random:
    """Return the same in the standard library's form, to draw and shuffle without tensors."""
    return random.Random(number(seed, purpose))


@contextmanager
def dropout_from(seed: int, purpose: str) -> Iterator[None]:
    """Seed the global generators, from which alone dropout can draw, for the block, and restore them after it."""
    with forked_generators():
        torch.manual_seed(number(seed, purpose))
        yield
