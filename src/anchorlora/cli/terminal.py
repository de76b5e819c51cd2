"""What a person reads of a command: text as it is, without markup of its own, and nothing that steers the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from anchorlora.shown import shown


class Terminal(Console):
    """A console on which text can be nothing but text."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*(shown(each) if isinstance(each, str) else each for each in objects), **how)
