"""The shell that carries out one run of a list by its number: for schedulers that start a script.

It passes signals on to the run and waits for it. A signal that comes before the run can handle it, while Python starts, counts as
an interruption as well. It writes what the run printed, and why it failed, where `grid/folder.py` says.

    0     the run is finished                75    it was interrupted; the same call goes on
    1     it failed                          2     this machine does not see the folder
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from anchorlora_lab.grid.folder import HERE, name_of
from anchorlora_lab.grid.scheduler import Command, Planned

OURS = "# written by anchorlora"
FUNCTIONS = """
asked= child=
stop() { asked=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null; }
trap stop TERM INT USR1

# the run with a number; $restarts: how often it was begun again, where the scheduler says so
carry_out() {
  take "$1" || { echo "error: there is no run number $1" >&2; return 1; }
  [ ! -e "$folder/record.json" ] || return 0
  here=$runs/$name
  rm -f "$here.failed"
  "${words[@]}" > "$here.txt" 2>&1 &
  child=$!
  [ -z "$asked" ] || stop
  while wait "$child"; status=$?; kill -0 "$child" 2>/dev/null; do :; done  # a trap ends `wait` early
  wait "$child"; status=$?
  child=
  [ "$status" -ne 0 ] || return 0
  [ "$status" -ne 75 ] || return 75
  if [ "$status" -gt 128 ]; then  # a signal ended it: ours, before Python could handle it, or somebody's
    [ -z "$asked" ] || return 75
    [ "${restarts:-3}" -ge 3 ] || return 75
  fi
  reason=$(grep -v '^[[:space:]]*$' "$here.txt" | tail -n 1)
  printf 'exit status %s: %s\\n' "$status" "${reason#error: }" > "$here.failed"
  return 1
}
"""


def script(planned: Sequence[Planned], root: Path, command: Command, *, head: str, body: str) -> str:
    """Return a script that can carry out each of some runs.

    Args:
        planned: Claimed runs; the first has the number 0.
        root: The folder of all runs.
        command: Returns the command line of a run.
        head: Comment lines below the first.
        body: What to do with the function `carry_out`.

    Example:
        >>> import subprocess
        >>> from anchorlora.config import RunConfig
        >>> from anchorlora.recipes import mini
        >>> from anchorlora_lab.grid.scheduler import Planned
        >>> run = Planned(tmp / "sfor", RunConfig(method="sfor", order=("reviews", "news"), seed=42, recipe=mini()))
        >>> (tmp / ".runs").mkdir()
        >>> fails = lambda folder, config: ["bash", "-c", "echo no room; exit 2"]
        >>> subprocess.run(["bash", "-c", script([run], tmp, fails, head="", body="carry_out 0")]).returncode
        1
        >>> (tmp / ".runs/sfor.failed").read_text()
        'exit status 2: no room\\n'
    """
    at = root.absolute()
    cases = [
        f"  {number}) name={shlex.quote(name_of(each.folder, root))} folder={shlex.quote(str(each.folder.absolute()))}\n"
        f"    words=({shlex.join(command(each.folder.absolute(), each.config))}) ;;"
        for number, each in enumerate(planned)
    ]
    parts = [
        "#!/bin/bash",
        f"{OURS}: {len(planned)} runs of {at}",
        *([head.rstrip()] if head else []),
        f"runs={shlex.quote(str(at / HERE))}",
        "take() {",
        "  case $1 in",
        *cases,
        "  *) return 1 ;;",
        "  esac",
        "}",
        FUNCTIONS.strip(),
        f"cd {shlex.quote(os.getcwd())} 2>/dev/null",
        body.strip(),
    ]
    return "\n".join(parts) + "\n"
