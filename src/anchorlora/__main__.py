"""The program, as `anchorlora` and as `python -m anchorlora`: first what a signal does, then everything else."""

import io
import sys

from anchorlora.cli.signals import deaf, leaving_at_once


def entry() -> None:
    leaving_at_once()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that has no Greek letters
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # whatever the system's is
    from anchorlora.cli.app import main

    status = main()
    deaf()  # what is done is done: a signal that comes now changes nothing
    sys.exit(status)


if __name__ == "__main__":
    entry()
