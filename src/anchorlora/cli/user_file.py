"""Python files that a user names on the command line: each runs once, and errors in its code are reported as the user's."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import walk_tb
from types import ModuleType

import click

from anchorlora.errors import NO_ROOM, AnchorloraError, Interrupted, InvalidValue, Stopped, TakenOver, Unwritten, UserFileFailed

NO_FAULT = (Stopped, Interrupted, Unwritten, TakenOver, UserFileFailed, click.ClickException, click.exceptions.Exit)
LONGEST = 500  # characters of an error message
_ran: dict[str, Path] = {}  # by the file name that their code objects have; the path is as the user wrote it


def run_file(path: Path) -> ModuleType:
    """Run a Python file and return its module; what it prints goes to stderr."""
    if path.suffix != ".py":
        raise InvalidValue(f"{path} is not a Python file; its name must end in .py")
    where = str(path.resolve())
    _ran[where] = path
    try:
        return _run(where, path.read_bytes())
    except (Exception, SystemExit) as error:
        raise UserFileFailed(_describe_error(error, where)) from error


@contextmanager
def users_files_answer_for_themselves() -> Iterator[None]:
    """Turn whatever a user's file raises in this block, directly or in what it calls, into UserFileFailed."""
    try:
        yield
    except NO_FAULT:
        raise
    except Exception as error:
        files = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_filename in _ran]
        if not files or type(error).__name__ in NO_ROOM:
            raise
        raise UserFileFailed(_describe_error(error, files[-1])) from error


@cache
def _run(where: str, source: bytes) -> ModuleType:
    """Execute a file as a registered module, since dataclasses look theirs up; under a unique name, since files may share one."""
    name = f"anchorlora_user_file_{hashlib.sha256(where.encode() + source).hexdigest()[:16]}"
    spec = spec_from_file_location(name, where)
    assert spec is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        with redirect_stdout(sys.stderr):
            exec(compile(source, where, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _describe_error(error: BaseException, where: str) -> str:
    """File, line, and error in one line."""
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == where]
    words = str(error)
    if isinstance(error, SyntaxError) and error.filename == where:
        lines, words = [error.lineno] if error.lineno else [], error.msg
    failure = f"{_ran[where]} failed in line {lines[-1]}" if lines else f"{_ran[where]} failed"
    words = f"{' '.join(words.split()):.{LONGEST}}"
    if isinstance(error, AnchorloraError):  # ours, over what the file wrote
        return f"{failure}: {words}"
    return f"{failure}: {type(error).__name__}" + (f": {words}" if words else "")
