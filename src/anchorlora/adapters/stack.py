"""LoRA blocks of a continually trained model, opened, folded and restored.

A model carries at most two adapters: `current`, which trains, and `history`, which holds all earlier blocks of a cumulative
method stacked into one frozen block of rank r (t-1). A forward therefore costs the same at task 15 as at task 2, and the
scale s never changes, however many blocks are stacked.
"""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from anchorlora.adapters.files import read_adapter, write_adapter
from anchorlora.adapters.gates import Gates
from anchorlora.adapters.layers import Anchor, block_factors, lora_layers, other_layers
from anchorlora.adapters.targets import keep_unpacked, refuse_misfit, target_layers
from anchorlora.devices import forked_generators
from anchorlora.errors import InvalidType, InvalidValue, ProtectionLost, UnknownName
from anchorlora.geometry import Factors

CURRENT, HISTORY = "current", "history"


@dataclass(eq=False)
class AdapterStack:
    """The LoRA blocks of one continually trained causal LM: one that trains, and the frozen history of earlier ones.

    `AdapterStack.continuing` begins beside an adapter that was trained elsewhere, `save` writes all blocks as one PEFT adapter.

    base      the model, an instance with nn.Linear targets, which bitsandbytes may hold in 4 or 8 bits; its parameters are frozen
    targets   module names as PEFT takes them: a list of suffixes, "all-linear", or a regular expression
    dropout   of the current block's input; history_dropout: "off", or "shared" for one mask over history and current
    """

    base: nn.Module
    targets: tuple[str, ...] | str
    rank: int
    alpha: float
    rslora: bool = False
    dropout: float = 0.0
    history_dropout: str = "off"
    model: PeftModel = field(init=False)
    gates: Gates | None = field(init=False, default=None)  # set by a plan whose blocks are gated
    _kept: dict[str, Factors] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        target_layers(self.base, self.targets)
        keep_unpacked(self.base)
        self.base.requires_grad_(False)
        self.model = self._quietly(get_peft_model, self.base, self._config(self.rank, self.dropout), adapter_name=CURRENT)
        self._names = list(lora_layers(self.model))

    @classmethod
    def continuing(cls, model: nn.Module, adapter: Path | str, *, rank: int, dropout: float = 0.0, seed: int = 0) -> AdapterStack:
        """A fresh block beside a trained adapter, which becomes the frozen history: the start of a new task.

        model: a causal LM as it was loaded, without adapters; adapter: the folder of a saved PEFT LoRA adapter, which is read as
        data; rank, dropout: of the new block; seed: of its A, while B = 0, so that no output changes. The new block adapts the
        layers of the old one, at its scale (of several, the first layer's), in float32. `model` of the result is a PeftModel that
        any trainer takes, with the new block alone trainable; see `anchor` and `save`. Raises ValueError for a folder that holds no
        plain LoRA adapter, or one of another model.
        """
        saved = read_adapter(Path(adapter))
        refuse_misfit(model, saved, where=str(adapter))
        scale = next(iter(saved.values())).scale
        blocks = cls(model, tuple(sorted(saved)), rank=rank, alpha=scale * rank, dropout=dropout)
        blocks.restore(saved, as_history=True)
        blocks.open(torch.Generator().manual_seed(seed))
        return blocks

    @property
    def scale(self) -> float:
        """s: alpha / r, or alpha / sqrt(r) with rslora.  The same for every block, however many are stacked."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def open(self, generator: torch.Generator) -> None:
        """A fresh current block: B = 0, A uniform in +-1/sqrt(d_in) (PEFT's start) from `generator`, in float32."""
        if CURRENT not in self.model.peft_config:
            self._add(CURRENT, self._config(self.rank, self.dropout))
        for module in self._layers().values():
            A, B = module.lora_A[CURRENT].weight, module.lora_B[CURRENT].weight
            bound = 1 / math.sqrt(A.shape[1])
            with torch.no_grad():
                A.copy_(torch.empty(A.shape).uniform_(-bound, bound, generator=generator))
                B.zero_()
        self._activate()

    def fold(self) -> None:
        """Append the current block to the frozen history.  The model computes what it computed before."""
        grown = self.stacked()
        self.check_history()
        self.restore(grown, as_history=True)

    def check_history(self) -> None:
        """Raises ProtectionLost unless the frozen history is bitwise what the current block began with."""
        for name, kept in self._kept.items():
            now = block_factors(self._layers()[name], HISTORY)
            same = torch.equal(now.A.cpu(), kept.A.cpu()) and torch.equal(now.B.cpu(), kept.B.cpu())
            if not same:
                raise ProtectionLost(f"the frozen history at {name} is not what the task began with; another program wrote to it")

    def restore(self, factors: Mapping[str, Factors], *, as_history: bool) -> None:
        """Take over saved factors, as the frozen history or as the shared current block.

        Factors of another scale or of unlike ranks, as adapters made elsewhere have them, keep their function: B is multiplied by
        the ratio of scales, which rounds each of its entries once at most, and missing rows are zero, which is exact.
        """
        if set(factors) != set(self._names):
            raise UnknownName(other_layers("saved factors", set(factors), set(self._names)))
        block = HISTORY if as_history else CURRENT
        rank = max(f.rank for f in factors.values())
        if not as_history and rank != self.rank:
            raise InvalidValue(f"the saved block has rank {rank} and the shared block {self.rank}; take it over as history instead")
        factors = {name: f.scaled_to(self.scale).padded(rank) for name, f in factors.items()}
        for name in (CURRENT, HISTORY):
            if as_history and name in self.model.peft_config:
                self._quietly(self.model.delete_adapter, name)
        if as_history:
            self._add(HISTORY, self._config(rank, 0.0))
            self._kept = {name: f.copy() for name, f in factors.items()}
        for name, module in self._layers().items():
            with torch.no_grad():
                module.lora_A[block].weight.copy_(factors[name].A)
                module.lora_B[block].weight.copy_(factors[name].B)
        self._activate()

    def factors(self) -> dict[str, Factors]:
        """The whole adapter as it acts, layer by layer: history rows first, the newest block last; gates are in B."""
        if self.gates is None:
            return self.stacked()
        columns = self.gates.multipliers().detach().repeat_interleave(self.rank)
        return {layer: Factors(f.A, f.B * columns, f.scale) for layer, f in self.stacked().items()}

    def stacked(self) -> dict[str, Factors]:
        """The factors as they were trained, without gates; detached copies."""
        out = {}
        for name, module in self._layers().items():
            parts = [block_factors(module, block).copy() for block in (HISTORY, CURRENT) if block in module.lora_A]
            out[name] = Factors(torch.cat([p.A for p in parts]), torch.cat([p.B for p in parts], dim=1), self.scale)
        return out

    def newest(self) -> dict[str, Factors]:
        """The current block alone; detached copies."""
        return {name: block_factors(module, CURRENT).copy() for name, module in self._layers().items()}

    def save(self, folder: Path | str, *, base: str | None = None) -> None:
        """All blocks as ONE ordinary PEFT LoRA adapter, written whole, that computes what the model computes.

        folder: must not exist (FileExistsError); base: what the adapter calls its base model, by default the name that the model
        was loaded by.
        """
        target = Path(folder)
        if target.exists():
            raise FileExistsError(f"{target} exists already and is not overwritten; give another name, or move it away")
        temporary = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)  # of a write that was interrupted
        try:
            write_adapter(temporary, self.factors(), base=base if base is not None else str(getattr(self.base, "name_or_path", "")))
            temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def anchor(self, **kept: Any) -> Anchor:
        """The scope of the current block, its present values as anchor; keywords cores, wides, past, losses as in `Anchor.of`."""
        return Anchor.of(self.model, adapter_name=CURRENT, history=HISTORY, gates=self.gates, **kept)

    def trainable(self) -> list[nn.Parameter]:
        """The current block's parameters, A before B, layer by layer."""
        return [p for s in self._layers().values() for p in (s.lora_A[CURRENT].weight, s.lora_B[CURRENT].weight)]

    def _layers(self) -> dict[str, LoraLayer]:
        return lora_layers(self.model)

    def _config(self, rank: int, dropout: float) -> LoraConfig:
        targets = self.targets if isinstance(self.targets, str) else list(self.targets)
        alpha: Any = self.scale * rank  # PEFT divides by the rank of this adapter: the scale must not change with history
        return LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets, task_type="CAUSAL_LM")

    def _add(self, name: str, config: LoraConfig) -> None:
        with forked_generators():  # PEFT draws start values that are overwritten at once
            self._quietly(self.model.add_adapter, name, config)
        for module in self._layers().values():  # a second adapter takes the base's precision in some versions of PEFT
            module.lora_A[name].float()
            module.lora_B[name].float()

    def _activate(self) -> None:
        """Both blocks active, only the current one trainable: PEFT makes every active block trainable again."""
        present = [name for name in (HISTORY, CURRENT) if name in self.model.peft_config]
        activate(self.model, present[-1], history=HISTORY if HISTORY in present else None)
        for module in self._layers().values():
            for block in present:
                for weight in (module.lora_A[block].weight, module.lora_B[block].weight):
                    if weight.dtype != torch.float32:
                        raise InvalidType(f"LoRA factors must be float32, but those of {block} are {weight.dtype}")
        if self.history_dropout == "shared" and self.dropout > 0 and present == [HISTORY, CURRENT]:
            for module in self._layers().values():
                mask = _OneMask(self.dropout)
                module.lora_dropout[HISTORY] = module.lora_dropout[CURRENT] = mask
        for module in self._layers().values() if self.gates is not None else ():
            for block in present:
                self._gate(module.lora_A[block], block)
        trains = {n for n, p in self.model.named_parameters() if p.requires_grad}
        assert all(f".{CURRENT}." in name for name in trains), f"unexpected trainable parameters: {sorted(trains)[:3]}"

    def _gate(self, routing: nn.Module, block: str) -> None:
        """Let the gates act on the activations between A and B; the hook goes with the adapter's own module."""
        if routing._forward_hooks:
            return

        def gated(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            assert self.gates is not None
            multipliers = self.gates.multipliers()
            mine = multipliers[-1:] if block == CURRENT else multipliers[: output.shape[-1] // self.rank]
            return output * mine.repeat_interleave(self.rank)

        routing.register_forward_hook(gated)

    @staticmethod
    def _quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():  # PEFT warns that a second adapter is unusual; here it is the design
            warnings.simplefilter("ignore")
            return call(*args, **kwargs)


def activate(model: PeftModel, block: str, *, history: str | None) -> None:
    """Both adapters active and only `block` trainable, or `history` alone where they are the same."""
    model.set_adapter(block)  # one name for PeftModel's own use; several only the inner model takes
    model.base_model.set_adapter([history, block] if history not in (None, block) else [block])
    if history is not None:
        model.set_requires_grad([history], requires_grad=False)


class _OneMask(nn.Dropout):
    """One dropout mask for two calls in a row: PEFT asks for history's input, then for current's (official O-LoRA)."""

    _mask: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        if self._mask is None:
            self._mask = torch.nn.functional.dropout(torch.ones_like(input), self.p)
            return input * self._mask
        mask, self._mask = self._mask, None
        return input * mask
