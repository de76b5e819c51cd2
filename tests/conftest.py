"""Shared fixtures: everything is made on the spot, nothing is downloaded."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20260101)


@pytest.fixture
def draw():
    """A generator of its own for each test."""
    return torch.Generator().manual_seed(7)


@pytest.fixture(scope="session")
def small_benchmark(tmp_path_factory):
    import small

    return small.write_benchmark(tmp_path_factory.mktemp("benchmark") / "data")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory, small_benchmark):
    import small

    return small.write_model(tmp_path_factory.mktemp("model") / "tiny", small_benchmark)


@pytest.fixture
def small_recipe(small_benchmark, small_model):
    import small

    return small.recipe(small_benchmark, small_model)
