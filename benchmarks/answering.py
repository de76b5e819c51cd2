"""Evaluation: packed batches with drafts against one prompt at a time, both stopping at the end of sequence."""

from __future__ import annotations

import torch

from anchorlora import embedded
from anchorlora.adapters import AdapterStack
from anchorlora.continual.evaluate import Scorer
from anchorlora.data import Benchmark, Encoder
from benchmarks.steps import base_model
from benchmarks.timing import report, seconds


def speed() -> None:
    loaded = base_model()
    data = embedded.folder("embedded:mini", "data")
    assert data is not None
    source = Benchmark(data)
    blocks = AdapterStack(loaded.model, targets=("q_proj", "v_proj"), rank=8, alpha=32)
    for name in source.names[:2]:
        task = source.task(name)
        encoded = Encoder(loaded.tokenizer, max_tokens=128).encode(task, source.examples(name, "test", limit=384))
        answers, taken = {}, {}
        for batch in (64, 1):

            def call(batch: int = batch, task=task, encoded=encoded, answers=answers) -> None:
                scorer = Scorer(
                    blocks.model,
                    loaded.tokenizer,
                    max_new_tokens=50,
                    batch=batch,
                    device=loaded.device,
                    share_prefix=batch > 1,
                    packed=batch > 1,
                )
                answers[batch] = scorer.score(task, encoded)

            call() if torch.cuda.is_available() else None
            taken[batch] = seconds(call)
        alike = sum(a.text == b.text for a, b in zip(answers[64], answers[1], strict=True))
        aim = ">= 10" if loaded.device.type == "cuda" else ">= 5.5"
        detail = f"({len(encoded) / taken[64]:.0f} examples/s; {alike} of {len(encoded)} texts alike)"
        report(f"examples per second, packed / one at a time ({name})", taken[1] / taken[64], aim, detail)
