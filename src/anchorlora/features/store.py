"""Feature rows: the inputs of adapted layers during a task, and the protected subspaces made from them.

Of the input rows of valid tokens, `limit` are kept per layer and task, float32 on the CPU: a sample of all of them, or the first
ones, as in the paper (appendix B.2) and in runs. They come from training forwards, or from separate forwards over a task's text
(`FeatureStore.read`). Layers that read the same tensor, such as q_proj and v_proj, share one store. `held_out` rows of other
examples are kept apart: no core is made from them, so they show what the selected core leaves out. How they are taken stands in
`collector.py`.

Rows of earlier tasks are held in a form that does not keep growing (`GrowingRows`); a run saves the rows of each task unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anchorlora.adapters.kinds import width_at
from anchorlora.devices import evaluating, float64_device, in_float64
from anchorlora.errors import InvalidValue, UnknownName
from anchorlora.features.collector import AGAIN, Collector, TaskRows, join_rows, reading_layers
from anchorlora.features.layout import current
from anchorlora.geometry import KEPT, GrowingRows, LayerCore, Subspace
from anchorlora.processes import ALONE, Processes

NAMED = 8  # layers in one message


@dataclass(eq=False)
class FeatureStore:
    """Feature rows of all tasks so far, and the protected subspaces made from them.

    Each `with store.collect(model):` block is one task with its own quota of rows. After the block, `cores` gives the protected
    subspaces for the next task.

    Args:
        limit: Rows per layer input and task that cores are made from.
        held_out: Further rows per layer input and task, of other examples, kept apart for measuring; none by default.
        spread: Sample the rows uniformly from all tokens of the block. False takes the first ones, as in the paper; with long
            examples, they come from one or two.
        stores: Adapted layer -> store. Filled by the first forward; layers that read the same tensor share a store.
        device: Device of the decompositions; by default that of the model.
        keep: Directions carried forward once there are more rows than can be decomposed exactly (see `GrowingRows`).
        passed_over: Only count the `limit` rows, where cores come from elsewhere; held-out rows follow them. Without `spread` only.

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
    spread: bool = True
    stores: dict[str, str] = field(default_factory=dict)  # adapted layer -> store
    device: torch.device | str | None = None
    keep: int = KEPT
    passed_over: bool = False
    count: int = field(default=0, init=False)
    last: TaskRows = field(default_factory=TaskRows, init=False)
    grown: dict[str, GrowingRows] = field(default_factory=dict, init=False, repr=False)  # core rows of the tasks in `settled`
    earlier: dict[str, list[Tensor]] = field(default_factory=dict, init=False, repr=False)  # held-out rows before `last`
    settled: int = field(default=0, init=False, repr=False)
    collector: Collector | None = field(default=None, init=False, repr=False)  # of the task that runs now

    @contextmanager
    def collect(
        self, model: nn.Module, begun: Mapping[str, Tensor] | None = None, *, processes: Processes = ALONE
    ) -> Iterator[FeatureStore]:
        """Collect one task's feature rows while the block runs.

        Rows come from forwards in training mode, and padding is skipped by the attention mask. An expert reads the tokens that are
        sent to it, among which padding cannot be told: batches must then be without padding. Compiled code runs uncompiled
        meanwhile. Without `spread`, the hooks remove themselves once the quota is full. If the block raises, the rows of this task
        are dropped.

        Args:
            model: A model with LoRA layers, or a wrapper around it. Call the model itself inside the block, not one of its parts.
            begun: Rows of this task from an interrupted block, as `begun()` returned them; they count toward the quota. Without
                `spread` only.
            processes: Those that train together; the first one gets the rows of all, each time that `join` is called. More than
                one without `spread` only.

        Yields:
            This store.

        Raises:
            InvalidValue: The rows in `begun` do not fit this model, a layer input is neither (examples, tokens, d_in) nor
                (tokens, d_in), an expert reads padded batches, the model is an encoder-decoder, or rows are spread over several
                processes or an interrupted block.
            InvalidType: PEFT adapts fused experts, or another layer that is not linear.
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
        if begun and self.spread:
            raise InvalidValue("rows of an interrupted block are the first ones: give FeatureStore(.., spread=False)")
        _refuse_misfit(begun or {}, model, counted="core" if self.passed_over else None)
        self._find_device(model)
        collector = self.collector = self._collector(model, processes=processes)
        for name, rows in (begun or {}).items():
            kind, _, store = name.partition("/")
            (collector.core if kind == "core" else collector.held)[store] = [collector.for_core(rows) if kind == "core" else rows]
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
        assert not self.spread, "rows that are spread cannot be continued"
        parts = {"core": self.collector.core, "held_out": self.collector.held}
        return {f"{kind}/{store}": rows for kind, kept in parts.items() for store, rows in join_rows(kept).items()}

    def read(self, model: nn.Module, texts: Iterable[tuple[Tensor, Tensor]]) -> int:
        """Collect one task's feature rows from its text, without training.

        Runs forward passes with dropout off, without `spread` until the quota is full.

        Args:
            model: A causal language model with LoRA layers. Its training mode is restored at the end.
            texts: One pair per forward: token ids (1, n), and a boolean mask (1, n) of the tokens to keep; of a packed row, the
                places of these tokens (m,) instead, where a token of the common beginning may stand more than once.

        Returns:
            The number of forwards.

        Raises:
            UnknownName: The model has no LoRA layer, or other layers than in earlier tasks.
            NotFinite: A layer reads NaN or infinite values.

        Example:
            >>> from anchorlora import FeatureStore
            >>> ids = torch.randint(0, 64, (3, 1, 12))
            >>> store = FeatureStore(limit=20, spread=False)
            >>> store.read(tiny(), ((text, torch.ones_like(text).bool()) for text in ids))  # 12 + 8 rows are enough
            2
        """
        count = 0
        self._find_device(model)
        with evaluating(model), closing(self._collector(model, training=False)) as collector:
            for ids, kept in texts:
                collector.chosen, layout = kept, current()
                where = {} if layout is None else {"position_ids": layout.positions()[None].to(ids.device)}
                last = torch.tensor([ids.shape[1] - 1], device=ids.device)  # given 1, Gemma 4 runs later layers on it alone
                model(input_ids=ids, logits_to_keep=last, use_cache=False, **where)
                count += 1
                if collector.closed:
                    break
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
            InvalidValue: No rows were collected, or layers have fewer rows than `at_least`; the message names them.

        Example:
            >>> from anchorlora import FeatureStore
            >>> model, store = tiny().train(), FeatureStore(limit=16)
            >>> with store.collect(model):
            ...     _ = model(input_ids=torch.randint(0, 64, (2, 10)))
            >>> part = store.decompose(energy=0.5, at_least=2, at_most=4, wide=8)["model.layers.1.self_attn.v_proj"]
            >>> part.core.k, part.wide.k, part.rows
            (3, 8, 16)
            >>> 0 < part.retained_energy < 1
            True
        """
        self._settle()
        if not any(rows.rows for rows in self.grown.values()):
            raise InvalidValue(
                "no feature rows were collected; call the model itself inside `with store.collect(model):`, in train mode: "
                "generate() calls a part of it, so call the model once more on the ids that it returned"
            )
        self._refuse_few(at_least)
        decomposed: dict[str, LayerCore] = {}
        for store in dict.fromkeys(self.stores.values()):
            try:
                spectrum = self.grown[store].spectrum(at_most=max(wide, at_most))
            except ValueError as error:  # rows of zeros
                raise InvalidValue(f"{store}: {error}") from None
            star = spectrum.k_star(energy)
            k = min(max(star or at_most, at_least), at_most, spectrum.directions.shape[1])
            core, broad = (spectrum.leading(n).to(device="cpu") for n in (k, min(wide, spectrum.directions.shape[1])))
            decomposed[store] = LayerCore(core, broad, star, spectrum.retained(k), spectrum.rows, spectrum.shares[:k].cpu())
        return {layer: decomposed[store] for layer, store in self.stores.items()}

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
        rows = join_rows(kept)
        return {layer: rows[store] for layer, store in self.stores.items() if store in rows}

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
            self.earlier[store] = _reduce([*self.earlier.get(store, ()), rows])
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

    def _refuse_few(self, at_least: int) -> None:
        """Name all stores with fewer rows than a core needs, such as experts that the model has hardly chosen."""
        rows = {store: self.grown[store].rows if store in self.grown else 0 for store in dict.fromkeys(self.stores.values())}
        if few := [f"{n} at {store}" for store, n in rows.items() if n < at_least]:
            more = f", and {len(few) - NAMED} others" if len(few) > NAMED else ""
            raise InvalidValue(
                f"too few feature rows: {', '.join(few[:NAMED])}{more}, but a core needs at least {at_least}; "
                "collect rows from more tokens, lower at_least, or leave these layers out of the targets"
            )

    def _collector(self, model: nn.Module, *, training: bool = True, processes: Processes = ALONE) -> Collector:
        if self.count and not set(reading_layers(model)) <= set(self.stores):
            raise UnknownName("the rows so far were collected from a model with other adapted layers")
        how: dict[str, Any] = {name: getattr(self, name) for name in ("stores", "limit", "held_out", "spread", "passed_over")}
        return Collector(model, **how, training=training, processes=processes)

    def _find_device(self, model: nn.Module) -> None:
        if self.device is None:
            self.device = next(model.parameters()).device


def computing_device(device: torch.device) -> torch.device:
    """Return the device on which rows of a model are decomposed: its own, or the CPU if it has no float64 or is "meta"."""
    return torch.device("cpu") if device.type == "meta" else float64_device(device)


def _refuse_misfit(rows: Mapping[str, Tensor], model: nn.Module, *, counted: str | None) -> None:
    """Raise where rows of an interrupted block are not of this model; those of the kind `counted` may have no columns."""
    layers = reading_layers(model)
    for name, taken in rows.items():
        kind, _, path = name.partition(AGAIN)[0].partition("/")
        width = width_at(layers[path]) if path in layers else None
        fits = taken.ndim == 2 and (taken.shape[1] == width or (kind == counted and taken.shape[1] == 0))
        if not fits or taken.dtype != torch.float32:
            raise InvalidValue(
                f"{name}: {taken.dtype} {tuple(taken.shape)} are not feature rows of this model (float32, d_in {width})"
            )


def _reduce(parts: list[Tensor]) -> list[Tensor]:
    """Rows (n, d), or d rows of the same X^T X where n would exceed 2 d: all that drift reads of them is |dW X^T|."""
    if sum(map(len, parts)) <= 2 * parts[-1].shape[1]:
        return parts
    return [torch.linalg.qr(torch.cat([in_float64(part) for part in parts]), mode="r").R]
