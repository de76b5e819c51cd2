"""Files of tasks of free text: which rows train and which are held out, what their answers are, and their tokens once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from anchorlora.data.forms.base import number_of
from anchorlora.data.holdout import RowHashes
from anchorlora.data.manifest import FileFacts
from anchorlora.data.metrics import METRICS, ExactMatch, Metric, TokenF1, normalize, refuse_uninstalled
from anchorlora.data.prompts import Encoder
from anchorlora.data.rendering import Turn
from anchorlora.data.sample_files import facts_of_data, lines_in, samples_in
from anchorlora.data.samples import Example, Sample, examples_of
from anchorlora.data.spool import EncodedExamples
from anchorlora.data.text import TextTask, count_rows, counting, fitted, turn_of
from anchorlora.errors import InvalidValue, UnknownName

MOST_LABELS = 50
LABEL_WORDS = 6
ENDS = "\"'`*_()[]{}.,;:!?"  # punctuation around a label that is not of it
PER_LABEL = 5  # examples; fewer, and the answers are texts that happen to repeat
Tell = Callable[[int, int], None]  # is told how many rows are read, and of how many
HELD_OUT = 10  # every tenth row is held out where there is no test file


@dataclass(frozen=True)
class TextSource:
    """Where the examples of a task of free text come from."""

    train: str  # A .jsonl, .json, .csv or .parquet file, a folder written by `datasets`, or ORG/NAME:SPLIT of the hub
    test: str | None = None  # the same for testing; None holds out every tenth row of `train`, chosen by a hash of its text
    columns: str | None = None  # which columns to read; see `anchorlora.data.samples`
    metrics: tuple[Metric, ...] | None = None
    max_new_tokens: int | None = None  # most tokens of an answer; None for what the recipe says
    reader: Callable[[str], Iterator[Sample]] | None = None

    def file(self, split: str) -> str:
        """Return the file of a split: where there is no test file, some rows of the training file are held out."""
        return self.train if split == "train" or self.test is None else self.test

    def samples(self, file: str) -> Iterator[Sample]:
        """Yield the samples of one of its files."""
        return self.reader(file) if self.reader else samples_in(file, column=self.columns)


@dataclass(eq=False)
class TextFiles:
    """Tasks of free text, each with files of its own."""

    sources: Mapping[str, TextSource]  # name of a task -> where its examples come from
    testing: bool = True  # whether test files may be opened
    opened: dict[str, FileFacts] = field(default_factory=dict)
    _listed: dict[str, _Listed] = field(default_factory=dict)
    _answers: dict[str, _Answers] = field(default_factory=dict)
    _encoded: dict[tuple[Any, ...], EncodedExamples] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of the tasks."""
        return list(self.sources)

    def training_only(self) -> TextFiles:
        """Return the same tasks without access to any test file."""
        return TextFiles(self.sources, testing=False)

    def task(self, name: str, encoder: Encoder | None = None) -> TextTask:
        """Return a task by its name; its training rows are read to find out what its answers are, as tokens of an encoder."""
        source = self._source(name)
        if source.test is None or name in self._listed:
            answers = self._listing(name).answers
        elif name not in self._answers:
            answers = self._answers[name] = _Answers()
            for example in examples_of(self._rows(name, "train")):
                answers.add(example)
                if answers.counts is None and not answers.plain and not answers.numbers:  # the file is not read any further
                    break
        else:
            answers = self._answers[name]
        metrics = source.metrics
        if metrics is None:
            metrics = (ExactMatch(),) if answers.labels else (TokenF1(), ExactMatch())
            metrics = () if answers.plain else (METRICS["verbatim_match"],) if answers.verbatim else metrics
        refuse_uninstalled(metrics)
        return TextTask(name, answers.labels if encoder is None else answers.read(encoder), metrics, source.max_new_tokens)

    def examples(self, name: str, split: str, *, limit: int | None = None, tell: Tell | None = None) -> Iterator[Example]:
        """Yield the examples of a split; files are read only as far as needed, with progress reported to `tell`."""
        source = self._source(name)
        if split == "test" and not self.testing:
            raise InvalidValue(f"the test file of {name} may not be opened here")
        any_answer = False
        for example in islice(examples_of(self.rows_of(name, split, tell)), limit):
            any_answer = True
            yield example
        if not any_answer:
            raise InvalidValue(f"{source.file(split)} has no answer to learn; a chat needs a message of the assistant")

    def rows_of(self, name: str, split: str, tell: Tell | None = None) -> Iterator[Sample]:
        """Yield the rows of a split as they stand; where no test file may be opened, none is held out."""
        if self._source(name).test is not None or not self.testing:
            yield from self._rows(name, split, tell)
            return
        held = self._holdout(name)
        yield from (s for i, s in enumerate(self._rows(name, split, tell)) if (i in held) == (split == "test"))

    def look_through(self, name: str, tell: Tell) -> None:
        """Scan a task's training rows before they are tokenized, reporting progress to `tell`."""
        self._listing(name, tell)

    def encoded(
        self, name: str, split: str, encoder: Encoder, *, limit: int | None = None, tell: Tell | None = None
    ) -> EncodedExamples:
        """Return the examples of a split as tokens, those that `counted` kept or else read, with progress reported to `tell`."""
        key = (name, split, limit, encoder.key)
        if key not in self._encoded:
            return encoder.encode(self.task(name), self.examples(name, split, limit=limit, tell=tell))
        return self._encoded[key]

    def counted(self, name: str, split: str, encoder: Encoder, *, test_limit: int | None, tell: Tell) -> dict[str, Any]:
        """Return how many rows a file has, and how many of them have each property; their tokens are kept for `encoded`."""
        source = self._source(name)
        held = self._holdout(name) if source.test is None else frozenset()
        parts = {"train": EncodedExamples(), "test": EncodedExamples()}

        def keep(number: int, example: Example, turn: Turn) -> None:
            part = "test" if number in held else split
            if part == "train" or test_limit is None or len(parts[part]) < test_limit:
                parts[part].add(fitted(replace(example, index=len(parts[part])), turn, encoder.max_tokens, name=name))

        counts, _ = count_rows(name, self._rows(name, split, tell), encoder, keep=keep)
        for part in ("train", "test") if source.test is None else (split,):
            self._encoded[name, part, test_limit if part == "test" else None, encoder.key] = parts[part]
        if split == "test":
            counts["also_learned"] = self._listing(name).rows.shared_with(self._rows(name, split))
        return counts

    def held_out(self, name: str) -> int:
        """Return how many rows of the training file are held out; 0 with a test file."""
        return 0 if self._source(name).test is not None else len(self._holdout(name))

    def _source(self, name: str) -> TextSource:
        if name not in self.sources:
            raise UnknownName(f"no task called {name!r}; there is: {', '.join(self.sources)}")
        return self.sources[name]

    def _rows(self, name: str, split: str, tell: Tell | None = None) -> Iterator[Sample]:
        """All rows of a split's file, with progress reported where it is known how many there are, as of a file of lines."""
        source = self._source(name)
        samples = source.samples(file := source.file(split))
        if file not in self.opened:
            self.opened[file] = facts_of_data(file)
        listed = self._listed.get(name) if file == source.train else None
        total = len(listed.rows.hashes) if listed else lines_in(file) if tell else None
        return counting(samples, tell, total) if tell and total else samples

    def _holdout(self, name: str) -> frozenset[int]:
        """Numbers of the rows that are held out: the tenth whose text has the smallest hashes, at least one; see `RowHashes`."""
        listed = self._listing(name)
        if listed.held is None:
            rows = len(listed.rows.hashes)
            if rows < 2:
                raise InvalidValue(f"{self.sources[name].train} has one row, and none can be held out; give a file to test on")
            listed.held = listed.rows.held_out(max(1, round(rows / HELD_OUT)), unfit=listed.unfit)
        return listed.held

    def _listing(self, name: str, tell: Tell | None = None) -> _Listed:
        if name not in self._listed:
            self._listed[name] = _Listed.of(name, self._rows(name, "train", tell))
        return self._listed[name]


@dataclass(eq=False)
class _Listed:
    """Facts about the rows of a task's training file, from one pass before they are tokenized."""

    rows: RowHashes
    answers: _Answers
    unfit: frozenset[int]  # rows of which nothing is learned
    held: frozenset[int] | None = None  # rows that are held out; None until that is asked

    @classmethod
    def of(cls, name: str, samples: Iterable[Sample]) -> _Listed:
        """Read the rows."""
        rows, answers, unfit = RowHashes(name), _Answers(), set[int]()
        for number, sample in enumerate(samples):
            rows.add(sample)
            examples = list(examples_of([sample]))
            if not examples:
                unfit.add(number)
            for example in examples:
                answers.add(example)
        return cls(rows, answers, frozenset(unfit))


class _Answers:
    """Counts of a task's answers, as long as they are a few short texts that repeat, as labels do."""

    def __init__(self) -> None:
        self.counts: dict[str, int] | None = {}  # None once an answer is no label
        self.firsts: dict[str, Example] = {}  # the first example of each
        self.examples = 0
        self.plain = True  # whether all rows are plain text, so far
        self.numbers = True  # the same of answers that are numbers
        self.signed = False  # whether normalizing makes another number of one

    def add(self, example: Example) -> None:
        """Look at an answer, unless it is known that they are no labels."""
        self.plain &= not example.is_answer
        self.examples += 1
        label = example.label.strip()
        if self.numbers:
            number = number_of(label)
            self.numbers = number is not None
            self.signed |= number_of(normalize(label)) != number
        if self.counts is None:
            return
        self.counts[label] = self.counts.get(label, 0) + 1
        self.firsts.setdefault(label, example)
        called = example.reply is not None and example.reply.get("tool_calls")
        if called or len(label.split()) > LABEL_WORDS or len(self.counts) > MOST_LABELS:
            self.counts = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, by first appearance; none if the answers are texts."""
        counts = self.counts or {}
        return tuple(counts) if not self.plain and 2 <= len(counts) <= self.examples / PER_LABEL else ()

    @property
    def verbatim(self) -> bool:
        """True if normalizing would make different answers equal, such as -1 and 1, or C and C++."""
        apart = {label.lower().strip(ENDS) or label for label in self.labels}
        return (self.numbers and self.signed) or len(apart) > len(set(map(normalize, self.labels)))

    def read(self, encoder: Encoder) -> tuple[str, ...]:
        """Return the labels as answers are compared, which a tokenizer and a template may write otherwise."""
        read = tuple(dict.fromkeys(self._read(label, encoder) for label in self.labels))
        return read if len(read) > 1 else ()

    def _read(self, label: str, encoder: Encoder) -> str:
        try:
            return turn_of(self.firsts[label], encoder).label
        except InvalidValue:  # of this example; it is refused with its tokens
            return label
