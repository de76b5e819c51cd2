"""What stops a run that was well asked.  Mistakes of the caller are ValueError, TypeError or LookupError instead."""

NO_ROOM = ("MemoryError", "OutOfMemoryError")  # of Python and of torch, which is not imported here


class Stopped(RuntimeError):
    """Nothing correct can follow; the last good state is kept (exit status 3)."""


class Interrupted(RuntimeError):
    """Asked to stop: the state is saved and the same call goes on (exit status 75)."""


class Unwritten(RuntimeError):
    """A write was refused, as by a full disk; what was saved before is intact and the same call goes on (exit status 1)."""


class NotFinite(Stopped, ValueError):
    """A loss, gradient, feature, core or factor is NaN or infinite; a ValueError too, as for a file that holds one."""


class TakenOver(RuntimeError):
    """Another process works in the directory now; this one has lost it and writes nothing more (exit status 1)."""


class UserFileFailed(RuntimeError):
    """Code of a file that the user named failed; says the file, the line and the error, which is the cause (exit status 2)."""


class ProtectionLost(Stopped):
    """A promise of the method no longer holds on the live parameters."""
