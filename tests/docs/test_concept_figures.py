"""The pictures of docs/rule.md show what the text beside them says; that of docs/results.md shows what was measured."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import results_keeping
from anchorlora.measurement.drift import rounding

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs/figures"


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(ROOT / "tools/concept_figures.py"))


@pytest.fixture(scope="module")
def drawn(tool):
    return tool["curves"]()


def test_a_projected_gradient_leaks_under_adamw_and_a_projected_displacement_does_not(drawn):
    leak, _, chance = drawn
    turned, plain, moved = ([rho for rho, _ in each] for each in leak.values())
    assert min(turned) > 0.1 * chance
    assert max(plain) < 1e-4 * min(turned)
    assert max(moved) < 1e-4 * min(turned)


def test_only_a_learned_anchor_with_a_free_b_shows_the_delta_b_term(drawn):
    free, fresh, frozen = ([term for _, term in each] for each in drawn[1].values())
    assert min(free) > 0.5, "most of the change, as the page says"
    assert max(fresh) < 10 * rounding(torch.float32)
    assert set(frozen) == {0.0}


@pytest.mark.parametrize("name", ["rule-leak", "rule-start"])
def test_the_committed_pictures_are_white_cards_with_the_words_of_the_tool(name, tool, drawn, monkeypatch):
    monkeypatch.setitem(tool["figures"].__globals__, "curves", lambda: drawn)
    words = {text.get_text() for text in tool["figures"]()[name].axes[0].texts}
    committed = (FIGURES / f"{name}.svg").read_text()
    assert {word for word in words if f">{word}<" not in committed} == set(), "python tools/concept_figures.py"
    first = re.search(r'<g id="patch_1">\s*<path [^>]*style="([^"]*)"', committed)[1]
    assert "fill: #ffffff" in first, "a page may be dark around it"


def test_the_picture_of_ways_to_keep_has_the_accuracies_of_the_results():
    axes = results_keeping.picture(results_keeping.read("keeping-linear")).axes[0]
    words = {text.get_text() for text in (*axes.texts, *axes.get_yticklabels())}
    committed = (FIGURES / "keeping-linear.svg").read_text()
    assert {word for word in words if f">{word}<" not in committed} == set(), "make docs draws it anew"
