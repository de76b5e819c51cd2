"""Signals: the first one asks a run to save and stop between two steps, a second Ctrl-C stops it at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anchorlora.experiments.keeping import Stop

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # Ctrl-C, a scheduler's end, a scheduler's warning


@contextmanager
def asked_to_stop(tell: Callable[[str], None]) -> Iterator[Stop]:
    """What the signals of the block set.  A signal that the caller has switched off, as nohup does with one, stays off.

    While nothing has been learned the first one stops at once. Later only a Ctrl-C after a Ctrl-C does: a scheduler may send its
    signal to a run and to the grid that started it, which passes one on.
    """
    from anchorlora.experiments.keeping import Stop

    stop = Stop()

    def ask(number: int, frame: Any) -> None:
        if stop.why is not None and number != signal.SIGINT:
            return
        if stop.why == signal.SIGINT.name or not stop.learning:
            raise KeyboardInterrupt
        stop.ask(signal.Signals(number).name)
        tell(f"{stop.why}: saving after this step; {'once more' if number == signal.SIGINT else 'Ctrl-C twice'} stops at once")

    with _handling(ask):
        yield stop


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Every signal as Ctrl-C, for commands that run others and stop those in turn."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    with _handling(stop):
        yield


@contextmanager
def _handling(handler: Callable[[int, Any], None]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ASKING}
    for number, old in before.items():
        if old is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def deaf() -> None:
    """Signals are ignored from here on."""
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)
