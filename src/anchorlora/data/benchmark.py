"""Read a folder in CL_Benchmark layout: <group>/<task>/{train,test,labels}.json, and instruction_config.json beside the groups.

Each split is a JSON list of {"label", "sentence"}; labels.json is a list of strings. A file that MANIFEST.json or the official
list describes must have exactly the bytes described. `dev.json` is never read: officially it is the same file as `test.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from anchorlora.data.manifest import LARGEST, OFFICIAL, FileFacts, Manifest, facts_of
from anchorlora.data.prompts import Task
from anchorlora.data.samples import Example
from anchorlora.data.text import AnyTask
from anchorlora.errors import InvalidValue, UnknownName, nearest_names
from anchorlora.paths import name_of_task, nearest, start_of
from anchorlora.store.json import read_file

INSTRUCTIONS_FILE = "instruction_config.json"
# the instruction of groups for which the folder has none
OWN_WORDING = "Read the text and answer with one of the options.\n"
SPLITS = frozenset({"train", "test"})


class TaskSource(Protocol):
    """A source of tasks for `run_sequence`: what a task is, its examples, and what was read for them.

    `Benchmark` reads a folder; any object with these members is another source (docs/extend.md).

    Args:
        opened: Name -> hashes and kind of everything that was read so far, for the record; a stopped run goes on only with the
            same hashes.
    """

    @property
    def opened(self) -> Mapping[str, FileFacts]:
        """Name -> hashes and kind of everything that was read so far."""

    def task(self, name: str) -> AnyTask:
        """Return a task by its name.

        Args:
            name: Name of the task, as an order gives it.

        Raises:
            UnknownName: There is no such task.
        """

    def examples(self, name: str, split: str, *, limit: int | None = None) -> Iterable[Example]:
        """Return or yield the examples of a split, always the same ones in the same order; a run reads them once, one by one.

        Args:
            name: Name of the task.
            split: "train" or "test". Where a recipe tests on a holdout of the training data, "test" is never asked for.
            limit: Number of examples, the first ones; None returns all.
        """


@dataclass(eq=False)
class Benchmark:
    """Tasks of one folder in CL_Benchmark layout.

    Args:
        root: The folder that holds the groups.
        splits: Splits that may be opened, "train" and "test".
        opened: Relative path -> hashes and kind of every file that was opened; filled while reading.

    Raises:
        InvalidValue: There is no such folder, or it holds no task.

    Example:
        >>> from anchorlora.embedded import folder
        >>> benchmark = Benchmark(folder("embedded:mini", "data"))
        >>> benchmark.names
        ['reviews', 'entities', 'news', 'questions']
        >>> len(benchmark.task("reviews").labels)
        5
    """

    root: Path
    splits: frozenset[str] = SPLITS
    opened: dict[str, FileFacts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.root.is_dir():
            near = nearest(self.root) or start_of(self.root)
            raise InvalidValue(f"{self.root} is not a folder; give a CL_Benchmark folder (anchorlora data import makes one){near}")
        self._manifest = Manifest.beside(self.root)
        self._groups = {path.parent.name: path.parent for path in sorted(self.root.glob("*/*/labels.json"))}
        if not self._groups:
            raise InvalidValue(f"{self.root} holds no <group>/<task>/labels.json; give a CL_Benchmark folder")

    def training_only(self) -> Benchmark:
        """Return the same folder without access to any test file.

        Example:
            >>> from anchorlora.embedded import folder
            >>> benchmark = Benchmark(folder("embedded:mini", "data"))
            >>> sorted(benchmark.training_only().splits)
            ['train']
        """
        return Benchmark(self.root, frozenset({"train"}))

    @property
    def names(self) -> list[str]:
        """The names of the tasks, sorted by group."""
        return list(self._groups)

    def task(self, name: str) -> Task:
        """Return what the prompts of a task consist of.

        Args:
            name: Name of the task.

        Raises:
            UnknownName: There is no such task; the message has the nearest names.
            InvalidValue: A file of the task cannot be read, or is not what the manifest describes.
        """
        folder = self._folder(name)
        labels = self._read(folder / "labels.json")
        if not isinstance(labels, list) or not labels or not all(isinstance(label, str) and label for label in labels):
            odd = [label for label in labels if not isinstance(label, str) or not label] if isinstance(labels, list) else []
            why = f": {odd[0]!r:.40} is no text" if odd else ""
            raise InvalidValue(f"{folder / 'labels.json'} is not a list of label names{why}")
        group = folder.parent.name
        return Task(group, name, self._instruction(group), tuple(labels))

    def examples(self, name: str, split: str, *, limit: int | None = None) -> Iterator[Example]:
        """Yield the examples of a split; the file is read whole, and is refused if any part of it cannot be read.

        Args:
            name: Name of the task.
            split: "train" or "test".
            limit: Number of examples, the first ones in file order; None yields all.

        Yields:
            Examples in file order.

        Raises:
            UnknownName: There is no such task.
            InvalidValue: The split may not be opened, the file cannot be read, or an example in it has no text or an unknown label.

        Example:
            >>> from anchorlora.embedded import folder
            >>> benchmark = Benchmark(folder("embedded:mini", "data"))
            >>> len(list(benchmark.examples("reviews", "train", limit=5)))
            5
        """
        if split not in self.splits:
            allowed = ", ".join(sorted(self.splits))
            raise InvalidValue(
                f"{split}.json of {name} may not be opened here: only {allowed} (dev is the test file under another name)"
            )
        path = self._folder(name) / f"{split}.json"
        official, labels = self._facts(path).kind == OFFICIAL, self.task(name).labels
        rows = self._read(path)
        if not isinstance(rows, list) or not rows:
            raise InvalidValue(f"{path} is not a list of examples{': it is empty' if rows == [] else ''}")
        for index, row in enumerate(rows[:limit]):
            if not (isinstance(row, dict) and isinstance(row.get("label"), str) and isinstance(row.get("sentence"), str)):
                raise InvalidValue(
                    f'{path}, line {_line(path, index)}: an example is {{"label": text, "sentence": text}}, not {row!r:.80}'
                )
            if row["label"] not in labels and not (official and split == "test"):  # MNLI's official test file has 131 labels "-"
                near = get_close_matches(row["label"], labels, n=3, cutoff=0.3) or list(labels)
                where = f"{path}, line {_line(path, index)}"
                raise InvalidValue(f"{where}: the label {row['label']!r} is not in labels.json; nearest: {', '.join(near)}")
            yield Example(index, row["sentence"], row["label"], place=f"{path}, example {index + 1}")

    def _folder(self, name: str) -> Path:
        if name not in self._groups:
            raise UnknownName(f"no task called {name!r} in {self.root}; {nearest_names(name, self._groups)}")
        name_of_task(name)
        return self._groups[name]

    def _instruction(self, group: str) -> str:
        path = self.root / INSTRUCTIONS_FILE
        if not path.is_file():
            return OWN_WORDING
        config = self._read(path)
        entries = config.get(group) if isinstance(config, dict) else None
        if entries is None:
            return ""  # as officially for COPA
        try:
            text = next(entry["instruction"] for entry in entries if entry["instruction_type"] == "zero-shot")
        except (StopIteration, TypeError, KeyError, AttributeError):
            raise InvalidValue(f"{path} has no zero-shot instruction for {group}") from None
        return str(text)

    def _read(self, path: Path) -> Any:
        self._facts(path)
        return read_file(path, object, remedy="fetch it again", largest=LARGEST)

    def _facts(self, path: Path) -> FileFacts:
        relative = path.relative_to(self.root).as_posix()
        if relative not in self.opened:
            if not path.exists():
                raise InvalidValue(f"{path} is missing; anchorlora data import copies a complete CL_Benchmark folder")
            facts = facts_of(path)
            self.opened[relative] = self._manifest.judge(relative, facts)
        return self.opened[relative]


def _line(path: Path, index: int) -> int:
    """Line, from 1, on which example number `index`, from 0, begins; a line may hold many examples."""
    text, decoder = path.read_text(encoding="utf-8"), json.JSONDecoder()
    position = text.index("[") + 1
    for _ in range(index):
        position = _skip(text, position)
        _, position = decoder.raw_decode(text, position)
    return text.count("\n", 0, _skip(text, position)) + 1


def _skip(text: str, position: int) -> int:
    while text[position] in " \t\r\n,":
        position += 1
    return position
