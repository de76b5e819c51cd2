"""Randomness is named and passed: one independent stream for each purpose of a seed; nothing draws from the global one."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from anchorlora.devices import forked_generators


def number(seed: int, purpose: str) -> int:
    """A 63-bit number for one purpose, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:8], "big") >> 1


def stream(seed: int, purpose: str) -> torch.Generator:
    """An independent, reproducible CPU generator for one purpose, such as "start/2" or "order/dbpedia/1"."""
    return torch.Generator().manual_seed(number(seed, purpose))


def draws(seed: int, purpose: str) -> random.Random:
    """The same in the standard library's form, for drawing and shuffling without tensors."""
    return random.Random(number(seed, purpose))


@contextmanager
def dropout_from(seed: int, purpose: str) -> Iterator[None]:
    """Dropout can only draw from the global generators: seed them for the block, and put them back afterwards."""
    with forked_generators():
        torch.manual_seed(number(seed, purpose))
        yield
