"""What a command prints: golden output, compared byte for byte, and the one line of an error.

`ANCHORLORA_REWRITE=1 pytest -n 0` writes it anew; the diff is the review.

All of it is one file, tests/cli/golden.txt: a line `==== NAME`, then what is to be found.

Rows of tables in docs/ that tests fill are written down, too (`make tables`).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

FILE = Path(__file__).parent / "cli/golden.txt"
HEADING = re.compile(r"^==== (\S+)\n", flags=re.M)


def stored() -> dict[str, str]:
    """Every golden output, by its name."""
    _, *parts = HEADING.split(FILE.read_text())
    return dict(zip(parts[::2], parts[1::2], strict=True))


def assert_golden(name: str, found: str) -> None:
    known = stored()
    if os.environ.get("ANCHORLORA_REWRITE"):
        known[name] = found
        FILE.write_text("".join(f"==== {each}\n{known[each]}" for each in sorted(known)))
    assert name in known, f"no golden output {name}; make it with ANCHORLORA_REWRITE=1"
    assert found == known[name], f"{name} differs; look at it, then rewrite it with ANCHORLORA_REWRITE=1"


def one_line(capsys):
    """What stderr says, which is one line without a traceback, while stdout says nothing."""
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1, said.err
    return said.err


def note_row(table: str, **line: object) -> None:
    """Add a row of a table as one JSON line to the file that ANCHORLORA_TABLES names; nothing where nobody asks for it."""
    path = os.environ.get("ANCHORLORA_TABLES")
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps({"table": table, **line}) + "\n")
