"""A study made by hand: every method, order and seed, with drawn accuracies; and a mechanism trace.  Nothing was trained."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from random import Random

import records
from anchorlora.scores import Scores
from anchorlora.store.former import method_facts
from anchorlora.store.record import BaseModelFacts, DataFile, Record

DEFINITIONS = {
    "seq-lora": "Shared()",
    "replay": "Shared() + Rehearsal(500, 0.05)",
    "ewc": "Shared() + FisherAnchor(10000.0)",
    "lwf": "Shared() + Distill(2.0)",
    "projected-lora": "Shared() + ProjectGradient('A')",
    "projected-lora-wrp": "Shared() + ProjectGradient('A') + ProjectDisplacement('A')",
    "projected-lora-freeze-b": "Shared() + ProjectGradient('A') + Freeze('B')",
    "sfor": "Shared() + ProjectGradient('A') + Freeze('B') + ProjectDisplacement('A')",
    "inc-lora": "PerTask()",
    "n-lora": "PerTask() + Sparsity(0.1)",
    "sd-lora": "GatedPerTask(0.01)",
    "o-lora": "PerTask() + RoutingOverlap(0.5)",
    "o-lora-retract": "PerTask() + RoutingOverlap(0.5) + Retract('A')",
    "o-lora-retract-gradient": "PerTask() + RoutingOverlap(0.5) + Retract('A') + ProjectGradient('A')",
    "o-lora-hard": "PerTask() + RoutingOverlap(0.5) + Retract('A') + ProjectGradient('A') + ProjectDisplacement('A')",
    "o-lora-effective": "PerTask() + RoutingOverlap(0.5) + EffectiveResponse(1.0)",
    "o-lora-bsr": "PerTask() + RoutingOverlap(0.5) + Retract('A') + ProjectGradient('A') + ProjectDisplacement('A') + "
    "EffectiveResponse(1.0)",
}
RHO = {"seq-lora": 0.31, "projected-lora": 0.19, "projected-lora-wrp": 0.16, "projected-lora-freeze-b": 0.15}
RHO |= {"sfor": 6.7e-9, "o-lora-hard": 2.2e-9, "o-lora-bsr": 2.3e-9, "o-lora-retract": 0.002}
TRACED = ("projected-lora", "projected-lora-wrp", "projected-lora-freeze-b", "sfor")
TRACED += ("o-lora", "o-lora-hard", "o-lora-effective", "o-lora-bsr")
TASKS = ("dbpedia", "amazon", "yahoo", "agnews")
MINI = ("entities", "reviews", "questions", "news")
PLACES = {"order1": (0, 1, 2, 3), "order2": (0, 1, 3, 2), "order3": (2, 1, 3, 0)}
SEEDS = (38, 42, 2026)
SIZES = {"dbpedia": 10000, "amazon": 5000, "yahoo": 10000, "agnews": 4000} | dict.fromkeys(MINI, 320)
OFFICIAL = DataFile(sha256="a" * 64, kind="official bytes")
LAYERS = [f"model.layers.{i}.self_attn.{name}" for i in range(4) for name in ("q_proj", "v_proj")]


def protocol(order: Iterable[str], **changes) -> dict:
    """A protocol as a record has it."""
    return {
        "tasks": {"train_limit": 10000, "test_limit": None},
        "base_model": {"dtype": "auto", "device": "auto", "threads": 1},
        "adapter": {"targets": ["q_proj", "v_proj"], "rank": 8, "alpha": 32.0, "dropout": 0.1},
        "features": {"rows": 128, "energy": 0.93, "at_least": 4, "at_most": 20, "wide": 64},
        "training": {"epochs": 1, "window": 8, "learning_rate": 1e-4, "betas": [0.9, 0.999]},
        "examples": {task: {"train": SIZES.get(task, 80), "test": 640} for task in order},
    } | changes


def run(method: str, *, name="", definition="", order="order1", seed=42, tasks=TASKS, **changes) -> Record:
    """One finished run with accuracies that depend on nothing but method, order and seed."""
    named = tuple(tasks[i] for i in PLACES[order]) if isinstance(order, str) else tuple(order)
    draw = Random(f"{method} {named} {seed}")
    size, rho = len(named), RHO.get(method, 0.08)
    start = [draw.uniform(50, 98) for _ in named]
    loss = [min(4.0, 12 * rho) * draw.uniform(0, 1) for _ in named]
    triangle = [[round(start[i] - loss[i] * (t - i) + draw.uniform(-0.3, 0.3), 4) for i in range(t + 1)] for t in range(size)]
    facts = records.record().drift[0].model_dump()
    drift = [
        facts | {"task": t, "rho": rho * draw.uniform(0.8, 1.2), "rho_first": rho * draw.uniform(0.9, 2), "rho_union": 0.1 + rho}
        for t in range(2, size + 1)
    ]
    layer = {"k": 12, "k_star": 12, "rows": 128}
    energies = [0.9 + 0.08 * math.sin(i) ** 2 + draw.uniform(0, 0.01) for i, _ in enumerate(LAYERS)]
    layers = [[layer | {"module": m, "retained_energy": e} for m, e in zip(LAYERS, energies, strict=True)] for _ in named]
    cost = {"train_seconds": [draw.uniform(5, 20) for _ in named], "evaluate_seconds": draw.uniform(10, 20)}
    cost |= {"peak_memory_bytes": 512_000_000, "trained_parameters": 40_000, "stored_parameters": 160_000}
    content = records.record().model_dump(by_alias=True) | {
        "method": method_facts(name or method, definition or DEFINITIONS[method]),
        "order": list(named),
        "seed": seed,
        "protocol": protocol(named),
        "accuracy": triangle,
        "invalid": [[round(10 * rho * draw.random(), 3) for _ in row] for row in triangle],
        "scores": Scores.of(triangle).as_dict(),
        "drift": drift,
        "layers": layers,
        "cost": cost | {"history_bytes": int(1e5 * draw.random())},
    }
    return Record.model_validate(content | changes)


def save(root: Path, *made: Record) -> Path:
    """Run directories with records."""
    for r in made:
        folder = folder_of(root, r)
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(r.as_json())
    return root


def folder_of(root: Path, r: Record) -> Path:
    return root / f"{r.recipe}-{r.base_model.name}-{r.method.name}-{'-'.join(r.order)}-{r.seed}".replace("/", "_")


def grid(methods=tuple(DEFINITIONS), orders=tuple(PLACES), seeds=SEEDS, **changes) -> list[Record]:
    return [run(m, order=o, seed=s, **changes) for m in methods for o in orders for s in seeds]


def papers_own(made: Iterable[Record], *, model="Qwen/Qwen3-8B", parameters=8_190_735_360) -> list[Record]:
    """The records as those of the paper's own model and data: printed values may stand beside them."""
    base_model = {"name": model, "revision": None, "sha256": None, "parameters": parameters, "dtype": "bfloat16"}
    return [r.model_copy(update=official(r) | {"base_model": BaseModelFacts(**base_model)}) for r in made]


def official(r: Record) -> dict:
    """The files of the benchmark and as many examples of them as the paper has."""
    files = {f"group/{task}/{name}.json": OFFICIAL for task in r.order for name in ("labels", "test", "train")}
    sizes = {task: {"train": SIZES[task], "test": 7600} for task in r.order}
    return {"data": files, "protocol": r.protocol | {"examples": sizes}}


def points(method: str, *, seed: int, steps: int = 40, count: int = 21) -> list[dict]:
    """A trace whose ratio grows to the method's endpoint."""
    rho, draw = RHO.get(method, 0.08), Random(f"{method} {seed}")
    end = rho * draw.uniform(0.9, 1.1)
    out = []
    for i in range(count):
        step, size = round(i * steps / (count - 1)), 0.2 * i
        now = end * (0.5 + 0.5 * i / (count - 1)) if i else None
        out.append(
            {
                "task": 2,
                "step": step,
                "d_eff": size,
                "d_old": size * (now or 0),
                "d_new": size * math.sqrt(1 - (now or 0) ** 2),
                "d_block": size,
                "rho": now,
                "rho_floor": 1.5e-8 if i else None,
                "chance": 0.07 if i else None,
                "wrp_before": 1e-3 * (1 + draw.random()) if i else None,
                "wrp_after": 1e-9 * (1 + draw.random()) if i else None,
                "penalties": {},
                "grad_norms": {"task": 1.0 if i else None, "penalties": 0.0 if i else None},
            }
        )
    return out


def traced(root: Path, methods=TRACED, seeds=SEEDS, *, tasks=("dbpedia", "amazon"), steps: int = 40, like=list, **changes) -> Path:
    """Run directories of a mechanism trace; all methods of a seed name one Task-1 state.  like: what is made of each record."""
    for method in methods:
        for seed in seeds:
            plan = protocol(tasks, task1_state=f"{seed:064d}", examples={task: {"train": 8 * steps, "test": 8} for task in tasks})
            (made,) = like([run(method, order=tasks, seed=seed, **({"protocol": plan} | changes))])
            save(root, made)
            write_points(folder_of(root, made) / "trace.jsonl", points(method, seed=seed, steps=steps))
    return root


def write_points(path: Path, lines: Iterable[dict | str]) -> None:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def evaluation(*, after: float, base: float = 74.7, **changes) -> str:
    """The text of an eval.json."""
    scores = {"base": {"score": base, "stderr": 0.3}, "after": {"score": after, "stderr": 0.3}}
    scores |= {"change": after - base, "change_stderr": 0.2}
    task = {"task": "mmlu", "metric": "acc", "n": 14042, "num_fewshot": 0, **scores}
    parts = {"mmlu_anatomy": {"n": 135, "base": 60.0, "after": 61.0}}
    content = {"schema": 3, **task, "limit": None, "num_fewshot": None, "apply_chat_template": False, "prompts": None, "cut": 0}
    content |= {"files": {}, "adapter_sha256": "0" * 64, "versions": {}}
    content["base_model"] = {"name": "tiny", "sha256": None, "dtype": "float32"}
    flips = {"right_to_wrong": 30, "wrong_to_right": 20}
    whole = {**task, "flips": flips, "metrics": {"acc": scores}, "parts": parts}
    content["tasks"] = [whole | {name: value for name, value in changes.items() if name in task}]
    return json.dumps(content | changes)


def evaluation_2(*, after: float, base: float = 74.7, **changes) -> str:
    """The text of an eval.json of schema 2, which had one task."""
    content = {"schema": 2, "task": "mmlu", "metric": "acc", "limit": None, "n": 14042, "change": after - base, "versions": {}}
    content |= {"base": {"score": base, "stderr": 0.3}, "after": {"score": after, "stderr": 0.3}}
    content |= {"few_shot": 0, "cut": 0, "data_sha256": None, "adapter_sha256": "0" * 64}
    content["base_model"] = {"name": "tiny", "sha256": None, "dtype": "float32"}
    content["parts"] = {"mmlu_anatomy": {"n": 135, "base": 60.0, "after": 61.0}}
    return json.dumps(content | changes)
