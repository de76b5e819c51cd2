"""How lm-evaluation-harness reads a model: in packed rows, with progress, a count of cut inputs, and a quiet terminal."""

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
from torch import Tensor

from anchorlora.errors import NotFinite
from anchorlora.features.layout import common_prefix, pack
from anchorlora.models.packing import packed, rows_at_once, unpackable
from anchorlora_lab.suites.questions import EvalProgress

SAMPLE = 64  # tokens of an input by which it is seen whether the model reads packed rows


class Reader(HFLM):
    """lm_eval's interface to a causal model, with progress reported, truncated inputs counted, and NaN refused. It packs inputs if
    the model can read them: a shared beginning, such as solved examples, is read once per row, and only continuations have logits.
    """

    def __init__(self, model: Any, tokenizer: Any, *, batch: int, watch: EvalProgress) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=rows_at_once(model, batch))
        self.watch, self.cut = watch, 0

    def loglikelihood(self, requests, disable_tqdm=False):
        """Score continuations, without lm_eval's own bar."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, override_bs=None):
        asked: dict[tuple[int, ...], list[int]] = {}  # what the model reads -> the requests that are scored on it
        for i, (_, context, continuation) in enumerate(requests):
            asked.setdefault((*context, *continuation[:-1]), []).append(i)
        self.cut += sum(len(ids) > self.max_length for ids in asked)
        self.watch.begins(len(asked))
        if self._unpacked(list(asked)):
            return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        scored = {ids: max(len(requests[i][2]) for i in those) for ids, those in asked.items()}
        inputs = sorted((ids[-self.max_length :], count, ids) for ids, count in scored.items())
        for prefix, row in shared_rows([e[:2] for e in inputs], self.batch_size * max(len(ids) for ids, *_ in inputs)):
            some, inputs = inputs[: len(row)], inputs[len(row) :]
            for log_p, (_, _, ids) in zip(self._log_p(row, prefix), some, strict=True):
                for i in asked[ids]:
                    right = torch.tensor(requests[i][2], device=log_p.device)
                    own = log_p[-len(right) :]
                    scores[i] = float(own.gather(1, right[:, None]).sum()), bool((own.argmax(1) == right).all())
            self.watch.advance(len(row))
        return scores

    def _unpacked(self, inputs: Sequence[tuple[int, ...]]) -> bool:
        """Return True if the model reads no packed rows."""
        longest = sorted(inputs, key=len)[-2:]
        width = min(self.max_length, max(map(len, longest), default=0))
        return not inputs or unpackable(self.model, [ids[-SAMPLE:] for ids in longest], longest=width) is not None

    def _log_p(self, row: Sequence[tuple[tuple[int, ...], int]], prefix: int) -> Sequence[Tensor]:
        """Log-probabilities (n, words) after the last n tokens of each input of a packed row."""
        layout, ids = pack([ids for ids, _ in row], prefix)
        keep = torch.cat([places[-count:] for places, (_, count) in zip(layout.places(), row, strict=True)])
        there = keep.to(self.device)
        tokens = {"input_ids": torch.tensor([ids]), "position_ids": layout.positions()[None]}
        with torch.inference_mode(), packed(self.model, layout, keep):
            logits = self.model(**{k: v.to(self.device) for k, v in tokens.items()}, logits_to_keep=there, use_cache=False).logits
        logits = logits[0] if logits.shape[1] == len(keep) else logits[0, there]
        _refuse_nan(logits)
        return logits.log_softmax(-1, dtype=self.softmax_dtype).split([count for _, count in row])

    def _model_call(self, inps, attn_mask=None, labels=None):
        logits = super()._model_call(inps, attn_mask=attn_mask, labels=labels)
        _refuse_nan(logits)
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


def _refuse_nan(logits: Tensor) -> None:
    if torch.isnan(logits).any():
        raise NotFinite("the model's scores are NaN, so no answer is the most likely; check the adapter, or use float32")


def shared_rows(
    inputs: Sequence[tuple[tuple[int, ...], int]], most: int
) -> Iterator[tuple[int, list[tuple[tuple[int, ...], int]]]]:
    """Yield sorted inputs in rows of at most so many tokens, with the number of shared tokens of each row; an input joins a row if
    that reads fewer tokens. Sharing ends before the last n tokens of an input, which are scored; n is given beside its tokens.
    """
    row: list[tuple[tuple[int, ...], int]] = []
    prefix = tokens = 0
    for ids, count in inputs:
        own = len(ids) - count
        if row:
            common = min(prefix, own, common_prefix([row[-1][0], ids]))
            joined = tokens + (len(row) - 1) * (prefix - common) + len(ids) - common
            if joined <= min(most, tokens + len(ids)):
                row.append((ids, count))
                prefix, tokens = common, joined
                continue
            yield prefix if len(row) > 1 else 0, row
        row, prefix, tokens = [(ids, count)], own, len(ids)
    if row:
        yield prefix if len(row) > 1 else 0, row


@contextmanager
def quiet() -> Iterator[None]:
    """Silence lm_eval and datasets, bars included, during the block; errors still come through. Resampling stays in this process,
    since lm_eval's pool of processes would print on stdout.
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
