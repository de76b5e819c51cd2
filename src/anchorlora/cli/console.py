"""What a person reads of a command: text as it is, without markup of its own, and nothing that steers the terminal.

What libraries log and warn of while a command runs: names of strangers stay words, and no secret is in them.
"""

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
    """A console on which text can be nothing but text.

    What is told on stderr while a program works is told to nobody when nobody is left to read it, as where `tee` ended before it.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def print(self, *objects: Any, **how: Any) -> None:
        text = [shown(each) if isinstance(each, str) else each for each in objects]
        with suppress(OSError) if self.stderr else nullcontext():
            super().print(*text, **how)

    def on_broken_pipe(self) -> None:
        """rich ends the program here, whatever it was doing."""
        if not self.stderr:
            super().on_broken_pipe()


class ShownRecord(logging.LogRecord):
    """A message of any logger, also of one that a library makes later with a handler of its own."""

    def getMessage(self) -> str:  # noqa: N802  # the name is logging's
        return shown(super().getMessage())


@contextmanager
def libraries_in_words() -> Iterator[None]:
    """Every message that is logged and every warning within the block is shown as words."""
    record, warning = logging.getLogRecordFactory(), warnings.formatwarning

    def in_words(*args: Any, **how: Any) -> str:
        return shown(warning(*args, **how))

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it says which of its kernels are not there, whatever is asked
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
    """Print one JSON object on stdout."""
    print(shown(json.dumps(content, indent=1, ensure_ascii=False)))
