"""A base whose weights bitsandbytes holds in 4 or 8 bits: it stays as it is, and passes gradients on.

On processors with AVX512-BF16, bitsandbytes packs a 4-bit weight into another layout in the first forward in eval mode. A packed
weight has no backward, and it is not unpacked for training: gradients through it are dropped without a word, and its scales are
rounded to bfloat16. A base that is to be trained over must therefore never be packed.
"""

from __future__ import annotations

from torch import nn

PACKS, PACKED = "support_avx512bf16_for_cpu", "packing_format_for_cpu"


def keep_unpacked(base: nn.Module) -> None:
    """Keep the 4-bit weights of a model as they are in eval mode too.  Raises ValueError for one that is packed already."""
    for name, module in base.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(state, PACKED, False):
            raise ValueError(
                f"{name} was read in eval mode before, and bitsandbytes has packed its 4-bit weight for inference: no gradient "
                "passes it; load the model again, and put the adapters on it first"
            )
        if state is not None and hasattr(module, PACKS):
            setattr(module, PACKS, False)
