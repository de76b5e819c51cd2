"""docs/reference.md lists the files of a run and the fields of its record: those that there are, and no others."""

import re
from pathlib import Path
from typing import get_args

import pytest

from anchorlora.store.json import FilePart
from anchorlora.store.record import Record
from anchorlora.store.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs/reference.md").read_text().partition("\n## A run directory\n")[2].partition("\n## ")[0]
EXAMPLE = {"1-<task>": r"\d+-[^/]+", "1": r"\d+", "2-begun": r"\d+-begun", "step-00000100": r"step-\d+"}


def listed():
    """The paths that stand in the section; a folder without files of its own below it stands for all that it holds."""
    paths, parents = [], [[""]]
    for line in re.findall(r"^ {4,28}\S.*$", SECTION, flags=re.M):
        depth = (len(line) - len(line.lstrip())) // 4
        names = re.split(r" {2,}", line.strip())[0].split(", ")
        parents[depth:] = [[parent + name for parent in parents[depth - 1] for name in names]]
        paths += parents[depth]
    return [path for path in paths if not (path.endswith("/") and any(other != path and other.startswith(path) for other in paths))]


def matches(path, pattern):
    parts = [EXAMPLE.get(part, re.escape(part)) for part in pattern.split("/")]
    return re.fullmatch("/".join(parts) + (".+" if pattern.endswith("/") else ""), path)


@pytest.mark.parametrize("kind", ["taught", "finished"])
def test_every_file_of_a_run_is_listed(kind, request):
    run = request.getfixturevalue(kind)
    files = [path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()]
    assert [file for file in files if not any(matches(file, pattern) for pattern in listed())] == []


def test_every_place_that_the_program_knows_is_listed_and_every_listed_name_is_in_the_program():
    run = RunFolder(Path("run"))
    known = [place.__get__(run, RunFolder) for place in vars(RunFolder).values() if type(place).__name__ == "_Below"]
    task = run.task(1, "<task>")
    known += [task.adapter, task.cores, task.predictions]
    paths = [path.relative_to("run").as_posix() for path in known]
    assert len(paths) > 9
    assert [path for path in paths if not any(each.rstrip("/") == path or each.startswith(f"{path}/") for each in listed())] == []
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    names = {part for path in listed() for part in path.rstrip("/").split("/") if part not in EXAMPLE}
    assert [name for name in sorted(names) if f'"{name}"' not in source and f'/{name}"' not in source] == []


def test_the_fields_of_a_record_are_those_that_are_listed():
    rows = re.findall(r"^\| (`\w.*?) \| (.*) \|$", SECTION, flags=re.M)
    named = {name: words for names, words in rows for name in re.findall(r"`(\w+)`", names)}
    fields = {field.alias or name: field.annotation for name, field in Record.model_fields.items()}
    assert named.keys() == fields.keys()
    for name, annotation in fields.items():
        for part in parts_of(annotation):
            assert [inner for inner in part.model_fields if not re.search(rf"\b{inner}\b", named[name])] == [], name


def parts_of(annotation):
    """The sections of a file within an annotation, those within a section too."""
    found = [each for inner in get_args(annotation) for each in parts_of(inner)]
    if isinstance(annotation, type) and issubclass(annotation, FilePart):
        found += [annotation, *(each for field in annotation.model_fields.values() for each in parts_of(field.annotation))]
    return found
