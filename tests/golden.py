"""Golden files: output compared byte for byte.  `ANCHORLORA_REWRITE=1 pytest` writes them anew; the diff is the review."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "cli/golden"


def assert_golden(name: str, found: str) -> None:
    path = FOLDER / name
    if os.environ.get("ANCHORLORA_REWRITE"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found)
    assert path.exists(), f"no golden file {name}; make it with ANCHORLORA_REWRITE=1"
    assert found == path.read_text(), f"{name} differs; look at it, then rewrite it with ANCHORLORA_REWRITE=1"
