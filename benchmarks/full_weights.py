"""What protected full weights cost beside plain full fine-tuning and PEFT's OSF: time, memory and size, on SmolLM2-135M-Instruct.

All linear layers in float32, AdamW, steps of 4 texts of 64 tokens, 20 directions at each layer; each variant in a process. OSF
freezes the leading half of each spectrum, its default. Run: ANCHORLORA_CHAT_MODEL=FOLDER python -m benchmarks.full_weights OUT;
OUT/*.json are the results.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import OSFConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from anchorlora import ProjectDisplacement, Subspace, measure, protect
from anchorlora.adapters import WeightAnchor

VARIANTS = ("plain", "protected", "osf")
STEPS, TEXTS, TOKENS, DIRECTIONS = 6, 4, 64, 20


def one(out: Path, variant: str) -> None:
    """Train one variant for some steps, and write what that took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    model: Any = AutoModelForCausalLM.from_pretrained(os.environ["ANCHORLORA_CHAT_MODEL"], dtype=torch.float32)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}
    began, anchor = time.process_time(), None
    if variant == "osf":
        model = get_peft_model(model, OSFConfig(target_modules=sorted(layers)))
    else:
        model.requires_grad_(False)
        for layer in layers.values():
            layer.requires_grad_(True)
        cores = {n: Subspace(torch.linalg.qr(torch.randn(m.in_features, DIRECTIONS)).Q) for n, m in layers.items()}
        anchor = WeightAnchor.of(model, cores=cores) if variant == "protected" else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    block = protect(optimizer, anchor, [ProjectDisplacement("W")]) if anchor is not None else nullcontext()
    setup, seconds = time.process_time() - began, []
    with block:
        for _ in range(STEPS):
            ids, began = torch.randint(40000, (TEXTS, TOKENS)), time.process_time()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    found: dict[str, Any] = {
        "setup_seconds": setup,
        "step_seconds": sorted(seconds)[STEPS // 2],
        "peak_bytes": peak,
        "trained": trained,
    }
    if anchor is not None:
        found["rho"] = measure(anchor).rho
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{variant}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(variant, found, flush=True)


if __name__ == "__main__":
    place, *variant = sys.argv[1:]
    if variant:
        one(Path(place), variant[0])
    else:
        for name in VARIANTS:
            subprocess.run([sys.executable, "-m", "benchmarks.full_weights", place, name], check=True)
