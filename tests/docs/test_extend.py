"""The sections of docs/extend.md after methods: their Python runs in an empty folder and prints what the page shows."""

import re
from pathlib import Path

import pytest

import forked
from anchorlora.adapters import kinds
from anchorlora.models import families

PAGE = (Path(__file__).parents[2] / "docs/extend.md").read_text()
SECTIONS = {name: text for name, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.S | re.M)}
SEAMS = ("A task source", "A metric", "A layer kind", "A model family", "An engine")


@pytest.mark.parametrize("name", SEAMS)
def test_the_example_runs_as_the_page_shows(name, tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```(python|text)\n(.*?)```", SECTIONS[name], flags=re.S)
    code = "".join(text for language, text in blocks if language == "python")
    shown = "".join(text for language, text in blocks if language == "text")
    monkeypatch.chdir(tmp_path)
    for its, listed in ((kinds, "LAYER_KINDS"), (families, "MODEL_FAMILIES")):  # two of the examples add to them
        monkeypatch.setattr(its, listed, list(getattr(its, listed)))
    monkeypatch.setattr("anchorlora.adapters.LAYER_KINDS", kinds.LAYER_KINDS)
    monkeypatch.setattr("subprocess.run", forked.run)
    exec(compile(code, name, "exec"), {})
    assert capsys.readouterr().out == shown


def test_every_seam_has_its_section():
    assert tuple(SECTIONS) == ("Your own method", *SEAMS)
