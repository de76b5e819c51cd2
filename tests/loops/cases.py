"""Every loop, parallelism and optimizer that is tried, and what comes of it: proved by the tests, printed in docs/supported.md."""

from __future__ import annotations

from dataclasses import dataclass

PRESERVED, REFUSED = "preserved", "refused"


@dataclass(frozen=True)
class Row:
    loop: str
    parallelism: str
    optimizer: str
    outcome: str = PRESERVED
    says: str = ""  # what a refusal says, in part

    def __str__(self):
        return f"{self.loop}-{self.parallelism}-{self.optimizer}".replace(" ", "_")


ONE, DDP, FSDP2, FSDP1 = "one process", "DDP", "FSDP2", "FSDP1"

STOCK = [
    *("SGD", "SGD with momentum", "AdamW", "AdamW foreach", "AdamW fused", "AdamW with amsgrad", "Adam", "Adagrad", "RMSprop"),
    *("Adadelta", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop", "Muon", "Adafactor"),
]
PLAIN = [Row("plain loop", ONE, name) for name in STOCK]
PLAIN += [
    Row("plain loop, closure", ONE, "AdamW"),
    Row("plain loop, gradient scaler", ONE, "AdamW"),
    Row("plain loop, gradient scaler", ONE, "AdamW fused"),
    Row("plain loop, autocast to bfloat16", ONE, "AdamW"),
    Row("plain loop, torch.compile", ONE, "AdamW"),
    Row("plain loop", ONE, "AdamW8bit (bitsandbytes)"),
]
PLAIN_REFUSED = [
    Row("plain loop", ONE, "LBFGS", REFUSED, "LBFGS moves the parameters several times"),
    Row("plain loop", ONE, "AdamW differentiable", REFUSED, "is differentiable"),
    Row("plain loop, closure called twice", ONE, "any", REFUSED, "asked for gradients 2 times in a step"),
    Row("plain loop, bfloat16 factors", ONE, "any", REFUSED, "needs float32 factors"),
    Row("plain loop, penalty under a gradient scaler", ONE, "AdamW fused", REFUSED, "use fused=False"),
    Row("plain loop", "DeepSpeed ZeRO", "any", REFUSED, "flat partitions"),
]
ACCELERATE = [Row("Accelerate, accumulation 4", ONE, name) for name in ("AdamW", "AdamW fused")]
TRAINER = [
    *(Row("transformers Trainer", ONE, name) for name in ("adamw_torch_fused", "adamw_torch", "adafactor", "sgd")),
    Row("transformers Trainer, accumulation 2", ONE, "adamw_torch"),
    Row("transformers Trainer, evaluation within", ONE, "schedule_free_adamw"),
    Row("TRL SFTTrainer", ONE, "adamw_torch_fused"),
]
TRAINER_REFUSED = [Row("TRL SFTTrainer, bfloat16 adapter", ONE, "adamw_torch_fused", REFUSED, "needs float32 factors")]
STAGES = [
    *(Row(f"TRL {name}Trainer", ONE, "adamw_torch") for name in ("DPO", "KTO", "GRPO", "SDFT")),
    *(
        Row(f"TRL {name}Trainer, {how}", ONE, "adamw_torch")
        for how in ("checkpointing", "checkpointing, reentrant", "accumulation 2")
        for name in ("SFT", "DPO", "KTO", "GRPO", "SDFT")
    ),
]
STAGES_REFUSED = [Row("TRL DPOTrainer, adapter of another name", ONE, "adamw_torch", REFUSED, "default")]
LIGHTNING = [Row("Lightning, automatic optimization", ONE, "AdamW"), Row("Lightning, manual optimization", ONE, "AdamW")]
TWO = [
    *(Row("plain loop", DDP, name) for name in ("AdamW", "AdamW fused", "ZeroRedundancyOptimizer(AdamW)")),
    Row("plain loop, no_sync accumulation", DDP, "AdamW"),
    Row("Accelerate, accumulation 4", DDP, "AdamW"),
    Row("transformers Trainer", DDP, "adamw_torch_fused"),
    *(Row("plain loop", FSDP2, name) for name in ("AdamW", "AdamW foreach", "AdamW fused", "SGD with momentum")),
    Row("plain loop, rank 3: uneven rows", FSDP2, "AdamW"),
    Row("plain loop, rank 1: a process without rows", FSDP2, "AdamW"),
    Row("plain loop, bfloat16 mixed precision policy", FSDP2, "AdamW"),
    Row("plain loop, penalty on factors", FSDP2, "AdamW"),
]
TWO_REFUSED = [
    Row("plain loop, protected before fully_shard", FSDP2, "any", REFUSED, "is not in this optimizer"),
    Row("plain loop", FSDP1, "any", REFUSED, "FSDP1 keeps factors in flat parameters"),
    Row("plain loop, cores differ between processes", DDP, "any", REFUSED, "cores differ between processes"),
]
ROWS = PLAIN + PLAIN_REFUSED + ACCELERATE + TRAINER + TRAINER_REFUSED + STAGES + STAGES_REFUSED + LIGHTNING + TWO + TWO_REFUSED
