"""What became of a skill and of what was to be kept, with 95 % intervals over the examples, and in one sentence each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from anchorlora.errors import InvalidValue
from anchorlora.runs.directory import SKILL
from anchorlora.schemas.json import loads
from anchorlora.schemas.record import Record
from anchorlora.scores import paired_interval
from anchorlora.skills.kept import CAPACITY
from anchorlora.skills.request import SkillRequest
from anchorlora.tasks import LOSS

Scores = Mapping[str, Sequence[Mapping[str, Any]]]


def verdict_of(
    request: SkillRequest,
    record: Record,
    *,
    facts: Mapping[str, Any],
    before: Scores,
    after: Scores,
    unprotected: Scores | None,
    adapter: Path,
) -> dict[str, Any]:
    """Return the verdict on a skill.

    Args:
        request: What was asked for.
        record: The record of the run.
        facts: How the cores came about.
        before: Scores of the skill's test and of all probes with the model as it was.
        after: The same with the new adapter.
        unprotected: The same with the twin; None where there is none.
        adapter: Folder of the new adapter.

    Returns:
        skill, kept, protection, unprotected, commands and sentences, as plain data.
    """
    skill = _judged(compared(before[request.name], after[request.name]), new=True)
    kept = []
    for part in facts["kept"]:
        if part["name"] in before:
            now = _judged(compared(before[part["name"]], after[part["name"]]), new=False)
            kept.append({"name": part["name"], "source": part["source"], **now, "energy": energy_of(part)})
    drift = record.drift[0] if record.drift else None
    protection = {
        "method": record.method,
        "definition": record.definition,
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
        "schema": 1,
        "name": request.name,
        "model": request.base_model.model,
        "skill": skill,
        "kept": kept,
        "protection": protection,
        "unprotected": twin,
        "adapter": str(adapter),
        "rank": rank_of(adapter),
        "serve": serving(adapter, request),
        "train_seconds": sum(record.cost.train_seconds),
    }
    return found | {"sentences": sentences(found)}


def compared(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return loss and primary metric before and after, over the same examples.

    Args:
        before: Scores of each example.
        after: Scores of the same examples.

    Returns:
        n, loss and metric with before, after, change and interval (the metric in percent), and answers that flipped.

    Example:
        >>> was, now = {"metrics": {"exact_match": 0.0, "loss": 2.0}}, {"metrics": {"exact_match": 1.0, "loss": 1.0}}
        >>> found = compared([was, was], [now, now])
        >>> found["metric"]["after"], found["loss"]["change"], found["flips"]
        (100.0, -1.0, {'gained': 2, 'lost': 0})
    """
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


def _judged(found: dict[str, Any], *, new: bool) -> dict[str, Any]:
    """The same with its verdict, and whether it is good, bad or neither."""
    (low, high), metric = found["loss"]["interval"], found["metric"]
    fell, rose, better = high < 0, low > 0, metric["interval"][0] > 0
    if new:
        said = "learned" if fell and better else "not learned" if rose else "no difference is measured"
        said = "the loss fell, but answers are not better" if fell and not better else said
        return found | {"verdict": said, "state": "good" if fell and better else "bad" if rose else "even"}
    said = "changed for the worse" if rose else "kept, and better" if fell else "kept: no loss is measured"
    return found | {"verdict": said, "state": "bad" if rose else "good"}


def energy_of(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how much of its energy the protected subspace of something holds; None for what an earlier version kept.

    Args:
        part: Its facts.
    """
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
    """Return the rank of an adapter.

    Args:
        adapter: Its folder.
    """
    from anchorlora.adapters import read_config

    return int(read_config(adapter)["r"])


def serving(adapter: Path, request: SkillRequest) -> str:
    """Return the command that serves an adapter, or what to do where no server takes it.

    Args:
        adapter: Its folder.
        request: What was asked for.
    """
    from anchorlora.export.serving import serve_line

    try:
        return serve_line(adapter, request.base_model.model or "", name=request.name)
    except InvalidValue as error:
        return str(error)


def sentences(found: Mapping[str, Any]) -> list[str]:
    """Return the verdict in words: the skill, what was kept, the protection, and warnings.

    Args:
        found: The verdict as data.
    """
    skill, protection = found["skill"], found["protection"]
    said = [f"{found['name']}: {_learned(skill)}"]
    said += [f"{kept['name']}: {_kept(kept)}" for kept in found["kept"]]
    if twin := found["unprotected"]:
        said.append(_unprotected(found["name"], twin["skill"]))
        said += [_unprotected(name, now) for name, now in twin["kept"].items()]
    if protection["exact"]:
        rho, tolerance = protection["rho"], protection["tolerance"]
        said.append(f"protected directions: {rho:.1e} of the change lies on them, no more than rounding explains ({tolerance:.0e})")
    elif protection["rho"] is not None:
        share, unaligned = 100 * protection["rho"], 100 * protection["chance"]
        said.append(
            f"{protection['method']} keeps no directions exactly: {share:.0f} % of the change lies on those of what was to be kept "
            f"({unaligned:.0f} % of a change that ignores them)"
        )
    if memory := protection.get("memory"):
        held = f"{100 * memory['energy']:.0f} % of what the kept answers depend on"
        said.append(f"protected directions: {memory['directions']:.0f} for each layer input, which hold {held}")
    if capacity := protection.get("capacity"):
        said.append(_room(capacity))
    for kept in found["kept"]:
        energy = kept["energy"]
        if energy and energy.get("cut"):
            said.append(
                f"warning: to leave room, {energy['cut']} of {energy['layers']} layer inputs gave up directions of {kept['name']}; "
                f"they hold {100 * energy['mean']:.0f} % of its energy (least: {100 * energy['least']:.0f} %; asked: "
                f"{100 * energy['asked']:.0f} %), and what lies outside is not protected"
            )
        elif energy and energy["below"]:
            said.append(
                f"warning: {energy['at_most']} directions hold less than the {100 * energy['asked']:.0f} % of energy asked for at "
                f"{energy['below']} of {energy['layers']} layer inputs of {kept['name']} (least: {100 * energy['least']:.0f} %); "
                "--set at_most=N --set wide=N raises the limit and leaves room for fewer skills"
            )
    return said


def _room(capacity: Mapping[str, Any]) -> str:
    used, width, skills = capacity["used"], capacity["width"], capacity["skills"]
    said = f"protected directions: {used} of {width} at the fullest layer input; "
    if skills:
        return said + f"room for {skills} more skill{'s' if skills > 1 else ''} like these"
    return said + f"half stay free to learn in, so the next skill cuts what is kept to the {capacity['limit']} that hold most of it"


def _learned(skill: Mapping[str, Any]) -> str:
    return f"{skill['verdict']}: {_metric(skill['metric'])}, {_loss(skill['loss'])} on {skill['n']} held-out examples"


def _kept(kept: Mapping[str, Any]) -> str:
    flips = kept["flips"]
    moved = f"; {flips['lost']} answers turned wrong, {flips['gained']} right" if flips else ""
    return f"{kept['verdict']}: {_loss(kept['loss'])}, {_metric(kept['metric'])}{moved}"


def _unprotected(name: str, now: Mapping[str, Any]) -> str:
    return f"{name}, unprotected twin: {_loss(now['loss'])}, {_metric(now['metric'])}"


def _metric(metric: Mapping[str, Any]) -> str:
    return f"{metric['name'].replace('_', ' ')} {metric['before']:.1f} -> {metric['after']:.1f} %"


def _loss(loss: Mapping[str, Any]) -> str:
    low, high = loss["interval"]
    return (
        f"loss {loss['before']:.3f} -> {loss['after']:.3f} (change {loss['change']:+.3f}, 95 % interval {low:+.3f} to {high:+.3f})"
    )
