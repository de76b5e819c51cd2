"""The site has a page for every method, of the catalog and the committed records, and what it tells a reader to do works."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_train_page import QUICK
from transformers import AutoModelForCausalLM

from anchorlora.cli.app import main
from anchorlora.methods import METHODS, Method
from anchorlora.train.request import skill_request
from built_pages import page
from method_pages import commands, pages

TRAIN = [line for method in METHODS.values() for line in commands(method).splitlines() if line.startswith("anchorlora train ")]


@pytest.fixture(scope="module")
def page_of():
    pytest.importorskip("ruff", reason="ruff, which formats the pages' code, is not installed")
    return lambda name: page(f"methods/{name}.md")


def test_every_method_has_a_page_and_a_link_to_it(page_of):
    assert set(pages()) == {f"methods/{name}.md" for name in METHODS}
    assert set(re.findall(r"\]\(methods/([\w-]+)\.md\)", page("methods.md"))) == set(METHODS)


def test_every_method_says_what_it_is_and_when_to_take_it():
    about = {name: method.entry for name, method in METHODS.items()}
    assert [name for name, entry in about.items() if not (entry.about and (entry.when or entry.choice))] == []
    words = {name: re.sub(r"`[^`]*`|\([^)]*\)", "", f"{entry.about} {entry.when}") for name, entry in about.items()}
    assert [name for name, said in words.items() if re.search(r"\d", said)] == []


@pytest.mark.parametrize("name", METHODS)
def test_the_definition_on_the_page_makes_the_method(name, page_of):
    (code,) = re.findall(r"```python\n(.*?)```", page_of(name), flags=re.S)
    made = {}
    exec(compile(code, name, "exec"), made)
    assert (made["mine"] if isinstance(made["mine"], Method) else Method.of(made["mine"])) == METHODS[name]


def test_a_page_has_an_equation_for_every_method_that_acts(page_of):
    for name, method in METHODS.items():
        acts = [part for part in method.constraints if type(part).__name__ != "Freeze"]
        assert not acts or re.search(r"```text\n|<-", page_of(name)), name


@pytest.mark.parametrize("line", TRAIN, ids=[re.findall(r"--method ([\w-]+)", line)[0] for line in TRAIN])
def test_train_takes_the_method_as_the_page_says(line):
    words = shlex.split(line)
    given = {name: words[words.index(name) + 1] for name in ("--data", "--adapter", "--keep", "--method") if name in words}
    fields = {
        "base_model": {},
        "data": given["--data"],
        "old_adapter": given.get("--adapter"),
        "keep": tuple(given.get("--keep", "").split()),
    }
    made = skill_request(fields, same_size="--same-size" in words, method=given["--method"], methods=METHODS)
    assert made.method == given["--method"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what loading with PEFT warns of is not ours
@pytest.mark.parametrize("line", TRAIN, ids=[re.findall(r"--method ([\w-]+)", line)[0] for line in TRAIN])
def test_what_the_page_tells_train_to_do_works(line, small_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(5)
    config = LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(small_model), config).save_pretrained("adapters/old")
    for name in ("new", "old"):
        rows = [{"prompt": f"the {name} fruit {i}", "completion": f" is {'very ' * (i % 3)}{name}"} for i in range(20)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*shlex.split(line.replace("MODEL", str(small_model)))[1:], *QUICK]) == 0
    found = json.loads(Path("runs/new/skill/verdict.json").read_text())
    promised = METHODS[re.findall(r"--method ([\w-]+)", line)[0]].preserves
    assert not promised.response or found["protection"]["exact"]
