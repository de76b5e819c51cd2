"""lm_eval's reader of a loaded causal model, told apart from it by progress, silence and what it refuses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.api import task as harness_task
from lm_eval.models.huggingface import HFLM

from anchorlora.errors import NotFinite


class Watch:
    """Told what happens; does nothing by itself."""

    def measures(self, what: str) -> None: ...

    def begins(self, inputs: int) -> None: ...

    def advance(self, inputs: int) -> None: ...

    def note(self, line: str) -> None: ...


class Reader(HFLM):
    """lm_eval's reader of a causal model, with progress told to a watch, cut inputs counted, and NaN refused."""

    def __init__(self, model: Any, tokenizer: Any, *, batch: int, watch: Watch) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch)
        self.watch, self.cut = watch, 0

    def loglikelihood(self, requests, disable_tqdm=False):
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, override_bs=None):
        inputs = {tuple(context + continuation[:-1]) for _, context, continuation in requests}  # read once each
        self.cut += sum(len(each) > self.max_length for each in inputs)
        self.watch.begins(len(inputs))
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)

    def _model_call(self, inps, attn_mask=None, labels=None):
        logits = super()._model_call(inps, attn_mask=attn_mask, labels=labels)
        if torch.isnan(logits).any():
            raise NotFinite("the model's scores are NaN, so no answer is the likeliest; look at the adapter, or use float32")
        self.watch.advance(len(inps))
        return logits

    def generate_until(self, requests, disable_tqdm=False):
        self.watch.begins(len(requests))
        return super().generate_until(requests, disable_tqdm=True)

    def _model_generate(self, context, max_length, stop, **generation_kwargs):
        tokens = super()._model_generate(context, max_length, stop, **generation_kwargs)
        self.watch.advance(len(context))
        return tokens


@contextmanager
def quiet() -> Iterator[None]:
    """lm_eval and datasets say nothing and draw no bars of their own while the block runs; errors still come through."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "evaluate", "transformers", "huggingface_hub")]
    levels, bars = [logger.level for logger in loggers], harness_task.tqdm
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        harness_task.tqdm = lambda rows, total=None: rows
        yield
    finally:
        harness_task.tqdm = bars
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
