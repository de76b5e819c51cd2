"""Parameters and estimated memory of a run, from the base model's configuration alone: the model is built on torch's meta device.
The estimate is within a fifth of torch's memory tracker over a step of the real models (`tests/study/test_sizes.py`).

    base model   parameters x bytes of the dtype
    blocks       LoRA factors in float32: value, gradient and two moments of the adapter that trains; values of frozen ones
    cores        float64 copies that projections work with, at the largest size, two per layer
    activations  what the backward pass needs of one micro-batch of the longest inputs, by shapes, without checkpointing
    evaluation   keys and values of one batch of the longest prompts, and what one layer computes of them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from anchorlora.adapters import target_layers
from anchorlora.adapters.targets import Adaptable, widths_of
from anchorlora.config import Recipe
from anchorlora.devices import free_memory, type_name
from anchorlora.errors import InvalidValue
from anchorlora.geometry.spectrum import SIDE
from anchorlora.models.failures import reading
from anchorlora.models.load import device_of, dtype_of, empty_model, quantization

FLOAT32, FLOAT64 = 4, 8
SAFE = 0.5  # of the memory that is left: logits and what the framework holds come on top of the estimate


@dataclass(frozen=True)
class Sizes:
    """Counts of parameters, and bytes by part."""

    parameters: int
    block: int  # LoRA parameters of one block
    layers: int
    dtype: str  # precision of the base model
    multiplied: int  # parameters that every token is multiplied with: all but the embedding and the head
    head: int  # parameters that a token is multiplied with where its successor is predicted
    product: tuple[int, int]  # input and output width of the MLP's first layer, the largest product of a layer
    memory: dict[str, int]  # on the device, estimated
    host: int  # feature rows in main memory, as `GrowingRows` holds them

    @property
    def peak(self) -> int:
        """Bytes of everything that stays, and of training or testing, whichever takes more."""
        m = self.memory
        return m["base_model"] + m["blocks"] + m["cores"] + max(m["activations"], m["evaluation"])


def sizes(recipe: Recipe, *, tasks: int, cumulative: bool, folder: Path | None = None) -> Sizes:
    """Estimate what a run takes, without loading weights."""
    settings = recipe.base_model
    model = empty_model(settings, folder=folder)
    dtype, how = dtype_of(settings), quantization(settings, model.config)
    shapes = [widths_of(layer) for layer in target_layers(model, recipe.adapter.targets).values()]
    parameters = sum(p.numel() for p in model.parameters())
    block = recipe.adapter.rank * sum(d_in + d_out for d_in, d_out in shapes)
    features = recipe.features
    with reading(f"the configuration of {settings.model} lacks what an estimate needs"):
        config = model.config.get_text_config()
        width = config.hidden_size
        kept = min(tasks * features.rows, SIDE, 2 * width) + min(tasks * features.held_out_rows, 2 * width)
        stores = config.num_hidden_layers * width  # one row of each layer's input
        memory = {
            "base_model": _stored_bytes(model, dtype.itemsize, how),
            "blocks": FLOAT32 * block * (4 + (tasks - 1 if cumulative else 0)),
            "cores": 2 * FLOAT64 * features.at_most * sum(d_in for d_in, _ in shapes),
            "activations": _activations(config, recipe, shapes, dtype.itemsize),
            "evaluation": _evaluation(config, recipe, shapes, dtype.itemsize),
        }
        product = (width, _of_the_mlp(config))
    kind, host = f"{type_name(dtype)} over {how}" if how else type_name(dtype), FLOAT32 * kept * stores
    head = config.vocab_size * width
    embeddings = head if getattr(config, "tie_word_embeddings", False) else 2 * head
    return Sizes(parameters, block, len(shapes), kind, max(0, parameters - embeddings), head, product, memory, host)


def needs_checkpointing(recipe: Recipe, device: torch.device) -> bool:
    """Return True on an accelerator whose free memory, with the base model loaded, may not hold a step's activations."""
    free = None if device.type == "cpu" else free_memory(device)
    if free is None:
        return device.type != "cpu"
    try:
        estimate = sizes(recipe, tasks=1, cumulative=False)
    except InvalidValue:  # a configuration that lacks what an estimate needs
        return True
    return estimate.peak - estimate.memory["base_model"] > SAFE * free


def _stored_bytes(model: PreTrainedModel, itemsize: int, quantized: str | None) -> int:
    """Bytes of the weights; bitsandbytes packs linear layers but the head, with a float32 scale for 64 entries or for a row."""
    total = sum(p.numel() for p in model.parameters()) * itemsize
    if quantized is None:
        return total
    head = model.get_output_embeddings()
    for layer in (m for m in model.modules() if isinstance(m, Adaptable) and m is not head):
        n, (_, d_out) = layer.weight.numel(), widths_of(layer)
        total += (n + FLOAT32 * d_out if quantized == "int8" else n // 2 + FLOAT32 * n // 64) - n * itemsize
    return total


def _activations(config: PretrainedConfig, recipe: Recipe, shapes: Sequence[tuple[int, int]], itemsize: int) -> int:
    """Norms keep float32 inputs, attention queries, keys and values for each head and its output, the MLP three products, and
    adapted layers their float32 input, after dropout and its mask.  One layer's gradients of the MLP come on top."""
    hidden, heads, of_keys = _widths(config)
    a_layer = FLOAT32 * (2 * hidden + heads + of_keys) + itemsize * (4 * heads + 3 * _of_the_mlp(config))
    of_mask = 0 if not recipe.adapter.dropout else FLOAT32 if device_of(recipe.base_model).type == "cpu" else 1
    adapted = (FLOAT32 + of_mask) * sum(d_in for d_in, _ in shapes)
    a_token = config.num_hidden_layers * a_layer + adapted + itemsize * 2 * _of_the_mlp(config)
    t = recipe.training
    packed = max(t.max_tokens, min(t.row_tokens, t.window * t.max_tokens))
    return (packed if t.batching == "packed" else t.micro_batch * t.max_tokens) * a_token


def _evaluation(config: PretrainedConfig, recipe: Recipe, shapes: Sequence[tuple[int, int]], itemsize: int) -> int:
    """Beside keys and values: three products of the MLP, or an adapted layer's output, in float32 too, whichever takes more."""
    hidden, _, of_keys = _widths(config)
    prompts = recipe.evaluation.eval_batch * recipe.training.max_tokens
    positions = prompts + recipe.evaluation.eval_batch * recipe.evaluation.max_new_tokens
    at_once = [itemsize * 3 * _of_the_mlp(config)]
    at_once += [itemsize * 2 * d_out + FLOAT32 * (2 * d_out + d_in) for d_in, d_out in shapes]
    return positions * config.num_hidden_layers * 2 * of_keys * itemsize + prompts * (max(at_once) + itemsize * 2 * hidden)


def _widths(config: PretrainedConfig) -> tuple[int, int, int]:
    """Widths of the residual stream, of all query heads, and of all key heads."""
    heads = getattr(config, "num_attention_heads", None) or 1  # Mamba, RWKV and xLSTM have none
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    return config.hidden_size, heads * head, keys * head


def _of_the_mlp(config: PretrainedConfig) -> int:
    """Width of the MLP, by the names that OPT, Falcon and GPT-2 have for it; four times the residual stream where none is given."""
    names = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
    width = next((width for name in names if (width := getattr(config, name, None))), 4 * config.hidden_size)
    return max(width) if isinstance(width, list) else width  # Gemma 3n has one a layer


def described(sizes: Sizes) -> list[str]:
    """Return the sizes as lines of text."""
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in sizes.memory.items())
    return [
        f"{sizes.parameters:,} parameters of the base model ({sizes.dtype}); {sizes.block:,} in a block at {sizes.layers} layers",
        f"about {sizes.peak / 2**30:.1f} GiB on the device, an estimate from shapes, plus the framework's own ({parts} GiB)",
        f"about {sizes.host / 2**30:.2f} GiB of feature rows in main memory",
    ]
