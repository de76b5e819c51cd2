"""A stack of LoRA adapters for continual training: open a new one, fold it into the history, restore it.

A model carries at most two PEFT adapters: `current`, which trains, and `history`, which holds all earlier ones of a cumulative
method, stacked into one frozen adapter of rank r (t-1). So a forward pass costs the same at task 15 as at task 2, and the scale
s never changes, however many are stacked.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from anchorlora.adapters.anchor import Anchor
from anchorlora.adapters.files import fitted, name_history, read_with_whole, write_adapter
from anchorlora.adapters.gates import Gates
from anchorlora.adapters.kinds import block_factors
from anchorlora.adapters.layers import lora_layers, other_layers
from anchorlora.adapters.targets import are_transposed, keep_unpacked, refuse_misfit, target_layers
from anchorlora.adapters.whole import NO_WHOLE, WholeWeights, put_whole
from anchorlora.devices import forked_generators, in_float64
from anchorlora.errors import InvalidType, InvalidValue, ProtectionLost, UnknownName
from anchorlora.geometry import Factors, one_scale
from anchorlora.store.files import new_folder

CURRENT, HISTORY = "default", "history"  # PEFT's own name for the one: TRL looks for it


@dataclass(eq=False)
class AdapterStack:
    """LoRA adapters of one continually trained causal LM: the current one, which trains, and the frozen history of earlier ones.

    Each task opens a new adapter (`open`), trains it and folds it into the history (`fold`). `AdapterStack.continuing` starts on
    top of an adapter that was trained elsewhere; `save` writes the whole stack as one PEFT adapter.

    Args:
        base: The model, as an instance. Targets must be linear layers: nn.Linear, in 4 or 8 bits by bitsandbytes if you like, or
            GPT-2's Conv1D. All of its parameters are frozen.
        targets: Module names as `target_layers` takes them: suffixes, "all-linear", or a regular expression.
        rank: Rank r of each adapter.
        alpha: LoRA's alpha; the scale is alpha / r.
        rslora: Use the scale alpha / sqrt(r) instead.
        dropout: Dropout on the current adapter's input.
        history_dropout: Dropout on the history's input: "off", or "shared" for one mask over history and current.

    Attributes:
        model: The adapted PeftModel; train this one; save it with `save`, since its save_pretrained writes block and history apart.
        gates: Gates of the stacked adapters, or None. Set by an adapter plan.
        fan_in_fan_out: Whether all adapted layers hold their weight as (d_in, d_out), as GPT-2's Conv1D does.

    Raises:
        UnknownName: No module of the model matches `targets`.
        InvalidType: A target is not a linear layer.

    Example:
        >>> from anchorlora import AdapterStack
        >>> base = tiny().unload()  # a plain transformers model
        >>> stack = AdapterStack(base, targets=("q_proj", "v_proj"), rank=4, alpha=8)
        >>> stack.open(torch.Generator().manual_seed(0))  # task 1: train stack.model, then
        >>> stack.fold()
        >>> stack.open(torch.Generator().manual_seed(1))  # task 2
        >>> stack.factors()["model.layers.0.self_attn.q_proj"].rank  # history and current
        8
        >>> len(stack.trainable())  # A and B of the current adapter at four layers
        8
    """

    base: nn.Module
    targets: tuple[str, ...] | str
    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0
    history_dropout: str = "off"
    model: PeftModel = field(init=False)
    gates: Gates | None = field(init=False, default=None)  # set by a plan with gated adapters
    fan_in_fan_out: bool = field(init=False)
    whole: WholeWeights = field(init=False, default=NO_WHOLE)  # what came with the first adapter, frozen
    _kept: dict[str, Factors] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        layers = target_layers(self.base, self.targets)
        self._targets = sorted(layers)
        self.fan_in_fan_out = are_transposed(layers.values())
        keep_unpacked(self.base)
        self.base.requires_grad_(False)
        try:
            self.model = self._quietly(get_peft_model, self.base, self._config(self.rank, self.dropout), adapter_name=CURRENT)
        except ValueError as error:  # layers of some kinds it does not adapt, such as Mamba's out_proj
            raise InvalidValue(f"PEFT puts no adapter on {type(self.base).__name__}: {' '.join(str(error).split()):.300}") from None
        self._names = list(lora_layers(self.model))

    @classmethod
    def continuing(cls, model: nn.Module, adapter: Path | str, *, rank: int, dropout: float = 0.0, seed: int = 0) -> AdapterStack:
        """Start a new task on top of a trained adapter, which becomes the frozen history.

        The new adapter covers the layers of the old one, at its scale (that of most layers, if they differ), in float32. It starts
        with B = 0, so no output changes. Whole weights that come with the old one (`modules_to_save`, `trainable_token_indices`) go
        on frozen. `model` of the result is a PeftModel for any trainer; only the new adapter trains. See
        `anchor` for protection and `save` for the result.

        Args:
            model: A causal LM as it was loaded, without adapters.
            adapter: Folder of a saved PEFT LoRA adapter. It is read as data; no code of it runs.
            rank: Rank of the new adapter.
            dropout: Dropout on the new adapter's input.
            seed: Seed of the new A.

        Returns:
            The stack, with the saved adapter as history and a new one open.

        Raises:
            InvalidValue: The folder holds no plain LoRA adapter, or one of another model.

        Example:
            >>> from anchorlora import AdapterStack
            >>> model = tiny()
            >>> model.save_pretrained(tmp / "first")
            >>> stack = AdapterStack.continuing(model.unload(), tmp / "first", rank=2)
            >>> layer = stack.anchor().layers[0]
            >>> layer.history.rank, layer.current.rank
            (4, 2)
        """
        read, whole = read_with_whole(Path(adapter))
        saved = fitted(read, [name for name, _ in model.named_modules()], where=str(adapter))
        refuse_misfit(model, saved, where=str(adapter))
        put_whole(model, whole, where=str(adapter))
        scale = one_scale(saved)
        stack = cls(model, tuple(sorted(saved)), rank=rank, alpha=scale * rank, dropout=dropout)
        stack.whole = whole
        stack.restore(saved, as_history=True)
        stack.open(torch.Generator().manual_seed(seed))
        return stack

    @property
    def scale(self) -> float:
        """Scale s of every adapter in the stack: alpha / r, or alpha / sqrt(r) with rslora."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def open(self, generator: torch.Generator, *, orthogonal: bool = False) -> None:
        """Open a new current adapter, in float32: B = 0, and A uniform in +-1/sqrt(d_in) as PEFT starts it.

        Args:
            generator: CPU generator that draws A.
            orthogonal: Make the rows of A orthogonal to each other and to those of the history, each of norm 1/sqrt(3), that of the
                uniform start.

        Raises:
            InvalidValue: The history leaves fewer directions of a layer's input than the adapter has rows.
        """
        if CURRENT not in self.model.peft_config:
            self._add(CURRENT, self._config(self.rank, self.dropout))
        for name, module in lora_layers(self.model).items():
            A, B = module.lora_A[CURRENT].weight, module.lora_B[CURRENT].weight
            bound = 1 / math.sqrt(A.shape[1])
            drawn = torch.empty(A.shape, device="cpu").uniform_(-bound, bound, generator=generator)
            if orthogonal:
                drawn = _orthogonal(drawn, self._kept.get(name), name)
            with torch.no_grad():
                A.copy_(drawn)
                B.zero_()
        self._activate()

    def fold(self) -> None:
        """Append the current adapter to the frozen history.  The model computes the same function as before.

        Raises:
            ProtectionLost: The history was written to since the task began.
        """
        grown = self.stacked()
        self.check_history()
        self.restore(grown, as_history=True)

    def check_history(self) -> None:
        """Check that the frozen history is bitwise what the task began with.

        Raises:
            ProtectionLost: It was written to.
        """
        for name, kept in self._kept.items():
            now = block_factors(lora_layers(self.model)[name], HISTORY)
            same = torch.equal(now.A.cpu(), kept.A.cpu()) and torch.equal(now.B.cpu(), kept.B.cpu())
            if not same:
                raise ProtectionLost(f"the frozen history at {name} is not what the task began with: other code wrote to it")

    def restore(self, factors: Mapping[str, Factors], *, as_history: bool) -> None:
        """Load saved factors, as the frozen history or as the shared current adapter.

        Factors of another scale or of unequal ranks, as in adapters made elsewhere, keep their function: B is multiplied by the
        ratio of scales, which rounds each entry at most once, and missing rows are zero, which is exact.

        Args:
            factors: Layer path -> factors, for every adapted layer.
            as_history: True replaces the history and removes the current adapter; False writes to the current adapter.

        Raises:
            UnknownName: The factors are for other layers.
            InvalidValue: The factors have another rank than the current adapter.
        """
        if set(factors) != set(self._names):
            raise UnknownName(other_layers("saved factors", set(factors), set(self._names)))
        adapter = HISTORY if as_history else CURRENT
        rank = max(f.rank for f in factors.values())
        if not as_history and rank != self.rank:
            raise InvalidValue(
                f"the saved adapter has rank {rank} and the shared adapter {self.rank}; restore it as history instead"
            )
        factors = {name: f.scaled_to(self.scale).padded(rank) for name, f in factors.items()}
        for name in (CURRENT, HISTORY):
            if as_history and name in self.model.peft_config:
                self._quietly(self.model.delete_adapter, name)
        if as_history:
            self._add(HISTORY, self._config(rank, 0.0))
            name_history(self.model, HISTORY)
            self._kept = {name: f.copy() for name, f in factors.items()}
        for name, module in lora_layers(self.model).items():
            with torch.no_grad():
                module.lora_A[adapter].weight.copy_(factors[name].A)
                module.lora_B[adapter].weight.copy_(factors[name].B)
        self._activate()

    def factors(self) -> dict[str, Factors]:
        """Return the whole stack as one adapter by layer: history rows first, the newest last, gates multiplied into B.

        Example:
            >>> from anchorlora import AdapterStack
            >>> stack = AdapterStack(tiny().unload(), targets=("q_proj",), rank=4, alpha=8)
            >>> stack.factors()["model.layers.1.self_attn.q_proj"].A.shape
            torch.Size([4, 32])
        """
        if self.gates is None:
            return self.stacked()
        columns = {layer: self.gates.multipliers(layer).detach().repeat_interleave(self.rank) for layer in lora_layers(self.model)}
        return {layer: Factors(f.A, f.B * columns[layer], f.scale) for layer, f in self.stacked().items()}

    def stacked(self) -> dict[str, Factors]:
        """Return detached copies of the stacked factors as they were trained, without gates."""
        out = {}
        for name, module in lora_layers(self.model).items():
            parts = [block_factors(module, adapter).copy() for adapter in (HISTORY, CURRENT) if adapter in module.lora_A]
            out[name] = Factors(torch.cat([p.A for p in parts]), torch.cat([p.B for p in parts], dim=1), self.scale)
        return out

    def newest(self) -> dict[str, Factors]:
        """Return detached copies of the current adapter's factors, by layer."""
        return {name: block_factors(module, CURRENT).copy() for name, module in lora_layers(self.model).items()}

    def save(self, folder: Path | str, *, base: str | None = None) -> None:
        """Save the stack as ONE ordinary PEFT LoRA adapter that computes what the model computes.

        The folder appears only when it is complete.

        Args:
            folder: New folder.
            base: Name of the base model in the adapter's configuration; by default the name that the model was loaded by.

        Raises:
            FileExistsError: The folder exists.

        Example:
            >>> from anchorlora import AdapterStack
            >>> from anchorlora.adapters import read_adapter
            >>> stack = AdapterStack(tiny().unload(), targets=("q_proj", "v_proj"), rank=4, alpha=8)
            >>> stack.fold()
            >>> stack.open(torch.Generator().manual_seed(1))
            >>> stack.save(tmp / "both")
            >>> read_adapter(tmp / "both")["model.layers.0.self_attn.q_proj"].rank
            8
        """
        target = Path(folder)
        if target.exists():
            raise FileExistsError(f"{target} exists already and is not overwritten; give another name, or move it away")
        named = base if base is not None else str(getattr(self.base, "name_or_path", ""))
        with new_folder(target) as temporary:
            write_adapter(temporary, self.factors(), base=named, fan_in_fan_out=self.fan_in_fan_out, whole=self.whole)

    def anchor(self, **kept: Any) -> Anchor:
        """Return the anchor of the current adapter, with its present factors as the start.

        Args:
            **kept: `cores`, `wides`, `past` and `losses`, as in `Anchor.of`.

        Example:
            >>> from anchorlora import AdapterStack
            >>> stack = AdapterStack(tiny().unload(), targets=("q_proj", "v_proj"), rank=4, alpha=8)
            >>> anchor = stack.anchor(cores=cores_of(stack.model))
            >>> anchor.layers[0].core.k
            3
        """
        return Anchor.of(self.model, adapter_name=CURRENT, history=HISTORY, gates=self.gates, **kept)

    def trainable(self) -> list[nn.Parameter]:
        """Return the current adapter's parameters, A before B, layer by layer, for the optimizer."""
        return [p for s in lora_layers(self.model).values() for p in (s.lora_A[CURRENT].weight, s.lora_B[CURRENT].weight)]

    def _config(self, rank: int, dropout: float) -> LoraConfig:
        return LoraConfig(
            r=rank,
            lora_alpha=self.scale * rank,  # PEFT divides by the rank of this adapter: the scale must not change with history
            lora_dropout=dropout,
            target_modules=self._targets,
            fan_in_fan_out=self.fan_in_fan_out,
            task_type="CAUSAL_LM",
        )

    def _add(self, name: str, config: LoraConfig) -> None:
        with forked_generators():  # PEFT draws initial values that are overwritten at once
            self._quietly(self.model.add_adapter, name, config)
        for module in lora_layers(self.model).values():  # a second adapter takes the base's precision in some versions of PEFT
            module.lora_A[name].float()
            module.lora_B[name].float()

    def _activate(self) -> None:
        """Activate both adapters and let only the current one train: PEFT makes every active adapter trainable again."""
        present = [name for name in (HISTORY, CURRENT) if name in self.model.peft_config]
        activate(self.model, present[-1], history=HISTORY if HISTORY in present else None)
        for module in lora_layers(self.model).values():
            for adapter in present:
                for weight in (module.lora_A[adapter].weight, module.lora_B[adapter].weight):
                    if weight.dtype != torch.float32:
                        raise InvalidType(f"LoRA factors must be float32, but those of {adapter} are {weight.dtype}")
        if self.history_dropout == "shared" and self.dropout > 0 and present == [HISTORY, CURRENT]:
            for module in lora_layers(self.model).values():
                mask = _OneMask(self.dropout)
                module.lora_dropout[HISTORY] = module.lora_dropout[CURRENT] = mask
        for name, module in lora_layers(self.model).items() if self.gates is not None else ():
            for adapter in present:
                self._gate(module.lora_A[adapter], name, adapter)
        trains = {n for n, p in self.model.named_parameters() if p.requires_grad}
        assert all(f".{CURRENT}." in name for name in trains), f"unexpected trainable parameters: {sorted(trains)[:3]}"

    def _gate(self, routing: nn.Module, layer: str, adapter: str) -> None:
        """Apply the gates to the activations between A and B; the hook is removed together with the adapter's module."""
        if routing._forward_hooks:
            return

        def apply_gate(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            assert self.gates is not None
            multipliers = self.gates.multipliers(layer)
            weights = multipliers[-1:] if adapter == CURRENT else multipliers[: output.shape[-1] // self.rank]
            return output * weights.repeat_interleave(self.rank)

        routing.register_forward_hook(apply_gate)

    @staticmethod
    def _quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():  # PEFT warns that a second adapter is unusual; here it is the design
            warnings.simplefilter("ignore")
            return call(*args, **kwargs)


def activate(model: PeftModel, adapter_name: str, *, history: str | None) -> None:
    """Activate an adapter together with the frozen history, and let only the adapter train."""
    model.set_adapter(adapter_name)  # PeftModel takes one name; only the inner model takes several
    model.base_model.set_adapter([history, adapter_name] if history not in (None, adapter_name) else [adapter_name])
    if history is not None:
        model.set_requires_grad([history], requires_grad=False)


def _orthogonal(drawn: Tensor, history: Factors | None, layer: str) -> Tensor:
    """Rows of norm 1/sqrt(3), orthogonal to each other and to those of the history."""
    rows = in_float64(drawn.cpu())
    earlier = in_float64(history.A.cpu()) if history is not None else rows[:0]
    earlier = earlier[earlier.norm(dim=1) > 0]
    if len(earlier) + len(rows) > rows.shape[1]:
        raise InvalidValue(
            f"{len(rows)} more orthogonal rows of A do not fit at {layer}: its input has {rows.shape[1]} directions, and earlier "
            f"blocks took {len(earlier)}; train fewer tasks, or a smaller rank"
        )
    taken = torch.linalg.qr(earlier.T).Q  # (d_in, rows of the history)
    for _ in range(2):  # the second time, what rounding left
        rows = torch.linalg.qr((rows - rows @ taken @ taken.T).T).Q.T
    return (rows / math.sqrt(3)).float()


class _OneMask(nn.Dropout):
    """One dropout mask for two calls in a row: PEFT drops history's input, then current's (official O-LoRA)."""

    _mask: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Drop what the mask says: a new one on the first of two calls, the same one on the second."""
        if not self.training:
            return input
        if self._mask is None:
            self._mask = torch.nn.functional.dropout(torch.ones_like(input), self.p)
            return input * self._mask
        mask, self._mask = self._mask, None
        return input * mask
