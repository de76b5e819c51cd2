"""Printed values in our units: a cell of each kind, read off the paper's tables by hand."""

import made
import pytest

from anchorlora.pages import labels as orders
from anchorlora.recipes import mini, standard_cl
from anchorlora_lab.report import published
from anchorlora_lab.report.tables.drift import is_paper_trace


@pytest.mark.parametrize(
    ("found", "by_hand"),
    [
        (published.printed_score("standard_cl_qwen3_8b", "sfor", "AA"), 80.45),  # percent
        (published.printed_score("standard_cl_qwen3_8b", "sfor", "BWT"), -0.86),  # percentage points
        (published.printed_by_order("ewc", "order2"), 80.87),
        (published.printed_by_order("ewc", "avg"), 80.87),
        (published.printed_seed_sd("o-lora-hard", "order2", "FM"), 0.46),
        (published.printed_cross("sfor", "AA"), 81.67),
        (published.printed_cross("sfor", "FM_std"), 0.89),
        (published.printed_of_seed("o-lora", 2026, "BWT"), -4.14),
        (published.printed_pair("sfor - projected-lora", 42, "FM"), -8.74),
        (published.printed_learning_change("sfor - projected-lora"), 0.15),
        (published.printed_endpoint("projected-lora", "d_eff"), 7.540),  # native
        (published.printed_endpoint("projected-lora", "rho"), 0.1912),  # 19.12 percent as a fraction
        (published.printed_endpoint("projected-lora", "rho_std"), 0.0110),
        (published.printed_endpoint("sfor", "d_old_std"), 0.0000069),
        (published.printed_endpoint("o-lora-bsr", "d_block"), 7.303),
        (published.printed_violation_sd("projected-lora-wrp", "pre"), 1.0920e-3),  # scaled by 1e-3
        (published.printed_violation_sd("sfor", "post"), 0.2474e-9),
        (published.printed_violation_sd("o-lora-hard", "post"), 4.7308e-12),
        (published.printed_capability("sfor", "mean"), 74.71),
        (published.printed_capability("o-lora", "delta"), -0.75),
        (published.printed_capability("base", "std"), 0.0),
    ],
)
def test_a_cell_of_each_kind_is_in_our_units(found, by_hand):
    assert found == pytest.approx(by_hand, rel=1e-12)


def test_what_was_not_printed_is_none():
    assert published.printed_score("standard_cl_qwen3_8b", "o-lora-retract", "AA") is None
    assert published.printed_of_seed("sfor", 7, "AA") is None
    assert published.printed_of_seed("sfor", 42, "LA") is None
    assert published.printed_endpoint("sfor", "d_block") is None
    assert published.printed_violation_sd("o-lora", "pre") is None
    assert published.printed_by_order("sfor", "order4") is None


def test_every_printed_field_has_a_unit():
    tables = [
        published.PUBLISHED[name] for name in published.PUBLISHED if name not in ("units", "std", "source", "protocol", "orders")
    ]
    rows = [row for table in tables for row in (table["rows"].values() if isinstance(table["rows"], dict) else table["rows"])]
    rows += list(published.MECHANISM["wrp_violation_std"].values())
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
