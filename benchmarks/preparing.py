"""What `train` does before it trains: rows as tokens, rows of old text for cores, and text that the model writes itself.

ANCHORLORA_CHAT_MODEL names a chat model; without it, mini's base model stands for one. CPU seconds of one thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anchorlora.adapters import AdapterStack, usual_targets
from anchorlora.config import base_model_of
from anchorlora.data import Encoder, TextTask, examples_of, read_samples, templates, token_ids
from anchorlora.features import FeatureStore
from anchorlora.models import own_text
from anchorlora.models.cores_from_text import CoreRule, cores_of_samples, spread_positions
from anchorlora.models.load import LoadedModel, load_base_model
from benchmarks.steps import base_model
from benchmarks.timing import ratio, report, side_by_side

PAGES = Path(__file__).parents[1] / "docs"


def chat_model() -> LoadedModel:
    name = os.environ.get("ANCHORLORA_CHAT_MODEL")
    return load_base_model(base_model_of("the model", model=name, device="cpu")) if name else base_model()


def encoding(rows: int = 1000) -> None:
    """Chats as tokens: their template is rendered three times a row, in one thread, against a thread for each time."""
    tokenizer = chat_model().tokenizer
    tokenizer.chat_template = tokenizer.chat_template or "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    words = (PAGES / "data.md").read_text().split()
    chats = [[{"role": role, "content": " ".join(words[i % 99 :][:30])} for role in ("user", "assistant")] for i in range(rows)]
    examples = list(examples_of(read_samples([{"messages": chat} for chat in chats])))
    encoder, within = Encoder(tokenizer, max_tokens=512), templates._within

    def anew(seconds: float, call: Callable[[], Any]) -> Any:
        outcome = within(seconds, call)
        templates._OWN.worker.calls.put(None)
        templates._OWN.worker = None
        return outcome

    def encode(way: Callable[..., Any]) -> None:
        templates._within = way
        encoder.encode(TextTask("chats"), examples)

    ways = {"one thread": partial(encode, within), "a thread each": partial(encode, anew)}
    times = side_by_side(ways, rounds=3, warm=1, clock=time.process_time)
    templates._within = within
    report(f"{rows} chats as tokens, one thread / one each", ratio(times, "one thread", "a thread each"), "<= 0.8")


def cores(texts: int = 12, rows: int = 60) -> None:
    """Packed rows of texts up to their last kept token, against whole texts one by one; the rows are the same."""
    loaded = chat_model()
    model = AdapterStack(loaded.model, usual_targets(loaded.model), rank=1, alpha=1).model
    text = "\n".join(file.read_text() for file in sorted(PAGES.glob("*.md")))
    for characters in (300, 1500):
        samples = read_samples([{"text": text[i * 997 :][:characters]} for i in range(texts)])
        rule = CoreRule(rows=rows, at_most=16, spread=True)

        def apart(samples: list = samples, rule: CoreRule = rule) -> None:
            ids = list(token_ids(samples, loaded.tokenizer, max_tokens=rule.max_tokens))
            store = FeatureStore(rule.rows, spread=False)
            pairs = []
            for i, kept in spread_positions([len(each) for each in ids], rule.rows).items():
                mask = torch.zeros(1, len(ids[i]), dtype=torch.bool)
                mask[0, kept] = True
                pairs.append((torch.tensor([ids[i]]), mask))
            store.read(model, pairs)
            store.decompose(energy=rule.energy, at_least=rule.at_least, at_most=rule.at_most, wide=rule.at_most)

        packed = partial(cores_of_samples, model, loaded.tokenizer, samples, rule, device=torch.device("cpu"))
        times = side_by_side({"packed": packed, "apart": apart}, rounds=3, warm=1, clock=time.process_time)
        report(
            f"cores of {texts} texts of {characters} characters, packed / one by one", ratio(times, "packed", "apart"), "<= 0.95"
        )


def own(texts: int = 64, tokens: int = 40) -> None:
    """Chats of the model's own as they are drawn, against the same in float32, and against transformers' sampling, 16 at a time."""
    loaded = chat_model()
    chat = bool(loaded.tokenizer.chat_template)
    before, after = own_text.frame(loaded.tokenizer, chat=chat)
    fast, counts = own_text.multiplies_bfloat16, {}

    def write(name: str, asked: Callable[[torch.device], bool]) -> None:
        own_text.multiplies_bfloat16 = asked
        rows = own_text.own_text(loaded.model, loaded.tokenizer, count=texts, seed=3, max_tokens=tokens)
        counts[name] = sum(len(row["prompt_ids"]) - len(before) - len(after) + len(row["completion_ids"]) for row in rows)

    def sample() -> None:
        how = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "max_new_tokens": tokens, "pad_token_id": 0}
        counts["transformers"] = 0
        for _ in range(texts // own_text.BATCH):
            ids = torch.tensor([before] * own_text.BATCH)
            for more in (after, []) if chat else ([],):
                drawn = loaded.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)
                counts["transformers"] += drawn.numel() - ids.numel()
                ids = torch.cat([drawn, torch.tensor([more] * own_text.BATCH, dtype=torch.long)], 1)

    ways = {
        "ours": partial(write, "ours", fast),
        "float32": partial(write, "float32", lambda device: False),
        "transformers": sample,
    }
    times = side_by_side(ways, rounds=1, warm=0, clock=time.process_time)
    each = {name: [seconds / counts[name] for seconds in taken] for name, taken in times.items()}
    report(f"a token of {texts} own texts, over transformers' sampling", ratio(each, "ours", "transformers"), "<= 0.4")
    report("the same without bfloat16", ratio(each, "float32", "transformers"), "")
