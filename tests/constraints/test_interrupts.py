"""Ctrl-C at any moment of a protected step: the factors keep the promise, nothing is blamed, and gradients are on again."""

import signal
import sys
from contextlib import suppress

import pytest
import torch

from anchorlora import Freeze, ProjectDisplacement, ProjectGradient, protect
from anchorlora.devices import product_precision, true_precision
from toys import anchor_of, displacement, on_core, optimizer_for, train

SHARES = 8
EVERY = 7  # of the lines; 1 tries them all, in a minute
SFOR = [ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")]


where = []


@pytest.fixture(autouse=True)
def ctrl_c():
    """What Python does by itself: programs that were started in the background ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted_at(line, act):
    """Act, and send Ctrl-C when so many lines of the library have run; False if it ended before."""
    left = line

    def trace(frame, event, arg):
        nonlocal left
        if not any(part in frame.f_code.co_filename for part in ("anchorlora", "contextlib")):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                where.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {event}")
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return left <= 0


def protected_steps(anchor):
    optimizer = optimizer_for(anchor, "adamw")
    with protect(optimizer, anchor, SFOR):
        train(anchor, optimizer, 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator of torch that was dropped
@pytest.mark.parametrize("share", range(SHARES))
def test_an_interrupt_at_any_line_of_a_step_leaves_no_leak(share):
    line, ended = 1 + EVERY * share, False
    while not ended:
        anchor, words = anchor_of(), product_precision()
        notes = []
        try:
            ended = not interrupted_at(line, lambda anchor=anchor: protected_steps(anchor))
        except KeyboardInterrupt as error:
            notes = getattr(error, "__notes__", [])
        assert not notes, f"line {line}: {notes}"
        assert torch.is_grad_enabled(), f"gradients stay off after line {line}: {where[-1]}"
        assert product_precision() == words
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, f"line {line}"
        for layer in anchor.layers:
            moved = displacement(layer)
            assert on_core(layer, moved) <= 1e-5 * float(moved.norm()) + 1e-6, f"line {line}"
            assert float(displacement(layer, "B").norm()) == 0.0, f"line {line}"
            assert layer.factor("B").requires_grad, f"line {line} {where[-1]}"
        line += EVERY * SHARES


def test_an_interrupt_in_true_precision_leaves_no_setting_behind():
    def act():
        with true_precision({"cpu"}):
            torch.ones(2).sum()

    line, ended = 1, False
    while not ended:
        words = product_precision()
        with suppress(KeyboardInterrupt):
            ended = not interrupted_at(line, act)
        assert torch.is_grad_enabled(), f"gradients stay off after line {line}: {where[-1]}"
        assert not torch.is_autocast_enabled("cpu")
        assert product_precision() == words
        line += 1


def test_an_interrupt_of_what_takes_long_is_not_put_off():
    with pytest.raises(KeyboardInterrupt), true_precision({"cpu"}) as signals:
        signals.passing = True
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the block went on")
    assert torch.is_grad_enabled()
