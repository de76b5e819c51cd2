"""Hold rows out of a file: by hashes of their texts, and never apart from a row that would give one away."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable

from anchorlora.data.samples import Sample


def text_hash(name: str, sample: Sample) -> int:
    """Return a number that decides whether a row is held out: the same for every order and every file that has the row."""
    content = sample.content if isinstance(sample.content, str) else "\0".join(str(m.get("content")) for m in sample.content)
    return _hash(f"{name}|{' '.join(content.split())}")


class RowHashes:
    """Rows by hashes of their texts, and which rows are held out together: duplicates, equal prompts, and chats that begin alike,
    up to the first message of the assistant that answers a user.
    """

    def __init__(self, name: str, samples: Iterable[Sample] = ()) -> None:
        self.name = name
        self.hashes = array("Q")
        self._parents = array("L")
        self._first: dict[int, int] = {}
        for sample in samples:
            self.add(sample)

    def add(self, sample: Sample) -> None:
        """Add the next row."""
        number = len(self.hashes)
        self.hashes.append(text_hash(self.name, sample))
        self._parents.append(number)
        for key in _keys(self.name, sample):
            roots = self._root(self._first.setdefault(key, number)), self._root(number)
            self._parents[max(roots)] = min(roots)

    @property
    def repeated(self) -> int:
        """How many rows have the text of an earlier one."""
        return len(self.hashes) - len(set(self.hashes))

    @property
    def together(self) -> int:
        """How many rows go where an earlier one goes."""
        return sum(parent != number for number, parent in enumerate(self._parents))

    def shared_with(self, others: Iterable[Sample]) -> int:
        """Return how many rows of another file have the text, the prompt or the beginning of one of these."""
        return sum(any(key in self._first for key in _keys(self.name, sample)) for sample in others)

    def held_out(self, count: int, *, unfit: Collection[int] = ()) -> frozenset[int]:
        """Return the numbers of rows to hold out: the smallest hashes, and all that go together with them; copies of one row are
        split.
        """
        order = sorted(range(len(self.hashes)), key=self.hashes.__getitem__)
        groups: dict[int, list[int]] = {}
        for number in order:
            groups.setdefault(self._root(number), []).append(number)
        if len(groups) == 1:
            return frozenset([number for number in order if number not in unfit][:count])
        measured = [group for group in groups.values() if not any(number in unfit for number in group)]
        held: list[int] = []
        for group in measured:
            if len(held) + len(group) <= count:
                held += group
        if not held and measured:
            held = min(measured, key=len)
        return frozenset(held)

    def _root(self, number: int) -> int:
        while self._parents[number] != number:
            self._parents[number] = self._parents[self._parents[number]]
            number = self._parents[number]
        return number


def _keys(name: str, sample: Sample) -> tuple[int, ...]:
    """Hashes of a row's text and, if it has one, of its beginning: rows that share one are taken together."""
    beginning = _beginning(sample)
    return (text_hash(name, sample), *(() if beginning is None else (beginning,)))


def _beginning(sample: Sample) -> int | None:
    """A hash of a row's prompt, or of a chat's beginning up to the first message of the assistant after a user's; None without."""
    content = sample.content
    if isinstance(content, str):
        prompt = " ".join(content[: sample.given].split())
        return _hash(f"prompt|{prompt}") if prompt else None
    asked, opening = False, []
    for message in content:
        if asked and message.get("role") == "assistant":
            break
        asked = asked or message.get("role") == "user"
        opening.append(f"{message.get('role')}\0{' '.join(str(message.get('content')).split())}")
    return _hash("chat|" + "\0\0".join(opening)) if asked else None


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
