"""How lm-evaluation-harness reads a model: its own arithmetic, with progress, a count of cut inputs, and a quiet terminal."""

from __future__ import annotations

import logging
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
import torch
from lm_eval.api import metrics
from lm_eval.api import task as harness_task
from lm_eval.models.huggingface import HFLM

from anchorlora.errors import NotFinite
from anchorlora_lab.suites.progress import EvalProgress


class Reader(HFLM):
    """lm_eval's interface to a causal model, with progress reported, truncated inputs counted, and NaN refused."""

    def __init__(self, model: Any, tokenizer: Any, *, batch: int, watch: EvalProgress) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch)
        self.watch, self.cut = watch, 0

    def loglikelihood(self, requests, disable_tqdm=False):
        """Score continuations, without lm_eval's own bar."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, override_bs=None):
        inputs = {tuple(context + continuation[:-1]) for _, context, continuation in requests}  # read once each
        self.cut += sum(len(each) > self.max_length for each in inputs)
        self.watch.begins(len(inputs))
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)

    def _model_call(self, inps, attn_mask=None, labels=None):
        logits = super()._model_call(inps, attn_mask=attn_mask, labels=labels)
        if torch.isnan(logits).any():
            raise NotFinite("the model's scores are NaN, so no answer is the most likely; check the adapter, or use float32")
        self.watch.advance(len(inps))
        return logits

    def generate_until(self, requests, disable_tqdm=False):
        """Generate answers, without lm_eval's own bar."""
        self.watch.begins(len(requests))
        return super().generate_until(requests, disable_tqdm=True)

    def _model_generate(self, context, max_length, stop, **generation_kwargs):
        tokens = super()._model_generate(context, max_length, stop, **generation_kwargs)
        self.watch.advance(len(context))
        return tokens


@contextmanager
def quiet() -> Iterator[None]:
    """Silence lm_eval and datasets, bars included, while the block runs; errors still come through.

    Resampling for standard errors stays in this process: lm_eval would start a pool of processes and print on stdout.
    """
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "evaluate", "transformers", "huggingface_hub")]
    levels, bars, resampled = [logger.level for logger in loggers], harness_task.tqdm, metrics.bootstrap_stderr
    shown = not datasets.are_progress_bars_disabled()
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        harness_task.tqdm = lambda rows, total=None: rows
        metrics.bootstrap_stderr = _resampled_error
        datasets.disable_progress_bars()
        yield
    finally:
        harness_task.tqdm, metrics.bootstrap_stderr = bars, resampled
        if shown:
            datasets.enable_progress_bars()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _resampled_error(aggregate: Callable[[Sequence[Any]], float], values: Sequence[Any], iters: int) -> float:
    """The standard deviation over resamples, from the draws that lm_eval makes."""
    draw = random.Random(0)
    return statistics.stdev(float(aggregate(draw.choices(values, k=len(values)))) for _ in range(iters))
