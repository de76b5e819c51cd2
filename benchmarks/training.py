"""What a pass over the same training examples costs: packed rows against padded ones, and against what people have.

The base model is mini-en on real text if ANCHORLORA_SHARED names its folder, else the embedded one on the embedded benchmark. Every
variant trains LoRA of rank 8 on q_proj and v_proj, eight examples per optimizer step, loss on the answers alone. Ours is protected
(sfor) and collects feature rows; the others do neither. Seconds are CPU seconds of one thread.

Free chats: no two begin alike, their lengths differ, the adapter is on all linear layers, and nobody protects. The others put
chats of like length into a batch. ANCHORLORA_CHAT_MODEL names their model.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Trainer, TrainingArguments

from anchorlora import METHODS, embedded
from anchorlora.config import BaseModelSettings
from anchorlora.continual.inputs import RunInputs
from anchorlora.continual.past import Past
from anchorlora.continual.sequence import TaskSequence
from anchorlora.data import Benchmark, Encoded, Encoder, TextFiles, TextSource
from anchorlora.models.load import LoadedModel, load_base_model
from anchorlora.recipes import standard_cl
from benchmarks.preparing import chat_model
from benchmarks.timing import ratio, report, side_by_side

EXAMPLES, WINDOW = 256, 8


def place() -> tuple[Path, Path, str]:
    """Folder of the base model, folder of the data, and the task."""
    shared = os.environ.get("ANCHORLORA_SHARED")
    if shared:
        return Path(shared) / "backbones/mini-en", Path(shared) / "data/standard_cl", "dbpedia"
    model, data = embedded.folder("embedded:mini", "base_model"), embedded.folder("embedded:mini", "data")
    assert model is not None
    assert data is not None
    return model, data, "news"


def loaded() -> LoadedModel:
    return load_base_model(BaseModelSettings(model=str(place()[0]), dtype="float32", device="cpu"))


def examples(base: LoadedModel) -> list[Encoded]:
    _, data, task = place()
    source = Benchmark(data)
    return Encoder(base.tokenizer, max_tokens=512).encode(source.task(task), source.examples(task, "train", limit=EXAMPLES))


def ours(**changes: Any) -> Callable[[], object]:
    """A pass of a run's own loop, under sfor, with feature rows."""
    _, data, task = place()
    other = next(name for name in Benchmark(data).names if name != task)
    settings = {"train_limit": EXAMPLES, "test_limit": 1, "window": WINDOW, "threads": 1, "learning_rate": 1e-3} | changes
    recipe = standard_cl().changed({"model": str(place()[0]), "data": str(data), "dtype": "float32", "device": "cpu"} | settings)
    base = loaded()
    inputs = RunInputs.of(base, Benchmark(data), recipe, order=(other, task), seed=1)
    sequence = TaskSequence(inputs, METHODS["sfor"])
    sequence._trained(1, other)  # so that there is a past to protect

    def one_pass() -> None:
        past: Past = sequence.past
        cores = past.cores
        anchor = sequence.blocks.anchor(cores=cores)
        with past.rows.collect(sequence.blocks.model):
            sequence._learn(2, task, anchor, None, 0.0)

    return one_pass


def adapted() -> tuple[Any, Any, list[Encoded]]:
    base = loaded()
    config = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(base.model, config).train(), base.tokenizer, examples(base)


def right_padded(rows: list[Encoded], pad: int) -> dict[str, Tensor]:
    longest = max(len(e.prompt) + len(e.answer) for e in rows)
    ids, labels = torch.full((len(rows), longest), pad), torch.full((len(rows), longest), -100)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, e in enumerate(rows):
        whole = torch.tensor(e.prompt + e.answer)
        ids[i, : len(whole)], mask[i, : len(whole)] = whole, 1
        labels[i, len(e.prompt) : len(whole)] = torch.tensor(e.answer)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def free_chats(folder: Path, count: int) -> Path:
    """Write chats of 30 to 300 words, each a passage of the documents of its own, half of it asked and half answered."""
    words = "\n".join(page.read_text() for page in sorted(Path("docs").glob("*.md"))).split()
    sizes = (torch.randn(count, generator=torch.Generator().manual_seed(0)) * 0.6 + 4.6).exp().clamp(30, 300).long().tolist()
    chats = []
    for i, size in enumerate(sizes):
        passage = words[i * len(words) // count :][:size]
        halves = " ".join(passage[: size // 2]), " ".join(passage[size // 2 :])
        chats.append({"messages": [{"role": r, "content": t} for r, t in zip(("user", "assistant"), halves, strict=True)]})
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return folder / "chats.jsonl"


def bare_peft() -> Callable[[], object]:
    """The loop that PEFT's documentation shows: padded batches of eight, loss by the model."""
    model, tokenizer, rows = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def one_pass() -> None:
        for start in range(0, len(rows), WINDOW):
            model(**right_padded(rows[start : start + WINDOW], tokenizer.pad_token_id)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return one_pass


def trainer() -> Callable[[], object]:
    """transformers' Trainer with padded batches of eight."""
    model, tokenizer, rows = adapted()
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=WINDOW, num_train_epochs=1, learning_rate=1e-3, report_to=[], use_cpu=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    made = Trainer(model, arguments, train_dataset=rows, data_collator=lambda batch: right_padded(batch, tokenizer.pad_token_id))
    return made.train


def trl() -> Callable[[], object]:
    """TRL's SFTTrainer on prompts and completions, as its documentation shows it, with batches of eight."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer, rows = adapted()
    data = Dataset.from_list([{"prompt": e.text, "completion": e.example.label} for e in rows])
    arguments = SFTConfig(
        tempfile.mkdtemp(), per_device_train_batch_size=WINDOW, num_train_epochs=1, learning_rate=1e-3, report_to=[], use_cpu=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, gradient_checkpointing=False, bf16=False,
    )  # fmt: skip
    return SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer).train


def chats(rounds: int = 2, count: int = 64) -> None:
    """Print what transformers' Trainer takes of the time of a packed pass over free chats, where it puts like lengths together."""
    base = chat_model()
    base.tokenizer.chat_template = base.tokenizer.chat_template or "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    source = TextFiles({"chats": TextSource(str(free_chats(Path(tempfile.mkdtemp()), count)))})
    settings = {"batching": "packed", "window": WINDOW, "threads": 1, "learning_rate": 1e-4, "test_limit": 1, "dropout": 0.0}
    recipe = standard_cl().changed(settings | {"targets": "all-linear", "dtype": "float32", "device": "cpu", "max_tokens": 1024})
    rows = Encoder(base.tokenizer, max_tokens=1024).encode(source.task("chats"), source.examples("chats", "train"))
    sequence = TaskSequence(RunInputs.of(base, source, recipe, order=("chats",), seed=1), METHODS["inc-lora"])
    anchor = sequence.blocks.anchor(cores={})
    theirs = chat_model()
    config = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(theirs.model, config).train()
    lengths = [{"input_ids": e.prompt + e.answer, "row": e} for e in rows]
    pad = theirs.tokenizer.pad_token_id
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=WINDOW, num_train_epochs=1, learning_rate=1e-4, report_to=[], use_cpu=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        train_sampling_strategy="group_by_length",
    )  # fmt: skip
    grouped = Trainer(
        model, arguments, train_dataset=lengths, data_collator=lambda batch: right_padded([e["row"] for e in batch], pad)
    )
    variants = {"packed": lambda: sequence._learn(1, "chats", anchor, None, 0.0), "grouped": grouped.train}
    times = side_by_side(variants, rounds=rounds, warm=0, clock=time.process_time)
    tokens = sum(len(e.prompt) + len(e.answer) for e in rows)
    detail = f"{min(times['grouped']):.1f} s against {min(times['packed']):.1f} s for {len(rows)} chats of {tokens:,} tokens"
    report(
        "CPU seconds of Trainer, grouped by length, over packed, free chats", ratio(times, "grouped", "packed"), ">= 1.8", detail
    )


def passes(rounds: int = 3) -> None:
    """Print what others take of the time of a packed pass."""
    variants = {
        "packed": ours(batching="packed"),
        "padded, micro-batch 1": ours(micro_batch=1),
        "padded, micro-batch 8": ours(micro_batch=8),
        "bare PEFT loop": bare_peft(),
        "transformers' Trainer": trainer(),
        "TRL's SFTTrainer": trl(),
    }
    times = side_by_side(variants, rounds=rounds, warm=1, clock=time.process_time)
    for name, aim in (
        ("padded, micro-batch 1", ""),
        ("padded, micro-batch 8", ""),
        ("bare PEFT loop", ">= 2.8"),
        ("transformers' Trainer", ">= 3"),
        ("TRL's SFTTrainer", ">= 4"),
    ):
        detail = f"{min(times[name]):.2f} s against {min(times['packed']):.2f} s for {EXAMPLES} examples of {place()[2]}"
        report(f"CPU seconds of {name} over packed", ratio(times, name, "packed"), aim, detail)


if __name__ == "__main__":
    torch.set_num_threads(1)
    passes()
    chats()
