"""`anchorlora audit` of a 72-module adapter pair at d = 4096, as a command: seconds and peak memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from anchorlora import Subspace
from anchorlora.adapters import write_adapter
from anchorlora.features.files import write_cores
from anchorlora.geometry import Factors
from benchmarks.timing import report

MODULES, D, R, K = 72, 4096, 8, 20

# the program, then its peak from Linux: the system's count for a child (ru_maxrss) includes the parent it was started from
PROGRAM = """
import sys
from pathlib import Path
from anchorlora.cli.app import main
assert main(sys.argv[1:]) == 0
sys.stderr.write(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")))
"""


def command() -> None:
    """Two threads, as on two cores; rank 8, k = 20; q_proj writes 4096 and v_proj 1024 outputs."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        _write(root)
        began = time.perf_counter()
        words = [sys.executable, "-c", PROGRAM, "audit", *(str(root / part) for part in ("before", "after"))]
        said = subprocess.run(
            [*words, "--cores", str(root / "cores.safetensors"), "--html", str(root / "page.html")],
            env={**os.environ, "OMP_NUM_THREADS": "2"},
            capture_output=True,
            text=True,
            check=True,
        )
        seconds = time.perf_counter() - began
    assert "Not protected" in said.stdout
    gigabytes = int(said.stderr.split()[-2]) / 2**20  # Linux counts in KiB
    report(f"audit of {MODULES} modules, d = {D}: seconds", seconds, "< 10")
    report(f"audit of {MODULES} modules, d = {D}: peak GiB", gigabytes, "< 1")


def _write(root: Path) -> None:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    before, after, cores = {}, {}, {}
    for number in range(MODULES // 2):
        core = Subspace(torch.linalg.qr(normal(D, K)).Q)
        for part, width in (("q", D), ("v", D // 4)):
            layer = f"model.layers.{number}.self_attn.{part}_proj"
            A, B = normal(R, D) / 64, normal(width, R) / 64
            before[layer] = Factors(A, B, 4.0)
            after[layer] = Factors(A + 1e-3 * normal(R, D), B + 1e-3 * normal(width, R), 4.0)
            cores[layer] = core
    write_adapter(root / "before", before, base="base")
    write_adapter(root / "after", after, base="base")
    write_cores(root / "cores.safetensors", cores)


if __name__ == "__main__":
    command()
