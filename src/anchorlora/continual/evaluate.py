"""Scores of a model: greedy decoding that stops where a server stops and nowhere else, batched by length.

Models that read packed rows read each batch as one, with its right answers, whose loss is needed anyway: they are the first
drafts, and the labels are the next (`decode`). For others, rows are sorted by length and padded on the left. Predictions come back
in the order of the examples. In float32 the text does not depend on any of this; in bfloat16 it can, where two tokens are nearly
tied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, takewhile
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from anchorlora.config import EvaluationSettings
from anchorlora.continual.batches import IGNORED, group_items, micro_batch, packed_row, padded, rows_of
from anchorlora.continual.decode import Answering, Begun, decode, drafts_of, finish
from anchorlora.data import LOSS, TOKEN_ACCURACY, Answer, AnyTask, Encoded
from anchorlora.data.templates import stop_ids
from anchorlora.data.thoughts import decode_answer
from anchorlora.devices import in_float64
from anchorlora.models.head import LARGE, leaving_out, of_own_rows, plain_head, token_scores
from anchorlora.models.load import cache_in, ends_of, limits_in, pad_of, whole_cache
from anchorlora.models.packing import packed, rows_at_once
from anchorlora.processes import ALONE, Processes

NOTHING: Mapping[int, str] = MappingProxyType({})
TOKENS = 64  # of prompts in a packed row, for each example that a padded batch would have
ROWS = 4  # packed rows, at most, whose answers are generated at once
T = TypeVar("T")


Watch = Callable[[dict[int, str]], None]  # is told the answers of each batch, by the number of their prompt


def ignore(texts: dict[int, str]) -> None:
    """Ignore answers."""


@dataclass(frozen=True, eq=False)
class Scorer:
    """Scores a model's greedy answers and its loss of the right ones; how rows are read together changes neither."""

    model: nn.Module
    tokenizer: Any
    max_new_tokens: int  # of an answer, where its task has no number of its own
    batch: int  # prompts that are read together if padded; packed, as many tokens as they would have
    device: torch.device
    packed: bool = False
    processes: Processes = ALONE

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any, settings: EvaluationSettings, **how: Any) -> Scorer:
        """Return the scorer of a recipe's settings; `how` are the other fields."""
        return cls(model, tokenizer, max_new_tokens=settings.max_new_tokens, batch=settings.eval_batch, **how)

    def score(
        self,
        task: AnyTask,
        examples: Sequence[Encoded],
        *,
        known: Mapping[int, str] = NOTHING,
        watch: Watch = ignore,
        count: Callable[[int], None] = lambda done: None,
    ) -> list[Answer]:
        """Return the answers to a task's examples with all their scores; known answers are not generated again. `count` is told the
        numbers of losses and answers when losses are new, then `watch` is told each answer.
        """
        if not task.answered:
            losses = self.losses(examples, count=count)
            return [Answer("", None, e.example.label, scores) for e, scores in zip(examples, losses, strict=True)]
        end = self.tokenizer.eos_token_id
        likely = [(*self.tokenizer(label, add_special_tokens=False).input_ids, end) for label in task.labels]
        likely += [e.answer for e in examples if task.labels and e.answer]
        if self.packed:
            how = self._answering(task.max_new_tokens, likely)
            losses, texts = self._scored(examples, how=how, known=known, watch=watch, count=count)
        else:
            losses, prompts = self.losses(examples, count=count), [e.prompt for e in examples]
            texts = self.texts(prompts, max_new_tokens=task.max_new_tokens, likely=likely, known=known, watch=watch)
        answers = [task.answer(text.strip(), e.example) for text, e in zip(texts, examples, strict=True)]
        return [replace(a, scores={**a.scores, LOSS: of_right[LOSS]}) for a, of_right in zip(answers, losses, strict=True)]

    def _answering(self, longest: int | None, likely: Sequence[Sequence[int]]) -> Answering:
        stops, drafts = stop_ids(self.tokenizer, ends_of(self.model)), drafts_of(likely)
        return Answering(stops, longest or self.max_new_tokens, drafts, limits_in(self.model)["positions"] or sys.maxsize)

    def texts(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        likely: Sequence[Sequence[int]] = (),
        known: Mapping[int, str] = NOTHING,
        watch: Watch = ignore,
    ) -> list[str]:
        """Return the greedy answer to each prompt; `likely` ones are drafts, which are accepted as far as they are right."""
        model, how = self.model.eval(), self._answering(max_new_tokens, likely)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        most = self.batch if self.packed else rows_at_once(model, min(self.batch, max(1, len(prompts))))

        def read(batch: Sequence[int]) -> dict[int, str]:
            some = [prompts[i] for i in batch]
            rows = decode(model, some, how, row_tokens=TOKENS * self.batch) if self.packed else self._generate(some, how)
            return dict(zip(batch, self._decoded(how, rows), strict=True))

        texts = {i: known[i] for i in order if i in known}
        alone = [how.room(len(prompt)) < how.max_new_tokens for prompt in prompts]  # padded, all would end where one has to
        batches = group_items(order, most, lambda i, before: most if alone[i] else 1)
        if self.packed:
            packed_rows = group_items(order, TOKENS * self.batch, lambda i, before: len(prompts[i]))
            batches = ([i for row in rows for i in row] for rows in _together(packed_rows, self.batch))
        for new in self._shared(read, [batch for batch in batches if not all(i in known for i in batch)]):
            texts.update(new)
            watch(new)
        return [texts[i] for i in range(len(prompts))]

    def _decoded(self, how: Answering, rows: Any) -> list[str]:
        """Texts of generated tokens before the first at which a server stops."""
        whole = (list(takewhile(lambda token: token not in how.stops, map(int, row))) for row in rows)
        return [decode_answer(self.tokenizer, ids) for ids in whole]

    def _generate(self, prompts: Sequence[Sequence[int]], how: Answering) -> Any:
        """The tokens after padded prompts."""
        inputs = padded(prompts, pad_of(self.tokenizer))
        with torch.inference_mode(), of_own_rows(self.model):
            ids = self.model.generate(  # type: ignore[operator]  # of any causal language model
                input_ids=inputs["input_ids"].to(self.device),
                attention_mask=inputs["attention_mask"].to(self.device),
                max_new_tokens=min(how.room(len(prompt)) for prompt in prompts),
                eos_token_id=sorted(how.stops),
            )
        return ids[:, inputs["input_ids"].shape[1] :]

    def losses(self, examples: Sequence[Encoded], *, count: Callable[[int], None] = lambda done: None) -> list[dict[str, float]]:
        """Return how well the model predicts the right answers, token by token, each given the right ones before it."""
        return self._scored(examples, count=count)[0]

    def _scored(
        self,
        examples: Sequence[Encoded],
        *,
        how: Answering | None = None,
        known: Mapping[int, str] = NOTHING,
        watch: Watch = ignore,
        count: Callable[[int], None],
    ) -> tuple[list[dict[str, float]], list[str]]:
        """Return how well the right answers are predicted, and the greedy ones as text."""
        # the likeliest tokens after the right answer's are the greedy answer's while both agree: no packed prompt is read again
        self.model.eval()
        order = sorted(range(len(examples)), key=lambda i: len(examples[i].prompt) + len(examples[i].answer))
        numbered = iter(order)
        most = TOKENS * self.batch if self.packed or len(examples) < 2 else rows_at_once(self.model, TOKENS * self.batch)
        groups = rows_of([examples[i] for i in order], most, share=self.packed)
        rows = [[(next(numbered), e) for e in group] for group in groups]

        def read(batch: Sequence[Sequence[tuple[int, Encoded]]]) -> dict[int, tuple[dict[str, float], str]]:
            numbers = [i for row in batch for i, _ in row]
            generated = how if any(i not in known for i in numbers) else None
            scores, begun = list[dict[str, float]](), list[Begun]()
            for row in batch:
                new, beginning = self._row([e for _, e in row], generated)
                scores += new
                begun += [beginning] if beginning else []
            texts = [known.get(i, "") for i in numbers]
            if generated is not None:
                texts = self._decoded(generated, finish(self.model, begun, generated))
            return dict(zip(numbers, zip(scores, texts, strict=True), strict=True))

        results: dict[int, tuple[dict[str, float], str]] = {}
        answers = 0
        for new in self._shared(read, list(_together(rows, self.batch if how else 0))):
            results |= new
            count(len(results) + answers)
            if how is not None and any(i not in known for i in new):
                watch({i: text for i, (_, text) in new.items()})
                answers += len(new)
        return [results[i][0] for i in range(len(examples))], [results[i][1] for i in range(len(examples))]

    def _row(self, examples: Sequence[Encoded], how: Answering | None) -> tuple[list[dict[str, float]], Begun | None]:
        """Return how well the right answers are predicted, and, where answers are generated, their beginnings."""
        batch = packed_row(examples) if self.packed else micro_batch(examples, pad=pad_of(self.tokenizer))
        counts = (batch.targets != IGNORED).sum(1).tolist()
        # a split model makes its logits in all processes alike
        large = batch.positions * len(self.tokenizer) > LARGE and not self.processes.sharded
        head, there = self._head if large else None, batch.to(self.device)
        with (
            torch.inference_mode(),
            packed(self.model, there.layout, there.kept),
            nullcontext() if head is None else leaving_out(head),
        ):
            kept = {} if how is None else whole_cache(self.model)
            outputs = self.model(**there.inputs, logits_to_keep=there.keep, use_cache=how is not None, **kept)
            right = there.targets[there.answered]
            losses, likeliest = token_scores(there.answer_logits(outputs.logits), right, head)
        # each of these waits for the device once
        hits = torch.stack([own.mean() for own in (likeliest == right).float().split(counts)]).tolist()
        means = torch.stack([own.mean() for own in in_float64(losses).split(counts)]).tolist()
        scores = [{TOKEN_ACCURACY: hit, LOSS: loss} for hit, loss in zip(hits, means, strict=True)]
        if how is None:
            return scores, None
        tokens = iter(likeliest.tolist())
        answers = [how.begun(list(islice(tokens, count)), e.answer) for count, e in zip(counts, examples, strict=True)]
        return scores, Begun(cache_in(outputs), batch.read_up_to([len(answer) - 1 for answer in answers]), answers)

    @cached_property
    def _head(self) -> nn.Linear | None:
        return plain_head(self.model)

    def _shared(self, read: Callable[[Any], dict[int, T]], batches: Sequence[Any]) -> Iterator[dict[int, T]]:
        """Results by example; the processes divide the batches, and each gets all results."""
        processes = self.processes
        for start in range(0, len(batches), processes.count):
            own: dict[int, T] = {}
            with processes.in_step(self.model):
                for batch in batches[start + processes.rank : start + processes.rank + 1]:
                    own = read(batch)
            yield {i: result for part in processes.gathered(own) for i, result in part.items()}


def _together(rows: Iterable[list[T]], batch: int) -> Iterator[list[list[T]]]:
    """Packed rows whose answers are generated at once: more than one while they hold fewer examples than a padded batch."""
    some: list[list[T]] = []
    for row in rows:
        if some and (len(some) == ROWS or sum(map(len, some)) >= batch):
            yield some
            some = []
        some.append(row)
    if some:
        yield some
