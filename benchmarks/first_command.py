"""What README's first command learns, keeps and costs on a real chat model, beside plain LoRA at its best rate.

The frontier's new skills and old abilities (`anchorlora_lab.frontier`), 192 chats of a skill; every variant is `anchorlora train`
in a process of its own, whose CPU seconds and peak memory count, and is tested as merged weights.

    before    the model as it was
    plain     --method inc-lora at the rate, targets and epochs that the frontier chose for plain LoRA
    command   --keep self, nothing else given

Run: python -m benchmarks.first_command OUT MODEL DATA [SKILL,.. [SEED,..]]; called again, only what is missing.  OUT/records.jsonl
holds a line a run; MODEL is a chat model's folder, DATA holds standard_cl.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from anchorlora_lab.frontier.bench import append, read_records
from anchorlora_lab.frontier.engine import Subject
from anchorlora_lab.frontier.measures import Measures, Sizes
from anchorlora_lab.frontier.skills import Skill, skills

SKILLS, SEEDS = ("labels", "card", "passage", "style"), (42, 7, 2026)
BEFORE = "before"
VARIANTS = {
    "plain": ["--method", "inc-lora", "--targets", "all-linear", "--learning-rate", "5e-4", "--epochs", "2"],
    "command": ["--keep", "self"],
}
if more := os.environ.get("ANCHORLORA_VARIANTS"):  # NAME=WORDS;NAME=WORDS, to try others
    VARIANTS = {name: words.split() for name, _, words in (each.partition("=") for each in more.split(";"))}


def write_data(skill: Skill, seed: int, path: Path) -> None:
    """Write a skill's training chats, as people have them."""
    rows = [
        {"messages": [{"role": "user", "content": item.prompt}, {"role": "assistant", "content": item.answer}]}
        for item in skill.drawn(Sizes().train, seed)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def timed(*words: str) -> dict[str, float]:
    """Run a command of anchorlora; return its CPU seconds and its peak memory in bytes."""
    pid = subprocess.Popen([sys.executable, "-m", "anchorlora", *words], env={**os.environ, "OMP_NUM_THREADS": "1"}).pid
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"anchorlora {' '.join(words)}: {os.waitstatus_to_exitcode(status)}")
    return {"cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_bytes": 1024 * usage.ru_maxrss}


def scores(model: str, data: Path, skill: Skill, out: Path) -> dict[str, Any]:
    """Answers of a model's folder, example by example, on a new skill and on old abilities."""
    subject = Subject.of(model, out / "made")
    with subject.scaled(0.0):
        found = Measures(subject, data, Sizes()).of(skill)
    return {name: found[name] for name in ("new", "old")}


def one(out: Path, model: str, data: Path, skill: Skill, seed: int, variant: str) -> None:
    """Carry out one variant and append its record."""
    name = f"{skill.name}-{seed}"
    run, merged, cost = out / "runs" / f"{name}-{variant}", out / "merged", {}
    if variant != BEFORE:
        write_data(skill, seed, out / "data" / f"{name}.jsonl")
        file = str(out / "data" / f"{name}.jsonl")
        cost = timed("train", model, "--data", file, *VARIANTS[variant], "--seed", str(seed), "--out", str(run))
        shutil.rmtree(merged, ignore_errors=True)
        timed("export", str(run), "--form", "merged", "--dtype", "float32", "--out", str(merged))
        cost["stored_bytes"] = (run / "adapter/adapter_model.safetensors").stat().st_size
    found = scores(model if variant == BEFORE else str(merged), data, skill, out)
    words = VARIANTS.get(variant, [])
    append(out, {"variant": variant, "skill": skill.name, "seed": seed, "options": " ".join(words), **cost, **found})
    kept = {ability: round(100 * sum(values) / len(values)) for ability, values in found["old"].items()}
    print(f"{name} {variant}: new {100 * sum(found['new']) / len(found['new']):.0f} {kept} {cost}", flush=True)


def main(out: Path, model: str, data: Path, names: list[str], seeds: list[int]) -> None:
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    known = skills(data, test=Sizes().test)
    for seed in seeds:
        for name in names:
            for variant in (BEFORE, *VARIANTS):
                done = {(r["variant"], r["skill"], r["seed"]) for r in read_records(out)}
                if (variant, name, seed) not in done and not (variant == BEFORE and seed != seeds[0]):
                    one(out, model, data, known[name], seed, variant)


if __name__ == "__main__":
    place, model_folder, data_folder, *rest = sys.argv[1:]
    chosen = rest[0].split(",") if rest else list(SKILLS)
    main(Path(place), model_folder, Path(data_folder), chosen, [int(s) for s in rest[1].split(",")] if rest[1:] else list(SEEDS))
