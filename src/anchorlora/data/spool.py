"""Examples as tokens, and many of them in a temporary file: what a run needs of its data does not have to fit into memory."""

from __future__ import annotations

import hashlib
import json
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, overload

from anchorlora.data.samples import Example
from anchorlora.errors import Unwritten

LONGEST_LABEL = 64  # characters; longer answers are no labels, and would fill the memory


@dataclass(frozen=True)
class Encoded:
    """One example as token ids."""

    example: Example
    text: str  # the prompt that was tokenized
    prompt: tuple[int, ...]
    answer: tuple[int, ...]  # tokens of the label and the end of sequence
    cut: bool  # True if the passage was cut to fit
    unknown: bool = field(default=False, compare=False)  # counted when it is read, and not kept
    split: bool = field(default=False, compare=False)  # True if the prompt alone is read as other tokens
    remembered: bool = field(default=False, compare=False)  # True if it is mixed in from an earlier task
    learned: bool = field(default=True, compare=False)  # False if it adds nothing to the task's loss

    def goes_on_from(self, earlier: Encoded) -> bool:
        """Return True if the prompt begins with another example's prompt and answer, as a later turn of its chat."""
        before = len(earlier.prompt)
        end = before + len(earlier.answer)
        return len(self.prompt) >= end and self.prompt[before:end] == earlier.answer and self.prompt[:before] == earlier.prompt

    @property
    def prompt_sha256(self) -> str:
        """SHA-256 of the prompt's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


class EncodedExamples(Sequence[Encoded]):
    """A list of tokenized examples in a temporary file without a name, so that each takes some thirty bytes of memory."""

    def __init__(self, examples: Iterable[Encoded] = ()) -> None:
        with _naming_the_folder():
            self._file: Any = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as this object
        weakref.finalize(self, _close, self._file)
        self._ends = array("Q", [0])
        self.labels: list[str] = []
        self.lengths = array("I")
        self.begins = array("Q")  # where a chat begins, of which each further turn goes on from the one before
        self._last: Encoded | None = None
        self.cut = self.unknown = self.split = 0
        self._known: dict[str, str] = {}  # one string for each label
        for e in examples:
            self.add(e)

    def add(self, e: Encoded) -> None:
        """Add an example at the end."""
        x = e.example
        parts = [x.index, x.sentence, x.label, e.text, e.prompt, e.answer, e.cut, x.lead, x.place]
        line = json.dumps(parts, separators=(",", ":")).encode() + b"\n"
        with _naming_the_folder():
            self._file.seek(self._ends[-1])
            self._file.write(line)
        self._ends.append(self._ends[-1] + len(line))
        label = x.label[:LONGEST_LABEL]
        self.labels.append(self._known.setdefault(label, label))
        if self._last is None or not e.goes_on_from(self._last):
            self.begins.append(len(self.lengths))
        self._last = e
        self.lengths.append(len(e.prompt) + len(e.answer))
        self.cut += e.cut
        self.unknown += e.unknown
        self.split += e.split

    def __len__(self) -> int:
        return len(self.labels)

    @overload
    def __getitem__(self, index: int) -> Encoded: ...
    @overload
    def __getitem__(self, index: slice) -> list[Encoded]: ...
    def __getitem__(self, index: int | slice) -> Encoded | list[Encoded]:
        """Return an example, or a list of some."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        begin, end = self._ends[position], self._ends[position + 1]
        with _naming_the_folder():
            self._file.seek(begin)  # which writes what is left to write
        line = self._file.read(end - begin)
        number, sentence, label, text, prompt, answer, cut, lead, location = json.loads(line)
        return Encoded(Example(number, sentence, label, lead=lead, place=location), text, tuple(prompt), tuple(answer), cut)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


def _close(file: Any) -> None:
    """Close a file; what a full disk has no room for is not missed."""
    with suppress(OSError):
        file.close()


@contextmanager
def _naming_the_folder() -> Iterator[None]:
    """Say where there is no room, or that there is no such folder."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        where = f"{reason}: {tempfile.tempdir}" if tempfile.tempdir else reason
        raise Unwritten(f"{where}, where tokenized examples are kept; make room, or name another folder with TMPDIR") from None
