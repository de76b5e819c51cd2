"""What protection costs an optimizer step, how little a step grows with the number of tasks, and what measuring and saving cost."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from anchorlora import AdaptedLayer, Anchor, Subspace, embedded, measure
from anchorlora.adapters import AdapterStack
from anchorlora.constraints import Constraint, Freeze, ProjectDisplacement, ProjectGradient, Retract, RoutingOverlap, protect
from anchorlora.continual.batches import Window, example_mean, windows
from anchorlora.continual.progress import Progress, tensors_of
from anchorlora.data import Benchmark, Encoder
from anchorlora.features.store import FeatureStore
from anchorlora.geometry import Factors
from anchorlora.models.load import LoadedModel, load_base_model
from anchorlora.recipes import mini
from anchorlora.runs.checkpoint import Checkpoint
from benchmarks.timing import ratio, report, side_by_side

ROUNDS = 40
EVERY = 100  # optimizer steps between two saves, the default
HARD = (RoutingOverlap(0.5), Retract("A"), ProjectGradient("A"), ProjectDisplacement("A"))


def base_model():
    return load_base_model(mini().base_model)


def window(tokenizer, *, micro: int) -> Window:
    """Eight examples of the embedded benchmark, as the paper takes them: one a forward."""
    data = embedded.folder("embedded:mini", "data")
    assert data is not None
    source = Benchmark(data)
    name = source.names[0]
    encoded = Encoder(tokenizer, max_tokens=128).encode(source.task(name), source.examples(name, "train", limit=8))
    return next(windows(encoded, range(8), size=8, micro=micro, pad=tokenizer.pad_token_id))


class Loop:
    """A model with its own optimizer, protected for good; calling it makes one optimizer step."""

    def __init__(self, constraints: Sequence[Constraint], *, history: int, batch: Window, model: LoadedModel | None = None) -> None:
        model = model or base_model()
        self.blocks = AdapterStack(model.model, targets=("q_proj", "v_proj"), rank=8, alpha=32, dropout=0.1)
        for task in range(history):
            self.blocks.open(torch.Generator().manual_seed(task))
            self.blocks.fold()
        self.blocks.open(torch.Generator().manual_seed(99))
        draw = torch.Generator().manual_seed(0)
        cores = {}
        for layer in self.blocks.anchor().layers:
            cores[layer.name] = Subspace(torch.linalg.qr(torch.randn(layer.current.A.shape[1], 20, generator=draw)).Q)
            if any(isinstance(part, Freeze) for part in constraints):  # which a new adapter's B, zero, would not leave
                torch.nn.init.normal_(layer.factor("B"), std=0.01, generator=draw)
        self.batch, self.device = batch, model.device
        self.optimizer = torch.optim.AdamW(self.blocks.trainable(), lr=1e-4)
        self.accelerator = Accelerator(cpu=model.device.type == "cpu")
        self.stack = ExitStack()
        self.stack.enter_context(protect(self.optimizer, self.blocks.anchor(cores=cores), constraints))
        self.blocks.model.train()

    def __call__(self) -> None:
        for part in self.batch.micro_batches:
            moved = part.to(self.device)
            outputs = self.blocks.model(**moved.inputs, logits_to_keep=moved.keep, use_cache=False)
            self.accelerator.backward(example_mean(outputs.logits, moved, self.batch))
        self.optimizer.step()
        self.optimizer.zero_grad()


def one_large_layer() -> LoadedModel:
    """One decoder layer of an 8B model, d = 4096, with random weights."""
    config = Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=len(base_model().tokenizer),
    )  # fmt: skip
    return replace(base_model(), model=Qwen3ForCausalLM(config))


def plain_peft(batch: Window) -> Callable[[], None]:
    """The same step with PEFT alone and both factors training."""
    loaded = base_model()
    config = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(loaded.model, config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        for part in batch.micro_batches:
            moved = part.to(loaded.device)
            outputs = model(**moved.inputs, logits_to_keep=moved.keep, use_cache=False)
            example_mean(outputs.logits, moved, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def protection() -> None:
    tokenizer = base_model().tokenizer
    for micro in (1, 8):
        batch = window(tokenizer, micro=micro)
        loops = {
            "frozen B": Loop([Freeze("B")], history=0, batch=batch),
            "sfor": Loop([ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")], history=0, batch=batch),
            "o-lora": Loop([RoutingOverlap(0.5)], history=1, batch=batch),
            "o-lora-hard": Loop(HARD, history=1, batch=batch),
            "plain PEFT LoRA": plain_peft(batch),
        }
        times = side_by_side(loops, rounds=ROUNDS)
        name = f"(mini, {8 // micro} forwards of {micro})"
        report(f"step of sfor / the same loop, B frozen, unprotected {name}", ratio(times, "sfor", "frozen B"), "<= 1.03")
        report(f"step of o-lora-hard / o-lora {name}", ratio(times, "o-lora-hard", "o-lora"), "<= 1.03")
        report(f"step of sfor / plain PEFT LoRA {name}", ratio(times, "sfor", "plain PEFT LoRA"), "-")
        report(f"step of o-lora-hard / plain PEFT LoRA {name}", ratio(times, "o-lora-hard", "plain PEFT LoRA"), "-")


def growth() -> None:
    batch = window(base_model().tokenizer, micro=8)
    loops = {f"task {t}": Loop(HARD, history=t - 1, batch=batch) for t in (2, 15, 50)}
    times = side_by_side(loops, rounds=ROUNDS)
    for t in (15, 50):
        report(f"step of o-lora-hard at task {t} / at task 2 (mini)", ratio(times, f"task {t}", "task 2"), "-")
    batch = window(base_model().tokenizer, micro=4)
    loops = {f"task {t}": Loop(HARD, history=t - 1, batch=batch, model=one_large_layer()) for t in (2, 50)}
    times = side_by_side(loops, rounds=4, warm=1)
    report("step of o-lora-hard at task 50 / at task 2 (a layer of d = 4096)", ratio(times, "task 50", "task 2"), "<= 1.1")


def checkpoint() -> None:
    """A save within a task beside the steps between two: on the mini base model, eight examples in one forward, the shortest steps
    that a run of this project has.
    """
    loop = Loop(
        [ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")], history=0, batch=window(base_model().tokenizer, micro=8)
    )
    rows, counted = FeatureStore(limit=128, held_out=32, spread=False), iter(range(1, 10**6))
    with tempfile.TemporaryDirectory() as name, rows.collect(loop.blocks.model):
        loop()  # fills the rows and the optimizer's state

        def save() -> None:
            tensors = tensors_of(loop.optimizer, rows, goes_on=True)
            progress = Progress(2, next(counted), 0.0, tensors, dict(rows.stores))
            Checkpoint(Path(name), Path(name) / "trace.jsonl").write_progress(progress)

        times = side_by_side({"save": save, "step": loop}, rounds=20)
    share = ratio(times, "save", "step") / EVERY
    report(f"a save within a task / {EVERY} steps of sfor; one forward of 8", share, "0.01")


def drift() -> None:
    """Measuring a 4096 x 4096 layer from its factors, against forming the matrix."""
    d, r, k = 4096, 8, 20
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    start = Factors(normal(r, d) / 64, normal(d, r) / 64, 4.0)
    now = Factors(start.A + 1e-3 * normal(r, d), start.B + 1e-3 * normal(d, r), 4.0)
    core = Subspace(torch.linalg.qr(normal(d, k)).Q)
    anchor = Anchor((AdaptedLayer("layer", now, start, core=core),))

    def dense() -> tuple[float, float, float]:
        """The formulas as written, in float64: dW, dW V and dW - dW V V^T as matrices."""
        A, B, A0, B0, V = (x.double() for x in (now.A, now.B, start.A, start.B, core.basis))
        dW = 4.0 * (B @ A - B0 @ A0)
        response = dW @ V
        return float(dW.norm()), float(response.norm()), float((dW - response @ V.T).norm())

    found = measure(anchor)
    for mine, theirs in zip((found.d_eff, found.d_old, found.d_new), dense(), strict=True):
        assert abs(mine - theirs) < 1e-9 * theirs
    times = side_by_side({"thin": lambda: measure(anchor), "dense": dense}, rounds=9, warm=1)
    milliseconds = 1e3 * sorted(times["thin"])[len(times["thin"]) // 2]
    report("measure / dense formulas, one 4096 x 4096 layer", ratio(times, "thin", "dense"), "<= 1/30", f"({milliseconds:.1f} ms)")
