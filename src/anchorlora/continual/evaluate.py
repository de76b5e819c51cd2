"""Asking the model: greedy decoding that stops at the end of sequence and at nothing else, batched by length.

Rows are sorted by length and padded on the left, and answers come back in the examples' order. In float32 the text does not
depend on how examples were batched; in bfloat16 it can, where two tokens are nearly tied (INFRA section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from anchorlora.continual.batches import padded
from anchorlora.tasks import Answer, Encoded, Task, read_answer


def ask(
    model: nn.Module,
    tokenizer: Any,
    task: Task,
    examples: Sequence[Encoded],
    *,
    max_new_tokens: int,
    batch: int,
    device: torch.device,
    watch: Callable[[int], None] = lambda count: None,
) -> list[Answer]:
    """The model's answers to a task's examples, in their order.  watch: called with the number of examples of each batch."""
    model.eval()
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].prompt))
    texts: dict[int, str] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        inputs = padded([examples[i].prompt for i in chosen], pad)
        with torch.inference_mode():
            ids = model.generate(  # type: ignore[operator]  # of any causal language model
                input_ids=inputs["input_ids"].to(device),
                attention_mask=inputs["attention_mask"].to(device),
                max_new_tokens=max_new_tokens,
            )
        said = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        texts.update(zip(chosen, said, strict=True))
        watch(len(chosen))
    return [read_answer(texts[i].strip(), gold=e.example.label, labels=task.labels) for i, e in enumerate(examples)]
