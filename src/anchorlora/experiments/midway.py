"""The state of a task that has begun and not ended: how far it is learned, or that it is learned and how far it is answered.

    <t>-begun/step-<q>/     after q optimizer steps; the two newest are kept
    <t>-begun/learned/      after its boundary: adapter, cores and what later tasks need
    <t>-begun/answers.json  texts of whole batches, with a hash of them

Sealed folders, written whole and renamed. What is damaged is named and passed over for the next older one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from anchorlora.continual.progress import Learned, Progress
from anchorlora.experiments.cores import read_tensors
from anchorlora.experiments.files import write_text
from anchorlora.experiments.sealed import damage, sealed_folder

KEPT = 2
FACTS, TENSORS, ANSWERS = "facts.json", "tensors.safetensors", "answers.json"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Midway:
    """The folder of one task's unfinished state."""

    root: Path

    @property
    def learned(self) -> Path:
        return self.root / "learned"

    def write_progress(self, progress: Progress) -> None:
        """Save how far a task is learned; older ones but one go."""
        with sealed_folder(self.root / f"step-{progress.step:08d}") as folder:
            save_file({name: t.contiguous() for name, t in progress.tensors.items()}, folder / TENSORS)
            kept = {"number": progress.number, "step": progress.step, "seconds": progress.seconds, "stores": progress.stores}
            write_text(folder / FACTS, json.dumps(kept))
        for old in self._steps()[KEPT:]:
            shutil.rmtree(old)

    def read_progress(self, number: int, tell: Tell) -> Progress | None:
        """The newest progress that is what was written; None where there is none."""
        for folder in self._steps():
            wrong = damage(folder)
            if wrong is None:
                facts = json.loads((folder / FACTS).read_text())
                if facts["number"] == number:
                    return Progress(**facts, tensors=read_tensors(folder / TENSORS))
                wrong = f"{folder} is of task {facts['number']}"
            tell(f"{wrong}; an older state is taken")
        return None

    @contextmanager
    def write_learned(self, learned: Learned) -> Iterator[Path]:
        """A folder for what a learned task leaves, beside the numbers of it; progress of its learning goes."""
        with sealed_folder(self.learned) as folder:
            yield folder
            numbers = {name: getattr(learned, name) for name in NUMBERS}
            write_text(folder / FACTS, json.dumps(numbers, allow_nan=False))
        for old in self._steps():
            shutil.rmtree(old)

    def read_learned(self, tell: Tell) -> Learned | None:
        """The numbers of a learned task with its answers so far; None where it is not learned yet."""
        if not self.learned.is_dir():
            return None
        wrong = damage(self.learned)
        if wrong:
            tell(f"{wrong}; the task is learned again")
            return None
        numbers = json.loads((self.learned / FACTS).read_text())
        texts, seconds = self._read_answers(tell)
        return Learned(**{**numbers, "evaluate_seconds": seconds}, texts=texts)

    def write_answers(self, texts: dict[str, dict[int, str]], seconds: float) -> None:
        content = json.dumps({"seconds": seconds, "texts": texts})
        write_text(self.root / ANSWERS, json.dumps({"sha256": _hash(content), "content": content}))

    def _read_answers(self, tell: Tell) -> tuple[dict[str, dict[int, str]], float]:
        path = self.root / ANSWERS
        if not path.is_file():
            return {}, 0.0
        try:
            sealed = json.loads(path.read_text(encoding="utf-8"))
            if _hash(sealed["content"]) != sealed["sha256"]:
                raise ValueError("its hash differs")
            content = json.loads(sealed["content"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            tell(f"{path} is not what was written ({error}); all examples are asked again")
            return {}, 0.0
        return {task: {int(i): text for i, text in each.items()} for task, each in content["texts"].items()}, content["seconds"]

    def clear(self) -> None:
        """The task has ended: its state is elsewhere."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _steps(self) -> list[Path]:
        """Newest first."""
        return sorted(self.root.glob("step-*"), reverse=True)


NUMBERS: tuple[str, ...] = tuple(f.name for f in fields(Learned) if f.name not in ("texts", "evaluate_seconds"))


def _hash(text: Any) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()
