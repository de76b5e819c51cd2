"""The methods of the table: parts, what each is and when to take it, and its place in tables and figures.

One shared adapter: each task starts from a learned anchor, B_0 is not zero, so B must be frozen as well.
A fresh block per task: its start can be retracted while B = 0, at no cost, and then B may train.
"""

from anchorlora.constraints import (
    AnswerSensitivity,
    Constraint,
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
from anchorlora.methods.entry import CUMULATIVE, EXAMPLES, NOTHING, REFERENCE, REPLAY, ROWS, SHARED, CatalogEntry, Choice, Tunable
from anchorlora.methods.folded import FoldedPerTask
from anchorlora.methods.gated import GatedPerTask
from anchorlora.methods.merged import MergedPerTask
from anchorlora.methods.plans import PerTask, Shared

seq_lora = CatalogEntry(
    about="One LoRA adapter, trained on one task after another. Nothing is protected.",
    when="Use it as the baseline: it shows what you lose without protection.",
    group=REFERENCE,
    place=0,
).of(Method("seq-lora", Shared()))
replay = CatalogEntry(
    about="`seq-lora` that stores some examples of earlier tasks and mixes them into the training of each later one.",
    when="Use it if you may store old examples and train on them again in every later task.",
    group=REPLAY,
    place=5,
    compared_with=("sfor",),
).of(seq_lora.plus(Rehearsal(), name="replay"))
replay_kl = CatalogEntry(
    about="`seq-lora` that stores some examples of earlier tasks and, on them, keeps the distribution of words near that of "
    "the earlier model. Their answers are not learned again.",
    when="Use it with text that the model wrote itself: `anchorlora train --keep self --method replay-kl`.",
    group=REPLAY,
).of(Method("replay-kl", Shared(), (Distillation(temperature=1.0, on="remembered"),), rehearsal=Rehearsal(learned=False)))
ewc = CatalogEntry(
    about="Elastic weight consolidation: a penalty pulls every entry of the factors back to its earlier value, "
    "harder if old answers depend on it more.",
    when="Use it if you need one shared adapter, may not keep old examples, and can live with soft protection. "
    "Choose its strength with `anchorlora select`: published values do not transfer.",
    group=REFERENCE,
    place=9,
    compared_with=("sfor",),
    tunable=Tunable("FisherAnchor.strength", (1e3, 1e4, 1e5, 1e6), "fisher"),
).of(seq_lora.plus(FisherAnchor(), name="ewc"))
lwf = CatalogEntry(
    about="Learning without forgetting: on the new task's own examples, answers are kept close to those of the earlier model.",
    when="Use it if you have nothing left of earlier tasks and can afford a second forward pass for every example.",
    group=REFERENCE,
    place=10,
    compared_with=("sfor",),
    tunable=Tunable("Distillation.strength", (0.1, 0.5, 1.0, 2.0)),
).of(seq_lora.plus(Distillation(), name="lwf"))
projected_lora = CatalogEntry(
    about="The gradient of A is projected off the protected subspace. The optimizer may then turn it back.",
    when="Use it to see that a projected gradient is not enough under AdamW. To protect, use [`sfor`](sfor.md).",
    group=SHARED,
    place=2,
    leaves_open="move of A and move of B open\n(gradient of A projected)",
    traced=True,
).of(seq_lora.plus(ProjectGradient("A"), name="projected-lora"))
projected_lora_wrp = CatalogEntry(
    about="A does not move on the protected subspace, but B trains. From a trained adapter, the term ΔB A₀ V remains.",
    when="Use it to see that term alone. To protect, use [`sfor`](sfor.md), or [`rank-split`](rank-split.md) if B must train.",
    group=SHARED,
    place=4,
    leaves_open="move of B open\nA's displacement is projected",
    traced=True,
).of(projected_lora.plus(ProjectDisplacement("A"), name="projected-lora-wrp"))
projected_lora_freeze_b = CatalogEntry(
    about="B is frozen, and the gradient of A is projected. The part that AdamW turns back toward the protected subspace remains.",
    when="Use it to see that part alone. To protect, use [`sfor`](sfor.md).",
    group=SHARED,
    place=3,
    leaves_open="move of A open\nB is frozen",
    traced=True,
).of(projected_lora.plus(Freeze("B"), name="projected-lora-freeze-b"))
sfor = CatalogEntry(
    about="The paper's exact method for one shared adapter: B is frozen, and A moves only off the protected subspace.",
    when="It is the method of `anchorlora train --same-size`. It learns less than methods that add a new block.",
    group=SHARED,
    default="same size",
    place=1,
    leaves_open="both closed\nB is frozen, A's displacement is projected",
    traced=True,
    paired_with="projected-lora",
    compared_with=("projected-lora", "projected-lora-freeze-b", "projected-lora-wrp", "seq-lora"),
    choice=Choice(ROWS, "exact; the adapter keeps its size", 2),
).of(projected_lora.plus(Freeze("B"), ProjectDisplacement("A"), name="sfor"))


inc_lora = CatalogEntry(
    about="A new LoRA block for each task; earlier blocks are frozen and summed. Nothing is protected.",
    when="Use it as the baseline for methods with a block for each task.",
    group=REFERENCE,
    place=0,
).of(Method("inc-lora", PerTask()))
# o-lora-hard without O-LoRA's penalty, which needs earlier blocks
inc_lora_hard = CatalogEntry(
    about="A new block that neither reads the protected subspace nor moves on it. Its output there stays zero "
    "while both factors train.",
    when="The default of `anchorlora train --adapter`: exact, with any old adapter or none. The adapter grows with every task.",
    default="beside",
    place=8,
    compared_with=(),
).of(inc_lora.plus(Retract("A"), ProjectGradient("A"), ProjectDisplacement("A"), name="inc-lora-hard"))
oplora = CatalogEntry(
    about="Both factors stay off the leading singular directions of the frozen weight, so the strongest part of "
    "what the base model computes does not change.",
    when="It keeps little of a task that does not use those directions.",
    place=17,
    compared_with=(),
    choice=Choice(NOTHING, "its weights' strongest directions kept", 3),
).of(inc_lora.plus(ProjectSingular(), name="oplora"))
# a control: nothing is protected
lora_plus = CatalogEntry(
    about="LoRA+: one shared adapter whose B trains at a higher learning rate than A. Nothing is protected.",
    when="Use it as a control: it shows what changes if B moves more.",
    place=7,
).of(Method("lora-plus", Shared(ratio=16.0)))
# a control
lora_fa = CatalogEntry(
    about="LoRA-FA: A stays at its random start, and only B trains. Freezing A does not protect: B changes the "
    "response to what A reads.",
    when="Use it as a control. To protect with a frozen A, use [`lora-fa-retract`](lora-fa-retract.md).",
    place=8,
    compared_with=(),
    choice=Choice(NOTHING, "one shared adapter of the usual shape", 2),
).of(seq_lora.plus(Freeze("A", first_task=1), name="lora-fa"))
lora_fa_retract = CatalogEntry(
    about="A new block whose A is moved off the protected subspace once and then frozen. It is exact, and only B trains.",
    when="Use it if optimizer memory is short. Otherwise use [`inc-lora-hard`](inc-lora-hard.md), which trains A, too.",
    place=18,
    compared_with=(),
).of(inc_lora.plus(Retract("A"), Freeze("A", first_task=1), name="lora-fa-retract"))
inf_lora = CatalogEntry(
    about="InfLoRA: A of a new block is set to the leading inputs of the new task, off the protected subspace, "
    "and frozen. Only B trains.",
    when="Use it if optimizer memory is short and you can afford one pass over some new examples before training.",
    place=15,
    compared_with=(),
).of(inc_lora.plus(InputStart(), Retract("A"), Freeze("A", first_task=1), name="inf-lora"))
orthogonal_adaptation = CatalogEntry(
    about="The A of each block is random, frozen, and orthogonal to the A of all earlier blocks. No features of old data are used.",
    when="Use it to compare orthogonal adapters with protected features. Orthogonal blocks still change old answers.",
    place=19,
).of(Method("orthogonal-adaptation", PerTask(orthogonal=True), (Freeze("A", first_task=1),)))
keep_lora = CatalogEntry(
    about="KeepLoRA: A of a new block is set to the leading directions of the task's first gradient, off the "
    "protected subspace and off the leading input directions of the frozen weight, and frozen; B trains. "
    "After Luo et al. (arXiv 2601.19659) and its official code. What differs: the protected subspace is "
    "chosen anew after each task and limited in size, the gradient is that of some examples, and rows of "
    "A are shorter. Besides what is promised below, a block reads nothing of those directions of the "
    "weight.",
    when="If optimizer memory is short, and one pass with gradients over some new examples before training is affordable.",
    place=20,
    compared_with=(),
).of(inc_lora.plus(GradientStart(first_task=1, principal=0.6), Retract("A"), Freeze("A", first_task=1), name="keep-lora"))
# a start is no constraint
lora_null = CatalogEntry(
    about="After LoRA-Null (Tang et al., arXiv 2503.02659): A of a new block starts at the directions that the "
    "inputs of earlier tasks use least, and trains. What differs: B starts at zero and the weight stays "
    "whole, and the inputs are those of earlier tasks, not of general text. With A frozen, LoRA-Null is "
    "[`lora-fa-retract`](lora-fa-retract.md), up to which rows outside the strongest directions A has.",
    when="To see what the start alone is worth: a start is no constraint. To protect, take "
    "[`lora-fa-retract`](lora-fa-retract.md), or [`inc-lora-hard`](inc-lora-hard.md) if A must train.",
    place=21,
    compared_with=(),
).of(inc_lora.plus(NullStart(), name="lora-null"))
# merges after training, which protect nothing
snapshot = CatalogEntry(
    about="Snapshot interpolation: after each task but the first, the mean of the weights before and after it, "
    "as in WiSE-FT (Wortsman et al., arXiv 2109.01903). What differs: WiSE-FT averages once, with the "
    "base model. So does [`anchorlora train`](../train.md), where what the base model can do is the past.",
    when="As a cheap baseline: it needs nothing but the block, and any method must beat it.",
    place=22,
    compared_with=("sfor", "o-lora-hard"),
    choice=Choice(NOTHING, "best scores without old data; the adapter may grow"),
).of(Method("snapshot", MergedPerTask("snapshot", 0.5)))
ties = CatalogEntry(
    about="TIES merging (Yadav et al., arXiv 2306.01708): after each task but the first, its change and that of "
    "all earlier tasks are trimmed to their largest entries, a sign is elected for each entry, and those "
    "that have it are averaged. What differs: the block was trained on top of the merged ones, they count "
    "as one change, and the result is cut to the rank of the stacked blocks.",
    when="As a cheap baseline of merging after training.",
    place=23,
).of(Method("ties", MergedPerTask("ties", 0.2)))
dare = CatalogEntry(
    about="DARE (Yu et al., arXiv 2311.03099): after each task but the first, entries of its change are dropped "
    "at random, the others scaled up, and the result is added. What differs: the block was trained on top "
    "of the earlier ones, and the sum is cut to the rank of the stacked blocks, as PEFT does.",
    when="As a cheap baseline of merging after training.",
    place=24,
).of(Method("dare", MergedPerTask("dare", 0.8)))
n_lora = CatalogEntry(
    about="A new block for each task, with a penalty on the size of every entry of its update, so that blocks collide less.",
    when="Use it for comparison. Its strength depends on the model: choose it with `anchorlora select`.",
    group=REFERENCE,
    place=12,
    compared_with=(),
    tunable=Tunable("EffectiveSparsity.strength", (1e-7, 1e-6, 1e-5, 1e-4), "sparsity"),
).of(inc_lora.plus(EffectiveSparsity(), name="n-lora"))
sd_lora = CatalogEntry(
    about="SD-LoRA: a new block for each task. The directions of earlier blocks are frozen, and one gate for "
    "each of them keeps training.",
    when="Use it for comparison. Gates change old blocks, so nothing is exact.",
    group=REFERENCE,
    place=7,
    tunable=Tunable("GatedPerTask.learning_rate", (1e-4, 1e-3, 1e-2, 5e-2)),
).of(Method("sd-lora", GatedPerTask()))
sd_lora_per_layer = CatalogEntry(
    about="`sd-lora` with finished blocks normalized layer by layer instead of over the network.",
    when="Use it for comparison with [`sd-lora`](sd-lora.md).",
    place=14,
    compared_with=("sd-lora",),
    tunable=Tunable("GatedPerTask.learning_rate", (1e-4, 1e-3, 1e-2, 5e-2)),
).of(Method("sd-lora-per-layer", GatedPerTask(normalize="layer")))
o_lora = CatalogEntry(
    about="O-LoRA: a new block for each task, with a penalty on the overlap of its A with the A of earlier blocks.",
    when="Use it for comparison: it needs only the blocks of old tasks. To protect, use [`o-lora-hard`](o-lora-hard.md).",
    group=CUMULATIVE,
    place=2,
    leaves_open="start and move of A open\n(penalty on overlap)",
    traced=True,
).of(inc_lora.plus(RoutingOverlap(0.5), name="o-lora"))
o_lora_retract = CatalogEntry(
    about="`o-lora` whose new block starts off the protected subspace. Training may lead it back.",
    when="Use it to see what the start alone contributes. It is one step from `o-lora` to [`o-lora-hard`](o-lora-hard.md).",
    group=CUMULATIVE,
    place=9,
    leaves_open="move of A open\nits start is retracted",
    component=True,
).of(o_lora.plus(Retract("A"), name="o-lora-retract"))
o_lora_retract_gradient = CatalogEntry(
    about="`o-lora-retract` with the gradient projected as well. The optimizer may still turn it back.",
    when="Use it to see what the gradient contributes. It is one step from `o-lora` to [`o-lora-hard`](o-lora-hard.md).",
    group=CUMULATIVE,
    place=16,
    leaves_open="move of A open\n(start retracted, gradient projected)",
    component=True,
).of(o_lora_retract.plus(ProjectGradient("A"), name="o-lora-retract-gradient"))
o_lora_hard = CatalogEntry(
    about="The paper's exact method with a block for each task: `o-lora` that neither reads the protected "
    "subspace nor moves on it.",
    when="Use it in studies of O-LoRA. If you do not have the earlier blocks, "
    "[`inc-lora-hard`](inc-lora-hard.md) is the same method without O-LoRA's penalty.",
    group=CUMULATIVE,
    place=1,
    leaves_open="both closed\nstart retracted, displacement projected",
    traced=True,
    paired_with="o-lora",
    compared_with=("o-lora", "o-lora-retract-gradient"),
    choice=Choice(ROWS, "exact; the adapter may grow"),
).of(o_lora_retract_gradient.plus(ProjectDisplacement("A"), name="o-lora-hard"))
o_lora_effective = CatalogEntry(
    about="`o-lora` with a penalty on the layer's effective change on a wider basis of earlier features.",
    when="Use it to see what the penalty does without an exact core.",
    group=CUMULATIVE,
    place=5,
    traced=True,
    tunable=Tunable("EffectiveResponse.strength", (0.01, 0.1, 1.0, 10.0)),
).of(o_lora.plus(EffectiveResponse(1.0), name="o-lora-effective"))
o_lora_bsr = CatalogEntry(
    about="The paper's combination: [`o-lora-hard`](o-lora-hard.md), exact on the core, and a penalty on a wider basis around it.",
    when="Use it to repeat the paper. On the embedded benchmark, at the selected strength, it scores the same as `o-lora-hard`.",
    group=CUMULATIVE,
    place=4,
    traced=True,
    tunable=Tunable("EffectiveResponse.strength", (0.01, 0.1, 1.0, 10.0), printed_at=1.0),
).of(o_lora_hard.plus(EffectiveResponse(1.0), name="o-lora-bsr"))
# where its gradient reaches the task's
o_lora_bsr_strong = CatalogEntry(
    about="`o-lora-bsr` at a strength that makes the penalty's gradient as large as that of the task.",
    when="Use it to see what the paper's penalty does once it is strong enough to matter.",
    group=CUMULATIVE,
    place=11,
    tunable=Tunable("EffectiveResponse.strength", (1e4, 1e5, 1e6, 1e7)),
).of(o_lora_hard.plus(EffectiveResponse(1e4), name="o-lora-bsr-strong"))

# our own: docs/lab/own-methods.md
brake = CatalogEntry(
    about="A new block, with a penalty on how much the update is predicted to change earlier answers, in nats of KL divergence.",
    when="Use it if soft protection is enough and no direction should be closed to the new task.",
    place=13,
    compared_with=("sensitive-core",),
).of(inc_lora.plus(AnswerSensitivity(), KroneckerBrake(100.0), name="brake"))
sensitive_core = CatalogEntry(
    about="A new block that is exact on the directions that earlier answers depend on most, instead of the strongest features.",
    place=6,
    compared_with=("seq-lora", "o-lora-hard"),
    choice=Choice(EXAMPLES, "least forgotten; the adapter may grow", 4),
).of(inc_lora.plus(AnswerSensitivity(), SensitiveCore(0.99, 4, 64), Retract("A"), ProjectDisplacement("A"), name="sensitive-core"))
rank_split = CatalogEntry(
    about="One shared adapter that is exact although B trains: B moves only where A does not carry the protected subspace.",
    when="Here B trains as well; [`sfor`](sfor.md) freezes it.",
    place=6,
    compared_with=(),
    choice=Choice(EXAMPLES, "one shared adapter of the usual shape, exact", 5),
).of(
    seq_lora.plus(
        AnswerSensitivity(),
        SensitiveCore(1.0, 4, 4),
        ProjectDisplacement("A"),
        RankSplit(),
        KroneckerBrake(100.0),
        name="rank-split",
    )
)


def folding(k: int) -> tuple[Constraint, ...]:
    """Return the constraints of a block that is folded, with cores of k directions."""
    core = (AnswerSensitivity(), SensitiveCore(1.0, k, k))
    return (*core, GradientStart(), Retract("A"), ProjectDisplacement("A"), KroneckerBrake(100.0))


fold_8 = CatalogEntry(
    about="[`fold-16`](fold-16.md) with a history of half the rank.",
    place=10,
    compared_with=("fold-16",),
    choice=Choice(EXAMPLES, "the same at rank 8", 3),
).of(Method("fold-8", FoldedPerTask(8), folding(2)))
fold_16 = CatalogEntry(
    about="A new block for each task: exact on the directions that answers depend on, and slowed elsewhere by a "
    "penalty. At the end of the task, it is folded into one adapter of constant rank.",
    when="It kept most of what it was measured on, at constant rank; after several skills, take [`fold-64`](fold-64.md).",
    place=3,
    compared_with=("seq-lora", "o-lora-hard", "sensitive-core"),
    choice=Choice(EXAMPLES, "the same at rank 16", 2),
).of(Method("fold-16", FoldedPerTask(16), folding(8)))
fold_64 = CatalogEntry(
    about="[`fold-16`](fold-16.md) with a history of four times the rank: several blocks have room before anything is cut.",
    when="The default of `anchorlora train`. A first skill is the same as with `fold-16`; later skills have more room.",
    default="new block",
    place=25,
    compared_with=("fold-16", "sensitive-core"),
    choice=Choice(EXAMPLES, "best scores; one adapter that grows up to a limit"),
).of(Method("fold-64", FoldedPerTask(64), folding(8)))
fold_64_replay = CatalogEntry(
    about="[`fold-64`](fold-64.md) that also mixes stored examples of what is kept into the training of each later skill.",
    when="Use it for a chain of skills if you may store old examples and train on them again.",
    group=REPLAY,
    place=26,
    compared_with=("fold-64", "replay"),
).of(Method("fold-64-replay", fold_64.plan, fold_64.constraints, rehearsal=Rehearsal(500, 0.1)))
