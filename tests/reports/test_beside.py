"""The paper's values stand beside runs of its own model and data, and beside no other, anywhere in a report."""

from pathlib import Path

import made
import pytest

from anchorlora.store.record import BaseModelFacts, DataFile
from anchorlora_lab.report.chapters import chapters_of
from anchorlora_lab.report.comparability import studies_of
from anchorlora_lab.report.page import all_tables
from anchorlora_lab.report.published import MISTRAL, QWEN
from anchorlora_lab.report.records import Run, find_runs
from anchorlora_lab.report.tables.paper import has_base_model, is_papers_own

SIZES = {QWEN: 8_190_735_360, MISTRAL: 7_248_023_552}
METHODS = ("projected-lora", "sfor", "o-lora", "o-lora-hard")


def compared(root):
    """The tables of a whole report that have a value of the paper or a difference from one."""
    tables = all_tables(chapters_of(studies_of(find_runs([root]))))
    assert len(tables) > 10
    for table in tables:
        assert ("Δ:" in table.note) == any(c.heading.endswith(" Δ") for c in table.columns), table.name
        assert ("paper:" in table.note) == any(c.heading.endswith("paper") for c in table.columns), table.name
    return {table.name for table in tables if any(c.heading.endswith(("paper", " Δ")) for c in table.columns)}


def study(root, change=lambda record: {}, *, model=QWEN, **how):
    """A report's worth of runs: the methods of the pairs, three orders and seeds, MMLU after order1, and a trace."""

    def own(records):
        return [r.model_copy(update=change(r)) for r in made.papers_own(records, model=model, parameters=SIZES[model])]

    made.save(root / "grid", *(runs := own(made.grid(METHODS, **how))))
    for run in runs:
        if tuple(run.order) == made.TASKS:
            (made.folder_of(root / "grid", run) / "eval.json").write_text(made.evaluation(after=74.0))
    made.traced(root / "trace", like=own, steps=625)
    return root


def fewer(record, **sizes):
    examples = record.protocol["examples"]
    return {"protocol": record.protocol | {"examples": examples | {"dbpedia": examples["dbpedia"] | sizes}}}


def other_base_model(**changes):
    return lambda record: {"base_model": BaseModelFacts(**(record.base_model.model_dump() | changes))}


def one_file(kind):
    def change(record):
        return {"data": record.data | {f"group/{record.order[0]}/train.json": DataFile(sha256="a" * 64, kind=kind)}}

    return change


def test_qwen_stands_beside_qwens_values_and_mistral_beside_mistrals(tmp_path):
    scores = {"main", "complete", "by-order", "seed-sd", "components-shared", "components-cumulative", "capability"}
    ends = {f"mechanism-{family}{sd}" for family in ("shared", "cumulative") for sd in ("", "-sd")} | {"violations"}
    assert compared(study(tmp_path / "qwen")) == scores | ends | {"settings"}
    assert compared(study(tmp_path / "mistral", model=MISTRAL)) == {"by-seed", "paired", "learning", "settings"}


NOT_THE_PAPERS = {
    "another model": other_base_model(name="embedded:mini", parameters=2_410_560),
    "another model by the same name": other_base_model(name="runs/Qwen3-8B", parameters=1000),
    "a smaller one of the family": other_base_model(name="Qwen/Qwen3-4B"),
    "a quantized one": other_base_model(dtype="bfloat16 over nf4"),
    "a holdout": one_file("holdout of official train instances, not the official test file"),
    "a part of a file": one_file("subset of official instances"),
    "data without a record of them": lambda record: {"data": {}},
}


@pytest.mark.parametrize("change", NOT_THE_PAPERS.values(), ids=NOT_THE_PAPERS)
def test_what_is_not_the_papers_in_one_thing_stands_beside_nothing(change, tmp_path):
    assert compared(study(tmp_path, change)) == set()


@pytest.mark.parametrize("split", ["test", "train"])
def test_a_part_of_the_papers_data_is_compared_in_its_settings_alone(split, tmp_path):
    """The settings are where a reader sees that it is a part.  What a trace was tested on is nothing to it."""
    found = compared(study(tmp_path, lambda record: fewer(record, **{split: 300})))
    traced = {name for name in found if name.startswith(("mechanism", "violations"))}
    assert found - traced == {"settings"}
    assert bool(traced) == (split == "test")


def test_a_local_copy_of_the_papers_model_is_its_model():
    (record,) = made.papers_own([made.run("sfor")], model="/models/qwen3-8b/")
    assert has_base_model(Run(Path("run"), record), QWEN)
    assert not has_base_model(Run(Path("run"), record), MISTRAL)


def test_mini_stands_beside_nothing(tmp_path):
    made.save(tmp_path / "grid", *made.grid(METHODS, tasks=made.MINI))
    made.traced(tmp_path / "trace", tasks=made.MINI[:2])
    assert compared(tmp_path) == set()


@pytest.mark.parametrize("examples", [None, [], {"dbpedia": 3}, {"dbpedia": {"train": "x"}}])
def test_a_protocol_that_no_run_wrote_is_not_the_papers(examples):
    (record,) = made.papers_own([made.run("sfor")])
    assert is_papers_own(Run(Path("run"), record), QWEN)
    record.protocol["examples"] = examples
    assert not is_papers_own(Run(Path("run"), record), QWEN)
