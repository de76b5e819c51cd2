"""Make cores of a model, with or without an adapter, from a sample of old text or from text that it writes itself.

    text -> tokens -> a forward pass without dropout -> features of each adapted layer, X (n, d_in) -> core V (d_in, k)

Which rows are kept is known before a text is read: only texts that give one are, each up to the last of its rows, several in one
packed row.
The default takes the first n tokens, as the paper does; with long examples they come from one or two of them. `spread` takes one
token from each of n equal shares of all tokens instead, so that every part of the sample counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anchorlora.adapters import lora_layers, read_adapter
from anchorlora.config import BaseModelSettings, Targets, base_model_of
from anchorlora.data import Sample, read_samples, token_ids
from anchorlora.errors import InvalidValue
from anchorlora.features.collector import EXPERT
from anchorlora.features.files import write_cores
from anchorlora.features.layout import pack
from anchorlora.features.store import FeatureStore, LayerCore
from anchorlora.geometry import Subspace
from anchorlora.models.load import ends_of, size_in
from anchorlora.models.own_text import OWN_TOKENS, own_text
from anchorlora.models.packing import packed, unpackable
from anchorlora.models.session import Session
from anchorlora.recipes import protocol
from anchorlora.store.adapter_config import WEIGHTS_FILE
from anchorlora.store.artifact import artifact_in
from anchorlora.store.files import refuse_existing
from anchorlora.store.seal import sha256
from anchorlora.text import amount

GOLDEN = (5**0.5 - 1) / 2  # places in equal shares that follow no period of the text, such as examples of one length
ROW_TOKENS = 2048  # most tokens of a packed row, or one text
TRIED = 32  # tokens of the two texts that a packed row is tried on


@dataclass(frozen=True)
class CoreRule:
    """How much text is read, and how many directions of its features a core holds.

    Args:
        rows: Feature rows per layer input.
        energy: Share of the squared singular values that a core holds, in (0, 1].
        at_least: Smallest number of directions per core.
        at_most: Largest number of directions per core; it wins over `energy`.
        max_tokens: Tokens read of each example, the first ones.
        spread: Take rows from the whole text instead of its beginning.

    Raises:
        InvalidValue: A size is out of range, or two of them do not fit.

    Example:
        >>> CoreRule(at_most=6).energy
        0.93
    """

    rows: int = protocol.ROWS
    energy: float = protocol.ENERGY
    at_least: int = protocol.AT_LEAST
    at_most: int = protocol.AT_MOST
    max_tokens: int = protocol.MAX_TOKENS
    spread: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.energy <= 1:
            raise InvalidValue(f"energy is a fraction of the rows' energy, above 0 and at most 1, not {self.energy}")
        if not 1 <= self.at_least <= self.at_most:
            raise InvalidValue(
                f"a core has at least 1 direction, and at_least {self.at_least} must not be above at_most {self.at_most}"
            )
        if self.rows < self.at_least:
            raise InvalidValue(
                f"{self.rows} rows make no core of at least {self.at_least} directions; raise rows or lower at_least"
            )
        if self.max_tokens < 1:
            raise InvalidValue(f"max_tokens must be at least 1, not {self.max_tokens}")


PAPER = CoreRule()  # the rule of the paper


@dataclass(frozen=True, eq=False)
class MadeCores:
    """Cores, and how they were made."""

    layers: Mapping[str, LayerCore]  # layer path -> core, k*, retained energy and number of feature rows
    stores: Mapping[str, str]  # layer path -> the layer whose feature rows it shares
    origin: Mapping[str, Any]  # what the cores were made from, as the header of their file has it

    @property
    def cores(self) -> dict[str, Subspace]:
        """Layer path -> core (d_in, k), as `Anchor.of` takes them."""
        return {layer: made.core for layer, made in self.layers.items()}

    def write(self, path: Path) -> None:
        """Write the cores to a file that `anchorlora.features.read_cores` reads."""
        write_cores(path, self.cores, stores=self.stores, origin=self.origin)


def cores_from_data(
    model: str | Path | BaseModelSettings,
    adapter: str | Path | None = None,
    data: str | Path | Iterable[Mapping[str, Any]] | None = None,
    *,
    rule: CoreRule = PAPER,
    own: int | None = None,
    seed: int = 0,
    targets: Targets | None = None,
    out: str | Path | None = None,
    limit: int | None = None,
    column: str | None = None,
    device: str = "auto",
) -> MadeCores:
    """Make the cores of a model, or of a trained PEFT LoRA adapter on it, from text of what it can do.

    The adapter is active and no dropout is drawn, so on one machine the result repeats bitwise. The tokenizer in the adapter's
    folder reads the text if there is one, else the model's. Whatever can be checked before the model is loaded is checked first.

    Args:
        model: Base model: a folder, a hub name, or settings that say how it is loaded.
        adapter: A run, a task, or a saved adapter; None for the base model alone.
        data: Text, a file or folder or rows in memory (see `anchorlora.data.read_samples`); None with `own`.
        rule: How much of the text is read, and how many directions a core holds.
        own: Number of texts that the model writes itself, instead of `data`.
        seed: Seed of those texts.
        targets: Modules to make cores for where there is no adapter; None takes the usual ones of the architecture.
        out: File to write the cores to as well; it must not exist. None writes nothing.
        limit: Examples read, the first ones; None reads all.
        column: Column to read, where the known ones are missing or ambiguous.
        device: Device to compute on; "auto" is the accelerator that torch finds, if any.

    Returns:
        The cores by layer path, with how they were made.

    Raises:
        InvalidValue: The text, the adapter and the model do not fit, or the text is too short or too uniform for a core.

    Example:
        >>> from anchorlora.geometry import Factors
        >>> from anchorlora.adapters import write_adapter
        >>> factors = {"model.layers.0.self_attn.q_proj": Factors(torch.randn(4, 192), torch.zeros(192, 4), 2.0)}
        >>> write_adapter(tmp / "adapter", factors, base="embedded:mini")
        >>> text = [{"text": "The bridge crosses the river near the old mill."}]
        >>> made = cores_from_data("embedded:mini", tmp / "adapter", text, rule=CoreRule(at_most=6), device="cpu")
        >>> {layer: core.k for layer, core in made.cores.items()}
        {'model.layers.0.self_attn.q_proj': 6}
    """
    if out is not None:
        refuse_existing(Path(out))
    folder = None
    if adapter is not None:
        folder = artifact_in(Path(adapter)).adapter
        read_adapter(folder, beside={})
    if (data is None) is (own is None):
        raise InvalidValue("cores are made from text or from what the model writes itself: give one of them")
    samples = [] if data is None else read_samples(data, column=column, limit=limit)
    settings = model if isinstance(model, BaseModelSettings) else base_model_of("the model's name", model=str(model), device=device)
    session = Session(settings, adapter=folder)
    base_model, tokenizer = session.loaded, session.tokenizer
    adapted, room = session.adapted(folder, targets=targets), session.room(rule.max_tokens)
    if own is not None:
        rows_of_its_own = own_text(adapted, tokenizer, count=own, seed=seed, max_tokens=min(room, OWN_TOKENS), room=room)
        samples = read_samples(rows_of_its_own)
    made = cores_of_samples(adapted, tokenizer, samples, replace(rule, max_tokens=room), device=base_model.device)
    refuse_alike(made.layers, rule.at_least)
    origin = {
        "model": {"name": base_model.name, "sha256": base_model.sha256, "dtype": base_model.dtype},
        "adapter_sha256": None if folder is None else sha256(folder / WEIGHTS_FILE),
        **made.origin,
        "rule": asdict(rule),
    }
    if own is not None:
        origin["examples"] = {**origin["examples"], "own": own, "seed": seed}
    made = MadeCores(made.layers, made.stores, origin)
    if out is not None:
        made.write(Path(out))
    return made


Watch = Callable[[int, int], None]  # is told how many texts are read, and of how many


def ignore(done: int, total: int) -> None:
    """Take no notice of texts."""


def cores_of_samples(
    adapted: Any, tokenizer: Any, samples: Sequence[Sample], rule: CoreRule, *, device: torch.device, watch: Watch = ignore
) -> MadeCores:
    """Make the cores of a model that is loaded."""
    store, used = _read(adapted, tokenizer, samples, rule, device=device, watch=watch)
    _refuse_few(store, rule.at_least)
    layers = store.decompose(energy=rule.energy, at_least=rule.at_least, at_most=rule.at_most, wide=rule.at_most)
    origin = {
        "examples": {"given": len(samples), "used": used},
        "rule": asdict(rule),
        "layers": {s: _facts(layers[s]) for s in dict.fromkeys(store.stores.values())},
    }
    return MadeCores(layers, store.stores, origin)


def _read(
    adapted: Any, tokenizer: Any, samples: Sequence[Sample], rule: CoreRule, *, device: torch.device, watch: Watch
) -> tuple[FeatureStore, int]:
    """Return the feature rows of all adapted layers, and how many examples they come from."""

    def sequences() -> Iterator[list[int]]:
        """The tokens of every text."""
        of_model = {"ends": ends_of(adapted), "size": size_in(getattr(adapted, "config", None))}
        return token_ids(samples, tokenizer, max_tokens=rule.max_tokens, **of_model)

    store, experts = FeatureStore(rule.rows, spread=False), any(map(EXPERT.search, lora_layers(adapted)))
    if experts and not rule.spread:  # which tokens an expert reads is not known before
        whole = (torch.tensor([ids], device=device) for ids in sequences() if ids)
        return store, store.read(adapted, ((ids, torch.ones_like(ids, dtype=torch.bool)) for ids in whole))
    positions = spread_positions([len(ids) for ids in sequences()], rule.rows) if rule.spread else None
    texts = list(_texts_with_rows(sequences(), positions, rule.rows))
    longest, first = max((len(ids) for ids, _ in texts), default=0), [ids[:TRIED] for ids, _ in texts[:2]]
    together = not experts and len(texts) > 1 and unpackable(adapted, first, longest=longest) is None
    watch(0, len(texts))
    with closing((_rows_together if together else _rows_apart)(adapted, texts, device, watch)) as rows:
        store.read(adapted, rows)
    watch(len(texts), len(texts))
    return store, len(texts)


Text = tuple[list[int], list[int]]  # tokens, and the positions of those whose features are kept
Rows = Generator[tuple[Tensor, Tensor], None, None]  # tokens (1, n), with a mask or the places of those whose features are kept


def _texts_with_rows(sequences: Iterable[list[int]], positions: Mapping[int, list[int]] | None, rows: int) -> Iterator[Text]:
    """Texts that give a row, each up to the last of its rows: none depends on the tokens after it."""
    for i, ids in enumerate(sequences):
        kept = list(range(min(rows, len(ids)))) if positions is None else positions.get(i, [])
        if kept:
            yield ids[: kept[-1] + 1], kept
            rows -= len(kept)
        if not rows:
            return


def _rows_together(adapted: Any, texts: Sequence[Text], device: torch.device, watch: Watch) -> Rows:
    """Packed rows of texts, what they begin with once, with the places of the tokens whose features are kept."""
    start = 0
    while start < len(texts):
        sizes = accumulate(len(ids) for ids, _ in texts[start:])
        end = start + max(1, sum(1 for _ in takewhile(ROW_TOKENS.__ge__, sizes)))
        group, start = texts[start:end], end
        layout, row = pack([ids for ids, _ in group])
        places = [
            at if at < layout.prefix else start_of_own + at - layout.prefix
            for (_, kept), start_of_own in zip(group, layout.starts, strict=True)
            for at in kept
        ]
        # so the last layer's own part is read at these alone, where nothing is adapted in it
        with packed(adapted, layout, layout.ends()):
            yield torch.tensor([row], device=device), torch.tensor(places, device=device)
        watch(end, len(texts))


def _rows_apart(adapted: Any, texts: Sequence[Text], device: torch.device, watch: Watch) -> Rows:
    """Texts one by one, with a mask of the tokens whose features are kept."""
    for number, (ids, kept) in enumerate(texts):
        watch(number, len(texts))
        mask = torch.zeros(1, len(ids), dtype=torch.bool)
        mask[0, kept] = True
        yield torch.tensor([ids], device=device), mask.to(device)


def spread_positions(lengths: Sequence[int], rows: int) -> dict[int, list[int]]:
    """Return which tokens to keep: one from each of `rows` equal shares of all tokens."""
    starts, total = [0, *accumulate(lengths)], sum(lengths)
    shares = min(rows, total)
    positions: dict[int, list[int]] = {}
    for j in range(shares):
        low, high = j * total // shares, (j + 1) * total // shares
        token = low + int((j * GOLDEN % 1) * (high - low))
        example = bisect_right(starts, token) - 1
        positions.setdefault(example, []).append(token - starts[example])
    return positions


def _refuse_few(store: FeatureStore, at_least: int) -> None:
    there = max((len(rows) for rows in store.last.core.values()), default=0)
    if there < at_least:
        raise InvalidValue(
            f"the text has only {amount(there, 'token')}, but a core needs at least {amount(at_least, 'feature row')}; "
            "give more text"
        )


def refuse_alike(layers: Mapping[str, LayerCore], at_least: int) -> None:
    """Refuse text whose feature rows span fewer directions than a core is to have."""
    for layer, made in layers.items():
        if made.core.k < at_least:
            raise InvalidValue(
                f"the {made.rows} feature rows at {layer} span only {amount(made.core.k, 'direction')}, but a core needs at least "
                f"{at_least}; give more varied text, or lower at_least"
            )


def _facts(made: LayerCore) -> dict[str, Any]:
    return {"k": made.core.k, "k_star": made.k_star, "retained_energy": made.retained_energy, "rows": made.rows}
