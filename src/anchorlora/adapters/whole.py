"""Whole weights that come with an adapter: modules that PEFT saved beside it (`modules_to_save`), and rows of an embedding.

They are put on a base model as modules that stand in for its own, so that what is below stays as it was loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from anchorlora.adapters.targets import named
from anchorlora.errors import InvalidValue
from anchorlora.geometry import Factors

ROWS = ".token_adapter.trainable_tokens_delta"  # PEFT's name for the rows of an embedding that it trains
COME_WITH = ("modules_to_save", "trainable_token_indices")
STANDS_FOR = "_stands_for"


@dataclass(frozen=True, eq=False)
class WholeWeights:
    """Whole weights that come with an adapter, as its files hold them; they go on frozen and are written again as they were."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # by name in the base model
    named: Mapping[str, Any] = field(default_factory=dict)  # the fields of its configuration that name them
    unread: Mapping[str, Factors] = field(default_factory=dict)  # factors of layers that read no text, which stay off the model

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> WholeWeights:
        """Return tensors with what a configuration says of them."""
        return cls(tensors, {name: config[name] for name in COME_WITH if config.get(name)} if tensors else {})

    def __str__(self) -> str:
        """Return the paths of their modules."""
        return ", ".join(self.modules)

    @property
    def modules(self) -> list[str]:
        """Paths of their modules in the base model."""
        return sorted({module_of(name) for name in self.tensors})


NO_WHOLE = WholeWeights()


def module_of(name: str) -> str:
    """Return the path of the module that a whole weight belongs to."""
    return name.removesuffix(ROWS) if name.endswith(ROWS) else name.rpartition(".")[0]


def comes_with(path: str | None, config: Mapping[str, Any]) -> bool:
    """Return True if an adapter's configuration says that a tensor of this name is a whole weight beside the factors."""
    if path is None or config.get("ensure_weight_tying"):
        return False
    if path.endswith(ROWS):
        return bool(config.get("trainable_token_indices"))
    saved = config.get("modules_to_save")
    ends = [name for name in saved if name and isinstance(name, str)] if isinstance(saved, list) else []
    return path.rpartition(".")[0].endswith(tuple(ends))  # as PEFT reads them: "norm" is the end of "input_layernorm", too


def put_whole(base: nn.Module, whole: WholeWeights, *, where: str) -> None:
    """Put whole weights on a base model, frozen; a head that is tied to an embedding gets the same rows, unless it has its own."""
    modules = dict(base.named_modules())
    weights: dict[str, dict[str, Tensor]] = {}
    own = whole.modules
    for name, tensor in whole.tensors.items():
        path, parameter = module_of(name), "weight" if name.endswith(ROWS) else name.rpartition(".")[2]
        ours = getattr(modules.get(path), parameter, None)
        if not isinstance(ours, Tensor):
            raise InvalidValue(f"{where} holds {name}, which the model does not have; the adapter belongs to another model")
        if name.endswith(ROWS):
            tokens = _tokens(whole.named["trainable_token_indices"], path)
            if len(tokens) != len(tensor) or max(tokens, default=0) >= len(ours) or tensor.shape[1:] != ours.shape[1:]:
                raise InvalidValue(f"{where}: the rows of {path} are {[*tensor.shape]} for {len(tokens)} of {len(ours)} tokens")
            rows = ours.detach().clone()
            rows[tokens] = tensor.to(rows)
            tied = [other for other, module in modules.items() if getattr(module, parameter, None) is ours]
            follow = tied if isinstance(modules[path], nn.Embedding) else []  # rows of a tied head are its own, and leave the table
            weights |= {other: {parameter: rows} for other in follow if other not in own} | {path: {parameter: rows}}
        elif tensor.shape != ours.shape:
            raise InvalidValue(f"{where} holds {name} as {[*tensor.shape]}, but it is {[*ours.shape]} in the model")
        else:
            weights.setdefault(path, {})[parameter] = tensor.detach().clone().to(ours)
    for path, tensors in weights.items():
        new = copy.copy(modules[path])
        frozen = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
        vars(new).update({"_parameters": {**new._parameters, **frozen}, STANDS_FOR: modules[path]})
        base.set_submodule(path, new)


def take_off(base: nn.Module) -> None:
    """Put the model's own modules back where others stand in for them."""
    for path, module in list(base.named_modules()):
        if STANDS_FOR in vars(module):
            base.set_submodule(path, vars(module)[STANDS_FOR])


def _tokens(given: Any, path: str) -> list[int]:
    """The numbers of the tokens at an embedding: PEFT takes one list for the input embedding, or one for each name."""
    of_path = next((tokens for name, tokens in given.items() if named(path, (name,))), []) if isinstance(given, dict) else given
    if not isinstance(of_path, list) or not all(type(token) is int and token >= 0 for token in of_path):
        raise InvalidValue(f"trainable_token_indices is {given!r:.40}, no numbers of tokens")
    return of_path
