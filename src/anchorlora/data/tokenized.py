"""A text as a tokenizer reads it: where each token begins and ends, where an answer's begin, and what no token stands for."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from anchorlora.errors import InvalidValue

# where the answer's first token begins within the prompt: what it is, and what to do
SPLIT = {
    "blank": (
        "the prompt ends in a blank that belongs to the answer's first token",
        "move it to the beginning of the answer, or serve the prompt without it",
    ),
    "white": ("the answer begins with white space that the prompt's last token takes", "begin the answer with its words"),
    "word": ("the prompt ends inside a token that the answer goes on", "end the prompt where a word ends"),
    "template": (
        "the chat template ends the prompt inside a token that the answer goes on",
        "give a template that ends it with a token of its own",
    ),
}


@dataclass(frozen=True, eq=False)
class Tokenized:
    """A text as tokens, of which the prompt ends at a boundary."""

    place: str
    text: str
    boundary: int
    tokenizer: Any
    special: bool  # whether the tokenizer adds its own beginning
    ids: list[int]
    offsets: list[tuple[int, int]]  # where each token begins and ends
    lost: list[int]  # places of which the tokenizer makes nothing

    @classmethod
    def of(cls, location: str, text: str, boundary: int, tokenizer: Any, *, special: bool) -> Tokenized:
        """Tokenize a text. Without a fast tokenizer, tokens are those of the prompt and of the rest."""
        if getattr(tokenizer, "is_fast", False):
            read = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
            ids, offsets = list(read.input_ids), [(int(a), int(b)) for a, b in read.offset_mapping]
            lost = _find_left_out(text, ids, offsets, tokenizer)
            if lost:  # offsets count as if what is left out had never been there
                gone = set(lost)
                there = [at for at in range(len(text)) if at not in gone]
                rest = "".join(text[at] for at in there)
                read = tokenizer(rest, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
                if list(read.input_ids) == ids:
                    offsets = [(there[a], there[b - 1] + 1) if a < b else (0, 0) for a, b in read.offset_mapping]
            return cls(location, text, boundary, tokenizer, special, ids, offsets, lost)
        ids = list(tokenizer(text, add_special_tokens=special, verbose=False).input_ids)
        before = list(tokenizer(text[:boundary], add_special_tokens=special, verbose=False).input_ids)
        while before and before != ids[: len(before)]:
            before.pop()
        within = [(0, 0) if i == 0 and special and before[:1] == ids[:1] else (0, boundary) for i in range(len(before))]
        offsets = within + [(boundary, len(text))] * (len(ids) - len(before))
        return cls(location, text, boundary, tokenizer, special, ids, offsets, [])

    def served(self, first: int, *, apart: bool = False) -> tuple[Tokenized, int, str]:
        """Return the text with the prompt's own tokens first, as a server reads it; where the answer's tokens begin; and a key of
        `SPLIT` if the answer begins within a token of the prompt, unless it may be read `apart`.

        A prompt that is not cut within a token is not tokenized again, except after blanks, whose tokens often depend on the next
        word.
        """
        text, boundary, ids, offsets, tokenizer = self.text, self.boundary, self.ids, self.offsets, self.tokenizer
        if first >= len(ids):
            return self, first, ""
        begin = offsets[first][0] if offsets[first][0] < boundary else max((stop for _, stop in offsets[:first]), default=0)
        taken, run = text[begin:boundary], text[max(0, boundary - 2) : boundary]
        if not (taken or (len(run) == 2 and run.isspace())):
            return self, first, ""
        alone, before = Tokenized.of(self.place, text[:boundary], boundary, tokenizer, special=self.special), ids[:first]
        for part in (alone.ids, before):  # some tokenizers end what they read
            while part and part[-1] == tokenizer.eos_token_id:
                part.pop()
        if alone.ids == before:  # what no token stands for, such as white space that is left out
            return self, first, ""
        places = alone.offsets[: len(alone.ids)]
        if not taken and getattr(tokenizer, "is_fast", False):
            return replace(self, ids=alone.ids + ids[first:], offsets=places + offsets[first:]), len(alone.ids), ""
        if apart:
            rest = Tokenized.of(self.place, text[boundary:], 0, tokenizer, special=False)
            if tokenizer.decode(alone.ids + rest.ids) == tokenizer.decode(ids):
                places += [(a + boundary, b + boundary) for a, b in rest.offsets]
                return replace(self, ids=alone.ids + rest.ids, offsets=places), len(alone.ids), ""
        if text[boundary : boundary + 1].isspace():
            return self, first, "white"
        return self, first, "blank" if taken.isspace() else "word"

    def unknown(self, last: int, *, own: str | Mapping[str, Any]) -> tuple[str, ...]:
        """Parts of a prompt, and of what the template writes, that the tokenizer does not know; those of an answer are refused."""
        end = self.offsets[last - 1][0] if last <= len(self.offsets) else len(self.text)
        given: dict[str, None] = {}
        for begin, stop in [*self._unread(), *((at, at + 1) for at in self.lost)]:
            if asked := _visible(self.text[begin : min(stop, self.boundary)]):
                given[asked] = None
            characters = _visible(self.text[max(begin, self.boundary) : min(stop, end)])
            if not characters:
                continue
            words = own if isinstance(own, str) else json.dumps(own, ensure_ascii=False, default=str)
            if not any(character in words for character in characters):
                given[characters] = None
                continue
            raise InvalidValue(
                f"{self.place}: the answer holds {characters[:20]!r}, which the tokenizer does not know, so it would not be "
                "learned; write it in other characters, leave the row out, or take a model whose tokenizer knows it"
            )
        return tuple(given)

    def _unread(self) -> Iterator[tuple[int, int]]:
        """Where the text is read as the unknown token."""
        tokenizer = self.tokenizer
        known = {tokenizer.eos_token_id, tokenizer.bos_token_id}  # as GPT-2's unknown token, which knows every byte
        unknown = {tokenizer.unk_token_id, _unknown_of_model(tokenizer)} - known
        if not getattr(tokenizer, "is_fast", False):
            if not unknown.isdisjoint(self.ids):
                for position, character in enumerate(self.text):
                    if not unknown.isdisjoint(tokenizer(character, add_special_tokens=False, verbose=False).input_ids):
                        yield position, position + 1
            return
        for token, (begin, stop) in zip(self.ids, self.offsets, strict=True):
            if token in unknown and self.text[begin:stop].strip() != tokenizer.convert_ids_to_tokens(token):
                yield begin, stop


@lru_cache(maxsize=4)
def _unknown_of_model(tokenizer: Any) -> int | None:
    """The unknown token of a tokenizer's model, if the tokenizer does not declare it."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    model = tokenizer.backend_tokenizer.model
    if hasattr(model, "unk_token"):
        return None if model.unk_token is None else tokenizer.backend_tokenizer.token_to_id(model.unk_token)
    unknown = json.loads(model.__getstate__()).get("unk_id")
    return None if unknown is None else int(unknown)


@lru_cache(maxsize=4)
def _leaves_out(tokenizer: Any) -> bool:
    """Return whether a tokenizer drops a character that is in no vocabulary."""
    return not tokenizer("\U0010fffd", add_special_tokens=False, verbose=False).input_ids


def _find_left_out(text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], tokenizer: Any) -> list[int]:
    """Places of characters that a tokenizer drops; some leave no gap, but shift what follows."""
    reached, whole = 0, True
    for begin, stop in offsets:
        whole &= begin <= reached
        reached = max(reached, stop)
    if whole and reached >= len(text) and not _leaves_out(tokenizer):
        return []
    lost = {c for c in set(text) if _visible(c) and not tokenizer(c, add_special_tokens=False, verbose=False).input_ids}
    added = tokenizer.get_added_vocab().values()
    spelled = {at for token, span in zip(ids, offsets, strict=True) if token in added for at in range(*span)}
    return [at for at, character in enumerate(text) if character in lost and at not in spelled]


def _visible(text: str) -> str:
    """A text without white space and what has no shape of its own, which some tokenizers leave out."""
    if not text or text.isspace():
        return ""
    return "".join(
        c for c in text if not c.isspace() and unicodedata.category(c) not in ("Cc", "Cf") and not "\ufe00" <= c <= "\ufe0f"
    )


def first_after(offsets: Sequence[tuple[int, int]], boundary: int) -> int:
    """Index of the first token that ends after a place in the text."""
    return next((i for i, (_, b) in enumerate(offsets) if b > boundary), len(offsets))
