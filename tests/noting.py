"""Rows of the tables in docs/ that tests fill: one JSON line each, into the file that ANCHORLORA_TABLES names (`make tables`)."""

import json
import os
from pathlib import Path


def note_row(table, **line):
    """Write down what a row of a table came to; nothing where nobody asks for it."""
    path = os.environ.get("ANCHORLORA_TABLES")
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps({"table": table, **line}) + "\n")
