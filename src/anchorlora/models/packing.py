"""Forward passes over packed rows: each example attends to the shared prefix and to itself, and to nothing else.

The attention is a function for transformers' attention interface: on CUDA, transformers' flex attention with a block mask;
elsewhere, and where that cannot be compiled, one call per example, so no mask over the whole row is needed.
Models that do not use the interface, or that mix tokens in another way too (recurrent layers, sliding windows), are found by
comparing a packed row with separate ones, and are read in padded micro-batches instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from anchorlora.adapters.kinds import LoraLinear, add_products, is_heard
from anchorlora.adapters.layers import base_model_in
from anchorlora.devices import evaluating
from anchorlora.features.layout import Layout, current, pack, reading
from anchorlora.models.failures import first_line

NAME = "anchorlora_packed"
REFUSED = ("softcap", "s_aux", "position_bias", "sliding_window")  # attention that is more than a causal softmax

_READS_PACKED: WeakSet[nn.Module] = WeakSet()  # base models that were found to read packed rows
_READS_PADDED: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
TRIED = 16  # tokens of the row that is read padded and alone

WINDOWS = {"sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention"}  # field -> kind of its layers
ATTENDING = {"attention", "full_attention", *WINDOWS.values()}


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **settings: Any
) -> tuple[Tensor, None]:
    """Attend within each example of the current layout."""
    layout = current()
    assert layout is not None
    longest = layout.prefix + max(layout.lengths)
    for name in REFUSED:
        asked = settings.get(name)
        if asked is not None and not (name == "sliding_window" and longest <= asked):
            raise NotImplementedError(f"packed rows have no {name}")
    how: dict[str, Any] = {"scale": settings.get("scaling"), "dropout_p": settings.get("dropout") or 0.0}
    how["enable_gqa"] = query.shape[1] != key.shape[1]
    if query.device.type == "cuda" and not how["dropout_p"]:
        at_once_outputs = _tried_at_once(layout, query, key, value, scale=how["scale"], training=module.training)
        if at_once_outputs is not None:
            return at_once_outputs.transpose(1, 2).contiguous(), None
    (q0, q), (k0, k), (v0, v) = (layout.parts(x, 2) for x in (query, key, value))
    asking = _ASKING.get()
    if asking is not None and asking[0] is module:
        _, rows, places = asking
        outputs = []
        for qi, ki, vi, own in zip(q, k, v, rows, strict=True):
            asked = own.to(qi.device)
            mask = layout.mask(ki.shape[2], qi)[asked]
            keys, values = torch.cat([k0, ki], 2), torch.cat([v0, vi], 2)
            outputs.append(scaled_dot_product_attention(qi[:, :, asked], keys, values, attn_mask=mask, **how))
        return _spread(_join(outputs), places(query), query.shape[2]), None
    outputs = [scaled_dot_product_attention(q0, k0, v0, is_causal=True, **how)] if layout.prefix else []
    for qi, ki, vi in zip(q, k, v, strict=True):
        if not layout.prefix:
            outputs.append(scaled_dot_product_attention(qi, ki, vi, is_causal=True, **how))
            continue
        keys, values, mask = torch.cat([k0, ki], 2), torch.cat([v0, vi], 2), layout.mask(qi.shape[2], qi)
        outputs.append(scaled_dot_product_attention(qi, keys, values, attn_mask=mask, **how))
    return _join(outputs), None


def _join(outputs: list[Tensor]) -> Tensor:
    """The outputs (1, heads, n, d) of all examples as (1, tokens, heads, d), which is how a CPU's attention lays them out."""
    return torch.cat([output.transpose(1, 2) for output in outputs], 1)


_refused: set[str] = set()  # why flex attention is not used in this process


def _tried_at_once(layout: Layout, *rows: Tensor, scale: float | None, training: bool) -> Tensor | None:
    """The result of `at_once`; None once it has failed, of which a warning is given the first time."""
    if _refused:
        return None
    try:
        return at_once(layout, *rows, scale=scale, training=training)
    except torch.OutOfMemoryError:
        raise
    except (ImportError, RuntimeError, ValueError) as error:
        _refused.add(first_line(error))
        logging.getLogger(__name__).warning(
            "packed rows cannot be read by flex attention (%s); from now on, attention is one call per example", first_line(error)
        )
        return None


def at_once(layout: Layout, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, training: bool) -> Tensor:
    """Attend within all examples by one call of flex attention, which skips blocks that nothing attends to."""
    from transformers.integrations.flex_attention import compile_friendly_flex_attention

    gqa = query.shape[1] != key.shape[1]
    how = {"block_mask": layout.blocks(query.device), "scale": scale, "enable_gqa": gqa}
    return compile_friendly_flex_attention(query, key, value, training=training, **how)


# without a mask function of that name, transformers makes no mask, and does not ask the device whether one is needed
AttentionInterface.register(NAME, packed_attention)


@contextmanager
def packed(model: nn.Module, layout: Layout | None, keep: int | Tensor | None = None) -> Iterator[None]:
    """Let forward passes in the block read packed rows of a layout; without one they read padded rows.

    In the last layer, only the kept positions (on the CPU) have queries, unless a module there is adapted in an unknown way or has
    a hook. On a CPU, dropout draws 16 bits per element, and frozen float32 RMS norms and unusual LoRA layers have faster functions.
    """
    if layout is None:
        yield
        return
    modules: list[Any] = list(model.modules())  # one walk a step, which takes milliseconds
    every = [module.config for module in modules if "config" in module.__dict__]
    configs = {id(config): config for config in every if hasattr(config, "_attn_implementation")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    faster = [(part, own) for part in modules if "forward" not in part.__dict__ and (own := _faster_forward(part)) is not None]
    try:
        for part, own in faster:
            part.__dict__["forward"] = partial(own, part)
        for config, _ in before:
            config._attn_implementation = NAME
        with reading(layout), _last_layer_on(modules, layout, keep):
            yield
    finally:
        for part, _ in faster:
            del part.__dict__["forward"]
        for config, name in before:
            config._attn_implementation = name


def _faster_forward(module: nn.Module) -> Callable[..., Tensor] | None:
    """The function that stands for a module's own forward pass in packed rows, if there is one."""
    if type(module) is nn.Dropout and module.training:
        return _drop
    if _frozen_rms_norm(module):
        return _normalize
    return add_products if type(module) is LoraLinear else None


def _drop(module: nn.Dropout, x: Tensor) -> Tensor:
    """Dropout with its probability rounded to 16 bits, of which a CPU draws four from each random number."""
    share = round(module.p * 2**16)
    if x.device.type != "cpu" or not 0 < share < 2**16:
        return nn.Dropout.forward(module, x)
    drawn = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[: x.numel()].view(x.shape)
    # written as numbers at once: to convert booleans takes five times as long
    kept = torch.ge(drawn, share - 2**15, out=torch.empty_like(x, requires_grad=False))
    return x * kept.mul_(2**16 / (2**16 - share))


def _frozen_rms_norm(module: Any) -> bool:
    """Return True if a module is an RMS norm as Llama has it; `unpackable` compares what comes out."""
    own = list(module._parameters.items())
    return (
        type(module).__name__.endswith("RMSNorm")
        and hasattr(module, "variance_epsilon")
        and (len(own) == 1 and own[0][0] == "weight" and own[0][1] is not None and not own[0][1].requires_grad)
    )


def _normalize(module: Any, x: Tensor) -> Tensor:
    if x.device.type != "cpu" or x.dtype != torch.float32 or module.weight.dtype != x.dtype:
        return type(module).forward(module, x)
    return RMSNorm.apply(x, module.weight, module.variance_epsilon)


class RMSNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, for a weight that does not train."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalize x, (..., d), and keep what its gradient needs."""
        inverse = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x, (..., d); weight and eps have none."""
        x, weight, inverse = ctx.saved_tensors
        scaled = grad * weight
        along = torch.linalg.vecdot(scaled, x).unsqueeze(-1).mul_(inverse**3).div_(-x.shape[-1])
        return scaled.mul_(inverse).addcmul_(x, along), None, None


_ASKING: ContextVar[tuple[nn.Module, list[Tensor], Callable[[Tensor], Tensor]] | None] = ContextVar("asking", default=None)


@contextmanager
def _last_layer_on(modules: Sequence[Any], layout: Layout, keep: int | Tensor | None) -> Iterator[None]:
    """Let the last layer compute queries at some positions of a row only; elsewhere it adds zero, which nothing reads."""
    layer = _last_layer(modules) if isinstance(keep, Tensor) else None
    if layer is None or not isinstance(keep, Tensor):
        yield
        return
    tokens, hooks = layout.prefix + sum(layout.lengths), list[Any]()
    kept, moved = keep.cpu(), {keep.device: keep}

    def places(like: Tensor) -> Tensor:
        """The positions on the device of a tensor."""
        if like.device not in moved:
            moved[like.device] = kept.to(like.device)
        return moved[like.device]

    takes, gives = _where_rows_are_cut(modules, layer)
    for part in takes:
        hooks.append(part.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, places(inputs[0])], *inputs[1:])))
    for part in gives:
        hooks.append(part.register_forward_hook(lambda _, inputs, output: _spread(output, places(output), tokens)))
    bounds = zip(layout.starts, layout.lengths, strict=True)
    rows = [kept[(kept >= start) & (kept < start + length)] - start for start, length in bounds]
    token = _ASKING.set((layer.self_attn, rows, places))
    try:
        yield
    finally:
        _ASKING.reset(token)
        for hook in hooks:
            hook.remove()


def _where_rows_are_cut(modules: Sequence[Any], layer: Any) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules that take the kept rows alone, and those whose output is spread again."""
    takes, gives = [layer.self_attn.o_proj], [layer.self_attn.o_proj, layer.mlp]
    norm: Any = getattr(layer, "post_attention_layernorm", None)
    sandwiched = any("feedforward" in name for name, _ in layer.named_children())  # then that norm is before the sum
    takes.append(layer.mlp if norm is None or sandwiched or is_heard(norm) else norm)
    for whole in modules:
        last = whole._modules.get("norm")
        if last is not None and not is_heard(last) and layer in (whole._modules.get("layers") or ()):
            takes.append(last)
            gives.append(last)
    asks: Any = getattr(layer.self_attn, "q_proj", None)
    plain_lora = hasattr(asks, "base_layer") and hasattr(asks, "lora_dropout") and not getattr(asks, "lora_variant", True)
    if asks is None or asks._forward_hooks or asks._backward_hooks or not (plain_lora or type(asks) is nn.Linear):
        return takes, gives
    if plain_lora:  # the layer itself sees all rows, so what listens to its input does, too
        inside = [asks.base_layer, *asks.lora_dropout.values()]
        return (takes, gives) if any(map(is_heard, inside)) else ([*takes, *inside], [*gives, asks])
    return (takes, gives) if is_heard(asks) else ([*takes, asks], [*gives, asks])


def _spread(rows: Tensor, places: Tensor, tokens: int) -> Tensor:
    """The rows (1, n, ..) at their places among zeros."""
    return rows.new_zeros(1, tokens, *rows.shape[2:]).index_copy_(1, places, rows)


def _last_layer(modules: Sequence[Any]) -> Any:
    """The last decoder layer, if what follows its attention is linear layers that nobody listens to."""
    lists = [module for module in modules if isinstance(module, nn.ModuleList) and len(module)]
    last: list[Any] = [layers[-1] for layers in lists if hasattr(layers[-1], "self_attn") and hasattr(layers[-1], "mlp")]
    if len(last) != 1 or not isinstance(getattr(last[0].self_attn, "o_proj", None), nn.Linear):
        return None
    mlp: nn.Module = last[0].mlp
    parts = [last[0].self_attn.o_proj, *mlp.modules()]
    heard = any(map(is_heard, parts))
    plain = all(isinstance(part, nn.Linear) or not list(part.parameters()) for part in list(mlp.modules())[1:])
    alone = len(signature(mlp.forward).parameters) == 1 and not list(mlp.parameters(recurse=False))
    return last[0] if plain and alone and not heard else None


def window_of(model: Any) -> int | None:
    """Return the most tokens back that some layer of a model attends to; None where all layers see everything."""
    config, kinds = _layers_of(model)
    windows = [(getattr(config, name, None), kind) for name, kind in WINDOWS.items() if kinds is None or kind in kinds]
    return min((width for width, _ in windows if isinstance(width, int)), default=None)


def _layers_of(model: Any) -> tuple[Any, list[str] | None]:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return config, getattr(config, "layer_types", None)


def unpackable(model: nn.Module, examples: Sequence[Sequence[int]], *, longest: int = 0) -> str | None:
    """Compare a packed row with separate ones, without gradients; a base model that was found to read them is not asked again."""
    device, base = next(model.parameters()).device, base_model_in(model)
    longest, window = max(longest, *map(len, examples)), window_of(model)
    if window is not None and longest > window:
        return f"its sliding_window of {window} tokens is shorter than the longest text, {longest}"
    if base in _READS_PACKED:
        return None
    layout, ids = pack(examples)
    packed_row = {"input_ids": torch.tensor([ids], device=device), "position_ids": layout.positions()[None].to(device)}
    ends = layout.ends().to(device)
    try:
        with evaluating(model):
            alone = [model(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0] for row in examples]
            with packed(model, layout):
                row = model(**packed_row, use_cache=False).logits
            with packed(model, layout, layout.ends()):
                kept = model(**packed_row, use_cache=False).logits[0, ends]
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:  # NotImplementedError is a RuntimeError
        return first_line(error)
    pairs = [*zip(alone, layout.examples(row), strict=True), *((a[-1], b) for a, b in zip(alone, kept, strict=True))]
    off, allowed = _difference(pairs)
    if off > allowed:
        return f"its logits differ by {off:.1e}, and rounding explains {allowed:.1e}"
    if others := {*(_layers_of(model)[1] or ())} - ATTENDING:  # in weights as small as these, no difference is to be seen
        return f"it has layers of {min(others)}"
    _READS_PACKED.add(base)
    return None


def _difference(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """The largest difference between logits, and what rounding explains of it."""
    off = max(float((a - b).abs().max()) for a, b in pairs)
    size, dtype = max(float(a.abs().max()) for a, _ in pairs), pairs[0][0].dtype
    return off, size * (torch.finfo(dtype).eps * 1000 if dtype.itemsize > 2 else 0.05)


def rows_at_once(model: Any, most: int) -> int:
    """Return `most`, or 1 if a model reads a padded row in another way than alone, as RWKV does, which knows no mask."""
    base = base_model_in(model)
    if most > 1 and base not in _READS_PACKED and base not in _READS_PADDED:
        _READS_PADDED[base] = _reads_padded(model)
    return most if _READS_PADDED.get(base, True) else 1


def _reads_padded(model: Any) -> bool:
    """Compare a row that is padded on the left with the same alone, without gradients."""
    device = next(model.parameters()).device
    mask = torch.ones(2, TRIED, dtype=torch.long, device=device)
    mask[1, : TRIED // 2] = 0
    places = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0), "attention_mask": mask}
    try:
        row = torch.arange(1, TRIED + 1, device=device) % model.get_input_embeddings().num_embeddings
        with evaluating(model):
            alone = model(input_ids=row[None, TRIED // 2 :], use_cache=False).logits[0]
            both = model(input_ids=torch.stack([row, row]), **places, use_cache=False).logits[1, TRIED // 2 :]
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return False
    off, allowed = _difference([(alone, both)])
    return off <= allowed
