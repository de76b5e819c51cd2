"""The paper's printed numbers obey identities; they guard the data file and our definitions at once."""

import json
from importlib.resources import files

import pytest

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
