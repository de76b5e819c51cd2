"""Every error that a caller can cause or has to handle derives from `AnchorloraError`; any other exception is a fault of ours.

AnchorloraError
|- InvalidValue     also a ValueError
|  `- NotFinite     also Stopped
|- InvalidType      also a TypeError
|- UnknownName      also a LookupError
|- UserFileFailed   code of the user's own file
`- a run that was well asked: Stopped (ProtectionLost, NotFinite), Interrupted, Unwritten, TakenOver, Failed
"""

NO_ROOM = ("MemoryError", "OutOfMemoryError")  # of Python and of torch, which is not imported here


class AnchorloraError(Exception):
    """Base class. Its message is one line for the user: what is wrong, where, and what to do.

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
    """An object is of a kind that cannot be protected, measured or read."""


class UnknownName(AnchorloraError, LookupError):
    """Nothing has this name; the message offers the nearest ones."""


class MissingExtra(AnchorloraError, ImportError):
    """A library is not installed that this needs; the message has the command that installs it."""


class Stopped(AnchorloraError, RuntimeError):
    """Nothing correct can follow; the last good state is kept (exit status 3)."""


class Interrupted(AnchorloraError, RuntimeError):
    """The run was asked to stop; its state is saved and the same call goes on (exit status 75)."""


class Unwritten(AnchorloraError, RuntimeError):
    """A write was refused, as by a full disk; what was saved before is intact and the same call goes on (exit status 1)."""


class Failed(AnchorloraError):
    """The job was well asked and failed (exit status 1)."""


class NotFinite(Stopped, InvalidValue):
    """A loss, gradient, feature, core or factor is NaN or infinite."""


class TakenOver(AnchorloraError, RuntimeError):
    """Another process works in the directory now; this one has lost it and writes nothing more (exit status 1)."""


class UserFileFailed(AnchorloraError, RuntimeError):
    """Code of a file that the user named failed; says the file, the line and the error, which is the cause (exit status 2)."""


class ProtectionLost(Stopped):
    """A promise of the method no longer holds on the live parameters."""
