"""log.jsonl of a run: one line an event, appended as it happens.  Nothing that a run does depends on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorlora.experiments.files import write_lines
from anchorlora.shown import without_secrets
from anchorlora.strict import Unreadable, bytes_of, loads

LARGEST_LOG = 2**31  # bytes


@dataclass(frozen=True)
class EventLog:
    """The file and what is done with it."""

    path: Path
    check: Callable[[], None] = lambda: None  # called before a write; raises where the directory is another's

    def write(self, event: dict[str, Any]) -> None:
        """Append one event."""
        self.check()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(without_secrets(json.dumps(event)) + "\n")

    def trim(self, finished: int, step: int = 0) -> None:
        """Drop the events of tasks that will be learned again; those of `step` steps of the one after `finished` stay."""

        def stays(event: dict[str, Any]) -> bool:
            task, at = event.get("task", 0), event.get("step", 0)
            if not isinstance(task, int) or not isinstance(at, int):
                return False
            return task <= finished or (task == finished + 1 and step > 0 and at <= step)

        if self.path.is_file():
            write_lines(self.path, [event for event in read_events(self.path) if stays(event)])


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a log; a line that was cut or damaged is none.  Raises ValueError for what is no file of that size."""
    try:
        lines = bytes_of(path, largest=LARGEST_LOG).split(b"\n")
    except Unreadable as error:
        raise ValueError(f"{path}: {error}; move it away") from None
    found = []
    for line in lines:
        with suppress(Unreadable, UnicodeDecodeError):
            found.append(loads(line.decode()))
    return [event for event in found if isinstance(event, dict)]
