"""Variants and controls of our own methods, for docs/lab/own-methods.md: what was chosen from, and what each part is worth.

F=benchmarks/own_methods.py
anchorlora grid mini --methods fold-16,fold-8,sensitive-core,brake,rank-split,inc-lora-hard,oplora --out OUT/grid
anchorlora grid mini --methods $F:old16,$F:both16k8,.. --orders order1 --set tested_on=holdout --out OUT/holdout
anchorlora run mini --method fold-16 --order news,entities,questions,reviews --seed 7 --out OUT/unseen/fold-16/..
python tools/collect.py OUT/grid results/beyond/grid                  # and so on, then: make docs
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from anchorlora import (
    AnswerSensitivity,
    FoldedPerTask,
    Freeze,
    GradientStart,
    KroneckerBrake,
    Method,
    PerTask,
    ProjectDisplacement,
    Rehearsal,
    Retract,
    RoutingOverlap,
    SensitiveCore,
    Shared,
)
from anchorlora.constraints.base import ActiveConstraint, ProtectsPast
from anchorlora.constraints.sensitivity import INPUTS, OUTPUTS, sensitivity

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


@dataclass(frozen=True)
class NestedCore(SensitiveCore):
    """A core that holds the one before it: `at_most` new directions a task, so what was exact once stays exact."""

    def end_task(self, anchor):
        return {f"nested/{layer.name}": layer.core.basis.float().cpu() for layer in anchor.layers if layer.core is not None}

    def cores(self, past):
        import torch

        from anchorlora.geometry import LayerCore, Subspace

        found = super().cores(past)
        for name, new in found.items():
            before = past.get(f"nested/{name}")
            if before is None:
                continue
            kept = torch.linalg.qr(before.double()).Q
            rest = new.wide.basis.double() - kept @ (kept.T @ new.wide.basis.double())
            C, _ = sensitivity(past, name, d_in=len(kept), d_out=len(past[f"{OUTPUTS}/{name}"]))
            left, _, _ = torch.linalg.svd(rest * C.values[: rest.shape[1]].sqrt(), full_matrices=False)
            basis = torch.linalg.qr(torch.cat([kept, left[:, : self.at_most]], dim=1)).Q
            held = float((basis * C.times(basis)).sum() / C.trace)
            found[name] = LayerCore(Subspace(basis), new.wide, new.k_star, min(1.0, held), new.rows)
        return found


@dataclass(frozen=True)
class EqualWeights(AnswerSensitivity):
    """Every task counts alike in C and in G, instead of by the size of its gradients."""

    def end_task(self, anchor):
        import torch

        from anchorlora.geometry import GrowingRows, SpikedCovariance

        mine = super().end_task(replace(anchor, past={}))
        kept = {}
        for place in [name for name in mine if not name.endswith("/tail")]:
            now = SpikedCovariance.read(mine[place], mine[f"{place}/tail"])
            rows = GrowingRows(keep=4 * now.root.shape[1], width=now.d)
            rows.add((now.root / now.trace**0.5).T)
            floor = now.tail / now.trace
            if place in anchor.past:
                earlier = SpikedCovariance.read(anchor.past[place], anchor.past[f"{place}/tail"])
                rows.add(earlier.root.T)
                floor += earlier.tail
            found = SpikedCovariance.of(rows, self.inputs if place.startswith(INPUTS) else self.outputs, floor=floor)
            kept[place] = found.root.float().contiguous()
            kept[f"{place}/tail"] = torch.tensor(found.tail, dtype=torch.float64)
        return kept


@dataclass(frozen=True)
class SoftProjection(ProtectsPast):
    """Shrink each step of A by mu (C + mu I)^-1 instead of projecting it: nothing exact. mu: a share of C's largest eigenvalue."""

    share: float = 0.01
    requires = ()
    reads_past = True

    def begin_task(self, anchor):
        return _Shrinking(anchor, self.share)


class _Shrinking(ActiveConstraint):
    def __init__(self, anchor, share):
        self.layers = []
        for layer in anchor.layers:
            C, _ = sensitivity(anchor.past, layer.name, d_in=layer.factor("A").shape[1], d_out=layer.factor("B").shape[0])
            self.layers.append((layer, C, share * float(C.values[0])))

    def before_optimizer_step(self):
        self.before = [layer.rows("A").detach().clone() for layer, *_ in self.layers]

    def project(self):
        for before, (layer, C, mu) in zip(self.before, self.layers, strict=True):
            rows = layer.rows("A")
            step = (rows - before).double().T
            rows.copy_((before + mu * C.power(step, -1.0, ridge=mu).T).to(rows))


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
brake_start = Method("brake-start", PerTask(), (AnswerSensitivity(), GradientStart(), KroneckerBrake(100.0)))

NESTED = (AnswerSensitivity(), NestedCore(1.0, 4, 20))
nested = Method("nested", PerTask(), (*NESTED, *EXACT))
equal_weights = Method(
    "equal-weights", FoldedPerTask(16), (EqualWeights(), SensitiveCore(1.0, 8, 8), GradientStart(), *EXACT, KroneckerBrake(100.0))
)
soft1, soft10 = (
    Method(f"soft{share}", PerTask(), (AnswerSensitivity(), GradientStart(), SoftProjection(share / 100))) for share in (1, 10)
)
beside_replay = Method("beside-replay", FoldedPerTask(16), parts(8), Rehearsal(500, 0.05))
f12, f24, f32 = (Method(f"f{rank}", FoldedPerTask(rank), parts(rank // 2)) for rank in (12, 24, 32))

# controls: a memory of 1,920 holds every example of mini, in fewer bytes than a fold remembers
replay_all_5, replay_all_25, replay_all_100 = (
    Method(f"replay-all-{share}", Shared(), (), Rehearsal(1920, share / 100)) for share in (5, 25, 100)
)
sfor_plain = Method("sfor-plain", Shared(), (Freeze("B"), ProjectDisplacement("A")))
hard_plain = Method("hard-plain", PerTask(), (RoutingOverlap(0.5), *EXACT))
inc_plain = Method("inc-plain", PerTask(), EXACT)
sfor_sensitive = Method("sfor-sensitive", Shared(), (AnswerSensitivity(), SensitiveCore(), Freeze("B"), ProjectDisplacement("A")))
seq_brake = Method("seq-brake", Shared(), (AnswerSensitivity(), KroneckerBrake(100.0)))

# fold-16 without one part
CORE = SensitiveCore(1.0, 8, 8)
fold_nobrake = Method("fold-16-no-brake", FoldedPerTask(16), (AnswerSensitivity(), CORE, GradientStart(), *EXACT))
fold_nocore = Method("fold-16-no-core", KeepingNothing(16), (AnswerSensitivity(), GradientStart(), KroneckerBrake(100.0)))
fold_uniform = Method("fold-16-uniform", FoldedPerTask(16), (AnswerSensitivity(), CORE, *EXACT, KroneckerBrake(100.0)))
