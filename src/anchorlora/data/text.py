"""Tasks of free text: rows of files, as prompts and answers, with the loss on the answers alone.

    chat                 every message of the assistant is an answer to what the template makes of the messages before it
    prompt, completion   prompt and completion as they stand, then the end of sequence
    text                 one answer without a prompt: the loss counts every token but the first

Nothing is added to prompts (see `anchorlora.data.rendering`). A prompt that is too long keeps its head (the beginning token, the
system message, what the template writes before the user's) and loses what follows it; plain text loses its end; an answer that does
not fit is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from anchorlora.data.holdout import RowHashes
from anchorlora.data.metrics import Answer, Metric, read_answer, score_answer
from anchorlora.data.prompts import Encoder, Task
from anchorlora.data.rendering import Turn, chat_ids, chat_turn, text_turn
from anchorlora.data.samples import Example, Sample, examples_of
from anchorlora.data.spool import Encoded
from anchorlora.data.thoughts import decode_answer, extract_answer
from anchorlora.errors import InvalidValue

SHOWN = 10  # characters that a tokenizer does not know
Row = TypeVar("Row")


@dataclass(frozen=True)
class TextTask:
    """A task of free text: prompts stand as they are, and answers are compared by metrics."""

    name: str
    labels: tuple[str, ...] = ()  # labels, if every answer is one of a few; else none
    metrics: tuple[Metric, ...] = ()
    max_new_tokens: int | None = None  # most tokens of an answer; None for what the recipe says

    @property
    def answered(self) -> bool:
        """True if answers are generated."""
        return bool(self.metrics)

    def answer(self, text: str, example: Example) -> Answer:
        """Return what a generated text answers, with its scores."""
        gold = example.label.strip()
        text = extract_answer(text, example.lead, gold)
        return score_answer(read_answer(text, gold=gold, labels=self.labels or (gold,)), example, self.metrics)

    def encoded(self, encoder: Encoder, examples: Iterable[Example]) -> Iterator[Encoded]:
        """Yield examples as tokens."""
        for example in examples:
            yield fitted(example, turn_of(example, encoder), encoder.max_tokens, name=self.name)


AnyTask: TypeAlias = Task | TextTask


def turn_of(example: Example, encoder: Encoder) -> Turn:
    """Return an example as tokens, whole; a prompt has at least one."""
    turn = _turn_of(example, encoder)
    encoder.refuse_outside(turn.prompt + turn.answer, example.place)
    return turn


def _turn_of(example: Example, encoder: Encoder) -> Turn:
    tokenizer = encoder.tokenizer
    if example.ids is not None:
        prompt, answer = example.ids
        stopped = answer[:-1] if answer and answer[-1] in encoder.stops else answer
        text = str(tokenizer.decode(list(prompt), skip_special_tokens=False))
        head = len(encoder.beginning) if prompt[: len(encoder.beginning)] == encoder.beginning else 0
        return Turn(text, prompt, answer, head, label=decode_answer(tokenizer, stopped).strip())
    if (example.messages or example.reply) and (tokenizer.chat_template or not example.sentence):
        return chat_turn(example, encoder)
    return text_turn(example, encoder)


def fitted(example: Example, turn: Turn, most: int, *, name: str) -> Encoded:
    """Return an example whose tokens are known, cut to fit; `name` stands for a place that it does not have."""
    prompt, answer = turn.prompt, turn.answer
    cut = len(prompt) + len(answer) > most
    if not example.is_answer:
        answer = answer[: most - len(prompt)]
    elif len(answer) >= most:
        raise _too_long(example.place or name, len(answer), most)
    elif cut:
        prompt = shortened(turn, most - len(answer))
    plain = replace(example, sentence=turn.text, label=turn.label, messages=(), reply=None, tools=(), ids=None, lead=turn.lead)
    return Encoded(plain, turn.text, prompt, answer, cut, unknown=bool(turn.unknown), split=bool(turn.split))


def _too_long(location: str, tokens: int, most: int) -> InvalidValue:
    return InvalidValue(
        f"{location}: the answer takes {tokens} tokens, and max_tokens is {most} for prompt and answer together; raise max_tokens, "
        "which is --max-length of train, or leave the row out"
    )


def count_rows(
    name: str,
    samples: Iterable[Sample],
    encoder: Encoder,
    *,
    measured: bool = False,
    keep: Callable[[int, Example, Turn], None] = lambda number, example, turn: None,
) -> tuple[dict[str, Any], dict[int, str]]:
    """Return how many rows there are, and how many of them have each property; and which rows cannot be measured, and why. `keep`
    takes every example that can be learned, with the number of its row and its tokens.
    """
    rows, most = RowHashes(name), encoder.max_tokens
    counts = dict.fromkeys(("cut", "skipped", "long", "longest", "unknown", "empty"), 0)
    characters: dict[str, None] = {}
    split: Counter[str] = Counter()
    unfit: dict[int, str] = {}
    for number, sample in enumerate(samples):
        rows.add(sample)
        turns = [(example, turn_of(example, encoder)) for example in examples_of([sample])]
        unknown = [character for _, turn in turns for part in turn.unknown for character in part]
        counts["unknown"] += bool(unknown)
        counts["empty"] += not all(turn.label for _, turn in turns)
        split.update({turn.split for _, turn in turns} - {""})
        if len(characters) < SHOWN:
            characters |= dict.fromkeys(unknown)
        counts["cut"] += any(len(turn.prompt) + len(turn.answer) > most for _, turn in turns)
        longest = max((len(turn.answer) for example, turn in turns if example.is_answer), default=0)
        if not turns:
            counts["skipped"] += 1
            unfit[number] = f"{sample.place}: there is no answer; a chat needs a message of the assistant"
        elif longest >= most:
            counts["long"] += 1
            unfit[number] = str(_too_long(sample.place, longest, most))
            if not measured:
                raise InvalidValue(unfit[number])
        else:
            counts["longest"] = max(counts["longest"], longest)
            for example, turn in turns:
                keep(number, example, turn)
    of_rows = {"read": len(rows.hashes), "repeated": rows.repeated, "together": rows.together}
    return of_rows | counts | {"characters": "".join([*characters][:SHOWN]), "split": dict(sorted(split.items()))}, unfit


def counting(items: Iterable[Row], tell: Callable[[int, int], None], total: int) -> Iterator[Row]:
    """Yield items, and report a hundred times, and at the end, how many are done."""
    for done, item in enumerate(items):
        if done and done % max(1, total // 100) == 0:
            tell(min(done, total - 1), total)
        yield item
    tell(total, total)


def answer_fits(example: Example, encoder: Encoder) -> bool:
    """Return True unless an answer to a prompt takes all the room; plain text is cut."""
    return not example.is_answer or len(turn_of(example, encoder).answer) < encoder.max_tokens


def shortened(turn: Turn, room: int) -> tuple[int, ...]:
    """Return a prompt's tokens without those after its head that do not fit."""
    head = turn.head if turn.head < room else min(1, room - 1)
    return turn.prompt[:head] + turn.prompt[len(turn.prompt) - (room - head) :]


def token_ids(samples: Iterable[Sample], tokenizer: Any, *, max_tokens: int, **of_model: Any) -> Iterator[list[int]]:
    """Yield the tokens of samples: those that training on them reads, the turns of a chat in one sequence where they are one."""
    encoder = Encoder(tokenizer, max_tokens=max_tokens, **of_model)
    for sample in samples:
        sequences: list[tuple[int, ...]] = []
        for example in examples_of([sample]):
            turn = turn_of(example, encoder)
            room = max_tokens - len(turn.answer)
            prompt = turn.prompt if not example.is_answer or room >= len(turn.prompt) else shortened(turn, max(room, 1))
            ids = (prompt + turn.answer)[:max_tokens]
            if sequences and ids[: len(sequences[-1])] == sequences[-1]:
                sequences.pop()
            sequences.append(ids)
        if not sequences and sample.weight and not isinstance(sample.content, str):  # nothing of it is an answer
            sequences = [tuple(chat_ids(sample, tokenizer)[:max_tokens])]
        yield from map(list, sequences)
