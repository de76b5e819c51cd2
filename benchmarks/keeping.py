"""What keeping an old skill is worth on real text, side by side: `anchorlora train` against what people would use instead.

A base model learned dbpedia before, by plain PEFT (a LoRA adapter of rank 8 on q_proj and v_proj). Now it learns agnews from a
prompt/completion file. Tested on both tasks and on plain text, which is its language modelling. All variants: 1,600 examples once,
eight a step, AdamW at a constant 1e-3, rank 8.

    block              a new LoRA block beside the old adapter, nothing protected        anchorlora train --method inc-lora
    snapshot           the same, and the mean of the weights before and after            .. --method snapshot
    keep old text      200 old prompts with answers and 200 passages protected           anchorlora train --keep
    keep self          512 texts that the model writes itself protected                  anchorlora train --keep self
    .. sensitive-core  the same text, of which what answers depend on is protected       .. --method sensitive-core
    .. fold-16         the same, and old adapter and new block folded into rank 16       .. --method fold-16
    .., same size      the same, with the old adapter trained further                    .. --same-size
    OPLoRA             a new block off the leading singular directions of the weights    .. --method oplora
    plain PEFT         the old adapter trained further, as PEFT's documentation shows
    replay 5 %         the same, with one old example for every twenty new ones
    .. equal memory    the same, with what `keep old text` stores: 200 old prompts with answers and 200 passages, each once
    KL on own text     the same, with the KL divergence to the old model on texts that it writes itself
    OSF                PEFT's OSF on the merged model (q_proj and v_proj, its default rank), which trains full weights

Run: ANCHORLORA_SHARED=FOLDER python -m benchmarks.keeping OUT [SEED ..]; called again, only what is missing. OUT SEED NAME carries
out one variant, also one of `without` (fold-16 with a part changed or left out). OUT/*.json are the results: copied to
results/keeping, tools/results_keeping.py makes tables of them. With ANCHORLORA_TARGETS=all-linear, every adapter is on all linear
layers, the old one, too; those results are in results/keeping-linear.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, OSFConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.utils import logging

from anchorlora import METHODS
from anchorlora.adapters import attach
from anchorlora.config import BaseModelSettings
from anchorlora.constraints import GradientStart, KroneckerBrake, ProjectDisplacement, Retract, SensitiveCore
from anchorlora.continual.callback import RunCallback, TaskState
from anchorlora.continual.seeds import number
from anchorlora.data import Benchmark, TextFiles, TextSource
from anchorlora.methods import Method, MethodTable, PerTask
from anchorlora.models.load import LoadedModel, load_base_model
from anchorlora.models.own_text import OWN_TOKENS, own_text
from anchorlora.models.session import Session
from anchorlora.store.files import write_lines
from anchorlora.train import train_skill
from anchorlora.train.request import CORES, MEMORY, default_recipe, skill_request
from anchorlora.train.stages import score_tasks

SEEDS = (38, 42, 2026)
TRAIN, TEST, KEPT, OWN = 1600, 400, 200, 512
WINDOW, RATE, KL_WEIGHT = 8, 1e-3, 1.0
OLD = "old adapter"
ALL_LINEAR = os.environ.get("ANCHORLORA_TARGETS") == "all-linear"
TARGETS = ["q_proj", "v_proj", *(["k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"] if ALL_LINEAR else [])]
SAME = {
    "epochs": "1", "rank": "8", "alpha": "32", "dropout": "0.1", "learning_rate": str(RATE), "schedule": "constant", "warmup": "0",
    "clip_norm": "none", "loss": "example_mean", "window": str(WINDOW), "max_tokens": "512", "max_new_tokens": "20",
    "test_limit": str(TEST), "targets": ",".join(TARGETS), "threads": "1",
}  # fmt: skip
Rows = list[dict[str, str]]


def shared() -> Path:
    return Path(os.environ["ANCHORLORA_SHARED"])


def settings() -> BaseModelSettings:
    return BaseModelSettings(model=str(shared() / "backbones/mini-en"), dtype="float32", device="cpu", threads=1)


def write_data(folder: Path) -> None:
    """The files, once: what is learned, what was learned before, and passages of other texts."""
    if (folder / "text-test.jsonl").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    source = Benchmark(shared() / "data/standard_cl")
    for name in ("dbpedia", "agnews"):
        task = source.task(name)
        for split, most in (("train", TRAIN), ("test", TEST)):
            found = source.examples(name, split, limit=most)
            write_lines(
                folder / f"{name}-{split}.jsonl", [{"prompt": task.prompt(e.sentence), "completion": e.label} for e in found]
            )
    passages = [{"text": e.sentence} for e in source.examples("yahoo", "train", limit=2 * KEPT)]
    write_lines(folder / "dbpedia-kept.jsonl", rows_of(folder / "dbpedia-train.jsonl")[:KEPT])
    write_lines(folder / "text-kept.jsonl", passages[:KEPT])
    write_lines(folder / "text-test.jsonl", passages[KEPT:])


def rows_of(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tests(folder: Path) -> dict[str, TextFiles]:
    """Both tasks and plain text."""
    places = {name: str(folder / f"{name}-test.jsonl") for name in ("agnews", "dbpedia", "text")}
    return {name: TextFiles({name: TextSource(place, test=place)}) for name, place in places.items()}


def tested(loaded: LoadedModel, model: Any, folder: Path) -> dict[str, Any]:
    session = Session(settings())
    session.loaded = loaded  # what is tested is loaded already
    return score_tasks(session, model, tests(folder), default_recipe().changed(SAME), lambda said: None)


def tokens(tokenizer: Any, row: dict[str, str]) -> tuple[list[int], list[int]]:
    prompt, answer = (row["prompt"], row["completion"]) if "prompt" in row else ("", row["text"])
    return tokenizer(prompt).input_ids, [*tokenizer(answer).input_ids, tokenizer.eos_token_id]


def batches(tokenizer: Any, rows: Rows, seed: int) -> Iterator[list[tuple[list[int], list[int]]]]:
    order = list(rows)
    random.Random(seed).shuffle(order)
    for start in range(0, len(order), WINDOW):
        yield [tokens(tokenizer, row) for row in order[start : start + WINDOW]]


def padded(batch: Sequence[tuple[list[int], list[int]]], pad: int) -> dict[str, Tensor]:
    longest = min(512, max(len(p) + len(a) for p, a in batch))
    ids, labels = torch.full((len(batch), longest), pad), torch.full((len(batch), longest), -100)
    mask = torch.zeros(len(batch), longest, dtype=torch.long)
    for i, (prompt, answer) in enumerate(batch):
        prompt, answer = prompt[: max(0, longest - len(answer))], answer[:longest]
        whole = torch.tensor(prompt + answer)
        ids[i, : len(whole)], mask[i, : len(whole)] = whole, 1
        labels[i, len(prompt) : len(whole)] = torch.tensor(answer)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def example_mean(model: Any, batch: Sequence[tuple[list[int], list[int]]], pad: int) -> Tensor:
    """The mean over examples of each one's loss per token; passages go by themselves, so that nothing is padded to their length."""
    total = torch.tensor(0.0)
    for part in ([pair for pair in batch if pair[0]], [pair for pair in batch if not pair[0]]):
        if part:
            inputs = padded(part, pad)
            logits, labels = model(**inputs).logits[:, :-1], inputs["labels"][:, 1:]
            losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none")  # 0 where there is no label
            total = total + (losses.sum(1) / (labels != -100).sum(1)).sum()
    return total / len(batch)


def trained(
    model: Any, tokenizer: Any, rows: Rows, seed: int, extra: Callable[[int], Tensor] | None = None, *, alike: bool = False
) -> float:
    """One pass, as PEFT's documentation shows it; with `alike`, each example counts alike.  Returns CPU seconds."""
    torch.manual_seed(seed)
    model.train()
    began = time.process_time()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
    for step, batch in enumerate(batches(tokenizer, rows, seed)):
        pad = tokenizer.pad_token_id
        loss = example_mean(model, batch, pad) if alike else model(**padded(batch, pad)).loss
        (loss if extra is None else loss + extra(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return time.process_time() - began


class Clock(RunCallback):
    """CPU seconds of training."""

    seconds = 0.0

    def on_task_begin(self, number: int, task: str, steps: int, done: int) -> None:
        self.began = time.process_time()

    def on_task_trained(self, state: TaskState) -> None:
        self.seconds = time.process_time() - self.began


def old_adapter(folder: Path, seed: int) -> Path:
    done = place_of(folder.parent, seed, OLD)
    if not done.exists():
        loaded = load_base_model(settings())
        torch.manual_seed(seed)
        config = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.1, target_modules=TARGETS, task_type="CAUSAL_LM")
        model = get_peft_model(loaded.model, config)
        trained(model, loaded.tokenizer, rows_of(folder / "dbpedia-train.jsonl"), seed)
        model.save_pretrained(done.parent)
    return done.parent


def by_us(
    folder: Path, seed: int, name: str, *, keep: Sequence[str], method: str | Method | None = None, same_size: bool = False
) -> dict[str, Any]:
    methods = METHODS if method is None or isinstance(method, str) else MethodTable({**METHODS, method.name: method})
    method = method.name if isinstance(method, Method) else method
    given: dict[str, Any] = {
        "base_model": settings().model_dump(), "data": str(folder / "agnews-train.jsonl"),
        "test": str(folder / "agnews-test.jsonl"), "name": "agnews", "old_adapter": str(old_adapter(folder, seed)),
        "keep": tuple(keep), "own": OWN, "seed": seed,
        "settings": {name: value for name, value in SAME.items() if name != "targets"},
    }  # fmt: skip
    out = folder / f"{name.replace(' ', '-')}-{seed}"
    request = skill_request(given, same_size=same_size, method=method, methods=methods)
    clock = Clock()
    verdict = train_skill(request, out, methods=methods, callbacks=[clock])
    loaded = load_base_model(settings())
    scores = tested(loaded, attach(loaded.model, out / "adapter"), folder)
    read = out / "skill/before" / (MEMORY if methods[request.method].reads_past else CORES)
    stored = (out / "adapter/adapter_model.safetensors").stat().st_size + (read.stat().st_size if read.exists() else 0)
    return {"scores": scores, "cpu_seconds": clock.seconds, "bytes": stored, "protection": asdict(verdict.protection)}


def further(folder: Path, seed: int, rows: Rows, *, kl: bool = False, alike: bool = False) -> dict[str, Any]:
    """The old adapter, trained further by PEFT alone."""
    loaded = load_base_model(settings())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(loaded.model, old_adapter(folder, seed), is_trainable=True)
    began, extra = time.process_time(), None
    if kl:
        texts = own_text(model, loaded.tokenizer, count=OWN, seed=number(seed, "own text"), max_tokens=256)
        extra = divergence(model, loaded.tokenizer, [[*row["prompt_ids"], *row["completion_ids"]] for row in texts])
    prepared = time.process_time() - began
    seconds = trained(model, loaded.tokenizer, rows, seed, extra, alike=alike)
    stored = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    return {"scores": tested(loaded, model, folder), "cpu_seconds": prepared + seconds, "bytes": stored}


def own_texts(folder: Path, seed: int) -> dict[str, Any]:
    """Which texts that the old model writes for `--keep self` have the form of the benchmark's prompts, see `form`."""
    loaded = load_base_model(settings())
    model = attach(loaded.model, old_adapter(folder, seed))
    rows = own_text(model, loaded.tokenizer, count=OWN, seed=number(seed, "own text"), max_tokens=OWN_TOKENS)
    write_lines(folder / f"own-text-{seed}.jsonl", rows)
    return {"scores": {"own text": [{"metrics": form(row["text"])} for row in rows]}, "bytes": 0}


def form(text: str) -> dict[str, float]:
    """1 for each form that a text has: any task's prompt, that of the old or the new task, or its lines without the head."""
    first, _, rest = text.partition("\n")
    prompt = first.startswith("Task:") and rest.startswith("Dataset:")
    named = {task: prompt and rest.partition("\n")[0].removeprefix("Dataset:").strip() == task for task in ("dbpedia", "agnews")}
    lines = not prompt and any(line.startswith(("Title:", "Text:", "Question:", "Answer:")) for line in text.splitlines())
    return {name: float(found) for name, found in {"benchmark": prompt, **named, "lines": lines}.items()}


def divergence(model: Any, tokenizer: Any, texts: list[list[int]]) -> Callable[[int], Tensor]:
    """KL(old model | model) per token, on eight texts a step."""
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    encoded = [tokens[:256] for tokens in texts]

    def extra(step: int) -> Tensor:
        chosen = [([], encoded[(step * WINDOW + i) % len(encoded)]) for i in range(WINDOW)]
        inputs = padded(chosen, tokenizer.pad_token_id)
        mask = inputs.pop("labels") != -100
        with torch.no_grad():
            old = teacher(**inputs).logits[mask].log_softmax(-1)
        new = model(**inputs).logits[mask].log_softmax(-1)
        return KL_WEIGHT * (old.exp() * (old - new)).sum(-1).mean()

    return extra


def osf(folder: Path, seed: int) -> dict[str, Any]:
    """The old adapter merged, then PEFT's OSF on the same modules."""
    loaded = load_base_model(settings())
    merged: Any = attach(loaded.model, old_adapter(folder, seed)).merge_and_unload()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(merged, OSFConfig(target_modules=TARGETS))
    seconds = trained(model, loaded.tokenizer, rows_of(folder / "agnews-train.jsonl"), seed)
    weights = sum(4 * m.weight.numel() for n, m in model.named_modules() if n.endswith(tuple(TARGETS)) and hasattr(m, "weight"))
    return {"scores": tested(loaded, model, folder), "cpu_seconds": seconds, "bytes": weights}


def variants(folder: Path, seed: int) -> dict[str, Callable[[], dict[str, Any]]]:
    old = [str(folder / f"{name}-kept.jsonl") for name in ("dbpedia", "text")]
    new = rows_of(folder / "agnews-train.jsonl")
    mixed = new + rows_of(folder / "dbpedia-train.jsonl")[: len(new) // 20]
    return {
        "before": lambda: before(folder, seed),
        "plain PEFT": lambda: further(folder, seed, new),
        "block": lambda: by_us(folder, seed, "block", keep=(), method="inc-lora"),
        "keep old text": lambda: by_us(folder, seed, "keep old text", keep=old),
        "keep self": lambda: by_us(folder, seed, "keep self", keep=("self",)),
        "replay 5 %": lambda: further(folder, seed, mixed),
        "replay equal memory": lambda: further(folder, seed, [*new, *chain(*map(rows_of, map(Path, old)))], alike=True),
        "OSF": lambda: osf(folder, seed),
        "own text": lambda: own_texts(folder, seed),
        "keep old text, same size": lambda: by_us(folder, seed, "same old text", keep=old, same_size=True),
        "keep self, same size": lambda: by_us(folder, seed, "same self", keep=("self",), same_size=True),
        "keep old text sensitive-core": lambda: by_us(folder, seed, "sensitive old text", keep=old, method="sensitive-core"),
        "keep old text fold-16": lambda: by_us(folder, seed, "folded old text", keep=old, method="fold-16"),
        "keep self sensitive-core": lambda: by_us(folder, seed, "sensitive self", keep=("self",), method="sensitive-core"),
        "OPLoRA": lambda: by_us(folder, seed, "oplora", keep=(), method="oplora"),
        "KL on own text": lambda: further(folder, seed, new, kl=True),
        "snapshot": lambda: by_us(folder, seed, "snapshot", keep=(), method="snapshot"),
    }


def without(folder: Path, seed: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """What limits fold-16: the row `keep old text fold-16` with one part changed or left out."""
    fold, old = METHODS["fold-16"], [str(folder / f"{name}-kept.jsonl") for name in ("dbpedia", "text")]
    core = {SensitiveCore, Retract, ProjectDisplacement}
    left_out = {"brake": {KroneckerBrake}, "start": {GradientStart}, "core": core}
    made = {f"without {words}": tuple(p for p in fold.constraints if type(p) not in parts) for words, parts in left_out.items()}
    made["strength 10"] = tuple(KroneckerBrake(10.0) if type(p) is KroneckerBrake else p for p in fold.constraints)
    methods = {f"fold-16 {words}": Method(f"fold-16-{words.replace(' ', '-')}", fold.plan, parts) for words, parts in made.items()}
    methods |= {"fold-16 without fold": Method("fold-16-without-fold", PerTask(), fold.constraints), "fold-16 now": fold}
    return {name: partial(by_us, folder, seed, name, keep=old, method=method) for name, method in methods.items()}


def before(folder: Path, seed: int) -> dict[str, Any]:
    loaded = load_base_model(settings())
    return {"scores": tested(loaded, attach(loaded.model, old_adapter(folder, seed)), folder), "bytes": 0}


def slim(found: dict[str, Any]) -> dict[str, Any]:
    """A result without any text: each metric of every test example."""
    columns = {
        task: {name: [round(each["metrics"][name], 5) for each in rows] for name in rows[0]["metrics"]}
        for task, rows in found["scores"].items()
    }
    return found | {"scores": columns}


def one(out: Path, seed: int, name: str) -> None:
    """Carry out one variant, in a process of its own, so that its peak of memory is its own."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    write_data(out / "work")
    if name == OLD:
        old_adapter(out / "work", seed)
        return
    found = slim((variants(out / "work", seed) | without(out / "work", seed))[name]())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    place_of(out, seed, name).write_text(json.dumps({"variant": name, "seed": seed, "peak": peak, **found}) + "\n")
    means = {task: {k: sum(v) / len(v) for k, v in columns.items()} for task, columns in found["scores"].items()}
    said = "  ".join(f"{task} {100 * next(iter(m.values())):.1f} % {m.get('loss', 0):.3f}" for task, m in means.items())
    print(f"{seed} {name:25} {said}  {found.get('cpu_seconds', 0):.0f} CPU seconds, {peak / 1e6:.0f} MB", flush=True)


def place_of(out: Path, seed: int, name: str) -> Path:
    if name == OLD:
        return out / "work" / f"old-{seed}" / "adapter_config.json"
    return out / f"{name.replace(' %', '').replace(',', '').replace(' ', '-')}-{seed}.json"


def main(out: Path, seeds: Sequence[int]) -> None:
    write_data(out / "work")
    for seed in seeds:
        for name in (OLD, *variants(out / "work", seed)):
            if not place_of(out, seed, name).exists():  # nothing large here: a process begins with its parent's peak of memory
                subprocess.run([sys.executable, "-m", "benchmarks.keeping", str(out), str(seed), name], check=True)


if __name__ == "__main__":
    place, *rest = sys.argv[1:]
    if len(rest) == 2 and not rest[1].isdecimal():
        one(Path(place), int(rest[0]), rest[1])
    else:
        main(Path(place), [int(seed) for seed in rest] or SEEDS)
