"""`note` writes down what a row came to when ANCHORLORA_LOOPS names a file; `make loops` builds docs/loops.md from it."""

import json
import os
from pathlib import Path

import pytest

from loops.cases import KEPT


@pytest.fixture
def note():
    def write(row, results):
        """results: setting -> (rho, bound), or the sentence of a refusal."""
        if row.outcome == KEPT:
            for setting, (rho, bound) in results.items():
                assert rho <= bound, f"{row}, {setting}: rho {rho:.1e}, and rounding explains {bound:.1e}"
        path = os.environ.get("ANCHORLORA_LOOPS")
        if path:
            with Path(path).open("a") as file:
                file.write(json.dumps({**vars(row), "results": results}) + "\n")

    return write
