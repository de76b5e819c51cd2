"""The notebook: whole, as a reader runs it, among the long tests; on little data, all but its commands, among the short ones."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs/notebook.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
TEXT = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
FIVE_MINUTES = 300  # seconds of one CPU core, whatever else the machine does

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries warn of is theirs


def test_it_is_stored_without_outputs_and_needs_no_shell():
    stored = json.loads(NOTEBOOK.read_text())
    assert stored["nbformat"] == 4
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    for cell in CELLS:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"], cell["metadata"]) == ([], None, {})
    for code in CODE:
        compile(code, NOTEBOOK.name, "exec")  # no ! and no % lines, which are not Python


def test_it_goes_from_protect_to_export_and_its_links_lead_somewhere():
    order = [TEXT.index(f"## {heading}\n") for heading in ("Protect and train", "Look", "Audit", "Export")]
    assert order == sorted(order)
    assert [link for link in re.findall(r"\]\(([^)#]+)", TEXT) if not (NOTEBOOK.parent / link).exists()] == []


def test_on_little_data_the_library_does_what_the_notebook_says(tmp_path, monkeypatch, capsys):
    """Every cell but the commands, on 8 examples for each task instead of 320, and one epoch."""
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in CODE:
        if "anchorlora(" in code or "served" in code:  # the command line has tests of its own
            continue
        small = re.sub(r"epochs=\d", "epochs=1", code.replace('"train", 320', '"train", 8').replace('"test", 120', '"test", 4'))
        exec(compile(small, NOTEBOOK.name, "exec"), names)
    rho = {name: names["measure"](anchor) for name, (_, anchor) in names["trained"].items()}
    assert rho["protected"].exact
    assert not rho["unprotected"].exact
    said = capsys.readouterr().out
    assert "unprotected: Not protected" in said
    assert "protected: Protected: rho is" in said
    assert (tmp_path / "notebook-work/rho.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_whole_notebook_keeps_the_old_skill_and_takes_less_than_five_minutes_of_a_cpu(tmp_path):
    after = "print('FOUND', json.dumps({'scores': scores, 'last': {t: accuracy(served, data[t]['test']) for t in data}}))"
    (tmp_path / "cells.py").write_text("\n\n".join([*CODE, after]))
    env = os.environ | {"MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "cells.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime < FIVE_MINUTES
    found = json.loads(re.search(r"^FOUND (.*)$", done.stdout, flags=re.M)[1])
    old = {name: score["reviews"] for name, score in found["scores"].items()}
    new = {name: score["news"] for name, score in found["scores"].items()}
    assert old["unprotected"] < old["before"] - 15, "without protection the old skill suffers"
    assert old["protected"] > old["before"] - 5, "with it, it stays"
    assert min(new["protected"], new["unprotected"]) > new["before"] + 20, "and the new one is learned"
    assert found["last"]["reviews"] > old["before"] - 5, "in what is exported, too"
    assert found["last"]["news"] > new["before"] + 20
    assert re.search(r"^protection: .* no more than rounding explains", done.stdout, flags=re.M)
    assert "vllm serve" in done.stdout
