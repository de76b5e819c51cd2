"""The methods of the table and their parts; `catalog.json` says what each is, when to take it, and its place in tables and figures.

One shared adapter: each task starts from a learned anchor, B_0 is not zero, so B must be frozen as well.
A fresh block per task: its start can be retracted while B = 0, at no cost, and then B may train.
"""

from anchorlora.constraints import (
    AnswerSensitivity,
    Distillation,
    EffectiveResponse,
    EffectiveSparsity,
    FisherAnchor,
    Freeze,
    GradientStart,
    InputStart,
    KroneckerBrake,
    NullStart,
    ProjectDisplacement,
    ProjectGradient,
    ProjectSingular,
    RankSplit,
    Retract,
    RoutingOverlap,
    SensitiveCore,
)
from anchorlora.data.rehearsal import Rehearsal
from anchorlora.methods.base import Method
from anchorlora.methods.folded import FoldedPerTask
from anchorlora.methods.gated import GatedPerTask
from anchorlora.methods.merged import MergedPerTask
from anchorlora.methods.plans import PerTask, Shared

seq_lora = Method("seq-lora", Shared())
replay = seq_lora.plus(Rehearsal(), name="replay")
replay_kl = replay.plus(Distillation(strength=1.0, temperature=1.0, on="remembered"), name="replay-kl")
ewc = seq_lora.plus(FisherAnchor(), name="ewc")
lwf = seq_lora.plus(Distillation(), name="lwf")
projected_lora = seq_lora.plus(ProjectGradient("A"), name="projected-lora")
projected_lora_wrp = projected_lora.plus(ProjectDisplacement("A"), name="projected-lora-wrp")
projected_lora_freeze_b = projected_lora.plus(Freeze("B"), name="projected-lora-freeze-b")
sfor = projected_lora.plus(Freeze("B"), ProjectDisplacement("A"), name="sfor")

inc_lora = Method("inc-lora", PerTask())
# o-lora-hard without O-LoRA's penalty, which needs earlier blocks
inc_lora_hard = inc_lora.plus(Retract("A"), ProjectGradient("A"), ProjectDisplacement("A"), name="inc-lora-hard")
oplora = inc_lora.plus(ProjectSingular(), name="oplora")
# controls
lora_plus = Method("lora-plus", Shared(ratio=16.0))
lora_fa = seq_lora.plus(Freeze("A", first_task=1), name="lora-fa")
lora_fa_retract = inc_lora.plus(Retract("A"), Freeze("A", first_task=1), name="lora-fa-retract")
inf_lora = inc_lora.plus(InputStart(), Retract("A"), Freeze("A", first_task=1), name="inf-lora")
orthogonal_adaptation = Method("orthogonal-adaptation", PerTask(orthogonal=True), (Freeze("A", first_task=1),))
keep_lora = inc_lora.plus(GradientStart(first_task=1, principal=0.6), Retract("A"), Freeze("A", first_task=1), name="keep-lora")
lora_null = inc_lora.plus(NullStart(), name="lora-null")  # a start is no constraint
# merges after training, which protect nothing
snapshot = Method("snapshot", MergedPerTask("snapshot", 0.5))
ties = Method("ties", MergedPerTask("ties", 0.2))
dare = Method("dare", MergedPerTask("dare", 0.8))
n_lora = inc_lora.plus(EffectiveSparsity(), name="n-lora")
sd_lora = Method("sd-lora", GatedPerTask())
sd_lora_per_layer = Method("sd-lora-per-layer", GatedPerTask(normalize="layer"))
o_lora = inc_lora.plus(RoutingOverlap(0.5), name="o-lora")
o_lora_retract = o_lora.plus(Retract("A"), name="o-lora-retract")
o_lora_retract_gradient = o_lora_retract.plus(ProjectGradient("A"), name="o-lora-retract-gradient")
o_lora_hard = o_lora_retract_gradient.plus(ProjectDisplacement("A"), name="o-lora-hard")
o_lora_effective = o_lora.plus(EffectiveResponse(1.0), name="o-lora-effective")
o_lora_bsr = o_lora_hard.plus(EffectiveResponse(1.0), name="o-lora-bsr")
o_lora_bsr_strong = o_lora_hard.plus(EffectiveResponse(1e4), name="o-lora-bsr-strong")  # where its gradient reaches the task's

# our own: docs/lab/own-methods.md
brake = inc_lora.plus(AnswerSensitivity(), KroneckerBrake(), name="brake")
sensitive_core = inc_lora.plus(
    AnswerSensitivity(), SensitiveCore(0.99, 4, 64), Retract("A"), ProjectDisplacement("A"), name="sensitive-core"
)
rank_split = seq_lora.plus(
    AnswerSensitivity(), SensitiveCore(1.0, 4, 4), ProjectDisplacement("A"), RankSplit(), KroneckerBrake(), name="rank-split"
)
new_block = (GradientStart(), Retract("A"), ProjectDisplacement("A"), KroneckerBrake())
fold_8 = Method("fold-8", FoldedPerTask(8), (AnswerSensitivity(), SensitiveCore(1.0, 2, 2), *new_block))
fold_16 = Method("fold-16", FoldedPerTask(16), (AnswerSensitivity(), SensitiveCore(1.0, 8, 8), *new_block))
fold_64 = Method("fold-64", FoldedPerTask(64), fold_16.constraints)
fold_64_replay = Method("fold-64-replay", fold_64.plan, fold_64.constraints, rehearsal=Rehearsal(500, 0.1))
