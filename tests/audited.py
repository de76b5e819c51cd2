"""Checkpoints on disk to audit: adapters with and without protection, cores, full weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import oracle
from anchorlora import Subspace
from anchorlora.adapters import write_adapter
from anchorlora.features.files import write_cores
from anchorlora.geometry import Factors

LAYERS = [f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qv"]
D_IN, D_OUT, R, K = 24, 16, 4, 5


class Drawn:
    """Factors, displacements and cores of four layers."""

    def __init__(self, seed=0, layers=LAYERS, d_in=D_IN):
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        self.A0 = {layer: normal(R, d_in) / d_in**0.5 for layer in layers}
        self.B0 = {layer: normal(D_OUT, R) / R**0.5 for layer in layers}
        self.dA = {layer: 0.1 * normal(R, d_in) / d_in**0.5 for layer in layers}
        self.dB = {layer: 0.1 * normal(D_OUT, R) / R**0.5 for layer in layers}
        self.V = {layer: torch.linalg.qr(normal(d_in, K)).Q for layer in layers}

    def before(self):
        return {n: Factors(self.A0[n].float(), self.B0[n].float(), 2.0) for n in self.A0}

    def after(self, *, outside=False, freeze=False):
        out = {}
        for n, A0 in self.A0.items():
            dA = self.dA[n] @ oracle.projector(self.V[n].float()) if outside else self.dA[n]
            dB = 0 * self.dB[n] if freeze else self.dB[n]
            out[n] = Factors((A0.float().double() + dA).float(), (self.B0[n] + dB).float(), 2.0)
        return out

    def cores(self):
        return {n: Subspace(V.float()) for n, V in self.V.items()}


def write_pair(root: Path, drawn=None, *, base="tiny", **kind) -> tuple[Path, Path, Path]:
    """BEFORE, AFTER and the file of cores."""
    drawn = drawn or Drawn()
    write_adapter(root / "before", drawn.before(), base=base)
    write_adapter(root / "after", drawn.after(**kind), base=base)
    write_cores(root / "cores.safetensors", drawn.cores())
    return root / "before", root / "after", root / "cores.safetensors"


def edit_config(folder: Path, **fields) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(folder: Path, change) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], *, shards: int = 1) -> Path:
    """Full weights as transformers saves them, in one file or several with an index."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = list(tensors)
    index = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for shard in sorted(set(index.values())):
        save_file({n: tensors[n] for n in names if index[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def full_weights(seed=0, step=0.0, dtype=torch.float32):
    """Two linear layers, a table and a norm."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens": (40, 12), "model.layers.0.mlp.up_proj": (20, 12), "model.layers.0.mlp.down_proj": (12, 20)}
    tensors = {f"{n}.weight": torch.randn(*s, generator=draw) for n, s in shapes.items()} | {"model.norm.weight": torch.ones(12)}
    moves = torch.Generator().manual_seed(seed + 1)
    return {n: (t + step * torch.randn(t.shape, generator=moves)).to(dtype) for n, t in tensors.items()}
