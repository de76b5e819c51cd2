import statistics

import made
import pytest

from anchorlora.reports.comparability import studies_of
from anchorlora.reports.records import find_runs
from anchorlora.reports.tables import core_table, endpoint_deviations, endpoint_table, energy_table, violation_table


@pytest.fixture
def runs(tmp_path):
    return find_runs([made.traced(tmp_path / "runs", like=made.papers_own, steps=625)])


def rows_of(table):
    headings = [c.heading for c in table.columns]
    return {row[0]: dict(zip(headings, row, strict=True)) for row in table.rows}


def ends(method, field):
    return [made.points(method, seed=seed)[-1][field] for seed in made.SEEDS]


def test_endpoints_are_means_over_seeds_of_the_last_point(runs):
    shared = rows_of(endpoint_table([r for r in runs if r.family == "shared"], family="shared"))
    assert list(shared) == ["projected-lora", "projected-lora-freeze-b", "projected-lora-wrp", "sfor"]
    for method, row in shared.items():
        for heading, field in (("D_eff", "d_eff"), ("D_old", "d_old"), ("rho", "rho"), ("D_new", "d_new")):
            assert row[heading] == pytest.approx(statistics.mean(ends(method, field)))
        assert row["runs"] == "3 of 3"
    assert shared["sfor"]["protected"] == "3 of 3"
    assert shared["projected-lora"]["protected"] == "0 of 3"


def test_ratios_are_compared_as_fractions(runs):
    shared = rows_of(endpoint_table([r for r in runs if r.family == "shared"], family="shared"))
    assert shared["projected-lora"]["rho paper"] == pytest.approx(0.1912)
    assert shared["projected-lora"]["rho Δ"] == pytest.approx(statistics.mean(ends("projected-lora", "rho")) - 0.1912)


def test_deviations_of_endpoints_and_violations_are_of_the_sample(runs):
    blocks = [r for r in runs if r.family == "cumulative"]
    table = rows_of(endpoint_deviations(blocks, family="cumulative"))
    assert table["o-lora"]["D_block"] == pytest.approx(statistics.stdev(ends("o-lora", "d_block")), abs=1e-12)
    assert table["o-lora"]["rho"] == pytest.approx(statistics.stdev(ends("o-lora", "rho")))
    assert table["o-lora"]["n"] == 3
    assert table["o-lora-bsr"]["rho paper"] == pytest.approx(0.0000024)
    violations = rows_of(violation_table(runs))
    assert violations["sfor"]["before"] == pytest.approx(statistics.mean(ends("sfor", "wrp_before")))
    assert violations["sfor"]["after sd"] == pytest.approx(statistics.stdev(ends("sfor", "wrp_after")))
    assert violations["sfor"]["after sd paper"] == pytest.approx(0.2474e-9)
    assert violations["projected-lora"]["before sd paper"] is None


def test_a_trace_of_other_tasks_has_no_values_of_the_paper(tmp_path):
    runs = find_runs([made.traced(tmp_path / "runs", ("sfor",), tasks=("amazon", "yahoo"), like=made.papers_own, steps=1250)])
    for table in (endpoint_table(runs, family="shared"), endpoint_deviations(runs, family="shared"), violation_table(runs)):
        assert not any("paper" in c.heading for c in table.columns)


def test_a_missing_seed_of_a_trace_is_named(tmp_path):
    runs = find_runs([made.traced(tmp_path / "runs", ("sfor", "projected-lora"), like=made.papers_own, steps=625)])
    table = endpoint_table([r for r in runs if (r.method, r.seed) != ("sfor", 42)], family="shared")
    assert rows_of(table)["sfor"]["runs"] == "2 of 3"
    assert rows_of(table)["sfor"]["rho Δ"] is None
    assert "sfor: dbpedia>amazon seed 42" in table.note


def test_two_tasks_without_a_shared_start_are_a_sequence(tmp_path):
    root = made.traced(tmp_path / "runs", ("sfor",), (42,), protocol=made.protocol(("dbpedia", "amazon")))
    (study,) = studies_of(find_runs([root]))
    assert study.kind == "sequence"


def test_the_runs_that_made_the_shared_starts_are_not_part_of_the_study(tmp_path):
    root = made.traced(tmp_path / "runs", ("sfor",), (42,))
    start = made.protocol(("dbpedia",), task1_state=f"{42:064d}")
    made.save(root, made.run("seq-lora", order=("dbpedia",), protocol=start, drift=[]))
    assert [study.kind for study in studies_of(find_runs([root]))] == ["trace"]
    alone = find_runs([root / "standard-cl-tiny-seq-lora-dbpedia-42"])
    assert [study.kind for study in studies_of(alone)] == ["sequence"]


def test_other_cores_and_held_out_rows_are_of_the_last_task(tmp_path):
    runs = find_runs([made.save(tmp_path / "runs", *made.grid(("sfor", "seq-lora")))])
    table = rows_of(core_table(runs))
    for method in ("sfor", "seq-lora"):
        last = [run.record.drift[-1] for run in runs if run.method == method]
        assert table[method]["rho first"] == pytest.approx(statistics.mean(d.rho_first for d in last))
        assert table[method]["rho union"] == pytest.approx(statistics.mean(d.rho_union for d in last))
        assert table[method]["off-core"] == pytest.approx(statistics.mean(d.held_out.off_core for d in last))
    assert table["sfor"]["protected"] == "27 of 27"


def test_energy_is_the_mean_over_runs_of_a_layer_and_its_minimum(tmp_path):
    runs = find_runs([made.save(tmp_path / "runs", *made.grid(("sfor", "seq-lora"), ("order1",)))])
    table = rows_of(energy_table(runs))
    assert list(table)[:2] == ["0.q_proj", "0.v_proj"]
    values = [run.record.layers[1][0].retained_energy for run in runs]
    assert table["0.q_proj"]["after task 2"] == pytest.approx(statistics.mean(values))
    assert table["0.q_proj"]["min"] == min(s[0].retained_energy for run in runs for s in run.record.layers)
