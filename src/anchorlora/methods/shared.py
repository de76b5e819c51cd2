"""Methods with one shared adapter: each task starts from a learned anchor, so the companion B must be watched too."""

from anchorlora.constraints import Distillation, FisherAnchor, Freeze, ProjectDisplacement, ProjectGradient
from anchorlora.methods.base import Method, Shared
from anchorlora.tasks.rehearsal import Rehearsal

seq_lora = Method("seq-lora", Shared())
replay = seq_lora.plus(Rehearsal(), name="replay")
ewc = seq_lora.plus(FisherAnchor(), name="ewc")
lwf = seq_lora.plus(Distillation(), name="lwf")
projected_lora = seq_lora.plus(ProjectGradient("A"), name="projected-lora")
projected_lora_wrp = projected_lora.plus(ProjectDisplacement("A"), name="projected-lora-wrp")
projected_lora_freeze_b = projected_lora.plus(Freeze("B"), name="projected-lora-freeze-b")
sfor = projected_lora.plus(Freeze("B"), ProjectDisplacement("A"), name="sfor")
