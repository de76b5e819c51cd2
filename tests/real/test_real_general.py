"""Real MMLU rows and a small real language model: scores equal to those by hand, nothing malformed in the folder."""

import os
from pathlib import Path

import pytest

import mmlu_folder
from anchorlora_lab.suites import mmlu
from anchorlora_lab.suites.measure import Questions, evaluate

SHARED = Path(os.environ.get("ANCHORLORA_SHARED", Path(__file__).parents[3] / "shared"))
MODEL, DATA = SHARED / "backbones/mini-en", SHARED / "data/mmlu"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (MODEL.is_dir() and DATA.is_dir()), reason="no real model and data: set ANCHORLORA_SHARED"),
]


def test_the_folder_is_all_of_mmlu():
    rows = mmlu.read_mmlu(DATA).rows
    assert sum(map(len, rows["test"].values())) == 14042
    assert {len(each) for each in rows["dev"].values()} == {5}


@pytest.mark.slow
def test_scores_on_real_questions_equal_a_computation_by_hand(tmp_path):
    by_hand = mmlu_folder.answers_by_hand(DATA, MODEL, limit=2)
    adapter = mmlu_folder.write_an_adapter(tmp_path / "adapter", MODEL, size=0.0)
    found = evaluate(adapter, Questions(data=DATA, limit=2), cache=tmp_path / "cache")
    assert {name: part.base for name, part in found.tasks[0].parts.items()} == {
        f"mmlu_{subject}": 50 * sum(said == right for said, right in pairs) for subject, pairs in by_hand.items()
    }
    assert found.change == 0
    assert found.n == 114
