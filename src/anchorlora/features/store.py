"""Feature rows: the inputs of adapted layers during a task, and the protected subspaces made from them.

The first `limit` input rows of valid tokens per layer and task are kept in the order in which they appear. They come from
training forwards and are stored as float32 on the CPU (paper, appendix B.2); or from separate forwards over a task's text
(`FeatureStore.read`). Layers that read the same tensor, such as q_proj and v_proj, share one store. After that, `held_out` rows
of later, different examples are kept apart: no core is made from them, so they show what the selected core leaves out.

Rows of earlier tasks are held in a form that does not keep growing (`GrowingRows`); a run saves the rows of each task unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from anchorlora.adapters import lora_layers
from anchorlora.adapters.kinds import width_at
from anchorlora.devices import float64_device, in_float64
from anchorlora.errors import InvalidValue, NotFinite, UnknownName
from anchorlora.features.layout import current as packed_layout
from anchorlora.geometry import KEPT, GrowingRows, Subspace
from anchorlora.processes import ALONE, Processes

PER_EXAMPLE = 4  # held-out rows per example, spread over its tokens: the first tokens are the prompt that all examples share


@dataclass(frozen=True, eq=False)
class LayerCore:
    """Protected subspace of one layer, and how it was chosen.

    Attributes:
        core: Protected subspace (d_in, k).
        wide: Wider basis (d_in, `wide`) of the strongest directions, for methods that need more than the core.
        k_star: Number of directions that the energy alone asks for, before the bounds; None if merges dropped too much to tell.
        retained_energy: Fraction of the rows' energy inside the core.
        rows: Number of feature rows that the core was made from.
    """

    core: Subspace
    wide: Subspace
    k_star: int | None
    retained_energy: float
    rows: int


@dataclass(eq=False)
class TaskRows:
    """Feature rows of one task by store: (n, d_in) each, float32, on the CPU.

    Attributes:
        core: Rows that cores are made from.
        held_out: Rows kept apart, for measuring only.
    """

    core: dict[str, Tensor] = field(default_factory=dict)
    held_out: dict[str, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class FeatureStore:
    """Feature rows of all tasks so far, and the protected subspaces made from them.

    Each `with store.collect(model):` block is one task with its own quota of rows. After the block, `cores` gives the protected
    subspaces for the next task.

    Args:
        limit: Rows per layer input and task that cores are made from.
        held_out: Further rows per layer input and task, kept apart for measuring; none by default.
        stores: Adapted layer -> store. Filled by the first forward; layers that read the same tensor share a store.
        device: Device of the decompositions; by default that of the model.
        keep: Directions carried forward once there are more rows than can be decomposed exactly (see `GrowingRows`).

    Attributes:
        count: Number of tasks so far.
        last: Rows of the last task.

    Example:
        >>> from anchorlora import Anchor, FeatureStore
        >>> model = tiny().train()
        >>> store = FeatureStore(limit=64)
        >>> with store.collect(model):  # task 1: train here as usual
        ...     for batch in torch.randint(0, 64, (8, 2, 16)):
        ...         _ = model(input_ids=batch, labels=batch)
        >>> cores = store.cores(energy=0.9, at_most=8)
        >>> cores["model.layers.0.self_attn.q_proj"].k
        8
        >>> anchor = Anchor.of(model, cores=cores)  # task 2: what its training must preserve
    """

    limit: int = 128
    held_out: int = 0
    stores: dict[str, str] = field(default_factory=dict)  # adapted layer -> store
    device: torch.device | str | None = None
    keep: int = KEPT
    count: int = field(default=0, init=False)
    last: TaskRows = field(default_factory=TaskRows, init=False)
    grown: dict[str, GrowingRows] = field(default_factory=dict, init=False, repr=False)  # core rows of the tasks in `settled`
    earlier: dict[str, list[Tensor]] = field(default_factory=dict, init=False, repr=False)  # held-out rows before `last`
    settled: int = field(default=0, init=False, repr=False)
    collector: _Collector | None = field(default=None, init=False, repr=False)  # of the task that runs now

    @contextmanager
    def collect(
        self, model: nn.Module, begun: Mapping[str, Tensor] | None = None, *, processes: Processes = ALONE
    ) -> Iterator[FeatureStore]:
        """Collect one task's feature rows while the block runs.

        Rows come from forwards in training mode, and padding is skipped by the attention mask. The hooks remove themselves once the
        quota is full. If the block raises, the rows of this task are dropped.

        Args:
            model: A model with LoRA layers, or a wrapper around it. Call the model itself inside the block, not one of its parts.
            begun: Rows of this task from an interrupted block, as `begun()` returned them; they count toward the quota.
            processes: Those that train together; the first one gets the rows of all, each time that `join` is called.

        Yields:
            This store.

        Raises:
            InvalidValue: The rows in `begun` do not fit this model, or a layer input is not (examples, tokens, d_in).
            UnknownName: The model has no LoRA layer, or other layers than in earlier tasks.
            NotFinite: A layer reads NaN or infinite values.

        Example:
            >>> from anchorlora import FeatureStore
            >>> model, ids = tiny().train(), torch.randint(0, 64, (2, 10))
            >>> store = FeatureStore(limit=16)
            >>> with store.collect(model):
            ...     _ = model(input_ids=ids)
            >>> store.count  # tasks
            1
            >>> store.last.core["model.layers.0.self_attn.q_proj"].shape
            torch.Size([16, 32])
        """
        _refuse_misfit(begun or {}, model)
        self._find_device(model)
        collector = self.collector = _Collector(self, model, processes=processes)
        for name, rows in (begun or {}).items():
            kind, _, store = name.partition("/")
            (collector.core if kind == "core" else collector.held)[store] = [rows]
        collector.count()
        try:
            yield self
        finally:
            collector.close()
            self.collector = None
        self._append(collector.collected())

    def join(self) -> None:
        """Take the rows that all processes have offered since the last call, in their order; alone, rows are taken at once."""
        if self.collector is not None:
            self.collector.join()

    def begun(self) -> dict[str, Tensor]:
        """Return the rows collected so far by the block that is running, by kind/store; `collect(begun=..)` takes them back."""
        assert self.collector is not None, "no rows are being collected"
        parts = {"core": self.collector.core, "held_out": self.collector.held}
        return {f"{kind}/{store}": rows for kind, kept in parts.items() for store, rows in _joined(kept).items()}

    def read(self, model: nn.Module, texts: Iterable[tuple[Tensor, Tensor]]) -> int:
        """Collect one task's feature rows from its text, without training.

        Runs forward passes with dropout off until the quota is full.

        Args:
            model: A causal language model with LoRA layers. Its training mode is restored at the end.
            texts: One pair per forward: token ids (1, n), and a boolean mask (1, n) of the tokens to keep.

        Returns:
            The number of texts read.

        Raises:
            UnknownName: The model has no LoRA layer, or other layers than in earlier tasks.
            NotFinite: A layer reads NaN or infinite values.

        Example:
            >>> from anchorlora import FeatureStore
            >>> ids = torch.randint(0, 64, (3, 1, 12))
            >>> store = FeatureStore(limit=20)
            >>> store.read(tiny(), ((text, torch.ones_like(text).bool()) for text in ids))  # 12 + 8 rows are enough
            2
        """
        was_training, count = model.training, 0
        self._find_device(model)
        model.eval()
        collector = _Collector(self, model, training=False)
        try:
            with torch.no_grad():
                for ids, kept in texts:
                    collector.chosen = kept
                    model(input_ids=ids, logits_to_keep=1, use_cache=False)
                    count += 1
                    if collector.closed:
                        break
        finally:
            collector.close()
            model.train(was_training)
        self._append(collector.collected())
        return count

    def decompose(self, *, energy: float, at_least: int, at_most: int, wide: int) -> dict[str, LayerCore]:
        """Return every adapted layer's protected subspace with its statistics (paper, eqs. 3-4).

        k is the smallest number of directions that holds `energy`, within `at_least` and `at_most`, and never more than the rank of
        the rows. Layers that share a store share one result.

        Args:
            energy: Share of the squared singular values to hold, in (0, 1].
            at_least: Smallest number of directions per layer.
            at_most: Largest number of directions per layer; it wins over `energy`.
            wide: Number of directions in the wide basis, at least `at_most`.

        Returns:
            Layer path -> core, wide basis and statistics, float32, on the CPU.

        Raises:
            InvalidValue: No rows were collected, or a layer has fewer rows than `at_least`.

        Example:
            >>> from anchorlora import FeatureStore
            >>> model, store = tiny().train(), FeatureStore(limit=16)
            >>> with store.collect(model):
            ...     _ = model(input_ids=torch.randint(0, 64, (2, 10)))
            >>> part = store.decompose(energy=0.5, at_least=2, at_most=4, wide=8)["model.layers.1.self_attn.v_proj"]
            >>> part.core.k, part.wide.k, part.rows
            (4, 8, 16)
            >>> 0 < part.retained_energy < 1
            True
        """
        if not self.stores:
            raise InvalidValue(
                "no feature rows were collected; train inside `with store.collect(model):`, with the model in train mode"
            )
        found: dict[str, LayerCore] = {}
        self._settle()
        for store in dict.fromkeys(self.stores.values()):
            rows = self.grown.get(store, GrowingRows())
            if rows.rows < at_least:
                raise InvalidValue(
                    f"only {rows.rows} feature rows at {store}, but a core needs at least {at_least}; "
                    "train on more tokens while rows are collected, or lower at_least"
                )
            spectrum = rows.spectrum(at_most=max(wide, at_most))
            star = spectrum.k_star(energy)
            k = min(max(star or at_most, at_least), at_most, spectrum.directions.shape[1])
            core, broad = (spectrum.leading(n).to(device="cpu") for n in (k, min(wide, spectrum.directions.shape[1])))
            found[store] = LayerCore(core, broad, star, spectrum.retained(k), spectrum.rows)
        return {layer: found[store] for layer, store in self.stores.items()}

    def cores(self, *, energy: float = 0.93, at_least: int = 4, at_most: int = 20) -> dict[str, Subspace]:
        """Return the protected subspace of every adapted layer (paper, eqs. 3-4), as `Anchor.of` takes them.

        Args:
            energy: Share of the squared singular values to hold, in (0, 1]. The default is the paper's.
            at_least: Smallest number of directions per layer.
            at_most: Largest number of directions per layer; it wins over `energy`.

        Returns:
            Layer path -> protected subspace (d_in, k), float32, on the CPU.

        Raises:
            InvalidValue: No rows were collected, or a layer has fewer rows than `at_least`.

        Example:
            >>> from anchorlora import FeatureStore
            >>> model, store = tiny().train(), FeatureStore(limit=32)
            >>> with store.collect(model):
            ...     _ = model(input_ids=torch.randint(0, 64, (4, 12)))
            >>> store.cores(at_most=6)["model.layers.0.self_attn.q_proj"].basis.shape
            torch.Size([32, 6])
        """
        parts = self.decompose(energy=energy, at_least=at_least, at_most=at_most, wide=at_most)
        return {layer: part.core for layer, part in parts.items()}

    def held_out_rows(self, *, tasks: int) -> dict[str, Tensor]:
        """Return the held-out rows by adapted layer, of all tasks or of all but the last.

        If there would be more than 2 d_in rows, those of earlier tasks are d_in float64 rows with the same X^T X.

        Args:
            tasks: Number of tasks, counted from the first: `count`, or `count - 1`.

        Returns:
            Layer path -> rows (n, d_in).

        Raises:
            InvalidValue: `tasks` is another number.
        """
        if not self.count - 1 <= tasks <= self.count:
            raise InvalidValue(f"held-out rows are kept for all {self.count} tasks or all but the last, not for the first {tasks}")
        latest = self.last.held_out if tasks == self.count else {}
        kept = {s: [*self.earlier.get(s, ()), *([latest[s]] if s in latest else ())] for s in self.stores.values()}
        joined = _joined(kept)
        return {layer: joined[store] for layer, store in self.stores.items() if store in joined}

    @property
    def core_bytes(self) -> int:
        """Size in bytes of the rows that cores are made from, as saved."""
        self._settle()
        return sum(4 * rows.rows * rows.width for rows in self.grown.values())

    def tensors(self) -> dict[str, Tensor]:
        """Return the last task's rows as named tensors, for saving; `restore_task` takes them back."""
        kept = self.last
        return {f"{kind}/{store}": rows for kind in ("core", "held_out") for store, rows in getattr(kept, kind).items()}

    def restore_task(self, tensors: Mapping[str, Tensor]) -> None:
        """Append one task's saved rows.  Restoring all tasks in order makes this store bitwise what it was.

        Args:
            tensors: kind/store -> rows (n, d_in), as `tensors` returned them.
        """
        task = TaskRows()
        for name, rows in tensors.items():
            kind, _, store = name.partition("/")
            getattr(task, kind)[store] = rows
        self._append(task)

    def _append(self, task: TaskRows) -> None:
        self._settle()
        for store, rows in self.last.held_out.items():
            self.earlier[store] = _reduced([*self.earlier.get(store, ()), rows])
        self.last, self.count = task, self.count + 1

    def _settle(self) -> None:
        """Add the last task's core rows to the earlier ones, once."""
        if self.settled == self.count:
            return
        for store, rows in self.last.core.items():
            if store not in self.grown:
                self.grown[store] = GrowingRows(keep=self.keep, device=computing_device(torch.device(self.device or "cpu")))
            try:
                self.grown[store].add(rows)
            except ValueError as error:
                raise InvalidValue(f"{store}: {error}") from None
        self.settled = self.count

    def _find_device(self, model: nn.Module) -> None:
        if self.device is None:
            self.device = next(model.parameters()).device


class _Collector:
    """Hooks of one task.  They take rows only inside a forward of the whole model in the expected mode: a forward that activation
    checkpointing repeats runs inside backward and does not count again.

    chosen: mask (examples, tokens) of the tokens to take; the attention mask if None.
    """

    chosen: Tensor | None = None
    mask: Tensor | None = None  # of the present forward

    def __init__(self, rows: FeatureStore, model: nn.Module, *, training: bool = True, processes: Processes = ALONE) -> None:
        self.rows, self.inside, self.training, self.processes = rows, False, training, processes
        self.room: dict[str, int] = {}  # core rows that a store may still take, and held-out rows
        self.wanted: dict[str, int] = {}
        self.offered: dict[str, list[_Offer]] = {}  # by this process, for the first one
        self.core: dict[str, list[Tensor]] = {}
        self.held: dict[str, list[Tensor]] = {}
        self.readers: dict[int, tuple[Tensor, str]] = {}  # during the first forward: input tensor -> store
        layers = lora_layers(model)
        if not layers:
            raise UnknownName("the model has no LoRA layer to collect feature rows from")
        if rows.stores and set(rows.stores) != set(layers):
            raise UnknownName("the rows so far were collected from a model with other adapted layers")
        self.hooks = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]
        leaders = set(rows.stores.values()) or set(layers)
        for name, layer in layers.items():
            if name in leaders:
                self.hooks.append(layer.register_forward_pre_hook(self._keep(name)))

    @property
    def closed(self) -> bool:
        return not self.hooks

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.readers, self.mask = [], {}, None

    def collected(self) -> TaskRows:
        return TaskRows(_joined(self.core), _joined(self.held))

    def _enter(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        self.inside = model.training == self.training
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if self.inside and mask is not None and mask.ndim != 2:
            raise InvalidValue(f"feature rows need an attention mask of shape (examples, tokens), not {tuple(mask.shape)}")
        self.mask = mask if self.chosen is None else self.chosen

    def _leave(self, model: nn.Module, args: tuple, output: object) -> None:
        if not self.inside:
            return
        self.inside, self.readers = False, {}
        if self.processes.count == 1:
            self._close_if_full()

    def _close_if_full(self) -> None:
        left = [places.get(s, 1) for s in set(self.rows.stores.values()) for places in (self.room, self.wanted)]
        if self.rows.stores and max(left) <= 0:
            self.close()

    def count(self) -> None:
        """Count what is there, as rows of an interrupted block."""
        for store in {*self.core, *self.held}:
            self.room[store] = self.rows.limit - sum(map(len, self.core.get(store, ())))
            self.wanted[store] = self.rows.held_out - sum(map(len, self.held.get(store, ())))

    def join(self) -> None:
        """Take what the processes have offered, those of the first rank first, as one process would have read them."""
        if self.closed or self.processes.count == 1:
            return
        for offered in self.processes.sent_to_first(self.offered):
            for store, offers in offered.items():
                for offer in offers:
                    self._accept(store, offer)
        self.count()
        self.offered = {}
        self.rows.stores, self.room, self.wanted = self.processes.told(lambda: (self.rows.stores, self.room, self.wanted))
        self._close_if_full()

    def _accept(self, store: str, offer: _Offer) -> None:
        core, held = self.core.setdefault(store, []), self.held.setdefault(store, [])
        room, wanted = self.rows.limit - sum(map(len, core)), self.rows.held_out - sum(map(len, held))
        if room > 0:
            core.append(offer.first[:room])
        elif wanted > 0 and offer.spread:
            held.append(offer.spread[min(wanted, len(offer.spread)) - 1])

    def _keep(self, layer: str):
        def hook(module: nn.Module, args: tuple) -> None:
            if not self.inside:
                return
            inputs: Tensor = args[0]
            if layer not in self.rows.stores:
                known = self.readers.get(id(inputs))
                self.rows.stores[layer] = known[1] if known else layer
                self.readers[id(inputs)] = (inputs, self.rows.stores[layer])  # a reference keeps the id unique
            if self.rows.stores[layer] == layer:
                self._take(layer, inputs.detach())

        return hook

    def _take(self, store: str, inputs: Tensor) -> None:
        if inputs.ndim != 3:
            raise InvalidValue(
                f"feature rows are taken from inputs of shape (examples, tokens, d_in), but {store} reads {tuple(inputs.shape)}"
            )
        core, held = self.core.setdefault(store, []), self.held.setdefault(store, [])
        layout = packed_layout()
        for i, example in enumerate(layout.examples(inputs) if layout else inputs):
            room, wanted = self.room.setdefault(store, self.rows.limit), self.wanted.setdefault(store, self.rows.held_out)
            if room <= 0 and wanted <= 0:
                return
            valid = example if self.mask is None else example[self.mask[i].bool()]
            spread = min(PER_EXAMPLE, wanted, len(valid))
            if self.processes.count > 1:  # those of a lower rank come first, so this may be taken otherwise, or not at all
                rows = [_finite(_spread(valid, n), store) for n in range(1, min(PER_EXAMPLE, len(valid)) + 1)]
                self.offered.setdefault(store, []).append(_Offer(_finite(valid[: max(room, 0)], store), rows))
            elif room > 0:
                core.append(_finite(valid[:room], store))
            elif spread > 0:
                held.append(_finite(_spread(valid, spread), store))
            if room > 0:
                self.room[store] -= min(room, len(valid))
            else:
                self.wanted[store] -= spread


@dataclass(frozen=True, eq=False)
class _Offer:
    """Rows of one example: the first ones, for a core, and 1, 2, .. spread over its tokens, to be held out."""

    first: Tensor
    spread: list[Tensor]


def _spread(rows: Tensor, count: int) -> Tensor:
    places = torch.linspace(0, len(rows) - 1, count).round().long()
    return rows[places.to(rows.device)]


def computing_device(device: torch.device) -> torch.device:
    """Return the device on which rows of a model are decomposed: its own, or the CPU if it has no float64 or is "meta".

    Args:
        device: Device of the model.
    """
    return torch.device("cpu") if device.type == "meta" else float64_device(device)


def _finite(rows: Tensor, store: str) -> Tensor:
    """Rows in their stored form, float32 on the CPU; half-precision rows that were finite stay finite."""
    kept = rows.float().cpu()
    if not bool(torch.isfinite(kept).all()):
        raise NotFinite(f"feature rows at {store} hold NaN or infinite values")
    return kept


def _refuse_misfit(rows: Mapping[str, Tensor], model: nn.Module) -> None:
    layers = lora_layers(model)
    for name, taken in rows.items():
        layer = layers.get(name.partition("/")[2])
        width = None if layer is None else width_at(layer)
        if taken.ndim != 2 or taken.shape[1] != width or taken.dtype != torch.float32:
            raise InvalidValue(
                f"{name}: {taken.dtype} {tuple(taken.shape)} are not feature rows of this model (float32, d_in {width})"
            )


def _joined(parts: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    return {store: torch.cat(rows) for store, rows in parts.items() if rows}


def _reduced(parts: list[Tensor]) -> list[Tensor]:
    """Rows (n, d), or d rows of the same X^T X where n would exceed 2 d: all that drift reads of them is |dW X^T|."""
    if sum(map(len, parts)) <= 2 * parts[-1].shape[1]:
        return parts
    return [torch.linalg.qr(torch.cat([in_float64(part) for part in parts]), mode="r").R]
