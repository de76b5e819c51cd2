"""Small finished runs as records, made by hand with stored decimals."""

from __future__ import annotations

import json
from pathlib import Path

from anchorlora.scores import Scores
from anchorlora.store.former import method_facts
from anchorlora.store.record import Record

VOLATILE = ("cost", "host", "started", "finished", "sha256")  # what may differ between two runs of one command on one machine
ORDER = ["dbpedia", "amazon", "yahoo", "agnews"]
TRIANGLES = {
    "seq-lora": [[98.0], [90.5, 55.25], [85.0, 40.0, 70.0], [80.0, 42.5, 60.0, 88.0]],
    "sfor": [[98.0], [97.5, 52.0], [97.0, 51.5, 66.0], [96.5, 51.0, 65.0, 86.0]],
    "o-lora-hard": [[98.0], [97.75, 54.0], [97.5, 53.0, 68.0], [97.25, 53.5, 67.0, 87.0]],
}
DEFINITIONS = {
    "seq-lora": "Shared()",
    "sfor": "Shared() + ProjectGradient('A') + Freeze('B') + ProjectDisplacement('A')",
    "o-lora-hard": "PerTask() + RoutingOverlap(0.5) + Retract('A') + ProjectGradient('A') + ProjectDisplacement('A')",
}
RHO = {"seq-lora": 0.31, "sfor": 6.7e-9, "o-lora-hard": 2.2e-9}


def record(method="sfor", *, name=None, definition=None, seed=42, shift=0.0, **changes) -> Record:
    triangle = [[value + shift for value in row] for row in TRIANGLES[method]]
    drift = [
        {
            "task": t,
            "d_eff": 4.25 * t,
            "d_old": RHO[method] * 4.25 * t,
            "d_new": 4.25 * t,
            "d_block": 4.25 * t,
            "rho": RHO[method],
            "rho_floor": 1.5e-8,
            "chance": 0.07,
            "rho_first": RHO[method] * 2,
            "rho_union": 0.2,
            "held_out": {"total": 0.125, "on_core": 0.1, "off_core": 0.05},
        }
        for t in (2, 3, 4)
    ]
    content = {
        "schema": 3,
        "method": method_facts(name or method, definition or DEFINITIONS[method]),
        "recipe": "standard-cl",
        "base_model": {"name": "tiny", "revision": None, "sha256": "0" * 64, "parameters": 1000, "dtype": "float32"},
        "order": ORDER,
        "seed": seed,
        "protocol": {"training": {"learning_rate": 1e-4}},
        "threads": 1,
        "accuracy": triangle,
        "invalid": [[1.0] * len(row) for row in triangle],
        "scores": Scores.of(triangle).as_dict(),
        "drift": drift,
        "layers": [[{"module": "q_proj", "k": 4, "k_star": 1, "retained_energy": 0.95, "rows": 128 * t}] for t in (1, 2, 3, 4)],
        "cost": {
            "train_seconds": [10.0, 5.0, 10.0, 4.0],
            "evaluate_seconds": 12.5,
            "peak_memory_bytes": 512_000_000,
            "trained_parameters": 100,
            "stored_parameters": 400,
            "history_bytes": 2048,
        },
        "versions": {"anchorlora": "0.1.0"},
        "data": {"TC/agnews/test.json": {"sha256": "a" * 64, "kind": "official bytes"}},
        "host": {"system": "Linux"},
        "started": "2026-01-01T00:00:00+00:00",
        "finished": "2026-01-01T00:01:00+00:00",
    }
    return Record.model_validate(content | changes)


def write(root: Path, *records: Record) -> Path:
    for r in records:
        folder = root / f"{r.method.name}-{r.seed}"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(r.as_json())
    return root


def three_methods(root: Path) -> Path:
    return write(root, *(record(m, seed=s, shift=d) for m in TRIANGLES for s, d in ((38, -0.5), (42, 0.0), (2026, 1.0))))


def edited(root: Path, *, name=None, **fields) -> Path:
    """One record with fields overwritten as raw JSON."""
    path = root / "sfor-42/record.json"
    path.parent.mkdir(parents=True)
    path.write_text(record(name=name).as_json())
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return root
