"""Skills that the tests here only read, or copy before they write: taught once for all files."""

import pytest

from anchorlora.cli.app import main
from skills import EXACT, FEW, NARROW, rows, written


@pytest.fixture(scope="session", autouse=True)
def _short_texts():
    """Texts of a model's own are of at most 32 tokens."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("anchorlora.train.stages.OWN_TOKENS", 32)
        yield


def _data(folder, count):
    return {name: written(folder / f"{name}.jsonl", rows(name, "train", count)) for name in ("news", "reviews", "questions")}


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return _data(tmp_path_factory.mktemp("data"), 80)


@pytest.fixture(scope="session")
def less_data(tmp_path_factory):
    return _data(tmp_path_factory.mktemp("less-data"), 40)


@pytest.fixture(scope="session")
def taught(data, tmp_path_factory):
    """News, with reviews kept, from nothing but the base model; and the unprotected twin."""
    out = tmp_path_factory.mktemp("taught") / "news"
    words = ["train", "embedded:mini", "--data", data["news"], "--keep", data["reviews"], "--compare", "--out", str(out), *FEW]
    assert main([*words, *EXACT]) == 0
    return out


@pytest.fixture(scope="session")
def finished(less_data, small_model, tmp_path_factory):
    """News, with reviews kept, on a model of random weights."""
    out = tmp_path_factory.mktemp("finished") / "news"
    words = ["--data", less_data["news"], "--keep", less_data["reviews"], "--out", str(out), *FEW, *NARROW]
    assert main(["train", str(small_model), *words]) == 0
    return out
