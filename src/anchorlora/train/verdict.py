"""The verdict on a skill: what became of it and of what was to be kept, in numbers, and in one sentence each.

`Verdict` is what skill/verdict.json holds. Another number is a field here, set in `verdict_of`, and a place in the page's template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from anchorlora.adapters.files import read_with_whole
from anchorlora.data import LOSS
from anchorlora.data.metrics import TOKEN_ACCURACY
from anchorlora.data.tokenized import SPLIT
from anchorlora.errors import InvalidValue
from anchorlora.models.own_text import OWN_TOKENS
from anchorlora.scores import LEAST_PAIRS, metric_in_words
from anchorlora.store.adapter_config import read_config
from anchorlora.store.json import loads
from anchorlora.store.record import Record
from anchorlora.store.run_folder import SKILL
from anchorlora.text import amount
from anchorlora.train.judge import DEFAULT_MARGIN, Change, Comparison, Judged, JudgedKept, Margin, judge_kept, judge_learned
from anchorlora.train.kept import CAPACITY
from anchorlora.train.request import SELF, SkillRequest

Scores = Mapping[str, Sequence[Mapping[str, Any]]]


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
    title: str = ""
    source: str  # where its text comes from
    energy: Energy | None = None  # None of what an earlier version kept
    own: dict[str, int] | None = None  # of texts of the model's own: how many there are, and how many have which defect
    over_chain: JudgedKept | None = None  # from when a run of the chain first kept it; None where that is this run

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", self.title or self.name)


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
    title: str = ""  # what it is called; files and keys have its name
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", self.title or self.name)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the file."""
        return asdict(self)


def verdict_of(
    request: SkillRequest,
    record: Record,
    *,
    facts: Mapping[str, Any],
    before: Scores,
    after: Scores,
    unprotected: Scores | None,
    adapter: Path,
    margin: Margin = DEFAULT_MARGIN,
    rows: Sequence[Mapping[str, Any]] = (),
    budget: Mapping[str, Any] | None = None,
) -> Verdict:
    """Return the verdict on a skill."""
    kept = [_kept_part(part, before[part["name"]], after[part["name"]], margin) for part in facts["kept"] if part["name"] in before]
    twin = None
    if unprotected is not None:
        names = [part.name for part in kept]
        others = {name: Comparison.of(before[name], unprotected[name]) for name in (request.name, *names)}
        twin = Twin(others.pop(request.name), others)
    titles = {part["name"]: part.get("title") for part in facts["kept"]} | {request.name: request.title}
    verdict = Verdict(
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
        protection=_protection(record, facts, adapter.parent / SKILL / "after" / CAPACITY),
        budget=None if budget is None else dict(budget),
        unprotected=twin,
        adapter=str(adapter),
        rank=int(read_config(adapter)["r"]),
        whole=read_with_whole(adapter)[1].modules,
        serve=serving(adapter, request),
        train_seconds=sum(record.cost.train_seconds),
    )
    measured = verdict.protection.rho is not None  # else the method protects no cores, in part or whole
    warnings = [warning for part in verdict.kept if measured and (warning := _warning(part))]
    return replace(verdict, sentences=[*sentences(verdict), *warnings], warnings=warnings)


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
        capacity=dict(loads(capacity.read_text())) if capacity.is_file() else None,  # methods without cores leave none
    )


def energy_of(part: Mapping[str, Any]) -> Energy | None:
    """Return how much of its energy the protected subspace of something holds; None for what an earlier version kept."""
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


def serving(adapter: Path, request: SkillRequest) -> str:
    """Return the command that serves an adapter, or what to do where no server takes it."""
    from anchorlora.export.beside import tokenizer_in, unknown_ends
    from anchorlora.export.serving import serve_line, stop_note

    try:
        line = serve_line(adapter, request.base_model.model or "", name=request.name)
    except InvalidValue as error:
        return str(error)
    stops = unknown_ends(tokenizer_in(adapter), request.base_model)
    return f"{line}  # {stop_note(stops)}" if stops else line


def sentences(verdict: Verdict) -> list[str]:
    """Return the verdict in words: the skill, what was kept, and the protection."""
    lines = [f"{verdict.title}: {_describe_skill(verdict.skill)}"]
    lines += [f"{kept.title}: {_describe_kept(kept)}" for kept in verdict.kept]
    lines += [f"{kept.title}, over the chain: {_describe_kept(kept.over_chain)}" for kept in verdict.kept if kept.over_chain]
    if twin := verdict.unprotected:
        titles = {kept.name: kept.title for kept in verdict.kept}
        lines.append(_describe_twin(verdict.title, twin.skill))
        lines += [_describe_twin(titles[name], now) for name, now in twin.kept.items()]
    lines += _describe_protection(verdict.protection)
    if verdict.whole:
        lines.append(f"whole weights: {', '.join(verdict.whole)} came with the old adapter, did not train, and are saved again")
    if verdict.budget is not None:
        lines += _describe_budget(verdict, verdict.budget)
    if verdict.cut:
        rest = (
            f"longer than --max-length, and {_are(verdict.cut)} learned without the tokens after the prompt's head that do not fit"
        )
        lines.append(f"{verdict.title}: {amount(verdict.cut, 'example is', 'examples are')} {rest}")
    for kept in verdict.kept:
        own = kept.own
        if own and (own["repeated"] or own["unfinished"] or own["degenerate"]):
            lines.append(
                f"{kept.title}: of {own['texts']:,} texts of the model's own, {amount(own['repeated'], 'is', 'are')} repeated and "
                f"{amount(own['degenerate'], 'is', 'are')} one token again and again; "
                f"{amount(own['unfinished'], 'is a beginning', 'are beginnings')}, since no message is "
                f"longer than {OWN_TOKENS} tokens"
            )
    for rows in verdict.rows:
        lines += _describe_rows(rows)
    return lines


def _describe_protection(protection: Protection) -> list[str]:
    """How much of the change lies on protected directions, how many these are, and the room that is left."""
    lines = []
    if protection.exact:
        share = f"{protection.rho:.1e} of the change touches what is protected"
        lines.append(f"protection: {share}, no more than rounding explains ({protection.tolerance:.0e})")
    elif protection.rho is not None:
        touched, unaligned = 100 * protection.rho, 100 * (protection.chance or 0.0)
        lines.append(
            f"protection: {protection.method} protects nothing exactly: {touched:.0f} % of the change touches what was to be kept "
            f"(of a change that ignores it, {unaligned:.0f} %)"
        )
    if memory := protection.memory:
        held = f"{100 * memory['energy']:.0f} % of what the kept answers depend on"
        rest = "; a penalty slows the rest" if protection.penalty else ""
        lines.append(f"protection: {memory['directions']:.0f} directions at each layer, which hold {held}{rest}")
    if protection.capacity and protection.exact:  # else they are left to a later skill, and this one protects none
        lines.append(_room(protection.capacity))
    return lines


def _warning(kept: Kept) -> str | None:
    """Say of something that is kept how much of it is not protected, if less is than was asked for."""
    energy = kept.energy
    if energy and energy.cut:
        return (
            f"warning: {kept.title} is protected in part: to leave room, {energy.cut} of {amount(energy.layers, 'layer')} gave up "
            f"directions of it; the others hold {100 * energy.mean:.0f} % of what the layers read there "
            f"(least: {100 * energy.least:.0f} %; asked: {100 * energy.asked:.0f} %)"
        )
    if energy and energy.below:
        hold = amount(energy.at_most, "direction holds", "directions hold")
        return (
            f"warning: {kept.title} is protected in part: at {energy.below} of {amount(energy.layers, 'layer')}, {hold} less than "
            f"{100 * energy.asked:.0f} % of what the layer reads there (least: {100 * energy.least:.0f} %); "
            "--set at_most=N --set wide=N protects more and leaves room for fewer skills"
        )
    return None


def _describe_budget(verdict: Verdict, budget: Mapping[str, Any]) -> list[str]:
    """Say what scale the budget has come to, what it holds on rows that did not choose it, and what was given up for it."""
    scale, whole, skill = budget["scale"], budget["tried"][0]["kept"], budget["skill"]
    titles = {kept.name: kept.title for kept in verdict.kept}
    if scale == 0:
        return [f"budget {budget['allowed']:g}: no part of the change keeps within it, so the adapter changes nothing; allow more"]
    lines = []
    for name, part in budget["kept"].items():
        rise = (
            f"loss {part['mean']:+.3f}, at most {part['most']:+.3f} on {amount(part['n'], 'held-out row')} that did not choose it"
        )
        full = f"; unscaled {whole[name]['mean']:+.3f} on those that did" if scale != 1 else ""
        lines.append(f"{titles[name]}: scale {scale:g} for a budget of {budget['allowed']:g}: {rise}{full}")
    if scale != 1:
        full, now = skill["trained"], skill["scaled"]
        tokens = f"{100 * now[TOKEN_ACCURACY]:.1f} instead of {100 * full[TOKEN_ACCURACY]:.1f} % of its tokens right"
        lines.append(f"{verdict.title}: given up for the budget: loss {now[LOSS]:.3f} instead of {full[LOSS]:.3f}, {tokens}")
    return lines


def _describe_rows(rows: Mapping[str, Any]) -> list[str]:
    """Sentences on the rows of one source, each only where there are any."""
    name, kept, lines = rows.get("title") or rows["name"], rows["use"] in ("kept", "measured"), []
    repeated, together, also_learned = rows["repeated"], rows["together"], rows.get("also_learned")
    if rows["use"] == "tested" and repeated:
        repeat = "repeats" if repeated == 1 else "repeat"
        lines.append(f"{repeated:,} of {amount(rows['read'], 'row')} of the test file {repeat} another")
    elif rows["use"] != "tested" and rows["source"] != SELF and together:  # of its own texts the sentence above tells
        divided = rows["held_out"] and rows["use"] != "measured"
        side = f", and {_are(together)} held out or trained on together with it" if divided else ""
        same = f" ({repeated:,} its whole text)" if 0 < repeated < together else ""
        repeat = amount(together, "row repeats", "rows repeat")
        lines.append(f"{repeat} the text, prompt or beginning of another{same}{side}")
    if also_learned:
        which = amount(rows["held_out"], "held-out row") if kept else f"{amount(rows['read'], 'row')} of the test file"
        remedy = "take that out of what is learned, or keep other rows" if kept else "test on other rows"
        have, they = ("has", "it is") if also_learned == 1 else ("have", "they are")
        lines.append(
            f"{also_learned:,} of {which} {have} the text, prompt or beginning of a row that is trained on, so {they} not "
            f"held out; {remedy}"
        )
    if rows["skipped"]:
        unmeasured = f", and {_are(rows['skipped'])} {'not measured' if kept else 'left out'}"
        lines.append(f"{amount(rows['skipped'], 'row has', 'rows have')} no answer{unmeasured}")
    if kept and rows["cut"]:
        what = "protected and measured" if rows["use"] == "kept" else "measured"
        lines.append(f"{amount(rows['cut'], 'row is', 'rows are')} longer than --max-length; {what} is what fits")
    if rows["long"]:
        alone = f"takes --max-length alone, and {_are(rows['long'])} not measured"
        lines.append(f"{amount(rows['long'], 'row has', 'rows have')} an answer that {alone}")
    if rows.get("generated") and rows["held_out"]:
        lines.append(
            f"the longest answer takes {amount(rows['longest'], 'token')}, and {amount(rows['generated'], 'is', 'are')} generated, "
            "so longer ones are scored by their beginning; --set max_new_tokens=N generates more"
        )
    if rows.get("empty") and rows["source"] != SELF:
        consequence = "" if kept else ", and the model is taught to say nothing there; take them out if something is missing"
        lines.append(f"{amount(rows['empty'], 'row has', 'rows have')} an empty answer{consequence}")
    if rows["unknown"]:
        what = f"characters that the tokenizer does not know ({rows['characters']!r}), so the model never sees them"
        lines.append(f"{amount(rows['unknown'], 'row has a prompt', 'rows have prompts')} with {what}")
    for way, number in rows["split"].items():
        what, remedy = SPLIT[way]
        some = f"{number:,} of {amount(rows['read'], 'row')} {_are(number)}"
        lines.append(f"{some} served other tokens than are trained on: {what}; {remedy}")
    if rows.get("more"):
        lines.append(f"only the first {amount(rows['read'], 'row is', 'rows are')} read")
    return [f"{name}: {line}" for line in lines]


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _room(capacity: Mapping[str, Any]) -> str:
    used, width, skills = capacity["used"], capacity["width"], capacity["skills"]
    sentence = f"room: the fullest layer protects {used} of its {width} directions; "
    if skills:
        return sentence + amount(skills, "more skill like these fits", "more skills like these fit")
    return sentence + f"half stay free to learn in, so with a next skill only the strongest {capacity['limit']} stay protected"


def _describe_skill(skill: Judged) -> str:
    return f"{_reasoned(skill)}: {_metric(skill.metric)}, {_loss(skill)} on {amount(skill.n, 'held-out example')}"


def _reasoned(judged: Judged) -> str:
    """The verdict with its reason, if there is one to give."""
    return f"{judged.verdict}{':' if judged.state != 'good' else ','} {judged.reason}" if judged.reason else judged.verdict


def _describe_kept(kept: JudgedKept) -> str:
    flips = kept.flips
    moved = f"; {flips.lost} right only before, {flips.gained} only now" if flips else ""
    return f"{_reasoned(kept)}: {_loss(kept)}, {_metric(kept.metric)} on {amount(kept.n, 'held-out example')}{moved}"


def _describe_twin(name: str, now: Comparison) -> str:
    return f"{name}, trained without protection: {_loss(now)}, {_metric(now.metric)}"


def _metric(metric: Change) -> str:
    return f"{metric_in_words(metric.name)} {metric.before:.1f} -> {metric.after:.1f} %"


def _loss(now: Comparison) -> str:
    loss, (low, high) = now.loss, now.loss.interval
    interval = f"95 % interval {low:+.3f} to {high:+.3f}" if now.n >= LEAST_PAIRS else "too few examples for an interval"
    return f"loss {loss.before:.3f} -> {loss.after:.3f} (change {loss.change:+.3f}, {interval})"
