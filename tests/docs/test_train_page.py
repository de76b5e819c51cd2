"""docs/train.md, from beginning to end: its commands in order, on a tiny model instead of the one it names."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from anchorlora.cli.app import main
from results_keeping import MEASURED, between, mean, read, scores

PAGE = Path(__file__).parents[2] / "docs/train.md"
MODEL = "Qwen/Qwen3-0.6B"
QUICK = ["--self-texts", "10", "--set", "rows=64", "--set", "at_most=8", "--set", "max_new_tokens=2", "--set", "max_tokens=64"]


def test_the_commands_of_the_page_work_in_their_order(small_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(small_model), config).save_pretrained("adapters/old")
    for name in ("new", "old", "third", "fourth"):
        rows = [{"prompt": f"the {name} fruit {i}", "completion": f" is {'very ' * (i % 3)}{name}"} for i in range(20)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [line for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), flags=re.S) for line in block.splitlines()]
    assert len(lines) == 5
    for line in lines:
        words = shlex.split(line.replace(MODEL, str(small_model)))[1:]
        narrow = ["--targets", "q_proj,v_proj"] if words[-1] == "runs/new" else []
        assert main([*words, *QUICK, *narrow]) == 0, line
        out = Path(words[words.index("--out") + 1])
        found = json.loads((out / "skill/verdict.json").read_text())
        assert found["protection"]["exact"], line
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small_model), out / "adapter")
        assert {path.name for path in out.iterdir()} >= {
            "adapter",
            "index.html",
            "record.json",
            "config.yaml",
            "log.jsonl",
            "tasks",
            "skill",
        }
    kept = json.loads(Path("runs/fourth/skill/verdict.json").read_text())
    assert sorted(each["name"] for each in kept["kept"]) == ["new", "self", "third"]
    assert kept["protection"]["method"] == "fold-64"


AVERAGING = [  # folder of results, variant, how many points more than snapshot it learns and keeps; None: not shown
    ("keeping", "keep self", 25, -18),
    ("keeping", "keep self sensitive-core", 21, None),
    ("keeping-linear", "keep self", 7, -12),
    ("keeping-linear", "keep self sensitive-core", 6, None),
]


@pytest.mark.parametrize(("folder", "variant", "learned", "kept"), AVERAGING)
def test_what_the_page_tells_of_averaging(folder, variant, learned, kept):
    results = read(folder)
    for where, points in zip(MEASURED, (learned, kept), strict=False):
        was, now = (scores(results[name], *where) for name in ("snapshot", variant))
        low, high = map(
            float, re.findall(r"[(]([-+.0-9]+) to ([-+.0-9]+);", between(results["snapshot"], results[variant], *where))[0]
        )
        if points is None:
            assert low <= 0 <= high
        else:
            assert low > 0 or high < 0
            assert mean(now) - mean(was) == pytest.approx(points, abs=0.5)


pytestmark = pytest.mark.filterwarnings("ignore")  # what loading with PEFT warns of is not ours
