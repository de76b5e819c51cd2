"""docs/extend.md: its Python runs in an empty folder and prints what the page shows, a method of one's own first of all."""

import re
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

import forked
from anchorlora.adapters import kinds, read_adapter
from anchorlora.cli.app import main
from anchorlora.models import families
from anchorlora.store.record import read_record

EXTEND = (Path(__file__).parents[2] / "docs/extend.md").read_text()
SECTIONS = {name: text for name, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", EXTEND, flags=re.S | re.M)}
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


PAGE = (Path(__file__).parents[2] / "docs/extend.md").read_text().partition("## A task source\n")[0]
FEWER = shlex.split("--order entities,reviews --set train_limit=48 --set test_limit=2 --set epochs=1 --set threads=1")
SHORTER = shlex.split("--set Leash.length=0.02")  # so short that it is felt in 6 steps


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The folder in which a reader worked, and what each command printed."""
    folder, printed = tmp_path_factory.mktemp("own"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("anchorlora_lab.report.page.all_pictures", lambda *args, **kwargs: {})
        for language, code in re.findall(r"```(python|bash)\n(.*?)```", PAGE, flags=re.S):
            if language == "python":
                Path(re.match(r"# (\w+\.py)\n", code)[1]).write_text(code)
                continue
            for line in code.splitlines():
                words = shlex.split(line)[1:]
                words += FEWER if words[0] == "run" else []
                words += SHORTER if words[0] == "run" and "leash.py:leashed" in words else []
                with redirect_stdout(StringIO()) as said:
                    assert main(words) == 0, line
                printed[line] = said.getvalue()
    return folder, printed


def numbers_hidden(text):
    return re.sub(r"\d\.\de[-+]\d\d", "#.#e###", text).rstrip()


def test_the_check_on_the_page_is_the_one_that_is_printed(followed):
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, flags=re.S)
    assert numbers_hidden(followed[1]["anchorlora check leash.py:leashed"]) == numbers_hidden(shown)


def test_both_methods_preserve_what_sfor_preserves(followed):
    for file in ("idea.py:mine", "leash.py:leashed"):
        verdicts = dict(re.findall(r"^(\w+) .*?  (preserved|not claimed)", followed[1][f"anchorlora check {file}"], flags=re.M))
        assert verdicts == {"displacement": "preserved", "state": "not claimed", "ΔB": "preserved", "response": "preserved"}


def test_the_leash_holds_in_a_run_and_is_felt(followed):
    record = read_record(followed[0] / "runs/mine/leashed/record.json")
    assert (record.method.name, [d.exact for d in record.drift]) == ("leashed", [True])
    assert farthest(followed[0] / "runs/mine/leashed") <= 0.02 * 1.00001 < farthest(followed[0] / "runs/mine/sfor")


def farthest(run):
    """How far the second task moved A, in the layer where it moved most."""
    before, after = (read_adapter(next(run.glob(f"tasks/{number}-*")) / "adapter") for number in (1, 2))
    return max(float((after[layer].A - before[layer].A).norm()) for layer in before)


def test_its_own_method_stands_in_the_report_beside_the_other(followed):
    page = (followed[0] / "runs/mine/report/index.html").read_text()
    assert "Leash(0.02)" in page
    assert re.search(r"<td[^>]*>leashed", page)
    assert re.search(r"<td[^>]*>sfor", page)
