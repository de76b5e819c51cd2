"""What a person reads of a command: text as it is, without markup of its own, and nothing that steers the terminal."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

from rich.console import Console

from anchorlora.shown import shown


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
