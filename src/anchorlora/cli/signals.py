"""Signals, from the program's first line on; whoever is stopped by one ends with exit status 75.

    before anything is learned, and in commands that only read    the process ends where it is
    while a run learns                                            the first one asks it to save and stop between two steps, a second
                                                                  Ctrl-C stops it at once
    in commands that tidy up behind themselves                    every one is Ctrl-C

Where the process ends at once no exception is raised: most of that time goes into imports of libraries, any of which may catch
one, or make another one of it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anchorlora.runs.autosave import Stop

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # Ctrl-C, a scheduler's end, a scheduler's warning
INTERRUPTED = 75


def leaving_at_once() -> None:
    """From here on a signal ends the process, unless the caller has switched it off, as nohup does with one."""
    _handle(_leave)


@contextmanager
def asked_to_stop(tell: Callable[[str], None]) -> Iterator[Stop]:
    """What the signals of the block set.  A signal that the caller has switched off stays off.

    While nothing has been learned the first one ends the process. Later only a Ctrl-C after a Ctrl-C stops at once: a scheduler may
    send its signal to a run and to the grid that started it, which passes one on.
    """
    from anchorlora.runs.autosave import Stop

    stop = Stop()

    def ask(number: int, frame: Any) -> None:
        if stop.why is not None and number != signal.SIGINT:
            return
        if stop.why == signal.SIGINT.name:
            raise KeyboardInterrupt
        if not stop.training:
            stop.leaving()
            _leave(number, frame)
        stop.ask(signal.Signals(number).name)
        tell(f"{stop.why}: saving after this step; {'once more' if number == signal.SIGINT else 'Ctrl-C twice'} stops at once")

    with _handling(ask):
        yield stop


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Every signal as Ctrl-C, for commands that tidy up: those that run others and stop them in turn, or have begun a folder."""
    came: list[int] = []

    def stop(number: int, frame: Any) -> None:
        came.append(number)
        raise KeyboardInterrupt

    with _handling(stop):
        try:
            yield
        except Exception:
            if came:  # a library has made another error of it
                raise KeyboardInterrupt from None
            raise


@contextmanager
def _handling(handler: Callable[[int, Any], None]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ASKING}
    _handle(handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _handle(handler: Callable[[int, Any], None]) -> None:
    for number in ASKING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _leave(number: int, frame: Any) -> None:
    with suppress(OSError):  # nobody may be left to read it
        os.write(2, f"error: interrupted by {signal.Signals(number).name}; the same command goes on\n".encode())
    os._exit(INTERRUPTED)


def deaf() -> None:
    """Signals are ignored from here on."""
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)
