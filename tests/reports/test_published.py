"""The paper's values stand beside runs of its own model and data, and beside no other, anywhere in a report."""

import json
from importlib.resources import files
from pathlib import Path

import made
import pytest

from anchorlora.pages import record as orders
from anchorlora.recipes import mini, standard_cl
from anchorlora.store.record import BaseModelFacts, DataFile
from anchorlora_lab.report import published
from anchorlora_lab.report.chapters import chapters_of
from anchorlora_lab.report.comparability import studies_of
from anchorlora_lab.report.page import all_tables
from anchorlora_lab.report.published import MISTRAL, QWEN, has_base_model, is_papers_own
from anchorlora_lab.report.records import Run, find_runs
from anchorlora_lab.report.tables.mechanism import is_paper_trace

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


@pytest.mark.parametrize(
    ("found", "by_hand"),
    [
        (published.printed("standard_cl_qwen3_8b", "sfor", "AA"), 80.45),  # percent
        (published.printed("standard_cl_qwen3_8b", "sfor", "BWT"), -0.86),  # percentage points
        (published.printed_by_order("ewc", "order2"), 80.87),
        (published.printed_by_order("ewc", "avg"), 80.87),
        (published.printed_seed_sd("o-lora-hard", "order2", "FM"), 0.46),
        (published.printed(published.CROSS, "sfor", "AA"), 81.67),
        (published.printed(published.CROSS, "sfor", "FM_std"), 0.89),
        (published.printed_of_seed("per_seed", "o-lora", 2026, "BWT"), -4.14),
        (published.printed_of_seed("paired", "sfor - projected-lora", 42, "FM"), -8.74),
        (published.printed_learning_change("sfor - projected-lora"), 0.15),
        (published.printed_endpoint("projected-lora", "d_eff"), 7.540),  # native
        (published.printed_endpoint("projected-lora", "rho"), 0.1912),  # 19.12 percent as a fraction
        (published.printed_endpoint("projected-lora", "rho_std"), 0.0110),
        (published.printed_endpoint("sfor", "d_old_std"), 0.0000069),
        (published.printed_endpoint("o-lora-bsr", "d_block"), 7.303),
        (published.printed_violation_sd("projected-lora-wrp", "pre"), 1.0920e-3),  # scaled by 1e-3
        (published.printed_violation_sd("sfor", "post"), 0.2474e-9),
        (published.printed_violation_sd("o-lora-hard", "post"), 4.7308e-12),
        (published.printed("mmlu_qwen3_8b_after_order1", "sfor", "mean"), 74.71),
        (published.printed("mmlu_qwen3_8b_after_order1", "o-lora", "delta"), -0.75),
        (published.printed("mmlu_qwen3_8b_after_order1", "base", "std"), 0.0),
    ],
)
def test_a_cell_of_each_kind_is_in_our_units(found, by_hand):
    assert found == pytest.approx(by_hand, rel=1e-12)


def test_what_was_not_printed_is_none():
    assert published.printed("standard_cl_qwen3_8b", "o-lora-retract", "AA") is None
    assert published.printed_of_seed("per_seed", "sfor", 7, "AA") is None
    assert published.printed_of_seed("per_seed", "sfor", 42, "LA") is None
    assert published.printed_endpoint("sfor", "d_block") is None
    assert published.printed_violation_sd("o-lora", "pre") is None
    assert published.printed_by_order("sfor", "order4") is None


def test_every_printed_field_has_a_unit():
    tables = [
        published.PUBLISHED[name] for name in published.PUBLISHED if name not in ("units", "std", "source", "protocol", "orders")
    ]
    rows = [row for table in tables for row in (table["rows"].values() if isinstance(table["rows"], dict) else table["rows"])]
    rows += list(published.PUBLISHED[published.MECHANISM]["wrp_violation_std"].values())
    fields = {field for row in rows if isinstance(row, dict) for field in row} - {"method", "order"}
    assert {field.removesuffix("_std") for field in fields} <= set(published.UNITS)


def test_orders_are_named_as_the_recipes_name_them():
    for recipe in (standard_cl(), mini()):
        for name, order in recipe.tasks.orders.items():
            assert orders.paper_order(order) == name
            assert orders.paper_tasks(order) == orders.PAPER[name]
    assert orders.MINI == mini().tasks.orders["order1"] == made.MINI
    assert orders.paper_order(("yelp", "amazon")) is None
    assert is_paper_trace(("dbpedia", "amazon"))
    assert not is_paper_trace(("entities", "reviews"))
    assert not is_paper_trace(("amazon", "dbpedia"))


PUBLISHED = json.loads((files("anchorlora_lab.report") / "published.json").read_text())
CL_TABLES = ("standard_cl_qwen3_8b", "projected_family_components_qwen3_8b", "olora_components_qwen3_8b_order1")
ROWS = [(table, method, row) for table in CL_TABLES for method, row in PUBLISHED[table]["rows"].items()]
ENDPOINTS = PUBLISHED["mechanism_endpoints_qwen3_8b"]["rows"]


@pytest.mark.parametrize(("table", "method", "row"), ROWS, ids=[f"{t}-{m}" for t, m, _ in ROWS])
def test_average_accuracy_is_learning_accuracy_plus_three_quarters_of_backward_transfer(table, method, row):
    assert row["AA"] == pytest.approx(row["LA"] + 0.75 * row["BWT"], abs=0.0125)  # three roundings to 0.01


@pytest.mark.parametrize(("table", "method", "row"), ROWS, ids=[f"{t}-{m}" for t, m, _ in ROWS])
def test_forgetting_is_at_least_what_was_lost_since_learning(table, method, row):
    assert row["FM"] >= -row["BWT"] - 0.0101


def test_order_means():
    for method, row in PUBLISHED["standard_cl_qwen3_8b_aa_by_order"]["rows"].items():
        assert sum(row[:3]) / 3 == pytest.approx(row[3], abs=0.0101), method
        assert row[3] == PUBLISHED["standard_cl_qwen3_8b"]["rows"][method]["AA"]


@pytest.mark.parametrize("method", ENDPOINTS)
def test_the_ratio_is_the_quotient_of_its_norms(method):
    """Up to half of the last printed digit, and a mean of ratios is no ratio of means: one percent for the scatter of seeds."""
    row = ENDPOINTS[method]
    last_digit = 0.5e-5 if row["rho_bod"] < 0.01 else 0.5e-4
    quotient = row["d_old"] / row["d_eff"]
    assert row["rho_bod"] / 100 == pytest.approx(quotient, abs=last_digit + 0.01 * quotient)


@pytest.mark.parametrize("method", [m for m, row in ENDPOINTS.items() if "d_new" in row])
def test_pythagoras(method):
    row = ENDPOINTS[method]
    assert row["d_eff"] ** 2 == pytest.approx(row["d_old"] ** 2 + row["d_new"] ** 2, rel=5e-4)
