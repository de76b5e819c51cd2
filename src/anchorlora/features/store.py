"""Feature rows: what an adapted layer read while a task was learned, and the cores made of them.

The first `limit` valid-token input rows of each layer and task are kept in encounter order, from training forwards, detached
to CPU float32 (paper, appendix B.2); or from forwards over a task's text that are made for this (`FeatureStore.read`). Layers
that read the same tensor, such as q_proj and v_proj, share one store. After them, `held_out` rows of later, different examples
are kept apart: no core is made of them, so they tell what the selected core leaves out.

Rows of earlier tasks are held in a form that does not grow for ever (`GrowingRows`); a run saves the rows of each task as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from anchorlora.adapters import lora_layers
from anchorlora.devices import float64_device, in_float64
from anchorlora.errors import InvalidValue, NotFinite, UnknownName
from anchorlora.geometry import KEPT, GrowingRows, Subspace

PER_EXAMPLE = 4  # held-out rows of one example, spread over its tokens: its first tokens are the prompt that all examples share


@dataclass(frozen=True, eq=False)
class LayerCore:
    """What one layer protects: `core` (d_in, k), `wide` (d_in, up to 64), and how they came about."""

    core: Subspace
    wide: Subspace
    k_star: int | None  # directions that the energy alone would ask for
    retained_energy: float  # fraction of the rows' energy inside the core
    rows: int


@dataclass(eq=False)
class TaskRows:
    """One task's rows by store: (n, d_in) each, float32 on CPU."""

    core: dict[str, Tensor] = field(default_factory=dict)
    held_out: dict[str, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class FeatureStore:
    """Rows of all tasks so far.  Each `with rows.collect(model):` is one task with a quota of its own.

    limit, held_out: rows of a layer input and task, for cores and apart from them. device: where decompositions run; by default
    where the model is that is listened to. keep: directions that go on once more rows have come than can be decomposed exactly.
    """

    limit: int = 128
    held_out: int = 0
    stores: dict[str, str] = field(default_factory=dict)  # adapted layer -> store
    device: torch.device | str | None = None
    keep: int = KEPT
    count: int = field(default=0, init=False)  # tasks
    last: TaskRows = field(default_factory=TaskRows, init=False)  # of the last task
    grown: dict[str, GrowingRows] = field(default_factory=dict, init=False, repr=False)  # core rows of the tasks in `settled`
    earlier: dict[str, list[Tensor]] = field(default_factory=dict, init=False, repr=False)  # held-out rows before `last`
    settled: int = field(default=0, init=False, repr=False)
    collector: _Collector | None = field(default=None, init=False, repr=False)  # of the task that is listened to

    @contextmanager
    def collect(self, model: nn.Module, begun: Mapping[str, Tensor] | None = None) -> Iterator[FeatureStore]:
        """Collect during the block; costs nothing once the quota is full.  On an exception the task's rows are dropped.

        begun: rows of this task taken before, as `begun()` gave them, where its training is taken up again. Raises ValueError
        for rows that this model cannot have read.
        """
        _refuse_misfit(begun or {}, model)
        self._find_device(model)
        collector = self.collector = _Collector(self, model)
        for name, rows in (begun or {}).items():
            kind, _, store = name.partition("/")
            (collector.core if kind == "core" else collector.held)[store] = [rows]
        try:
            yield self
        finally:
            collector.close()
            self.collector = None
        self._append(collector.collected())

    def begun(self) -> dict[str, Tensor]:
        """The rows that the block which is listening has taken so far, by kind/store."""
        assert self.collector is not None, "no task is being listened to"
        parts = {"core": self.collector.core, "held_out": self.collector.held}
        return {f"{kind}/{store}": rows for kind, kept in parts.items() for store, rows in _joined(kept).items()}

    def read(self, model: nn.Module, texts: Iterable[tuple[Tensor, Tensor]]) -> int:
        """One task's rows from its text, without training: forwards of our own with dropout off, until the quota is full.

        texts: token ids (1, n) and which of them to keep, booleans (1, n), one pair a forward. The model, a causal LM, is left
        in the mode that it was in. Returns how many texts it read.
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
        """Cores from the rows of all tasks so far, by adapted layer; layers of one store share one result.

        k is the smallest number of directions that holds `energy`, but at least `at_least` and at most `at_most` (and
        never more than the rows' rank). Raises ValueError with the layer's name for fewer rows than `at_least`.
        """
        if not self.stores:
            raise InvalidValue(
                "no feature row was collected; train inside `with rows.collect(model):`, with the model in train mode"
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
        """The protected directions of every adapted layer, as `Anchor.of` takes them.  The paper's rule by default."""
        parts = self.decompose(energy=energy, at_least=at_least, at_most=at_most, wide=at_most)
        return {layer: part.core for layer, part in parts.items()}

    def held_out_rows(self, *, tasks: int) -> dict[str, Tensor]:
        """Held-out rows (n, d_in) of the first `tasks` tasks, by adapted layer: of all of them, or of all but the last.

        Where there would be more than 2 d_in rows, those of earlier tasks are d_in float64 rows with the same X^T X.
        """
        if not self.count - 1 <= tasks <= self.count:
            raise InvalidValue(f"held-out rows of all {self.count} tasks or of all but the last are kept, not of the first {tasks}")
        latest = self.last.held_out if tasks == self.count else {}
        kept = {s: [*self.earlier.get(s, ()), *([latest[s]] if s in latest else ())] for s in self.stores.values()}
        joined = _joined(kept)
        return {layer: joined[store] for layer, store in self.stores.items() if store in joined}

    @property
    def core_bytes(self) -> int:
        """Bytes of the rows that cores are made from, as they are saved."""
        self._settle()
        return sum(4 * rows.rows * rows.width for rows in self.grown.values())

    def tensors(self) -> dict[str, Tensor]:
        """The last task's rows as named tensors, for saving; `restore_task` takes them back."""
        kept = self.last
        return {f"{kind}/{store}": rows for kind in ("core", "held_out") for store, rows in getattr(kept, kind).items()}

    def restore_task(self, tensors: Mapping[str, Tensor]) -> None:
        """Append a task's rows as `tensors` gave them; all tasks in their order make this store what it was, bitwise."""
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
        """Take the last task's core rows in, once."""
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
    """Hooks of one task.  Rows are taken only inside a forward of the whole model, in training mode or in evaluation mode: a
    forward that is recomputed for activation checkpointing runs inside backward and is not counted again.

    chosen: the tokens to take, booleans (examples, tokens); without it, those of the attention mask.
    """

    chosen: Tensor | None = None
    mask: Tensor | None = None  # of the forward that is going on

    def __init__(self, rows: FeatureStore, model: nn.Module, *, training: bool = True) -> None:
        self.rows, self.inside, self.training = rows, False, training
        self.core: dict[str, list[Tensor]] = {}
        self.held: dict[str, list[Tensor]] = {}
        self.readers: dict[int, tuple[Tensor, str]] = {}  # during the first forward: input tensor -> store
        layers = lora_layers(model)
        if not layers:
            raise UnknownName("the model has no LoRA layer to collect feature rows from")
        if rows.stores and set(rows.stores) != set(layers):
            raise UnknownName("these rows were collected from a model with other adapted layers")
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
        if self._full():
            self.close()

    def _full(self) -> bool:
        stores = set(self.rows.stores.values())
        rows = self.rows
        return all(_count(self.core, s) >= rows.limit and _count(self.held, s) >= rows.held_out for s in stores)

    def _keep(self, layer: str):
        def hook(module: nn.Module, args: tuple) -> None:
            if not self.inside:
                return
            inputs: Tensor = args[0]
            if layer not in self.rows.stores:
                known = self.readers.get(id(inputs))
                self.rows.stores[layer] = known[1] if known else layer
                self.readers[id(inputs)] = (inputs, self.rows.stores[layer])  # held, so that no other tensor takes this id
            if self.rows.stores[layer] == layer:
                self._take(layer, inputs.detach())

        return hook

    def _take(self, store: str, inputs: Tensor) -> None:
        if inputs.ndim != 3:
            raise InvalidValue(
                f"feature rows are taken from inputs of shape (examples, tokens, d_in), but {store} reads {tuple(inputs.shape)}"
            )
        core, held = self.core.setdefault(store, []), self.held.setdefault(store, [])
        for i, example in enumerate(inputs):
            room = self.rows.limit - sum(map(len, core))
            wanted = self.rows.held_out - sum(map(len, held))
            if room <= 0 and wanted <= 0:
                return
            valid = example if self.mask is None else example[self.mask[i].bool()]
            if room > 0:
                core.append(_finite(valid[:room], store))
            elif len(valid):
                spread = torch.linspace(0, len(valid) - 1, min(PER_EXAMPLE, wanted, len(valid))).round().long()
                held.append(_finite(valid[spread.to(valid.device)], store))


def computing_device(device: torch.device) -> torch.device:
    """Where rows of a model on this device are decomposed: there, unless it has no float64 or holds no numbers."""
    return torch.device("cpu") if device.type == "meta" else float64_device(device)


def _finite(rows: Tensor, store: str) -> Tensor:
    """Rows as they are kept, float32 on the CPU: half-precision rows are finite there if they were."""
    kept = rows.float().cpu()
    if not bool(torch.isfinite(kept).all()):
        raise NotFinite(f"feature rows at {store} hold NaN or infinite values")
    return kept


def _refuse_misfit(rows: Mapping[str, Tensor], model: nn.Module) -> None:
    layers = lora_layers(model)
    for name, taken in rows.items():
        width = getattr(layers.get(name.partition("/")[2]), "in_features", None)
        if taken.ndim != 2 or taken.shape[1] != width or taken.dtype != torch.float32:
            raise InvalidValue(
                f"{name}: {taken.dtype} {tuple(taken.shape)} are no rows that this model's layers read (d_in {width})"
            )


def _joined(parts: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    return {store: torch.cat(rows) for store, rows in parts.items() if rows}


def _reduced(parts: list[Tensor]) -> list[Tensor]:
    """Rows (n, d), or d rows of the same X^T X where n would exceed 2 d: all that drift reads of them is |dW X^T|."""
    if sum(map(len, parts)) <= 2 * parts[-1].shape[1]:
        return parts
    return [torch.linalg.qr(torch.cat([in_float64(part) for part in parts]), mode="r").R]


def _count(parts: dict[str, list[Tensor]], store: str) -> int:
    return sum(map(len, parts.get(store, [])))
