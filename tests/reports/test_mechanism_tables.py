import math
import statistics
from dataclasses import replace
from itertools import product

import made
import pytest

from anchorlora_lab.report.comparability import studies_of
from anchorlora_lab.report.figures import looks_of
from anchorlora_lab.report.figures.mechanism import forgetting_of_runs
from anchorlora_lab.report.records import find_runs
from anchorlora_lab.report.tables.mechanism import (
    core_table,
    correlation_table,
    endpoint_deviations,
    endpoint_table,
    gradient_table,
    rank_correlation,
    spots_of_boundaries,
    spots_of_runs,
    violation_table,
)
from anchorlora_lab.report.tables.settings import energy_table


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


def test_gradients_and_moves_are_means_of_the_recorded_points(tmp_path):
    root = made.traced(tmp_path / "runs", ("sfor", "o-lora"), steps=20)
    for method, seed in product(("sfor", "o-lora"), made.SEEDS):
        lines = made.points(method, seed=seed, steps=20)
        for i, line in enumerate(lines):
            penalties = (10.0 + i if method == "o-lora" else 0.0) if i else None
            line["grad_norms"] = {"task": 2.0 if i else None, "penalties": penalties}
            line["moves"] = {"A": 0.1 * i, "B": 0.2 * i}
        made.write_points(next(root.rglob(f"*{method}*{seed}*/trace.jsonl")), lines)
    found = rows_of(gradient_table(find_runs([root])))
    count = len(lines)
    tenth = max(1, (count - 1) // 10)
    assert found["o-lora"]["penalties, first"] == pytest.approx(statistics.mean(10.0 + i for i in range(1, tenth + 1)))
    assert found["o-lora"]["penalties / task"] == pytest.approx(statistics.mean((10.0 + i) / 2 for i in range(1, count)))
    assert (found["sfor"]["task, last"], found["sfor"]["penalties / task"]) == (2.0, 0.0)
    assert found["sfor"]["moved A"] == pytest.approx(0.1 * (count - 1))
    assert found["sfor"]["moved B"] == pytest.approx(0.2 * (count - 1))


def test_traces_of_earlier_versions_have_no_moves(runs):
    table = gradient_table(runs)
    assert not {"moved A", "moved B"} & {c.heading for c in table.columns}


def test_a_rank_correlation_is_that_of_scipy_with_ties_and_its_interval_keeps_clusters_together():
    x, y = [3.0, 1.0, 1.0, 7.0, 5.0, 5.0], [2.0, 2.0, 0.0, 9.0, 3.0, 4.0]

    def ranks(values):
        return [sum(v < w for v in values) + (sum(v == w for v in values) + 1) / 2 for w in values]

    assert rank_correlation(x, y)[0] == pytest.approx(statistics.correlation(ranks(x), ranks(y)))
    clusters = [i % 6 for i in range(60)]
    same = [float(c) for c in clusters]  # ten copies of six points: as uncertain as six
    noisy = [c + (-1) ** c * 2.0 for c in same]
    low, high = rank_correlation(same, noisy, clusters)[1]
    alone = rank_correlation(same, noisy, list(range(60)))[1]
    assert high - low > 2 * (alone[1] - alone[0])
    assert rank_correlation(x, [1.0] * 6) is None
    assert rank_correlation(x, y, ["a", "b"] * 3)[1] is None


def with_kl(record):
    """Forecasts that order the tasks as their rho does."""
    return record.model_copy(update={"drift": [d.model_copy(update={"predicted_kl": 7 * d.rho}) for d in record.drift]})


def rows_by(table):
    return {(row[0], row[1]): row for row in table.rows}


def test_forgetting_is_set_against_the_drift_of_a_run_and_of_a_boundary(tmp_path):
    methods = ("sfor", "projected-lora", "o-lora", "o-lora-hard")
    runs = find_runs([made.save(tmp_path, *made.grid(methods))])
    run, drift = runs[0], runs[0].record.drift
    spot = next(s for s in spots_of_runs(runs) if s.run is run)
    assert (spot.lost, spot.drift["rho"]) == (run.record.scores.FM, pytest.approx(statistics.mean(d.rho for d in drift)))
    spots = [s for s in spots_of_boundaries(runs) if s.run is run]
    first, second = run.record.accuracy[0], run.record.accuracy[1]
    assert spots[0].lost == pytest.approx(first[0] - second[0])
    assert [s.drift["rho"] for s in spots] == [d.rho for d in drift]
    table = correlation_table(runs)
    rows = rows_by(table)
    assert rows["all runs", "rho"][2] == len(runs) == 36
    assert rows["all boundaries", "rho"][2] == 36 * len(drift)
    assert rows["all runs", "rho"][4] is not None
    assert rows["order1 alone", "rho"][4] is None  # three seeds
    assert math.isfinite(rows["all runs", "rho"][3])
    assert ("all runs", "predicted KL") not in rows
    known = [replace(run, record=with_kl(run.record)) for run in runs]
    assert rows_by(correlation_table(known))["all runs", "predicted KL"][2:4] == rows["all runs", "rho"][2:4]
    assert [len(forgetting_of_runs(some, looks_of(some)).axes) for some in (runs, known)] == [2 * 3, 2 * 4]
    few = [*known[:12], *runs[12:]]
    assert len(forgetting_of_runs(few, looks_of(few)).axes) == 2 * 3, "what most runs lack has no column"
    assert correlation_table([run for run in runs if run.method in methods[:3]]) is None
    assert correlation_table([run for run in runs if run.seed == 42]) is None
