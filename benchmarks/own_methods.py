"""Variants and controls of our own methods, for docs/own-methods.md: what was chosen from, and what each part is worth.

F=benchmarks/own_methods.py
anchorlora grid mini --methods fold-16,fold-8,sensitive-core,brake,rank-split,inc-lora-hard,oplora --out OUT/grid
anchorlora grid mini --methods $F:old16,$F:both16k8,.. --orders order1 --set tested_on=holdout --out OUT/holdout
anchorlora run mini --method fold-16 --order news,entities,questions,reviews --seed 7 --out OUT/unseen/fold-16/..
python tools/collect.py OUT/grid results/beyond/grid                  # and so on, then: make docs
"""

from __future__ import annotations

from dataclasses import dataclass

from anchorlora import (
    AnswerSensitivity,
    FoldedPerTask,
    Freeze,
    GradientStart,
    KroneckerBrake,
    Method,
    PerTask,
    ProjectDisplacement,
    Retract,
    RoutingOverlap,
    SensitiveCore,
    Shared,
)

EXACT = (Retract("A"), ProjectDisplacement("A"))


@dataclass(frozen=True)
class OnlyNext(FoldedPerTask):
    """A fold that keeps the next core alone: the adapter it saves breaks its promise to the one saved before."""

    def _kept(self, layer, boundary):
        return boundary.cores.get(layer)


@dataclass(frozen=True)
class KeepingNothing(FoldedPerTask):
    """A fold that keeps no core: nearest in the metric alone."""

    def _kept(self, layer, boundary):
        return None


def parts(k: int, *, start: bool = True, mu: float = 100.0) -> tuple:
    """The constraints of a fold."""
    begun = (GradientStart(),) if start else ()
    return AnswerSensitivity(), SensitiveCore(1.0, k, k), *begun, *EXACT, KroneckerBrake(mu)


# chosen from, on the holdout
old16, both16k8, both16k4 = (
    Method("old16", OnlyNext(16), parts(8)),
    Method("both16k8", FoldedPerTask(16), parts(8)),
    Method("both16k4", FoldedPerTask(16), parts(4)),
)
old8, both8k4, both8k2 = (
    Method("old8", OnlyNext(8), parts(4)),
    Method("both8k4", FoldedPerTask(8), parts(4)),
    Method("both8k2", FoldedPerTask(8), parts(2)),
)
both16k4u = Method("both16k4u", FoldedPerTask(16), parts(4, start=False))
both8k2u = Method("both8k2u", FoldedPerTask(8), parts(2, start=False))
f16m30, f16m300 = (Method(f"f16m{mu}", FoldedPerTask(16), parts(8, mu=mu)) for mu in (30, 300))
f8m30, f8m300 = (Method(f"f8m{mu}", FoldedPerTask(8), parts(2, mu=mu)) for mu in (30, 300))

# further than the rule's candidates, tried on the holdout
WIDE = (AnswerSensitivity(), SensitiveCore(0.99, 4, 64))
sc_plain = Method("sc-plain", PerTask(), (*WIDE, *EXACT))
sc_start = Method("sc-start", PerTask(), (*WIDE, GradientStart(), *EXACT))
sc_start_brake = Method("sc-start-brake", PerTask(), (*WIDE, GradientStart(), *EXACT, KroneckerBrake(30.0)))
brake_start = Method("brake-start", PerTask(), (AnswerSensitivity(), GradientStart(), KroneckerBrake()))

# controls
sfor_plain = Method("sfor-plain", Shared(), (Freeze("B"), ProjectDisplacement("A")))
hard_plain = Method("hard-plain", PerTask(), (RoutingOverlap(0.5), *EXACT))
inc_plain = Method("inc-plain", PerTask(), EXACT)
sfor_sensitive = Method("sfor-sensitive", Shared(), (AnswerSensitivity(), SensitiveCore(), Freeze("B"), ProjectDisplacement("A")))
seq_brake = Method("seq-brake", Shared(), (AnswerSensitivity(), KroneckerBrake()))

# fold-16 without one part
CORE = SensitiveCore(1.0, 8, 8)
fold_nobrake = Method("fold-16-no-brake", FoldedPerTask(16), (AnswerSensitivity(), CORE, GradientStart(), *EXACT))
fold_nocore = Method("fold-16-no-core", KeepingNothing(16), (AnswerSensitivity(), GradientStart(), KroneckerBrake()))
fold_uniform = Method("fold-16-uniform", FoldedPerTask(16), (AnswerSensitivity(), CORE, *EXACT, KroneckerBrake()))
