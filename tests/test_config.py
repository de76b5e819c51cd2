import pytest
from pydantic import ValidationError

from anchorlora.config import Recipe, RunConfig, differences, leaves
from anchorlora.recipes import RECIPES, mini, protocol, standard_cl


@pytest.mark.parametrize("make", RECIPES.values(), ids=RECIPES)
def test_leaf_names_are_unique_so_that_settings_need_no_path(make):
    names = [path.rsplit(".", 1)[-1] for path, _ in leaves(make())]
    assert len(names) == len(set(names))


def test_the_standard_recipe_is_the_papers_protocol():
    r = standard_cl()
    assert (r.adapter.rank, r.adapter.alpha, r.adapter.dropout, r.adapter.targets) == (8, 32, 0.1, ("q_proj", "v_proj"))
    t = r.training
    assert (t.learning_rate, t.betas, t.weight_decay, t.window, t.micro_batch, t.epochs) == (1e-4, (0.9, 0.999), 0.0, 8, 1, 1)
    assert (t.clip_norm, t.schedule, t.loss, t.max_tokens, r.evaluation.max_new_tokens) == (
        None,
        "constant",
        "example_mean",
        512,
        50,
    )
    f = r.features
    assert (f.rows, f.held_out_rows, f.energy, f.at_least, f.at_most, f.wide) == (128, 32, 0.93, 4, 20, 64)
    assert r.adapter.history_dropout == "off"
    assert protocol.SEEDS == (38, 42, 2026)
    assert r.tasks.orders == {
        "order1": ("dbpedia", "amazon", "yahoo", "agnews"),
        "order2": ("dbpedia", "amazon", "agnews", "yahoo"),
        "order3": ("yahoo", "amazon", "agnews", "dbpedia"),
    }


def test_the_papers_step_count_follows_from_the_protocol():
    r = standard_cl()
    assert [r.steps(n) for n in (10_000, 5_000, 10_000, 4_000)] == [1250, 625, 1250, 500]
    assert sum(r.steps(n) for n in (10_000, 5_000, 10_000, 4_000)) == 3625
    assert r.steps(9) == 2, "the last window may be smaller"


def test_mini_permutes_its_own_tasks_by_the_papers_positions():
    orders = mini().tasks.orders
    first = orders["order1"]
    assert orders["order2"] == (first[0], first[1], first[3], first[2])
    assert orders["order3"] == (first[2], first[1], first[3], first[0])


def test_settings_come_as_text_by_leaf_or_by_path():
    r = standard_cl().changed({"rank": "16", "training.learning_rate": "1e-3", "targets": "q_proj,k_proj", "clip_norm": "1.0"})
    assert (r.adapter.rank, r.training.learning_rate, r.adapter.targets, r.training.clip_norm) == (
        16,
        1e-3,
        ("q_proj", "k_proj"),
        1.0,
    )
    assert r.changed({"clip_norm": "none"}).training.clip_norm is None


def test_an_unknown_field_offers_its_neighbors():
    with pytest.raises(LookupError, match="no field 'learning_rat'; nearest: .*learning_rate"):
        standard_cl().changed({"learning_rat": "1"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": "0"}, r"adapter.rank: .*greater than or equal to 1 \(found '0'\)"),
        ({"rank": "many"}, r"adapter.rank: .*integer.*\(found 'many'\)"),
        ({"energy": "1.5"}, "features.energy"),
        ({"rows": "3"}, "features: .*3 rows make no core of at least 4 directions"),
        ({"at_most": "100"}, "features: .*at_most 100 and wide 64 must not decrease"),
        ({"loss": "sum"}, "training.loss: .*'example_mean' or 'token_mean'"),
        ({"learning_rate": "nan"}, "training.learning_rate"),
        ({"rank": 4, "adapter.rank": 8}, "rank and adapter.rank are one field; give it once"),
    ],
)
def test_a_wrong_value_is_named_with_its_field(settings, message):
    with pytest.raises(ValueError, match=message):
        standard_cl().changed(settings)


def test_recipes_are_frozen_and_refuse_unknown_fields():
    with pytest.raises(ValidationError):
        standard_cl().name = "other"
    with pytest.raises(ValidationError, match="extra"):
        Recipe.model_validate(standard_cl().model_dump() | {"speed": 3})


def test_differences_name_path_and_both_values():
    cell = RunConfig(method="sfor", order=("a", "b"), seed=1, recipe=standard_cl())
    other = cell.model_copy(update={"seed": 2, "recipe": standard_cl().changed({"rank": 4})})
    assert differences(cell, other) == ["seed: 1 -> 2", "recipe.adapter.rank: 8 -> 4"]
    assert differences(cell, RunConfig.model_validate(cell.model_dump(mode="json"))) == []


def test_a_folder_is_the_same_with_the_slash_that_shells_add():
    recipe = standard_cl().changed({"data": "data/cl", "model": "models/base"})
    assert recipe.changed({"data": "data/cl/", "model": "models/base/"}) == recipe
    assert recipe.changed({"data": "/"}).tasks.data == "/"
