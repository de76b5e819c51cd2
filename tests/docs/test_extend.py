"""The pages of docs/extend, from beginning to end: their Python runs in an empty folder and prints what the page shows."""

import re
from pathlib import Path

import pytest

from anchorlora.adapters import kinds
from anchorlora.models import families

PAGES = sorted((Path(__file__).parents[2] / "docs/extend").glob("*.md"))
SEAMS = {"task-source", "metric", "layer-kind", "model-family", "engine"}


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_example_runs_as_the_page_shows(page, tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```(python|text)\n(.*?)```", page.read_text(), flags=re.S)
    code = "".join(text for language, text in blocks if language == "python")
    shown = "".join(text for language, text in blocks if language == "text")
    monkeypatch.chdir(tmp_path)
    for its, listed in ((kinds, "LAYER_KINDS"), (families, "MODEL_FAMILIES")):  # two of the examples add to them
        monkeypatch.setattr(its, listed, list(getattr(its, listed)))
    monkeypatch.setattr("anchorlora.adapters.LAYER_KINDS", kinds.LAYER_KINDS)
    exec(compile(code, page.name, "exec"), {})
    assert capsys.readouterr().out == shown


def test_every_seam_has_its_page():
    assert {page.stem for page in PAGES} == SEAMS
