"""The verdict on a skill in words: one sentence each on the skill, on what was kept, and on the protection; then the warnings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anchorlora.data import LOSS
from anchorlora.data.metrics import TOKEN_ACCURACY
from anchorlora.data.tokenized import SPLIT
from anchorlora.models.own_text import OWN_TOKENS
from anchorlora.scores import LEAST_PAIRS, metric_in_words
from anchorlora.text import amount
from anchorlora.train.judge import Change, Comparison, Judged, JudgedKept
from anchorlora.train.request import SELF
from anchorlora.train.verdict import Kept, Protection, Verdict


def with_sentences(verdict: Verdict) -> Verdict:
    """Return a verdict with its sentences, the warnings last."""
    measured = verdict.protection.rho is not None  # else the method protects no cores, in part or whole
    warnings = [warning for part in verdict.kept if measured and (warning := _warning(part))]
    return replace(verdict, sentences=[*sentences(verdict), *warnings], warnings=warnings)


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
    if protection.exact and protection.rho is None:
        lines.append("protection: the adapter changes nothing, and so nothing that is protected")
    elif protection.exact:
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
        if divided and together == rows["read"] - 1:  # one group, of which a part is held out all the same
            side = "; all go together, so what is held out is not apart from the rest: add other rows"
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
