"""Errors that a caller can cause or has to handle.  All derive from `AnchorloraError`; anything else is a fault of this library.

AnchorloraError
|- InvalidValue     also a ValueError
|  `- NotFinite     also Stopped
|- InvalidType      also a TypeError
|- UnknownName      also a LookupError
|- MissingExtra     also an ImportError
|- UserFileFailed   code of the user's own file
`- a valid run that did not finish: Stopped (ProtectionLost, NotFinite), Interrupted, Unwritten, TakenOver, Failed
"""

from collections.abc import Iterable
from difflib import get_close_matches

INTERRUPTED = 75  # exit status of a program that was interrupted and can be called again
NO_ROOM = ("MemoryError", "OutOfMemoryError")  # of Python and of torch, which is not imported here


class AnchorloraError(Exception):
    """Base class of all errors.  The message is one line for the user: what is wrong, where, and what to do.

    Example:
        >>> from anchorlora import Subspace
        >>> from anchorlora.errors import AnchorloraError
        >>> try:
        ...     Subspace(torch.ones(4, 2))
        ... except AnchorloraError as error:
        ...     print(type(error).__name__)
        InvalidValue
    """


class InvalidValue(AnchorloraError, ValueError):
    """A value, a file or a combination of them cannot be used."""


class InvalidType(AnchorloraError, TypeError):
    """An object has a type that cannot be protected, measured or read."""


class UnknownName(AnchorloraError, LookupError):
    """Nothing has this name; the message lists the nearest ones."""


class MissingExtra(AnchorloraError, ImportError):
    """A library that this needs is not installed; the message has the command that installs it."""


class Stopped(AnchorloraError, RuntimeError):
    """Training cannot continue correctly; the last good state is kept (exit status 3)."""


class Interrupted(AnchorloraError, RuntimeError):
    """The run was asked to stop; its state is saved, and the same call resumes it (exit status 75)."""


class Unwritten(AnchorloraError, RuntimeError):
    """A write was refused, for example by a full disk; earlier saves are intact, and the same call resumes (exit status 1)."""


class Failed(AnchorloraError):
    """The request was valid, but the job failed (exit status 1)."""


class NotFinite(Stopped, InvalidValue):
    """A loss, gradient, feature, core or factor is NaN or infinite."""


class TakenOver(AnchorloraError, RuntimeError):
    """Another process has taken over the directory; this one writes nothing more (exit status 1)."""


class UserFileFailed(AnchorloraError, RuntimeError):
    """Code in a file that the user named failed (exit status 2).

    The message has the file, the line and the error, which is the cause.
    """


class ProtectionLost(Stopped):
    """A condition that the method promises no longer holds on the live parameters."""


def nearest_names(name: str, known: Iterable[str], *, most: int = 3, cutoff: float = 0.4) -> str:
    """Return what a message about an unknown name ends in: the nearest names, or all where none is near."""
    names = list(known)
    near = get_close_matches(name, names, n=most, cutoff=cutoff)
    return f"{'nearest' if near else 'there is'}: {', '.join(near or names)}"


def message_of(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
