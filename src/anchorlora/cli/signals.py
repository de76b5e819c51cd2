"""Signal handling from the program's first line on; a process that a signal stops exits with status 75.

    before training, and in commands that only read    the process ends at once
    while a run trains                                 the first signal asks it to save and stop between two steps; a second Ctrl-C
                                                       stops it at once
    in commands that clean up after themselves         every signal acts as Ctrl-C

No exception is raised where the process ends at once: most of that time goes into importing libraries, which may catch the
exception or turn it into another.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from anchorlora.errors import INTERRUPTED

if TYPE_CHECKING:
    from anchorlora.runs.autosave import Stop

# Ctrl-C; a scheduler's request to end; its early warning, which Windows does not have
ASKING = tuple(number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGUSR1"))


def leaving_at_once() -> None:
    """Let a signal end the process from here on, unless the caller has turned it off, as nohup does with SIGHUP."""
    _handle(_leave)


@contextmanager
def asked_to_stop(tell: Callable[[str], None]) -> Iterator[Stop]:
    """Let the signals of a block ask a run to stop; a signal that the caller has turned off stays off.

    Before training, the first signal ends the process. Later, only a second Ctrl-C does so at once: a scheduler may signal both a
    run and the grid that started it, and the grid passes the signal on.
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
        how = "again" if number == signal.SIGINT else "twice"
        tell(f"{stop.why}: saving after this step; press Ctrl-C {how} to stop at once")

    with _handling(ask):
        yield stop


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Treat every signal as Ctrl-C, for commands that clean up: they stop the runs they started, or remove an unfinished folder."""
    came: list[int] = []

    def stop(number: int, frame: Any) -> None:
        came.append(number)
        raise KeyboardInterrupt

    with _handling(stop):
        try:
            yield
        except Exception:
            if came:  # a library turned it into another error
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


def _handle(handler: Callable[[int, Any], None] | signal.Handlers) -> None:
    for number in ASKING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _leave(number: int, frame: Any) -> None:
    with suppress(OSError):  # stderr may be closed
        os.write(2, f"error: interrupted by {signal.Signals(number).name}; the same command continues\n".encode())
    os._exit(INTERRUPTED)


def deaf() -> None:
    """Ignore signals from here on."""
    _handle(signal.SIG_IGN)
