"""Arithmetic that a loop cannot lower: constraints act and are looked at in true float32 and float64.

Hard constraints compute in float64, which nothing lowers. Penalties compute in float32: autocast would turn its products into
bfloat16, and torch's matmul precision into TF32 on a GPU or into bfloat16 on a CPU that has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def true_precision(devices: Collection[str]) -> Iterator[None]:
    """Without gradients, autocast or lowered float32 products, whatever the loop has set; all of it is put back.

    devices: kinds of device ("cpu", "cuda", "xpu", "mps") whose autocast is left for the block.
    """
    products = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [product.fp32_precision for product in products]
    with ExitStack() as off:
        off.enter_context(torch.no_grad())
        for device in devices:
            if torch.amp.is_autocast_available(device):
                off.enter_context(torch.autocast(device, enabled=False))
        try:
            for product in products:
                product.fp32_precision = "ieee"
            yield
        finally:
            for product, precision in zip(products, before, strict=True):
                product.fp32_precision = precision
