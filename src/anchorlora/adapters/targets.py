"""Target layers of an adapter, and the checks that a saved adapter fits them.

The base model may hold its weights in 4 or 8 bits by bitsandbytes: they stay as they are and pass gradients on.

On processors with AVX512-BF16, bitsandbytes packs a 4-bit weight into another layout at the first forward in eval mode. A packed
weight has no backward and is not unpacked for training: gradients through it vanish silently, and its scales are rounded to
bfloat16. A base model that adapters are trained on must therefore never be packed.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any, TypeAlias

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from anchorlora.devices import forked_generators
from anchorlora.errors import InvalidType, InvalidValue, UnknownName
from anchorlora.geometry import Factors
from anchorlora.store.adapter_config import MERGE

WEIGHT = re.compile(r"\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape)\b)")
ROUTER = re.compile(r"gate|\w*router\w*")  # what transformers calls them, beside their experts; a GLU has no experts
NOT_COMPUTING = re.compile(r".*(?:\binit\.|\bisinstance\().*")  # lines that start a weight, or ask what it is

Adaptable: TypeAlias = nn.Linear | Conv1D  # y = x W^T + b, and y = x W + b


def target_layers(base: nn.Module, targets: tuple[str, ...] | str) -> dict[str, Adaptable]:
    """Return the layers that `targets` names in a model without adapters."""
    kind, head, reading_text = type(base).__name__, _output_layer(base), _modules_of_text(base)
    linear = {name: module for name, module in reading_text.items() if module is not head and _is_linear(module)}
    experts = _taken_for_experts(base, linear)
    left_out = experts | _read_as_weights(base, linear) | {name for name in linear if _chooses_experts(base, name)}
    adaptable = {name: module for name, module in linear.items() if name not in left_out}
    there = ", ".join(names_of(adaptable)) or "none"
    if targets == "all-linear":
        matched: dict[str, Any] = adaptable
    else:  # an expression or a whole path says which part of a model it means; a name does not
        chosen, exact = {n: m for n, m in base.named_modules() if _is_target(n, targets)}, isinstance(targets, str)
        matched = {name: module for name, module in chosen.items() if exact or name in reading_text or name in targets}
    if not matched:
        asked = targets if isinstance(targets, str) else ", ".join(targets)
        fused = next((n for n, p in base.named_parameters() if p.ndim > 2 and _is_target(n, targets)), None)
        if fused is not None:
            raise InvalidType(
                f"{fused} of {kind} holds all experts in one parameter, and only linear layers can be adapted and protected here; "
                f"choose other targets (its linear layers: {there})"
            )
        raise UnknownName(f"{kind} has no module called {asked}; its linear layers are: {there}")
    for name, module in matched.items():
        if name in experts:
            raise InvalidType(
                f"{name} of {kind} would become a fused expert: in models of this type, PEFT takes the name for that of an expert; "
                f"choose other targets (its linear layers: {there})"
            )
        if not _is_linear(module):
            raise InvalidType(
                f"{name} of {kind} is a {type(module).__name__}, and only linear layers (nn.Linear, Conv1D) can be adapted and "
                f"protected here; choose other targets (its linear layers: {there}) or another model"
            )
    return matched


def _modules_of_text(base: nn.Module) -> dict[str, nn.Module]:
    whole: Any = base
    config: Any = getattr(whole, "config", None)  # of a model that reads images or sound too, it has that of a part that reads text
    if not hasattr(config, "get_text_config") or config.get_text_config() is config:
        text, prefix = base, ""
    else:
        text = whole.get_decoder()
        prefix = next(name for name, module in base.named_modules() if module is text)
    modules = dict(text.named_modules(prefix=prefix))
    passed = _never_run(base, modules)
    return {name: module for name, module in modules.items() if name not in passed}


def _never_run(base: Any, modules: Mapping[str, nn.Module]) -> set[str]:
    """Layers of blocks that share their weights which no text reaches, as Zamba 2's adapters for other depths of a block."""
    linear = {n: m for n, m in modules.items() if isinstance(m, nn.Linear) and m.weight.is_floating_point()}
    users = Counter(id(module.weight) for module in linear.values())
    waiting = {name for name, module in linear.items() if users[id(module.weight)] > 1}
    if not waiting:
        return set()
    called = set[str]()
    with ExitStack() as until_the_end, forked_generators(), torch.no_grad():
        for name in waiting:
            until_the_end.enter_context(linear[name].register_forward_pre_hook(lambda *_, name=name: called.add(name)))
        try:
            base(input_ids=torch.zeros(1, 2, dtype=torch.long, device=next(base.parameters()).device), use_cache=False)
        except (RuntimeError, TypeError, ValueError):  # it needs other inputs too, or weights
            return set()
    return waiting - called


def split_by_text(base: nn.Module, saved: Mapping[str, Factors], *, where: str) -> tuple[dict[str, Factors], dict[str, Factors]]:
    """Return the factors of layers that read text, and of those that do not, as of a vision tower: with text, these never run."""
    head, reading_text = _output_layer(base), _modules_of_text(base)
    reading = {name: f for name, f in saved.items() if name in reading_text or base.get_submodule(name) is head}
    if not reading:
        raise InvalidValue(f"{where} adapts no layer that reads text, as {next(iter(saved))}; {MERGE}")
    return reading, {name: f for name, f in saved.items() if name not in reading}


def _chooses_experts(base: nn.Module, name: str) -> bool:
    """True for a layer of a router: if that learned, old inputs would reach other experts, which no core of a layer can hold."""
    parts = name.split(".")
    return any(ROUTER.fullmatch(part) and _has_experts(base.get_submodule(".".join(parts[:i]))) for i, part in enumerate(parts))


def _has_experts(module: nn.Module) -> bool:
    words = [*vars(module), *module._modules, *(type(child).__name__ for child in module.children())]
    return any("expert" in word.lower() for word in words)


def _read_as_weights(base: nn.Module, names: Iterable[str]) -> set[str]:
    # as Mamba's kernels do in place of a call, so that an adapter would be passed by
    of_parent = {name: name.rpartition(".") for name in names}
    kinds: dict[str, Any] = {path: type(base.get_submodule(path)) for path, _, _ in of_parent.values()}
    return {name for name, (path, _, last) in of_parent.items() if last in _weights_read_in(kinds[path])}


@cache
def _weights_read_in(kind: Any) -> frozenset[str]:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # of a class that was made in a session
        return frozenset()
    return frozenset(WEIGHT.findall(NOT_COMPUTING.sub("", source)))


def _output_layer(base: nn.Module) -> nn.Module | None:
    """The layer that makes logits, whatever it is called; None where the model does not say."""
    get = getattr(base, "get_output_embeddings", None)
    try:
        return get() if get else None
    except (AttributeError, NotImplementedError):  # a model without one
        return None


def _is_linear(module: nn.Module) -> bool:
    """True for a layer that computes W x + b: some routers are nn.Linear by class and choose experts in their forward."""
    if isinstance(module, Conv1D):
        return True
    if not isinstance(module, nn.Linear):
        return False
    weight = module.weight
    packed = not weight.is_floating_point() or weight.dtype.itemsize == 1 or weight.shape[-1] != module.in_features
    if type(module).forward is nn.Linear.forward or packed:
        return True  # quantized ones have a forward of their own, and 4 bits may be stored in a type as wide as the model's
    x = torch.ones(1, module.in_features, dtype=module.weight.dtype, device=module.weight.device)
    try:
        with torch.no_grad():
            output, expected = module(x), nn.functional.linear(x, module.weight, module.bias)
    except (RuntimeError, TypeError, ValueError, AttributeError):  # it needs other inputs too
        return False
    if not isinstance(output, Tensor) or output.shape != expected.shape:
        return False
    return output.is_meta or bool((output - expected).norm() <= 0.05 * expected.norm())


def _taken_for_experts(base: nn.Module, names: Iterable[str]) -> set[str]:
    """Layers that PEFT takes for experts by their names, since experts were layers before transformers 5 fused them."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # an older PEFT renames nothing
        return set()

    def kept(name: str) -> bool:
        config = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model=base, conversions=None)
        except ValueError:  # half of what is fused
            return False
        return name in config.target_modules

    names = list(names)
    known = {last: kept(last) for last in {name.rsplit(".", 1)[-1] for name in names}}
    return {name for name in names if not known[name.rsplit(".", 1)[-1]]}


def _is_target(name: str, targets: tuple[str, ...] | str) -> bool:
    return re.fullmatch(targets, name) is not None if isinstance(targets, str) else named(name, targets)


def widths_of(layer: Adaptable) -> tuple[int, int]:
    """Return (d_in, d_out) of a linear layer, whose quantized weight may be packed into another shape."""
    return (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)


def are_transposed(layers: Iterable[nn.Module]) -> bool:
    """Return PEFT's `fan_in_fan_out`: whether all layers hold their weight as (d_in, d_out), as GPT-2's Conv1D does. PEFT finds out
    for each layer of a model that has both.
    """
    return all(isinstance(layer, Conv1D) for layer in layers)


def names_of(paths: Iterable[str]) -> list[str]:
    """Return the names of layers, each once: the ends of their paths from the last part that is no number, as `projections.0`."""
    return sorted({re.sub(r"^.*?([^.]+(\.\d+)*)$", r"\1", path) for path in paths})


def named(layer: str, names: Iterable[str]) -> bool:
    """Return True if one of the names is a layer's path or the end of it, as PEFT reads a list."""
    return any(layer == name or layer.endswith("." + name) for name in names)


def refuse_misfit(base: nn.Module, saved: Mapping[str, Factors], *, where: str) -> None:
    """Raise unless saved factors fit the layers of a model."""
    weighted: dict[str, Any] = {
        name: module for name, module in base.named_modules() if getattr(module, "weight", None) is not None
    }
    shapes = {name: widths_of(m)[::-1] if isinstance(m, Adaptable) else tuple(m.weight.shape) for name, m in weighted.items()}
    for name, f in saved.items():
        shape = f.B.shape[0], f.A.shape[1]
        if name not in shapes:
            raise InvalidValue(f"{where} adapts {name}, which the model does not have; the adapter belongs to another model")
        if shapes[name] != shape:
            raise InvalidValue(f"{where} adapts {name} as {shape}, but it is {shapes[name]}; the adapter belongs to another model")


PACKS, PACKED = "support_avx512bf16_for_cpu", "packing_format_for_cpu"


def keep_unpacked(base: nn.Module) -> None:
    """Keep the 4-bit weights of a model in the layout that passes gradients on, in eval mode too."""
    for name, module in base.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(state, PACKED, False):
            raise InvalidValue(
                f"{name} has run in eval mode before, and bitsandbytes has packed its 4-bit weight for inference: no gradient "
                "passes through it; load the model again, and add the adapters first"
            )
        if state is not None and hasattr(module, PACKS):
            setattr(module, PACKS, False)
