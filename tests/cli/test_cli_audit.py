"""`anchorlora audit` from the command line: text, JSON, page, exit status."""

import ast
import json
import re
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest

from anchorlora.adapters import write_adapter
from anchorlora.cli.app import main
from anchorlora.features.files import write_cores
from anchorlora.pages.audit import render
from audited import Drawn, full_weights, write_pair, write_weights
from golden import assert_golden, one_line


def masked(text):
    """Digits are computed anew and belong to the machine; what is left says which numbers are rounding and which are not."""
    text = re.sub(r"\d\.\de-(0[5-9]|1\d)", "  ~zero", text)
    text = re.sub(r"\d+\.\d+( %| times)", r"##.#\1", text)
    return re.sub(r"\d\.\de[-+]\d\d", "#.#e###", text)


def read(parts, capsys):
    assert main(["audit", *map(str, parts)]) == 0
    return capsys.readouterr().out


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_unprotected_learned_adapter_is_told_what_would_have_preserved_it(here, capsys):
    write_pair(here)
    assert_golden("audit-violated.txt", masked(read(["before", "after", "--cores", "cores.safetensors"], capsys)))


def test_a_protected_one_is_told_what_preserved_it(here, capsys):
    write_pair(here, outside=True, freeze=True)
    assert_golden("audit-preserved.txt", masked(read(["before", "after", "--cores", "cores.safetensors"], capsys)))


def test_full_weights_are_audited_on_both_sides(here, capsys):
    write_weights(here / "a", full_weights())
    write_weights(here / "b", full_weights(step=0.1))
    assert_golden("audit-weights.txt", masked(read(["a", "b", "--weights", "3"], capsys)))


def test_the_command_explains_itself(capsys):
    assert main(["audit", "--help"]) == 0
    assert_golden("help-audit.txt", capsys.readouterr().out)


def test_json_has_the_documented_fields(here, capsys):
    from pathlib import Path

    write_pair(here)
    found = json.loads(read(["before", "after", "--cores", "cores.safetensors", "--json"], capsys))
    documented = (Path(__file__).parents[2] / "docs/reference.md").read_text().partition("## Audits")[2]
    for name in [*found, *found["overall"], *found["layers"]["model.layers.0.self_attn.q_proj"]]:
        assert f"`{name}`" in documented, name


def test_pipelines_may_ask_for_a_status(here, capsys):
    before, after, cores = map(str, write_pair(here))
    assert main(["audit", before, after, "--cores", cores, "--fail-if-unprotected"]) == 1
    said = capsys.readouterr()
    assert "verdict: Not protected" in said.out
    assert said.err.startswith("error: ")
    assert "is not protected (violated)" in said.err
    assert main(["audit", before, before, "--cores", cores, "--fail-if-unprotected"]) == 0
    write_pair(here / "preserved", outside=True, freeze=True)
    preserved = [str(here / "preserved" / name) for name in ("before", "after")]
    assert main(["audit", *preserved, "--cores", str(here / "preserved/cores.safetensors"), "--fail-if-unprotected"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["before", "nowhere"], "there is no folder nowhere"),
        (["before", "after", "--cores", "nowhere"], "nowhere is missing"),
        (["before", "after", "--data", "data.jsonl"], "data.jsonl"),
        (["before", "after", "--weights", "0"], "0 is not in the range"),
        (["before", "after", "--weights", "3"], "give it with --model"),
        (["before", "after", "--weights", "3", "--cores", "cores.safetensors"], "name different directions; give one of them"),
        (["before", "after", "--cores", "cores.safetensors", "--html", "no/such/page.html"], "No such file or directory"),
    ],
)
def test_a_wrong_request_gets_one_line_and_status_2(arguments, message, here, capsys):
    write_pair(here)
    assert main(["audit", *arguments]) == 2
    assert re.search(message, one_line(capsys))


class Page(HTMLParser):
    """Tags, what they load, and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_complete_in_itself_and_escapes_hostile_names(here, capsys):
    hostile = ["a.<script>alert(1)</script>", 'b."onload="x', "c.&amp;<!--"]
    drawn = Drawn(layers=hostile)
    for name, factors in (("before", drawn.before()), ("after", drawn.after())):
        write_adapter(here / name, factors, base="<b>base</b>")
    write_cores(here / "<i>.safetensors", drawn.cores())
    read(["before", "after", "--cores", "<i>.safetensors", "--html", "page.html"], capsys)
    page = Page((here / "page.html").read_text())
    assert page.open == [], "every element is closed"
    assert not {"script", "img", "link", "iframe", "b>"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes  # whatever slips through loads nothing
    shown = "".join(page.text)
    assert all(name in shown for name in hostile)
    assert "<i>.safetensors" in shown
    assert "Not protected" in shown
    assert 'Freeze("B") and ProjectDisplacement("A")' in shown


def test_the_page_of_every_outcome_can_be_made(here, capsys):
    write_pair(here)
    write_weights(here / "a", full_weights())
    write_weights(here / "b", full_weights(step=0.1))
    for parts in (["before", "before"], ["before", "after"], ["a", "b", "--weights", "3"], ["a", "a"]):
        page = Page(render(json.loads(read([*parts, "--json"], capsys))))
        assert page.open == []
        assert page.tags.count("tr") > 3


def test_the_program_that_the_benchmark_starts_has_what_it_imports(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    from benchmarks.auditing import PROGRAM

    imports = [node for node in ast.walk(ast.parse(PROGRAM)) if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        assert hasattr(import_module(node.module), node.names[0].name)
