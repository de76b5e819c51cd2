import statistics

import made
import pytest

from anchorlora.pages.labels import short_layers
from anchorlora_lab.report.records import find_runs
from anchorlora_lab.report.tables.energy import cost_table
from anchorlora_lab.report.tables.evaluation import invalid_by_seed, invalid_table
from anchorlora_lab.report.tables.settings import methods_table, orders_table, settings_table


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


def test_layers_are_named_by_what_tells_them_apart():
    assert short_layers(["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"]) == ["0.q_proj", "1.v_proj"]
    assert short_layers(["a.b"]) == ["a.b"]
    assert short_layers(["a", "b.c"]) == ["a", "b.c"]
