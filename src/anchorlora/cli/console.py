"""Output of commands: literal text without markup, terminal control sequences, or secrets; log messages and warnings included."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from rich.console import Console

from anchorlora.schemas.text import shown


class Terminal(Console):
    """A console that shows text literally.

    Progress on stderr is dropped silently once nobody reads it, as when `tee` has ended.

    Args:
        stderr: Whether to write to stderr rather than stdout.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def print(self, *objects: Any, **how: Any) -> None:
        """Print objects; control sequences and secrets in strings are made harmless.

        Args:
            *objects: As for rich's `Console.print`.
            **how: As for rich's `Console.print`.
        """
        text = [shown(each) if isinstance(each, str) else each for each in objects]
        with suppress(OSError) if self.stderr else nullcontext():
            super().print(*text, **how)

    def on_broken_pipe(self) -> None:
        """Go on without stderr; rich would end the program here."""
        if not self.stderr:
            super().on_broken_pipe()


class ShownRecord(logging.LogRecord):
    """A log record with a harmless message, for every logger and handler, those that libraries add later included."""

    def getMessage(self) -> str:  # noqa: N802  # the name is logging's
        """The message, without control sequences and secrets."""
        return shown(super().getMessage())


@contextmanager
def libraries_in_words() -> Iterator[None]:
    """Make every log message and warning in the block harmless: no control sequences, no secrets."""
    record, warning = logging.getLogRecordFactory(), warnings.formatwarning

    def in_words(*args: Any, **how: Any) -> str:
        return shown(warning(*args, **how))

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it lists missing kernels whatever is asked
    logging.setLogRecordFactory(ShownRecord)
    warnings.formatwarning = in_words
    try:
        yield
    finally:
        logging.setLogRecordFactory(record)
        warnings.formatwarning = warning


out = Terminal()
err = Terminal(stderr=True)


def print_json(content: Any) -> None:
    """Print one JSON object on stdout.

    Args:
        content: Anything that `json.dumps` takes.
    """
    print(shown(json.dumps(content, indent=1, ensure_ascii=False)))
