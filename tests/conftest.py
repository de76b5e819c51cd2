"""Shared fixtures: everything is made on the spot, nothing is downloaded."""

import gc
import os
import random
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

settings.register_profile("long", deadline=None)  # how long an example takes is no law
settings.register_profile("short", deadline=None, max_examples=25)

torch.set_num_threads(1)

FAULTS = Path(__file__).parent / "faults"
FEWEST = 4  # cases of one test of faults in the short suite
DRAWING = {"reports", "test_hostile_text.py", "test_cli.py", "test_docstrings.py"}  # tests of figures, or of what draws them


def pytest_configure(config):
    settings.load_profile("short" if "not slow" in config.option.markexpr else "long")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The short suite draws from long lists of cases, by the name of the test; the long form takes all.

    Of a test that is marked `drawn(n)`, n cases; of the others in tests/faults, a sixth, at least four.
    """
    cases = defaultdict(list)
    for item in items:
        asked = item.get_closest_marker("drawn")
        if hasattr(item, "callspec") and (asked or FAULTS in item.path.parents) and not item.get_closest_marker("slow"):
            cases[item.path, item.originalname].append(item)
    for (path, name), listed in cases.items():
        asked = listed[0].get_closest_marker("drawn")
        count = asked.args[0] if asked else max(FEWEST, len(listed) // 6)
        taken = random.Random(f"{path.name}::{name}").sample(listed, min(len(listed), count))
        for item in listed:
            if item not in taken:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Keep collections of garbage, of which every Trainer asks for one, from looking through all that is imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _unsynced():
    """No test cuts the power, and a small run would mostly wait for the disk."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def few_figures(request, monkeypatch):
    """Reports draw SVG alone, which the page shows, and tests marked `vector` see the other forms; most tests look at no figure."""
    if not request.node.get_closest_marker("vector"):
        monkeypatch.setattr("anchorlora_lab.report.page.FILES", ())
        if not DRAWING & {*request.path.parts}:
            monkeypatch.setattr("anchorlora_lab.report.page.all_pictures", lambda *args, **kwargs: {})


@pytest.fixture
def without_pictures(monkeypatch):
    """Pages of words and tables, for tests that look at these."""
    monkeypatch.setattr("anchorlora_lab.report.page.all_pictures", lambda *args, **kwargs: {})


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20260101)


@pytest.fixture
def draw():
    """A generator of its own for each test."""
    return torch.Generator().manual_seed(7)


@pytest.fixture(scope="session")
def extra_eval():
    """Skip the test where lm_eval is not installed, or is older than the extra `eval` asks for."""
    pytest.importorskip("lm_eval", minversion="0.4.12")


@pytest.fixture(scope="session")
def extra_metrics():
    """Skip the test where a library of the extra `metrics` is not installed."""
    for name in ("rapidfuzz", "rouge_score", "sacrebleu"):
        pytest.importorskip(name, reason=f"{name}, of the extra metrics, is not installed")


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
