"""What became of a skill and of what was to be kept, with 95 % intervals over the examples, and in one sentence each.

    worse        the interval of the loss lies above what rounding explains, or that of the answers below zero
    kept         both intervals, and what so few rows can miss, exclude a harm larger than the margin
    cannot tell  neither; the sentence has the largest harm still possible, and how many rows would tell

An event that none of n rows shows may still happen in 1 - 0.025^(1/n) of all, about 3.7/n: an interval of equal rows has no width,
and three rows prove nothing. Answers that are right or wrong have Clopper and Pearson's bound of the share that turned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from anchorlora.data import LOSS
from anchorlora.data.metrics import TOKEN_ACCURACY
from anchorlora.data.rendering import SPLIT
from anchorlora.errors import InvalidValue
from anchorlora.scores import most_share, paired_interval
from anchorlora.store.json import loads
from anchorlora.store.record import Record
from anchorlora.store.run_folder import SKILL
from anchorlora.train.kept import CAPACITY
from anchorlora.train.request import SELF, SkillRequest

Scores = Mapping[str, Sequence[Mapping[str, Any]]]

ROUNDING = 1e-3  # nats; a loss that changes by less has not changed
LEAST = 6  # rows; fewer have no 95 % interval, since all their signs are equal by chance in more than 5 %
FEWEST = 20  # rows without which nothing is called kept
LITTLE = 50.0  # percent of answers right, below which a skill is learned a little
LITTLE_TOKENS = 0.1  # share of the tokens that were wrong, the same where no answers are generated


@dataclass(frozen=True)
class Margin:
    """The largest harm with which something counts as kept."""

    points: float = 5.0
    nats: float = 0.05  # of the loss, per token

    def __post_init__(self) -> None:
        if not (0 < self.points <= 100 and 0 < self.nats < math.inf):
            raise InvalidValue(f"a margin is 0 to 100 points and some nats, both above 0, not {self.points:g} and {self.nats:g}")

    def __str__(self) -> str:
        return f"{self.points:g} points of answers and {self.nats:g} nats of loss"

    def as_dict(self) -> dict[str, float]:
        """Return both as plain data."""
        return asdict(self)


DEFAULT_MARGIN = Margin()


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
) -> dict[str, Any]:
    """Return the verdict on a skill."""
    skill = judged_learned(compared(before[request.name], after[request.name]), margin)
    kept, titles = [], {each["name"]: each.get("title") for each in facts["kept"]} | {request.name: request.title}
    for part in facts["kept"]:
        if part["name"] in before:
            now = judged_kept(compared(before[part["name"]], after[part["name"]]), margin)
            called = {"name": part["name"], "title": part.get("title") or part["name"]}
            kept.append({**called, "source": part["source"], **now, "energy": energy_of(part), "own": part.get("own")})
    drift = record.drift[0] if record.drift else None
    protection = {
        "method": record.method.name,
        "definition": record.method.definition,
        "rho": None if drift is None else drift.rho,
        "tolerance": None if drift is None else drift.bound,
        "chance": None if drift is None else drift.chance,
        "exact": drift is not None and drift.exact,
        "memory": facts.get("memory"),
        "capacity": _capacity(adapter.parent / SKILL / "after" / CAPACITY),
    }
    twin = None
    if unprotected is not None:
        twin = {
            "skill": compared(before[request.name], unprotected[request.name]),
            "kept": {each["name"]: compared(before[each["name"]], unprotected[each["name"]]) for each in kept},
        }
    found = {
        "schema": 2,
        "name": request.name,
        "title": request.title or request.name,
        "model": request.base_model.model,
        "skill": skill,
        "kept": kept,
        "margin": margin.as_dict(),
        "rows": [
            {key: value for key, value in each.items() if key != "unfit"} | {"title": titles.get(each["name"]) or each["name"]}
            for each in rows
        ],
        "together": sum(each["together"] for each in rows if each["use"] == "learned" and each["held_out"]),
        "cut": record.protocol.get("passages_cut", {}).get(request.name, 0),
        "protection": protection,
        "budget": budget,
        "unprotected": twin,
        "adapter": str(adapter),
        "rank": rank_of(adapter),
        "serve": serving(adapter, request),
        "train_seconds": sum(record.cost.train_seconds),
    }
    return found | {"sentences": sentences(found)}


def compared(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return loss and primary metric before and after, over the same examples."""
    name = next(iter(before[0]["metrics"]))
    out: dict[str, Any] = {"n": len(before)}
    for kind, key, unit in (("metric", name, 100.0), ("loss", LOSS, 1.0)):
        was, now = ([unit * each["metrics"][key] for each in scores] for scores in (before, after))
        low, high = paired_interval(was, now)
        out[kind] = {"name": key, "before": mean(was), "after": mean(now), "change": mean(now) - mean(was), "interval": [low, high]}
    pairs = [(a["metrics"][name], b["metrics"][name]) for a, b in zip(before, after, strict=True)]
    answers = all(value in (0.0, 1.0) for pair in pairs for value in pair)
    flips = {"gained": sum(a < b for a, b in pairs), "lost": sum(a > b for a, b in pairs)}
    return out | {"flips": flips if answers else None}


def judged_kept(found: Mapping[str, Any], margin: Margin = DEFAULT_MARGIN) -> dict[str, Any]:
    """Return a comparison of something that was to be kept with its verdict: kept, worse, or that nothing can be told."""
    n, metric, loss = found["n"], found["metric"], found["loss"]
    possible = {"points": _possible(found, worse=True), "nats": loss["interval"][1]}
    out = dict(found) | {"margin": margin.as_dict(), "possible": possible, "rows_needed": None, "reason": ""}
    unsound = not math.isfinite(loss["after"])
    if unsound or (n >= LEAST and (loss["interval"][0] > ROUNDING or metric["interval"][1] < 0)):
        return out | {"verdict": "worse", "state": "bad"}
    if metric["before"] <= margin.points:
        reason = f"only {metric['before']:.1f} % was right before, and no drop by more than {margin.points:g} points could be seen"
        return out | {"verdict": f"cannot tell (n = {n})", "state": "even", "reason": reason}
    if n >= FEWEST and possible["points"] <= margin.points and possible["nats"] <= margin.nats:
        better = n >= LEAST and loss["interval"][1] < -ROUNDING
        return out | {"verdict": f"kept within {margin.points:g} points", "state": "good", "reason": "and better" if better else ""}
    reasons = []
    if possible["points"] > margin.points:
        drop = f"{possible['points']:.{_digits(possible['points'])}f}"
        reasons.append(f"a drop of up to {drop} points is possible, and {margin.points:g} are allowed")
    if possible["nats"] > margin.nats:
        reasons.append(f"the loss may have risen by up to {possible['nats']:.3f}, and {margin.nats:g} is allowed")
    if n < FEWEST and not reasons:
        reasons.append(f"fewer than {FEWEST} held-out rows show no harm reliably")
    needed = _rows_needed(found, possible, margin)
    reasons.append(f"about {needed:,} held-out rows would tell")
    return out | {"verdict": f"cannot tell (n = {n})", "state": "even", "rows_needed": needed, "reason": "; ".join(reasons)}


def judged_learned(found: Mapping[str, Any], margin: Margin = DEFAULT_MARGIN) -> dict[str, Any]:
    """Return a comparison of a new skill with its verdict: learned, learned a little, not learned, or that nothing can be told.

    A skill is learned if its loss fell and its answers are better, both by their intervals; a little, if fewer than half of the
    answers are right then, or the loss did not fall. Without generated answers, tokens count: a little is less than a tenth of
    those that were wrong.
    """
    n, metric, loss = found["n"], found["metric"], found["loss"]
    low, high = loss["interval"]
    enough, out = n >= LEAST, dict(found) | {"reason": "", "rows_needed": None}
    fell, better = enough and high < -ROUNDING, enough and metric["interval"][0] > 0
    if not math.isfinite(loss["after"]) or (enough and not better and (low > ROUNDING or metric["interval"][1] < 0)):
        return out | {"verdict": "not learned", "state": "bad", "reason": "loss or answers are worse"}
    if fell and better:
        tokens = metric["name"] == TOKEN_ACCURACY
        little = metric["change"] < LITTLE_TOKENS * (100 - metric["before"]) if tokens else metric["after"] < LITTLE
        if not little:
            return out | {"verdict": "learned", "state": "good"}
        share = f"{metric['after']:.{_digits(metric['after'])}f} % of {'tokens' if tokens else 'answers'} right"
        return out | {"verdict": "learned a little", "state": "even", "reason": share}
    if better:
        return out | {"verdict": "learned a little", "state": "even", "reason": "answers are better, but no lower loss is shown"}
    gain = min(_possible(found, worse=False), 100 - metric["before"])
    if metric["before"] >= 100 and metric["after"] >= 100 and enough:
        return out | {"verdict": "not learned", "state": "even", "reason": "the answers were right before"}
    if enough and (gain <= margin.points or -low <= ROUNDING):
        reason = "the loss fell, but answers are not better" if fell else "no difference is shown"
        return out | {"verdict": "not learned", "state": "even", "reason": reason}
    width = metric["interval"][1] - metric["change"]
    room = max(abs(metric["change"]), margin.points)
    needed = max(n + 1, FEWEST, math.ceil(n * (width / room) ** 2), 0 if metric["change"] else _fewest(margin.points))
    loss_too = "the loss fell; " if fell else ""
    reason = f"{loss_too}a rise of up to {gain:.{_digits(gain)}f} points is possible; about {needed:,} held-out rows would tell"
    return out | {"verdict": f"cannot tell (n = {n})", "state": "even", "rows_needed": needed, "reason": reason}


def _possible(found: Mapping[str, Any], *, worse: bool) -> float:
    """Largest drop, or rise, of the metric that the rows do not exclude, in points: of the interval, and of what few rows miss."""
    n, (low, high) = found["n"], found["metric"]["interval"]
    bound = -low if worse else high
    if found["flips"]:
        turned, back = (found["flips"][key] for key in (("lost", "gained") if worse else ("gained", "lost")))
        bound = max(bound, 100 * (most_share(turned, n) - back / n))
    elif found["metric"]["name"] != TOKEN_ACCURACY or n < LEAST:
        bound = max(bound, 100 * most_share(0, n))
    return float(min(100.0, max(0.0, bound)))


def _rows_needed(found: Mapping[str, Any], possible: Mapping[str, float], margin: Margin) -> int:
    """Held-out rows that would tell, if further rows are as these: where the interval's half excludes the margin, or no harm."""
    n = found["n"]
    tokens = found["metric"]["name"] == TOKEN_ACCURACY
    needed = max(n + 1, FEWEST if tokens else _fewest(margin.points))
    # where no answer turned, the bound shrinks with n, as `_fewest` has it; an interval with a width shrinks with its root
    points = possible["points"] if found["flips"] and found["flips"]["lost"] else -found["metric"]["interval"][0]
    harms = ((-found["metric"]["change"], points, margin.points), (found["loss"]["change"], possible["nats"], margin.nats))
    for harm, most, allowed in harms:
        if most > allowed and math.isfinite(most):
            room = max(allowed - harm, harm, allowed / 100)  # to the margin, or to none: the nearer end needs more rows
            needed = max(needed, math.ceil(n * ((most - harm) / room) ** 2))
    return needed


def _fewest(points: float) -> int:
    """Rows of which none must turn wrong to exclude a drop of so many points."""
    return max(FEWEST, math.ceil(math.log(0.025) / math.log1p(-min(points, 99.9) / 100) - 1e-9))


def _digits(points: float) -> int:
    return 0 if points >= 1 else 1


def energy_of(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how much of its energy the protected subspace of something holds; None for what an earlier version kept."""
    layers = part.get("layers")
    if not layers:
        return None
    worst = min(layers, key=lambda layer: layers[layer]["retained_energy"])
    asked = part["rule"]["energy"]
    return {
        "asked": asked,
        "mean": mean(layer["retained_energy"] for layer in layers.values()),
        "least": layers[worst]["retained_energy"],
        "layer": worst,
        "below": sum(layer["retained_energy"] < asked - 1e-9 for layer in layers.values()),
        "layers": len(layers),
        "at_most": part["rule"]["at_most"],
        "directions": mean(layer["k"] for layer in layers.values()),
        "cut": part.get("cut", 0),
    }


def _capacity(file: Path) -> dict[str, Any] | None:
    """How many directions are protected; None of methods without cores, and of what an earlier version left."""
    return dict(loads(file.read_text())) if file.is_file() else None


def rank_of(adapter: Path) -> int:
    """Return the rank of an adapter."""
    from anchorlora.store.adapter_config import read_config

    return int(read_config(adapter)["r"])


def serving(adapter: Path, request: SkillRequest) -> str:
    """Return the command that serves an adapter, or what to do where no server takes it."""
    from anchorlora.export.serving import serve_line

    try:
        return serve_line(adapter, request.base_model.model or "", name=request.name)
    except InvalidValue as error:
        return str(error)


def title_of(part: Mapping[str, Any]) -> str:
    """Return what the skill, or something that is kept, is called; files and keys have its name."""
    return str(part.get("title") or part["name"])


def sentences(found: Mapping[str, Any]) -> list[str]:
    """Return the verdict in words: the skill, what was kept, the protection, and warnings."""
    skill, protection = found["skill"], found["protection"]
    titles = {kept["name"]: title_of(kept) for kept in found["kept"]}
    said = [f"{title_of(found)}: {_learned(skill)}"]
    said += [f"{title_of(kept)}: {_kept(kept)}" for kept in found["kept"]]
    if twin := found["unprotected"]:
        said.append(_unprotected(title_of(found), twin["skill"]))
        said += [_unprotected(titles[name], now) for name, now in twin["kept"].items()]
    if protection["exact"]:
        rho, tolerance = protection["rho"], protection["tolerance"]
        said.append(f"protected directions: {rho:.1e} of the change lies on them, no more than rounding explains ({tolerance:.0e})")
    elif protection["rho"] is not None:
        share, unaligned = 100 * protection["rho"], 100 * protection["chance"]
        said.append(
            f"{protection['method']} keeps no directions exactly: {share:.0f} % of the change lies on those of what was to be kept "
            f"({unaligned:.0f} % of a change that ignores them)"
        )
    if budget := found.get("budget"):
        said += _budgeted(budget, titles, title_of(found))
    if memory := protection.get("memory"):
        held = f"{100 * memory['energy']:.0f} % of what the kept answers depend on"
        said.append(f"protected directions: {memory['directions']:.0f} for each layer input, which hold {held}")
    if capacity := protection.get("capacity"):
        said.append(_room(capacity))
    if cut := found.get("cut"):
        rest = "are longer than max_tokens, and are learned without the tokens after the prompt's head that do not fit"
        said.append(f"{title_of(found)}: {cut:,} examples {rest}")
    for kept in found["kept"]:
        own = kept.get("own")
        if own and (own["repeated"] or own["unfinished"] or own["degenerate"]):
            said.append(
                f"{title_of(kept)}: of {own['texts']:,} texts of the model's own, {own['repeated']:,} are repeated, "
                f"{own['unfinished']:,} were not finished, and {own['degenerate']:,} are one token again and again"
            )
    for rows in found.get("rows", ()):
        said += _counted(rows)
    for kept in found["kept"]:
        energy = kept["energy"]
        if energy and energy.get("cut"):
            said.append(
                f"warning: to leave room, {energy['cut']} of {energy['layers']} layer inputs gave up directions of "
                f"{title_of(kept)}; they hold {100 * energy['mean']:.0f} % of its energy "
                f"(least: {100 * energy['least']:.0f} %; asked: "
                f"{100 * energy['asked']:.0f} %), and what lies outside is not protected"
            )
        elif energy and energy["below"]:
            said.append(
                f"warning: {energy['at_most']} directions hold less than the {100 * energy['asked']:.0f} % of energy asked for at "
                f"{energy['below']} of {energy['layers']} layer inputs of {title_of(kept)} (least: {100 * energy['least']:.0f} %); "
                "--set at_most=N --set wide=N raises the limit and leaves room for fewer skills"
            )
    return said


def _budgeted(budget: Mapping[str, Any], titles: Mapping[str, str], title: str) -> list[str]:
    """What the budget has come to: the scale, what it holds on rows that did not choose it, and what was given up for it."""
    scale, whole, skill = budget["scale"], budget["tried"][0]["kept"], budget["skill"]
    if scale == 0:
        return [f"budget {budget['allowed']:g}: no part of the change keeps within it, so the adapter changes nothing; allow more"]
    said = []
    for name, part in budget["kept"].items():
        rise = f"loss {part['mean']:+.3f}, at most {part['most']:+.3f} on {part['n']} held-out rows that did not choose it"
        full = f"; unscaled {whole[name]['mean']:+.3f} on those that did" if scale != 1 else ""
        said.append(f"{titles[name]}: scale {scale:g} for a budget of {budget['allowed']:g}: {rise}{full}")
    if scale != 1:
        full, now = skill["trained"], skill["scaled"]
        tokens = f"{100 * now[TOKEN_ACCURACY]:.1f} instead of {100 * full[TOKEN_ACCURACY]:.1f} % of its tokens right"
        said.append(f"{title}: given up for the budget: loss {now[LOSS]:.3f} instead of {full[LOSS]:.3f}, {tokens}")
    return said


def _counted(rows: Mapping[str, Any]) -> list[str]:
    """What is to be said of the rows of one source, each only where there are any."""
    name, kept, said = title_of(rows), rows["use"] in ("kept", "measured"), []
    if rows["use"] == "tested" and rows["repeated"]:
        said.append(f"{rows['repeated']:,} of {rows['read']:,} rows of the test file repeat another")
    elif rows["use"] != "tested" and rows["source"] != SELF and rows["together"]:  # of its own texts the sentence above tells
        side = ", and are on its side of the holdout" if rows["held_out"] and rows["use"] != "measured" else ""
        same = f" ({rows['repeated']:,} its whole text)" if 0 < rows["repeated"] < rows["together"] else ""
        said.append(f"{rows['together']:,} rows repeat the text, prompt or beginning of another{same}{side}")
    if rows["skipped"]:
        unmeasured = ", and are not measured" if kept else ", and are left out"
        said.append(f"{rows['skipped']:,} rows have no answer{unmeasured}")
    if kept and rows["cut"]:
        what = "their cores and losses are" if rows["use"] == "kept" else "what is measured is"
        said.append(f"{rows['cut']:,} rows are longer than max_tokens, and {what} of what fits")
    if rows["long"]:
        said.append(f"{rows['long']:,} rows have an answer that takes max_tokens alone, and are not measured")
    if rows["unknown"]:
        what = f"characters that the tokenizer does not know ({rows['characters']!r}), so the model never sees them"
        said.append(f"{rows['unknown']:,} rows have prompts with {what}")
    for way, number in rows["split"].items():
        what, remedy = SPLIT[way]
        said.append(f"{number:,} of {rows['read']:,} rows are served other tokens than are trained on: {what}; {remedy}")
    if rows.get("more"):
        said.append(f"only the first {rows['read']:,} rows are read")
    return [f"{name}: {each}" for each in said]


def _room(capacity: Mapping[str, Any]) -> str:
    used, width, skills = capacity["used"], capacity["width"], capacity["skills"]
    said = f"protected directions: {used} of {width} at the fullest layer input; "
    if skills:
        return said + f"room for {skills} more skill{'s' if skills > 1 else ''} like these"
    return said + f"half stay free to learn in, so the next skill cuts what is kept to the {capacity['limit']} that hold most of it"


def _learned(skill: Mapping[str, Any]) -> str:
    return f"{_reasoned(skill)}: {_metric(skill['metric'])}, {_loss(skill['loss'])} on {skill['n']} held-out examples"


def _reasoned(judged: Mapping[str, Any]) -> str:
    """The verdict with its reason, if there is one to give."""
    reason = judged.get("reason")
    return f"{judged['verdict']}{':' if judged['state'] != 'good' else ','} {reason}" if reason else str(judged["verdict"])


def _kept(kept: Mapping[str, Any]) -> str:
    flips = kept["flips"]
    moved = f"; {flips['lost']} answers turned wrong, {flips['gained']} right" if flips else ""
    return f"{_reasoned(kept)}: {_loss(kept['loss'])}, {_metric(kept['metric'])} on {kept['n']} held-out examples{moved}"


def _unprotected(name: str, now: Mapping[str, Any]) -> str:
    return f"{name}, unprotected twin: {_loss(now['loss'])}, {_metric(now['metric'])}"


def _metric(metric: Mapping[str, Any]) -> str:
    return f"{metric['name'].replace('_', ' ')} {metric['before']:.1f} -> {metric['after']:.1f} %"


def _loss(loss: Mapping[str, Any]) -> str:
    low, high = loss["interval"]
    return (
        f"loss {loss['before']:.3f} -> {loss['after']:.3f} (change {loss['change']:+.3f}, 95 % interval {low:+.3f} to {high:+.3f})"
    )
