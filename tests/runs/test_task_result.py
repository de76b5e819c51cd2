"""A task's numbers: declared once, and in the record where the declaration says."""

import json
from dataclasses import fields
from typing import get_type_hints

import pytest

import records
from anchorlora.store.former import FORMER
from anchorlora.store.record import Cost, Record, TaskResult, read_record

DRIFT = {"task": 2, "rho": 0.5}


def result(number, **changes):
    numbers = {
        "accuracy": [50.0] * number,
        "invalid": [0.0] * number,
        "metrics": [{"exact_match": 50.0, **({"f1": 25.0} if task else {})} for task in range(number)],
        "drift": DRIFT if number > 1 else None,
        "layers": [{"module": "q", "k": number}],
        "train_seconds": 10.0 * number,
        "evaluate_seconds": 1.0 * number,
        "peak_memory_bytes": 300 - number,
        "trained_parameters": 5,
        "stored_parameters": 5 * number,
        "history_bytes": 7 * number,
    }
    return TaskResult(number=number, task=f"task {number}", **numbers | changes)


def test_the_numbers_of_all_tasks_become_those_of_the_record():
    assert TaskResult.collected([result(1), result(2)]) == {
        "accuracy": [[50.0], [50.0, 50.0]],
        "invalid": [[0.0], [0.0, 0.0]],
        "metrics": {"exact_match": [[50.0], [50.0, 50.0]], "f1": [[None], [None, 25.0]]},
        "drift": [DRIFT],
        "layers": [[{"module": "q", "k": 1}], [{"module": "q", "k": 2}]],
        "cost": {
            "train_seconds": [10.0, 20.0],
            "evaluate_seconds": 3.0,
            "peak_memory_bytes": 299,
            "trained_parameters": 5,
            "stored_parameters": 10,
            "history_bytes": 14,
        },
    }


def test_every_number_of_a_task_has_a_place_in_the_record():
    hints = get_type_hints(TaskResult, include_extras=True)
    places = {
        each.name: hints[each.name].__metadata__[0].place for each in fields(TaskResult) if each.name not in ("number", "task")
    }
    sections = {"": Record.model_fields, "cost": Cost.model_fields}
    for name, place in places.items():
        section, _, field = place.rpartition(".")
        assert field in sections[section], name
    assert {f"cost.{name}" for name in Cost.model_fields} <= set(places.values())


@pytest.mark.parametrize("schema", [1, 2])
def test_records_of_former_schemas_are_read_in_the_words_of_schema_3(schema, tmp_path):
    new = records.record()
    old = json.loads(new.as_json()) | {"schema": schema, "method": new.method.name, "definition": new.method.definition}
    if schema == 1:
        former = {after: before for before, after in FORMER.items()}
        old = {former.get(name, name): value for name, value in old.items()}
        assert {"backbone", "illegal", "sites"} <= set(old)
    (tmp_path / "record.json").write_text(json.dumps(old))
    assert read_record(tmp_path / "record.json") == new
