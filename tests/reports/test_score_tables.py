import math
import statistics
from pathlib import Path

import made
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import records
from anchorlora.pages.record import short_layers, triangle_table
from anchorlora.scores import Scores
from anchorlora.store.record import Record
from anchorlora_lab.report.records import Run, by_method, deviation, find_runs
from anchorlora_lab.report.tables.answers import invalid_by_seed, invalid_table
from anchorlora_lab.report.tables.pairs import learning_table, paired_table
from anchorlora_lab.report.tables.scores import complete_table, deviation_table, main_table, order_table, seed_table
from anchorlora_lab.report.tables.settings import cost_table, methods_table, orders_table, settings_table

METHODS = ("projected-lora", "sfor", "o-lora", "o-lora-hard")


def as_runs(made_records):
    return [Run(Path(f"{r.method.name}-{'-'.join(r.order)}-{r.seed}"), r) for r in made_records]


def mistral(records):
    return made.papers_own(records, model="mistralai/Mistral-7B-v0.3", parameters=7_248_023_552)


def headings(tables):
    return {c.heading for table in tables for c in table.columns}


def column(table, heading):
    at = [c.heading for c in table.columns].index(heading)
    return {row[0]: row[at] for row in table.rows}


@pytest.fixture(scope="module")
def whole():
    return as_runs(made.grid())


@pytest.fixture(scope="module")
def papers():
    """The same runs as runs of the paper's own model and data."""
    return as_runs(made.papers_own(made.grid()))


def test_means_are_over_all_runs_and_say_how_many(whole):
    table = main_table(whole)
    mine = [run.record.scores.AA for run in whole if run.method == "sfor"]
    assert column(table, "runs")["sfor"] == "9 of 9"
    assert column(table, "AA")["sfor"] == pytest.approx(statistics.mean(mine))
    assert [c.heading for c in table.columns if c.heading.endswith("sd")] == []


def test_over_one_order_the_sample_deviation_is_over_its_seeds(tmp_path):
    runs = find_runs([records.three_methods(tmp_path / "runs")])
    mine = [run.record.scores.AA for run in runs if run.method == "sfor"]
    assert column(main_table(runs), "AA sd")["sfor"] == pytest.approx(statistics.stdev(mine))
    assert deviation([1.0]) is None


def test_deviations_are_over_the_seeds_of_one_order_never_over_orders(whole):
    for method, order, n, *found in deviation_table(whole).rows:
        mine = [run.record.scores for run in whole if run.method == method and run.record.order == list(named(order))]
        assert n == len(mine) == 3
        assert found[0] == pytest.approx(statistics.stdev(s.AA for s in mine))


def named(order):
    return [made.TASKS[i] for i in made.PLACES[order]]


def test_the_families_stand_apart_and_fewer_parts_come_first(whole):
    methods = list(by_method(whole))
    assert methods.index("inc-lora") == 8
    assert set(methods[:8]) == {m for m, d in made.DEFINITIONS.items() if d.startswith("Shared()")}
    assert methods[0] == "seq-lora"
    assert methods[7] == "sfor"
    assert methods[-1] == "o-lora-bsr"


def test_the_papers_means_stand_beside_ours_over_all_three_orders_only(papers):
    table = complete_table(papers)
    assert column(table, "FM paper")["sfor"] == 0.91
    assert column(table, "FM Δ")["sfor"] == pytest.approx(column(table, "FM")["sfor"] - 0.91)
    assert column(table, "AA paper")["o-lora-retract"] is None
    assert "paper: the published values on Qwen/Qwen3-8B, with the same data. Δ: ours minus the paper's." in table.note
    assert column(order_table(papers), "order2 paper")["sfor"] == 80.06
    two = complete_table([run for run in papers if run.order != tuple(named("order3"))])
    scores = ("AA", "LA", "BWT", "FM")
    assert headings([two]) == {"method", "runs", *scores, *(f"{score} 95 % runs" for score in scores)}


def test_other_tasks_have_no_values_of_the_paper_and_no_borrowed_names():
    runs = as_runs([made.run("sfor", order=("a", "b"), seed=seed) for seed in made.SEEDS])
    for table in (main_table(runs), order_table(runs), seed_table(runs), deviation_table(runs)):
        assert not any("paper" in c.heading for c in table.columns)
    assert "a>b" in [c.heading for c in order_table(runs).columns]


def test_half_a_grid_says_what_is_missing_and_is_not_ranked(papers):
    gone = {("sfor", "order2", 42), ("ewc", "order3", 38), ("ewc", "order3", 42), ("lwf", "order3", 38), ("lwf", "order3", 42)}
    labels = {tuple(named(order)): order for order in made.PLACES}
    half = [run for run in papers if (run.method, labels[run.order], run.seed) not in gone]
    table = main_table(half)
    assert column(table, "runs")["sfor"] == "8 of 9"
    assert column(table, "runs")["lwf"] == "7 of 9"
    assert column(table, "AA Δ")["sfor"] is None
    assert "Missing runs: ewc, lwf: order3 seeds 38 42; sfor: order2 seed 42." in table.note
    assert column(order_table(half), "seeds")["lwf"] == "3+3+1"
    ns = {(row[0], row[1]): row[2] for row in deviation_table(half).rows}
    assert ns["lwf", "order3"] == 1
    partial = [table.rows[i][0] for i in table.partial]
    assert sorted(partial) == ["ewc", "lwf", "sfor"]
    assert not {i for i, _ in table.marked} & table.partial
    assert "Missing" not in main_table(papers).note


def test_an_unpaired_run_is_left_out_of_the_differences_and_named():
    runs = [run for run in as_runs(mistral(made.grid(METHODS))) if (run.method, run.seed) != ("o-lora", 42)]
    table = paired_table(runs)
    assert [row[2] for row in table.rows if row[0] == "o-lora-hard - o-lora"] == [38, 2026, 38, 2026, 38, 2026, "n = 6"]
    assert "Missing pairs: o-lora-hard - o-lora at order1, seed 42; " in table.note
    assert "sfor" not in table.note
    assert [row[-1] for row in learning_table(runs).rows if row[0] == "o-lora-hard - o-lora"] == [None] * 4  # not compared


def test_the_papers_differences_and_seeds_stand_beside_order1_only():
    whole = as_runs(mistral(made.grid()))
    shown = {(row[0], row[1], row[2]): row for row in paired_table(whole).rows}
    assert shown["sfor - projected-lora", "order1", 38][4] == 7.24
    assert shown["sfor - projected-lora", "order2", 38][4] is None
    seeds = {(row[0], row[1], row[2]): row for row in seed_table(whole).rows}
    assert seeds["seq-lora", "order1", 2026][4] == 74.52
    assert "mistralai/Mistral-7B-v0.3" in seed_table(whole).note
    changes = {(row[0], row[1]): row for row in learning_table(whole).rows}
    assert changes["o-lora-hard - o-lora", "order1"][4] == 0.07


percent = st.floats(0, 100, allow_nan=False)


@st.composite
def grids(draw):
    """Records of four methods with drawn triangles, over drawn numbers of orders and seeds."""
    orders = draw(st.lists(st.sampled_from(list(made.PLACES)), min_size=1, max_size=3, unique=True))
    seeds = draw(st.lists(st.sampled_from(made.SEEDS), min_size=1, max_size=3, unique=True))
    out = []
    for base in made.grid(METHODS, orders, seeds):
        triangle = [draw(st.lists(percent, min_size=t, max_size=t)) for t in range(1, 5)]
        content = base.model_dump(by_alias=True) | {"accuracy": triangle, "scores": Scores.of(triangle).as_dict()}
        out.append(Record.model_validate(content))
    return as_runs(out)


@settings(max_examples=25, deadline=None)
@given(grids())
def test_the_identities_hold_in_our_tables(runs):
    complete, close = complete_table(runs), {"abs": 1e-9}
    aa, la, bwt, fm = (column(complete, name) for name in ("AA", "LA", "BWT", "FM"))
    by_order, n = order_table(runs), len({run.order for run in runs})
    orders = [c.heading for c in by_order.columns if c.heading.startswith("order") and " " not in c.heading]
    for method in METHODS:
        assert aa[method] == pytest.approx(la[method] + 3 / 4 * bwt[method], **close)
        assert fm[method] >= -bwt[method] - 1e-9
        mine = [run.record.scores.AA for run in runs if run.method == method]
        assert n == 1 or column(by_order, "all")[method] == pytest.approx(math.fsum(mine) / len(mine), **close)
        assert len(orders) == n
        assert statistics.mean(column(by_order, o)[method] for o in orders) == pytest.approx(aa[method], **close)
    means = {row[0]: row for row in paired_table(runs).rows if row[1] == "mean"}
    headings = [c.heading for c in paired_table(runs).columns]
    for one, other in (("sfor", "projected-lora"), ("o-lora-hard", "o-lora")):
        for name, means_of in (("AA", aa), ("BWT", bwt), ("FM", fm)):
            found = means[f"{one} - {other}"][headings.index(name)]
            assert found == pytest.approx(means_of[one] - means_of[other], **close)
        changes = learning_table(runs).rows
        last = [row for row in changes if row[0] == f"{one} - {other}"][-1]
        assert last[3] == pytest.approx(la[one] - la[other], **close)


@pytest.fixture
def runs(tmp_path):
    return find_runs([made.save(tmp_path / "runs", *made.grid(("sfor", "seq-lora", "ewc")))])


def rows_of(table):
    headings = [c.heading for c in table.columns]
    return {row[0]: dict(zip(headings, row, strict=True)) for row in table.rows}


def test_seconds_a_step_are_training_time_by_the_steps_of_the_protocol(runs):
    steps = (10000 + 5000 + 10000 + 4000) / 8  # 3,625 steps a run, as the paper has it
    mine = [1000 * sum(run.record.cost.train_seconds) / steps for run in runs if run.method == "sfor"]
    assert rows_of(cost_table(runs))["sfor"]["ms/step"] == pytest.approx(statistics.mean(mine))


def test_without_a_number_of_steps_there_is_no_time_a_step(tmp_path):
    runs = find_runs([made.save(tmp_path, made.run("sfor", protocol={}))])
    assert "ms/step" not in [c.heading for c in cost_table(runs).columns]


def test_invalid_predictions_are_those_after_the_last_task_by_task_not_by_place(runs):
    table = rows_of(invalid_table(runs))
    for task in made.TASKS:
        mine = [run.record.invalid[-1][run.order.index(task)] for run in runs if run.method == "ewc"]
        assert table["ewc"][task] == pytest.approx(statistics.mean(mine))
    rates = [rate for run in runs if run.method == "ewc" for row in run.record.invalid for rate in row]
    assert table["ewc"]["worst"] == max(rates)
    cells = {row[:3]: row for row in invalid_by_seed(runs).rows}
    assert len(cells) == 27
    (order3,) = (run for run in runs if (run.method, run.seed, run.order[0]) == ("sfor", 38, "yahoo"))
    assert cells["sfor", "order3", 38][3:7] == tuple(order3.record.invalid[-1][order3.order.index(task)] for task in made.TASKS)


def test_settings_stand_beside_the_papers_for_its_own_models_and_data(runs, tmp_path):
    assert [c.heading for c in settings_table(runs).columns] == ["setting", "ours"]
    (own,) = made.papers_own([made.run("sfor")])
    own = own.model_copy(update={"protocol": made.protocol(made.TASKS)})  # tested on fewer: the settings are where it shows
    table = rows_of(settings_table(find_runs([made.save(tmp_path / "own", own)])))
    assert table["adapter.rank"] == {"setting": "adapter.rank", "ours": "8", "paper": "8"}
    assert table["features.energy"]["paper"] == "0.93"
    assert table["training.betas"]["ours"] == table["training.betas"]["paper"] == "0.9, 0.999"
    assert table["examples.agnews.train"]["paper"] == "4000"
    assert table["examples.agnews.test"] == {"setting": "examples.agnews.test", "ours": "640", "paper": "7600"}
    assert table["tasks.train_limit"]["paper"] is None
    assert not any(name.startswith(("base_model.threads", "base_model.device")) for name in table)  # these are in the footnote


def test_what_was_tuned_stands_beside_the_method(tmp_path):
    tuned = made.run("ewc", protocol=made.protocol(made.TASKS, tuned={"strength": 1e4}, selection="f" * 64))
    runs = find_runs([made.save(tmp_path, tuned, made.run("sfor"))])
    table = rows_of(methods_table(runs))
    assert table["ewc"]["tuned"] == '{"strength": 10000.0}'
    assert table["sfor"]["tuned"] is None
    assert table["ewc"]["definition"] == "Shared() + FisherAnchor(10000.0)"
    assert not any(row[0].startswith(("tuned", "selection")) for row in settings_table(runs).rows)


def test_orders_are_told_task_by_task_and_those_of_mini_beside_the_papers(tmp_path, runs):
    assert orders_table(runs).rows[2] == ("order3", "yahoo", "amazon", "agnews", "dbpedia")
    assert orders_table(runs).note == ""
    mini = orders_table(find_runs([made.save(tmp_path / "mini", made.run("sfor", order="order2", tasks=made.MINI))]))
    assert mini.rows == (("order2", "entities", "reviews", "news", "questions"),)
    assert "order2: dbpedia, amazon, agnews, yahoo" in mini.note


def test_orders_and_runs_are_told_apart_however_alike_or_long_the_names_of_their_tasks_are():
    tasks = [f"task{i}" for i in range(1, 6)]
    runs = [Run(Path(str(i)), made.run("sfor", order=order)) for i, order in enumerate((tasks, tasks[::-1]))]
    headings = [column.heading for column in order_table(runs).columns]
    assert headings[2:] == [">".join(tasks), ">".join(tasks[::-1]), "all"]
    long = [f"{'x' * 40}{i}" for i in range(4)]
    names = {triangle_table(made.run("sfor", order=long, seed=seed)).name for seed in made.SEEDS}
    assert len(names) == 3
    assert max(map(len, names)) == 120


def test_layers_are_named_by_what_tells_them_apart():
    assert short_layers(["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"]) == ["0.q_proj", "1.v_proj"]
    assert short_layers(["a.b"]) == ["a.b"]
    assert short_layers(["a", "b.c"]) == ["a", "b.c"]
