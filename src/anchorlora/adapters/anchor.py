"""The anchor of a task: all adapted layers of a model, and what else a constraint may see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from anchorlora.adapters.files import name_history
from anchorlora.adapters.gates import Gated, Gates
from anchorlora.adapters.guard import Sums, WholeLayer, active_adapters, idle_tensors, refuse_not_linear, refuse_unprotectable
from anchorlora.adapters.kinds import adapters_at, block_factors
from anchorlora.adapters.layers import COMPILED, NOTHING, AdaptedLayer, as_subspace, lora_layers, other_layers
from anchorlora.adapters.sharding import is_sharded, is_split, refuse_flat_parameters
from anchorlora.adapters.targets import keep_unpacked
from anchorlora.adapters.weights import modules_of, trains_whole, weight_layers
from anchorlora.devices import true_precision
from anchorlora.errors import InvalidType, InvalidValue, UnknownName
from anchorlora.geometry import Factors, LayerCore, Subspace


@dataclass(frozen=True, eq=False)
class Anchor:
    """Adapted layers with their factors at the start of a task and the directions to protect: all that a constraint may see.

    Make one with `Anchor.of(model)` right before training, after all wrapping, and give it to `protect`.

    Args:
        layers: All adapted layers, in the model's order.
        model: The model, for constraints that run it; None if only factors matter.
        past: Tensors that constraints remembered at the end of earlier tasks, by name.
        losses: Function of a count n: the losses of n single training examples of this task, one at a time, without dropout and
            with a graph. None if the task gives none. If it has a method `together(n)`, which yields vectors of losses, each of
            several examples in one row without padding, what sums over examples takes that, which is faster; and `summed(n)`, which
            yields sums of losses, where the gradient of the sum is enough.
        adapter_name: Name of the adapter in `model` that the layers belong to.
        rest: What else the model computes with, by name: the parameters and saved buffers outside the layers, as they were.
        beside: The anchor of full weights that train beside the adapter and have cores; None if there are none.

    Example:
        >>> from anchorlora import Anchor, ProjectDisplacement, Retract, protect
        >>> model = tiny()
        >>> anchor = Anchor.of(model, cores=cores_of(model))
        >>> parameters = [p for p in model.parameters() if p.requires_grad]
        >>> optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        >>> ids = torch.randint(0, 64, (2, 8))
        >>> with protect(optimizer, anchor, [Retract("A"), ProjectDisplacement("A")]):
        ...     for _ in range(3):
        ...         model(input_ids=ids, labels=ids).loss.backward()
        ...         _ = optimizer.step()
        ...         optimizer.zero_grad()
        >>> layer = anchor.layers[0]
        >>> moved = layer.current.A - layer.start.A
        >>> bool(moved.norm() > 0), bool((moved @ layer.core.basis).norm() < 1e-5)  # A moved, but not along the core
        (True, True)
    """

    layers: tuple[AdaptedLayer, ...]
    model: nn.Module | None = None
    past: Mapping[str, Tensor] = field(default_factory=dict)
    losses: Callable[[int], Iterable[Tensor]] | None = None
    adapter_name: str | None = None
    rest: Mapping[str, Sums] = field(default_factory=dict, repr=False)
    beside: WeightAnchor | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        adapter_name: str | None = None,
        cores: Mapping[str, Subspace | LayerCore | Tensor] = NOTHING,
        wides: Mapping[str, Subspace | Tensor] = NOTHING,
        history: str | None = None,
        past: Mapping[str, Tensor] = NOTHING,
        losses: Callable[[int], Iterable[Tensor]] | None = None,
        gates: Gates | None = None,
    ) -> Anchor:
        """Return the anchor of one adapter of a PEFT model: its layers, with their present factors as the start.

        Call it after all wrapping. If anything trains, 4-bit base weights are kept in the layout that passes gradients on.

        Args:
            model: A PeftModel, or what wraps one (DDP, torch.compile, a LightningModule).
            adapter_name: Adapter that trains; by default the active one.
            cores: Protected subspaces by layer path in the base model, for every adapted layer; none for the first task. A tensor
                (d_in, k) with orthonormal columns, and a `LayerCore` of `SensitiveCore.cores`, are taken as well. What trains
                beside the adapter is protected where it has a core too: a linear layer such as "lm_head" a subspace, an embedding
                the numbers of the tokens whose rows must stay.
            wides: Wider bases by layer path, for constraints that need them.
            history: Name of the adapter that holds the rows of earlier adapters, frozen.
            past: Tensors that constraints remembered at the end of earlier tasks.
            losses: Losses of single training examples, as in `Anchor`.
            gates: Gates of the history and the current adapter.

        Returns:
            The anchor, with copies of the present factors.

        Raises:
            UnknownName: The model has no such adapter, several could be meant, or `cores` or `wides` are for other layers.
            InvalidValue: The adapter is not active or is merged, a core has another width than the layer's input or is not
                orthonormal, or a 4-bit base passes no gradient.
            InvalidType: A layer's update is not a product s B A (DoRA and other variants), the factors lie in flat buffers (FSDP1,
                DeepSpeed ZeRO), a core is neither a subspace nor a tensor, or `losses` is no function.

        Example:
            >>> from anchorlora import Anchor
            >>> model = tiny()
            >>> anchor = Anchor.of(model, cores=cores_of(model, k=3))
            >>> for layer in anchor.layers[:2]:
            ...     print(layer.name, layer.current.rank, layer.core.k)
            model.layers.0.self_attn.q_proj 4 3
            model.layers.0.self_attn.v_proj 4 3
            >>> Anchor.of(model, adapter_name="other")
            Traceback (most recent call last):
                ...
            anchorlora.errors.UnknownName: the model has no LoRA adapter called 'other'; it has: default
        """
        if losses is not None and not callable(losses):
            raise InvalidType(f"losses is a {type(losses).__name__}; give a function of a count n that yields n losses")
        for name, mapping, source in (
            ("cores", cores, "read_cores(FILE)"),
            ("wides", wides, "a FeatureStore"),
            ("past", past, "AnswerSensitivity().end_task(anchor)"),
        ):
            if not isinstance(mapping, Mapping):
                raise InvalidType(f"{name} is a {type(mapping).__name__}; give a mapping, as {source} returns one")
        refuse_flat_parameters(model)
        if any(parameter.requires_grad for parameter in model.parameters()):
            keep_unpacked(model)
        lora, split = lora_layers(model), is_split(model)
        for name, module in lora.items():
            if adapter_name is None or adapter_name in adapters_at(module):
                refuse_not_linear(name, module)
        adapter_name = adapter_name or _training_adapter(lora)
        modules = {name: module for name, module in lora.items() if adapter_name in adapters_at(module)}
        if not modules:
            raise UnknownName(f"the model has no LoRA adapter called {adapter_name!r}; it has: {', '.join(_names(lora)) or 'none'}")
        bases = dict(cores)
        given_whole = {name: bases.pop(name) for name in (bases.keys() - modules.keys()) & trains_whole(model)} if bases else {}
        for kind, given in (("cores", bases), ("wide bases", wides)):
            if given and set(given) != set(modules):
                raise UnknownName(other_layers(kind, set(given), set(modules)))
        layers = []
        for name, module in modules.items():
            gated = Gated(gates, gates.multipliers(name).detach().clone(), name) if gates else None
            core, wide = as_subspace(bases.get(name), at=name), as_subspace(wides.get(name), at=name)
            earlier = history if history in adapters_at(module) else None
            for adapter in filter(None, (adapter_name, earlier)):
                refuse_unprotectable(name, module, adapter)
            current = block_factors(module, adapter_name)
            frozen = block_factors(module, earlier) if earlier else None
            for directions in (core, wide):
                if directions is not None and directions.d != current.A.shape[1]:
                    raise InvalidValue(
                        f"the core of {name} has width {directions.d}, but its A reads {current.A.shape[1]} inputs; "
                        "these cores belong to another model"
                    )
            whole = None
            if isinstance(module, LoraLayer):
                with true_precision({current.A.device.type}):
                    whole = WholeLayer.of(name, module, adapter_name, core=core, gated=gates is not None, split=split)
            layers.append(AdaptedLayer(name, current, current.copy(), frozen, core, wide, gated, whole))
        if history is not None and any(layer.history for layer in layers):
            name_history(model, history)
        held = frozenset(id(layer.factor(name)) for layer in layers for name in layer.names)
        beside = WeightAnchor.of(model, cores=given_whole, held=held) if given_whole else None
        known = beside.held if beside else held
        rest = {n: Sums.of(t) for n, t in rest_of(model, [*layers, *(beside.layers if beside else ())]) if id(t) not in known}
        return cls(tuple(layers), model, dict(past), losses, adapter_name, rest, beside)

    def ending_at(self, factors: Mapping[str, Factors]) -> Anchor:
        """Return an anchor whose change is that of the whole stack: from the history at the task's start to given factors.

        Args:
            factors: Layer path -> factors of the whole stack at the end of the task, of any rank.

        Example:
            >>> from anchorlora import AdapterStack
            >>> stack = AdapterStack(tiny().unload(), targets=("q_proj",), rank=4, alpha=8)
            >>> stack.fold()
            >>> stack.open(torch.Generator().manual_seed(1))  # task 2
            >>> anchor = stack.anchor()
            >>> layer = anchor.ending_at(stack.factors()).layers[0]
            >>> layer.current.rank, layer.start.rank, float(layer.change().norm())
            (8, 4, 0.0)
        """
        ends = []
        for layer in self.layers:
            end = factors[layer.name]
            start = layer.history.copy() if layer.history is not None else end.unborn()
            ends.append(AdaptedLayer(layer.name, end, start, None, layer.core, layer.wide))
        return Anchor(tuple(ends), past=self.past)

    def changed(self) -> list[str]:
        """Return one sentence per layer in which anything but the protected factors has changed since the anchor."""
        if self.model is None or self.adapter_name is None:
            return []
        layers = lora_layers(self.model)
        devices = {layer.current.A.device.type for layer in self.layers}
        with true_precision(devices):
            sentences = [layer.whole.changed(layers.get(layer.name)) for layer in self.layers if layer.whole is not None]
        return [sentence for sentence in sentences if sentence]

    def changed_beside(self) -> list[str]:
        """Return the names of parameters and saved buffers outside the layers whose values have changed since the anchor."""
        if not self.rest or self.model is None:
            return []
        now = dict(rest_of(self.model, self.layers))
        return [name for name, sums in self.rest.items() if name in now and not sums.same(now[name])]

    def unprotected(self) -> list[str]:
        """Return the paths of the model's layers that train, or compute with an adapter, although the anchor does not hold them."""
        if self.model is None or self.adapter_name is None:
            return []
        protected, idle = {layer.name for layer in self.layers}, idle_tensors(self.model)
        others = {name: module for name, module in lora_layers(self.model).items() if name not in protected}
        adapted = [name for name, module in others.items() if active_adapters({name: module})]
        training = [name.rpartition(".")[0] for name, p in self.trains_beside().items() if id(p) not in idle]
        beside = [path for path in training if not any(f".{name}." in f".{path}." for name in (*protected, *adapted))]
        return list(dict.fromkeys([*adapted, *beside, *(self.beside.tied if self.beside else ())]))

    def trains_beside(self) -> dict[str, nn.Parameter]:
        """Return every trainable parameter of the model that is not a protected factor, by name."""
        if self.model is None or self.adapter_name is None:
            return {}
        factors = {id(layer.factor(name)) for layer in self.layers for name in layer.names}
        if self.beside is not None:
            factors |= self.beside.held | {id(layer.factor("W")) for layer in self.beside.layers}
        return {n.replace(COMPILED, ""): p for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in factors}

    def replaced(self) -> str | None:
        """Return the name of the first layer whose factors in the model are no longer those of the anchor, or None."""
        if self.model is None or self.adapter_name is None:
            return None
        live = self.live()
        for layer in self.layers:
            if layer.name not in live:
                return layer.name
            for name in layer.names:
                parameter = getattr(live[layer.name], name)
                gathered = is_sharded(layer.factor(name)) and not is_sharded(parameter)  # FSDP2 shows the whole factor for a while
                if parameter is not layer.factor(name) and not gathered:
                    return layer.name
        return None

    def live(self) -> dict[str, Factors]:
        """Return the factors that the model computes with now, by layer; they differ if the training loop has replaced them."""
        if self.model is None or self.adapter_name is None:
            return {}
        modules = {name: m for name, m in lora_layers(self.model).items() if self.adapter_name in adapters_at(m)}
        return {layer.name: block_factors(modules[layer.name], self.adapter_name) for layer in self.layers if layer.name in modules}


@dataclass(frozen=True, eq=False)
class WeightAnchor(Anchor):
    """Linear layers and embeddings without LoRA, with their weights at the start of a task and the directions to protect.

    Give it to `protect` or `ProtectionCallback` in place of an `Anchor`, with `ProjectDisplacement("W")`. For weights that train
    beside LoRA, `Anchor.of` makes it of the cores that it is given for them. It holds one copy of each protected weight. Whatever
    else trains, such as biases and norms, is refused unless `also_training` names it.

    Example:
        >>> from anchorlora import ProjectDisplacement, measure, protect
        >>> from anchorlora.adapters import WeightAnchor
        >>> adapted = tiny()
        >>> cores = cores_of(adapted)  # `anchorlora cores MODEL TEXT --out FILE` makes them of a model without an adapter
        >>> model, ids = adapted.unload(), torch.arange(16)[None]
        >>> for name, p in model.named_parameters():
        ...     _ = p.requires_grad_(name.removesuffix(".weight") in cores)
        >>> anchor = WeightAnchor.of(model, cores=cores)
        >>> optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        >>> with protect(optimizer, anchor, [ProjectDisplacement("W")]):
        ...     for _ in range(3):
        ...         model(input_ids=ids, labels=ids).loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> measure(anchor).exact
        True
    """

    held: frozenset[int] = frozenset()  # identities of what trains beside and is protected otherwise
    tied: tuple[str, ...] = ()  # modules that compute with protected rows too, in a way that nothing protects

    @classmethod
    def of(  # type: ignore[override]
        cls, model: nn.Module, *, cores: Mapping[str, Subspace | LayerCore | Tensor] = {}, held: frozenset[int] = frozenset()
    ) -> WeightAnchor:
        """Return the anchor of the layers that cores are given for.

        Args:
            model: A model whose full weights train, or what wraps it (DDP, torch.compile).
            cores: Layer path in the model, such as "model.layers.0.self_attn.q_proj" -> protected subspace (d_in, k), or a tensor
                with orthonormal columns. For an embedding, the numbers of the tokens whose rows must stay, such as
                `torch.unique(ids)` of old text; rows that PEFT trains alone (`trainable_token_indices`) may not be among them.
            held: Identities of parameters that another anchor holds.

        Returns:
            The anchor, with copies of the present weights.

        Raises:
            UnknownName: No cores are given, or the model has no layer of such a path.
            InvalidType: A layer is neither linear nor an embedding, has an adapter, or its weight is not stored in float32 or
                float64; the weights lie in flat buffers (FSDP1, DeepSpeed ZeRO) or are split (FSDP2).
            InvalidValue: A weight does not train or is shared with another layer, or a core has another width; a token's row is to
                stay and to train.
        """
        refuse_flat_parameters(model)
        if is_split(model):
            raise InvalidType("full weights that are split over processes (FSDP2) are not protected; use one process or DDP")
        if not cores:
            raise UnknownName("no cores are given, so no layer is protected; pass cores={layer path: core}")
        layers, rows, tied = weight_layers(model, cores)
        held |= rows
        rest = {name: Sums.of(tensor) for name, tensor in rest_of(model, layers) if id(tensor) not in held}
        return cls(tuple(layers), model, rest=rest, held=held, tied=tuple(tied))

    def unprotected(self) -> list[str]:
        """Return the paths of the layers that train although the anchor does not hold them; beside LoRA, its anchor does that."""
        if self.held:
            return []
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.trains_beside()))

    def trains_beside(self) -> dict[str, nn.Parameter]:
        """Return every trainable parameter of the model that is not a protected weight, by name."""
        assert self.model is not None
        weights = self.held | {id(layer.factor("W")) for layer in self.layers}
        named = self.model.named_parameters()
        return {n.replace(COMPILED, ""): p for n, p in named if p.requires_grad and id(p) not in weights}

    def replaced(self) -> str | None:
        """Return the name of the first layer whose weight in the model is no longer that of the anchor, or None."""
        assert self.model is not None
        modules = modules_of(self.model)
        live = ((layer, getattr(modules.get(layer.name), "weight", None)) for layer in self.layers)
        return next((layer.name for layer, weight in live if weight is not layer.factor("W")), None)


def rest_of(model: nn.Module, layers: Iterable[AdaptedLayer]) -> Iterator[tuple[str, Tensor]]:
    """The parameters and saved buffers that the model computes with outside the layers."""
    known = idle_tensors(model)
    for layer in layers:
        known |= {id(layer.factor(name)) for name in layer.names}
        if layer.whole is not None and layer.whole.rows:  # else its function is unknown, and torch counts no write through `.data`
            known |= {id(t) for t in (*layer.whole.module.parameters(), *layer.whole.module.buffers())}
    for path, module in model.named_modules():
        saved = [(n, b) for n, b in module.named_buffers(recurse=False) if n not in module._non_persistent_buffers_set]
        for name, tensor in (*module.named_parameters(recurse=False), *saved):
            wide = tensor.is_floating_point() and tensor.dtype.itemsize > 1
            if wide and id(tensor) not in known and tensor.device.type != "meta":
                yield f"{path}.{name}".replace(COMPILED, "").lstrip("."), tensor


def _training_adapter(layers: Mapping[str, Any]) -> str:
    """The active adapter that trains, or the only active one.  Raises UnknownName if several could be meant."""
    active = active_adapters(layers)
    training = [name for name in active if any(_trains(module, name) for module in layers.values())]
    meant = training or active
    if not active:
        raise UnknownName(f"the model has no active LoRA adapter; it has: {', '.join(_names(layers)) or 'none'}")
    if len(meant) != 1:
        named = ", ".join(map(repr, meant)) or "none"
        raise UnknownName(
            f"give the name of the adapter to protect: {len(meant)} adapters {'train' if training else 'are active'} ({named})"
        )
    return meant[0]


def _trains(module: nn.Module, adapter: str) -> bool:
    factors = block_factors(module, adapter) if adapter in adapters_at(module) else None
    return factors is not None and (factors.A.requires_grad or factors.B.requires_grad)


def _names(layers: Mapping[str, Any]) -> list[str]:
    return sorted({name for module in layers.values() for name in adapters_at(module)})
