"""What README's first command learns, keeps and costs on a real chat model, beside plain LoRA at 5e-4.

The frontier's new skills and old abilities (`anchorlora_lab.frontier`), 192 chats of a skill; every variant is `anchorlora train`
in a process of its own, whose CPU seconds and peak memory count, and is tested as merged weights.

    before    the model as it was
    peft      plain LoRA at 5e-4, on all linear layers, for two epochs, by transformers' Trainer: batches of four chats
              of like length, and answers to the held-out chats before and after by `generate`
    plain     the same by --method inc-lora
    command   --keep self, nothing else given
    rival     the same with --method replay: plain LoRA with the model's own text in the mix
    kl        the same with --method replay-kl: one own text for each chat, and the divergence from the model before on it

    plain-chain, ..    the same for labels; then card, and then passage, with --after: all skills so far are tested, on more
                       examples than elsewhere. Plain LoRA trains the same adapter further.

Run: python -m benchmarks.first_command OUT MODEL DATA [SKILL,.. [SEED,..]]; called again, only what is missing.  OUT/records.jsonl
holds a line a run; MODEL is a chat model's folder, DATA holds standard_cl. "chain" among the skills runs the chains.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoTokenizer

from anchorlora_lab.frontier.bench import append, read_records
from anchorlora_lab.frontier.measures import Measures, Sizes
from anchorlora_lab.frontier.skills import Skill, skills
from anchorlora_lab.frontier.subject import Subject

SKILLS, SEEDS = ("labels", "card", "passage", "style"), (42, 7, 2026)
CHAIN = {"labels": 400, "card": 200, "passage": 200}  # and how many examples tell what is kept of each
BEFORE = "before"
PEFT = "peft"
VARIANTS = {
    PEFT: [],
    "plain": ["--method", "inc-lora", "--targets", "all-linear", "--learning-rate", "5e-4", "--epochs", "2"],
    "command": ["--keep", "self"],
    "rival": ["--keep", "self", "--method", "replay"],
    "kl": ["--keep", "self", "--method", "replay-kl", "--set", "Rehearsal.share=1"],
}
NEXT = {  # in a chain, where --keep is that of the first skill
    "plain": ["--method", "seq-lora", "--same-size", "--learning-rate", "5e-4", "--epochs", "2"],
    "command": [],
    "rival": ["--method", "replay"],
}
if more := os.environ.get("ANCHORLORA_VARIANTS"):  # NAME=WORDS or NAME=WORDS>NEXT WORDS, with ; between, to try others
    said = {name: words.partition(">") for name, _, words in (each.partition("=") for each in more.split(";"))}
    VARIANTS = {name: first.split() for name, (first, _, _) in said.items()}
    NEXT = {name: words.split() for name, (_, _, words) in said.items()}


def write_data(skill: Skill, seed: int, path: Path, model: str) -> None:
    """Write a skill's training chats, as people have them; for a model without a chat template, prompts and completions."""
    drawn = skill.drawn(Sizes().train, seed)
    if AutoTokenizer.from_pretrained(model).chat_template:
        turns = [(("user", item.prompt), ("assistant", item.answer)) for item in drawn]
        rows: list[dict[str, Any]] = [{"messages": [{"role": role, "content": text} for role, text in pair]} for pair in turns]
    else:
        rows = [{"prompt": f"{item.prompt}\n", "completion": item.answer} for item in drawn]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def by_peft(model: str, file: Path, out: Path, seed: int) -> None:
    """Train as PEFT's pages show it, with a tenth of the chats held out; save the adapter and the merged weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from benchmarks.training import right_padded

    torch.set_num_threads(1)
    tokenizer, base = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = [json.loads(line)["messages"] for line in file.read_text(encoding="utf-8").splitlines()]
    random.Random(seed).shuffle(rows)
    asked = [tokenizer.apply_chat_template(row[:1], add_generation_prompt=True, return_dict=False) for row in rows]
    whole = [tokenizer.apply_chat_template(row, return_dict=False) for row in rows]
    held = len(rows) // 10
    learned = [{"input_ids": ids, "answer": ids[len(ask) :], "prompt": ask} for ask, ids in zip(asked, whole, strict=True)][held:]
    config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(base, config)

    def answer() -> None:
        batch = tokenizer.pad({"input_ids": asked[:held]}, padding_side="left", return_tensors="pt")
        with torch.inference_mode():
            adapted.eval().generate(**batch, max_new_tokens=128, do_sample=False)

    def collated(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return right_padded([SimpleNamespace(**e) for e in batch], tokenizer.pad_token_id)

    arguments = TrainingArguments(
        str(out / "trainer"), per_device_train_batch_size=4, num_train_epochs=2, learning_rate=5e-4, report_to=[], use_cpu=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False, seed=seed,
        lr_scheduler_type="cosine", warmup_steps=0.03, train_sampling_strategy="group_by_length",
    )  # fmt: skip
    answer()
    Trainer(adapted.train(), arguments, train_dataset=learned, data_collator=collated).train()
    answer()
    adapted.save_pretrained(out / "adapter")
    adapted.merge_and_unload().save_pretrained(out / "merged")
    tokenizer.save_pretrained(out / "merged")


def timed(*words: str, module: str = "anchorlora") -> dict[str, float]:
    """Run a command; return its CPU seconds and its peak memory in bytes."""
    pid = subprocess.Popen([sys.executable, "-m", module, *words], env={**os.environ, "OMP_NUM_THREADS": "1"}).pid
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"{module} {' '.join(words)}: {os.waitstatus_to_exitcode(status)}")
    return {"cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_bytes": 1024 * usage.ru_maxrss}


def scores(model: str, data: Path, skill: Skill, out: Path) -> dict[str, Any]:
    """Answers of a model's folder, example by example, on a new skill and on old abilities."""
    subject = Subject.of(model, out / "made")
    with subject.scaled(0.0):
        found = Measures(subject, data, Sizes()).of(skill)
    return {name: found[name] for name in ("new", "old")}


def trained(out: Path, model: str, data: Path, skill: Skill, seed: int, variant: str, words: list[str]) -> dict[str, Any]:
    """Train a variant on a skill; return what it cost. Its merged weights lie in OUT/merged."""
    run, merged, file = out / "runs" / f"{skill.name}-{seed}-{variant}", out / "merged", out / "data" / f"{skill.name}-{seed}.jsonl"
    write_data(skill, seed, file, model)
    shutil.rmtree(merged, ignore_errors=True)
    if variant == PEFT:
        cost = timed(PEFT, model, str(file), str(run), str(seed), module="benchmarks.first_command")
        shutil.move(run / "merged", merged)
        return cost | {"stored_bytes": (run / "adapter/adapter_model.safetensors").stat().st_size}
    cost = timed("train", model, "--data", str(file), *words, "--seed", str(seed), "--out", str(run))
    timed("export", str(run), "--form", "merged", "--dtype", "float32", "--out", str(merged))
    return cost | {"stored_bytes": (run / "adapter/adapter_model.safetensors").stat().st_size}


def one(out: Path, model: str, data: Path, skill: Skill, seed: int, variant: str) -> None:
    """Carry out one variant and append its record."""
    words = VARIANTS.get(variant, [])
    cost = trained(out, model, data, skill, seed, variant, words) if variant != BEFORE else {}
    found = scores(model if variant == BEFORE else str(out / "merged"), data, skill, out)
    append(out, {"variant": variant, "skill": skill.name, "seed": seed, "options": " ".join(words), **cost, **found})
    print(f"{skill.name}-{seed} {variant}: new {percent(found['new'])} {old_of(found)} {cost}", flush=True)


def answered(model: str, skill: Skill, out: Path) -> list[float]:
    """Answers of a model's folder on a new skill alone."""
    subject = Subject.of(model, out / "made")
    with subject.scaled(0.0):
        said = subject.answers([item.prompt for item in skill.test], max_new_tokens=skill.max_new_tokens)
    return [skill.score(text, item.answer) for text, item in zip(said, skill.test, strict=True)]


def chain(out: Path, model: str, data: Path, known: dict[str, Skill], seed: int, variant: str) -> None:
    """Teach one skill after another; after each, test all that there are."""
    longer = {skill: skills(data, test=count)[skill] for skill, count in CHAIN.items()}
    name, words, taught = f"{variant}-chain", VARIANTS[variant], list[str]()
    for skill in CHAIN:
        done = {(r["variant"], r["skill"], r["seed"]) for r in read_records(out)}
        mine = [*NEXT[variant], "--after", str(out / "runs" / f"{taught[-1]}-{seed}-{name}")] if taught else words
        taught.append(skill)
        if (name, skill, seed) in done:
            continue
        cost = trained(out, model, data, known[skill], seed, name, mine)
        found = scores(str(out / "merged"), data, known[skill], out)
        skills_so_far = {each: answered(str(out / "merged"), longer[each], out) for each in taught}
        options = " ".join(Path(word).name for word in mine)  # of the skill before, the run's name alone
        record = {"variant": name, "skill": skill, "seed": seed, "options": options, "skills": skills_so_far, **cost}
        append(out, record | found)
        said = {each: percent(answers) for each, answers in skills_so_far.items()}
        print(f"{skill}-{seed} {name}: {said} {old_of(found)} {cost}", flush=True)


def percent(answers: list[float]) -> int:
    return round(100 * sum(answers) / len(answers))


def old_of(found: dict[str, Any]) -> dict[str, int]:
    return {ability: percent(values) for ability, values in found["old"].items()}


def main(out: Path, model: str, data: Path, names: list[str], seeds: list[int]) -> None:
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    known = skills(data, test=Sizes().test)
    for seed in seeds:
        for name in names:
            if name == "chain":
                for variant in NEXT:
                    chain(out, model, data, known, seed, variant)
                continue
            for variant in (BEFORE, *VARIANTS):
                done = {(r["variant"], r["skill"], r["seed"]) for r in read_records(out)}
                if (variant, name, seed) not in done and not (variant == BEFORE and seed != seeds[0]):
                    one(out, model, data, known[name], seed, variant)


if __name__ == "__main__" and sys.argv[1] == PEFT:
    by_peft(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
elif __name__ == "__main__":
    place, model_folder, data_folder, *rest = sys.argv[1:]
    chosen = rest[0].split(",") if rest else list(SKILLS)
    main(Path(place), model_folder, Path(data_folder), chosen, [int(s) for s in rest[1].split(",")] if rest[1:] else list(SEEDS))
