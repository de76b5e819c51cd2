"""Verdict and advice: the selection rule, applied to what an audit found.

learned anchor (B_0 != 0)      dA V = 0 and dB = 0     Freeze("B"), ProjectDisplacement("A")        sfor
zero-output block (B_0 = 0)    A V = 0, B free         Retract("A"), ProjectDisplacement("A")       o-lora-hard
full weight                    dW V = 0                W <- W_0 + (W - W_0) P after every step
"""

from __future__ import annotations

from anchorlora.audits.layers import Audited, Reading

HELD_BY = {
    "state": "the state A V = 0",
    "displacement": "the displacement dA V = 0 with B as it was",
    "response": "neither condition on the factors, only their product; the next step may break it",
}


def verdict(audited: Audited, storage: str) -> str:
    """What was found, in one or two sentences.  storage: the type that the numbers are stored in."""
    found = audited.overall
    drift = found.right
    if found.status == "unmoved":
        return "Nothing moved."
    rho, bound = _percent(drift.rho), _percent(drift.bound)
    if found.status == "unresolved":
        return (
            f"Cannot be told: rho is {rho}, but rounding to {storage} alone explains up to {bound}, and a change that is aligned "
            f"with nothing would read {_percent(drift.chance)}."
        )
    if found.status == "kept":
        by = "the displacement dW V = 0" if found.kind == "full weight" else HELD_BY[_kept_by(audited)]
        return f"Protected: rho is {rho}, and storage in {storage} explains up to {bound}. Kept by {by}.{_exceptions(audited)}"
    assert drift.rho is not None
    times = f", {drift.rho / drift.chance:.2f} times what an unaligned change would read" if drift.chance else ""
    what = f"{rho} of the change lies on protected directions{times}; storage in {storage} explains {bound}"
    return f"Not protected: {what}.{_why(found)}"


def advice(audited: Audited) -> str:
    """Which constraint keeps it, or would have kept it, and why."""
    found = audited.overall
    if found.status == "unmoved":
        return "Nothing to protect against; check that AFTER is the checkpoint you mean."
    if found.status == "unresolved":
        return "Save both checkpoints in float32 and audit again; a change this small is lost in their storage type."
    if found.status == "kept" and _kept_by(audited) != "response":
        return "Keep the constraints that are in place."
    return ADVICE[found.kind](found)


def _learned(found: Reading) -> str:
    kept = {name for name, condition in found.conditions.items() if condition.kept}
    if "displacement" in kept and "companion" not in kept:
        missing = 'dA V = 0 holds, but B moved and carries A_0 V with it: Freeze("B") is what is missing.'
    elif "companion" in kept and "displacement" not in kept:
        missing = 'B did not move, but A moved inside V: ProjectDisplacement("A") is what is missing.'
    else:
        missing = "both factors moved, so both paths into V are open."
    return (
        'Freeze("B") and ProjectDisplacement("A") (method sfor): the adapter starts from a learned anchor, B_0 is not zero, so '
        f"dW V = s (B_0 dA + dB A) V vanishes when dA V = 0 and dB = 0; {missing}"
    )


def _fresh(found: Reading) -> str:
    moved = found.conditions["displacement"]
    if moved.kept:
        missing = 'A did not move inside V, but it starts there: Retract("A") before the first step is what is missing.'
    elif moved.kept is None:
        missing = "the start of A was not saved, so the files cannot tell whether it began inside V or moved there."
    else:
        missing = "A moved inside V."
    return (
        'Retract("A") before the first step and ProjectDisplacement("A") after every step (method o-lora-hard): the block starts '
        f"with B = 0, so A V = 0 keeps B A V = 0 for any B, and B may train; {missing}"
    )


def _re_ranked(found: Reading) -> str:
    return (
        "The blocks have another rank or scale than before, so no factor has an anchor to be projected from. Keep rank and scale "
        'and use Freeze("B") with ProjectDisplacement("A") (sfor), or leave the old block frozen and train a new one with '
        'Retract("A") and ProjectDisplacement("A") (o-lora-hard).'
    )


def _full(found: Reading) -> str:
    step = "W <- W_0 + P_U (W - W_0) P on both sides" if found.left else "W <- W_0 + (W - W_0) P"
    return (
        f"Project the displacement after every optimizer step, {step}: a projected gradient is not a "
        'projected step once the optimizer has scaled it. Or train a fresh LoRA block with Retract("A") and '
        'ProjectDisplacement("A") (o-lora-hard) instead of the weight.'
    )


def _mixed(found: Reading) -> str:
    return (
        'Layers differ. Where B was zero at the start: Retract("A") and ProjectDisplacement("A") (o-lora-hard). Where it was '
        'learned: Freeze("B") and ProjectDisplacement("A") (sfor). The kind of each layer is listed.'
    )


ADVICE = {
    "learned anchor": _learned,
    "zero-output block": _fresh,
    "other rank": _re_ranked,
    "full weight": _full,
    "mixed": _mixed,
}


def _kept_by(audited: Audited) -> str:
    """The condition of all layers where they agree, else the weakest explanation."""
    held = {reading.kept_by for reading in audited.layers.values() if reading.kept_by}
    if len(held) == 1:
        return str(next(iter(held)))
    return audited.overall.kept_by or "response"


def _exceptions(audited: Audited) -> str:
    over = [layer for layer, reading in audited.layers.items() if reading.status == "leaking"]
    if not over:
        return ""
    among = f"{len(over)} of {len(audited.layers)} layers, first {over[0]}"
    return f" {among}, exceed their own bound, by too little to count in the whole."


def _why(found: Reading) -> str:
    paths = found.paths
    if not paths:
        return ""
    return (
        f" On V, the displacement path s B_0 dA V is {_percent(paths['displacement'])} of the change, "
        f"the companion path s dB A V {_percent(paths['companion'])}."
    )


def _percent(fraction: float | None) -> str:
    """A fraction as a reader takes it: percent, or a power of ten where percent would be all zeros."""
    if fraction is None:
        return "-"
    if fraction == 0:
        return "0"
    return f"{100 * fraction:.3g} %" if fraction >= 1e-4 else f"{fraction:.1e}"
