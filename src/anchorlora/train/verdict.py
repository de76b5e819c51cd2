"""The verdict on a skill in numbers: what became of it and of what was to be kept.

`Verdict` is what skill/verdict.json holds. Another number is a field here, set in `verdict_of`, and a place in the page's template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from anchorlora.adapters.files import read_with_whole
from anchorlora.errors import InvalidValue
from anchorlora.store.adapter_config import read_config
from anchorlora.store.json import load
from anchorlora.store.record import Record, read_record
from anchorlora.store.run_folder import RunFolder
from anchorlora.train.folder import BEGIN_AGAIN, budget_in, facts_in, rows_in, scores_after, scores_in
from anchorlora.train.judge import Comparison, Judged, JudgedKept, Margin, judge_kept, judge_learned
from anchorlora.train.kept import CAPACITY
from anchorlora.train.request import SkillRequest

UNPROTECTED = "unprotected"  # in skill/, the run directory of the twin


@dataclass(frozen=True)
class Energy:
    """How much of its energy the protected subspace of something holds, over the layer inputs."""

    asked: float
    mean: float
    least: float
    layer: str  # where it is least
    below: int  # layer inputs with less than was asked for
    layers: int
    at_most: int  # directions
    directions: float  # mean
    cut: int = 0  # layer inputs that gave up directions to leave room


@dataclass(frozen=True, kw_only=True)
class Kept(JudgedKept):
    """Something that was to be kept, as it was judged."""

    name: str
    title: str
    source: str  # where its text comes from
    energy: Energy | None = None  # None where no cores were made of it
    own: dict[str, int] | None = None  # of texts of the model's own: how many there are, and how many have which defect
    over_chain: JudgedKept | None = None  # from when a run of the chain first kept it; None where that is this run


@dataclass(frozen=True, kw_only=True)
class Protection:
    """How the skill was trained, and how much of the change lies on protected directions."""

    method: str
    definition: str
    rho: float | None  # share of the change on them; None where none are protected
    tolerance: float | None  # what rounding explains of it
    chance: float | None  # what a change that ignores them would have
    exact: bool
    memory: dict[str, float] | None = None  # mean directions and energy of cores that come of what answers depend on
    penalty: float | None = None  # strength of the one on all changes that these answers depend on
    capacity: dict[str, Any] | None = None  # how many directions are protected, and the room that is left


@dataclass(frozen=True)
class Twin:
    """The unprotected twin: the skill, and by name what was to be kept."""

    skill: Comparison
    kept: dict[str, Comparison]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on a skill, as skill/verdict.json holds it."""

    schema: int = 2
    name: str
    title: str  # what it is called; files and keys have its name
    model: str | None
    skill: Judged
    kept: list[Kept]
    margin: Margin
    rows: list[dict[str, Any]] = field(default_factory=list)  # of each source of text, as skill/rows.json has them
    together: int = 0  # rows of the skill that go together with another, to one side of the holdout
    cut: int = 0  # examples that are learned without the tokens that do not fit
    protection: Protection
    budget: dict[str, Any] | None = None  # as skill/budget.json has it; None without --budget
    unprotected: Twin | None = None
    adapter: str
    rank: int
    whole: list[str] = field(default_factory=list)  # what comes with the adapter as it was before, and did not train
    serve: str  # the command that serves the adapter, or what to do where no server takes it
    train_seconds: float
    sentences: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # those of the sentences that say what is not protected

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the file."""
        return asdict(self)


def verdict_of(request: SkillRequest, out: Path, margin: Margin) -> Verdict:
    """Return the verdict on a skill that was taught, from the files of its directory, without its sentences."""
    run = RunFolder(out)
    folder, adapter = run.skill, run.adapter
    before, after = scores_in(folder, "before"), scores_after(out, request.name)
    unprotected = scores_after(folder / UNPROTECTED, request.name) if request.compare else None
    for later in (after, unprotected or {}):  # an interval over the same examples needs the same examples
        for name in before.keys() & later.keys():
            if [row["prompt_sha256"] for row in before[name]] != [row["prompt_sha256"] for row in later[name]]:
                raise InvalidValue(f"{out}: {name} was tested on other examples before than after; {BEGIN_AGAIN}")
    record, facts, rows = read_record(run.record_file), facts_in(folder), rows_in(folder)
    kept = [_kept_part(part, before[part["name"]], after[part["name"]], margin) for part in facts["kept"] if part["name"] in before]
    twin = None
    if unprotected is not None:
        names = [part.name for part in kept]
        others = {name: Comparison.of(before[name], unprotected[name]) for name in (request.name, *names)}
        twin = Twin(others.pop(request.name), others)
    titles = {part["name"]: part.get("title") for part in facts["kept"]} | {request.name: request.title}
    return Verdict(
        name=request.name,
        title=request.title or request.name,
        model=request.base_model.model,
        skill=judge_learned(Comparison.of(before[request.name], after[request.name]), margin),
        kept=kept,
        margin=margin,
        rows=[
            {key: value for key, value in counts.items() if key != "unfit"}
            | {"title": titles.get(counts["name"]) or counts["name"]}
            for counts in rows
        ],
        together=sum(counts["together"] for counts in rows if counts["use"] == "learned" and counts["held_out"]),
        cut=record.protocol.get("passages_cut", {}).get(request.name, 0),
        protection=_protection(record, facts, folder / "after" / CAPACITY),
        budget=budget_in(folder),
        unprotected=twin,
        adapter=str(adapter),
        rank=int(read_config(adapter)["r"]),
        whole=read_with_whole(adapter)[1].modules,
        serve=serving(adapter, request, record.base_model.dtype),
        train_seconds=sum(record.cost.train_seconds),
    )


def _kept_part(
    part: Mapping[str, Any], before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], margin: Margin
) -> Kept:
    source = {"name": part["name"], "title": part.get("title") or part["name"], "source": part["source"]}
    pairs = [({**then, "metrics": then["first"]}, now) for then, now in zip(before, after, strict=True) if "first" in then]
    chain = judge_kept(Comparison.of(*zip(*pairs, strict=True)), margin) if pairs else None
    judged = judge_kept(Comparison.of(before, after), margin)
    return Kept(**vars(judged), **source, energy=energy_of(part), own=part.get("own"), over_chain=chain)


def _protection(record: Record, facts: Mapping[str, Any], capacity: Path) -> Protection:
    drift = record.drift[0] if record.drift else None
    return Protection(
        method=record.method.name,
        definition=record.method.definition,
        rho=None if drift is None else drift.rho,
        tolerance=None if drift is None else drift.bound,
        chance=None if drift is None else drift.chance,
        exact=drift is not None and drift.exact,
        memory=facts.get("memory"),
        penalty=facts.get("penalty"),
        capacity=dict(load(capacity)) if capacity.is_file() else None,  # methods without cores leave none
    )


def energy_of(part: Mapping[str, Any]) -> Energy | None:
    """Return how much of its energy the protected subspace of something holds; None where no cores were made of it."""
    layers = part.get("layers")
    if not layers:
        return None
    worst = min(layers, key=lambda layer: layers[layer]["retained_energy"])
    asked = part["rule"]["energy"]
    return Energy(
        asked=asked,
        mean=mean(layer["retained_energy"] for layer in layers.values()),
        least=layers[worst]["retained_energy"],
        layer=worst,
        below=sum(layer["retained_energy"] < asked - 1e-9 for layer in layers.values()),
        layers=len(layers),
        at_most=part["rule"]["at_most"],
        directions=mean(layer["k"] for layer in layers.values()),
        cut=part.get("cut", 0),
    )


def serving(adapter: Path, request: SkillRequest, dtype: str) -> str:
    """Return the command that serves an adapter, or what to do where no server takes it."""
    from anchorlora.export.serving import serve_line, stop_note
    from anchorlora.export.source import tokenizer_in, unknown_ends

    try:
        line = serve_line(adapter, request.base_model.model or "", name=request.name)
    except InvalidValue as error:
        return str(error)
    stops = unknown_ends(tokenizer_in(adapter), request.base_model)
    notes = [stop_note(stops)] if stops else []
    if dtype.startswith("float32"):
        notes.insert(0, "vLLM computes in half precision by default, and the verdict is of float32: some answers may differ")
    return f"{line}  # {'; '.join(notes)}" if notes else line
