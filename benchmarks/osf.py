"""OSF as PEFT has it, audited: what of the realized update lies in the singular directions that it promises to freeze.

    W = U_high S_high V_high + U_low S_low V_low      frozen: high      trained: low, from the SVD of W
    promised   V_low V_high^T = 0 and U_high^T U_low = 0, so that dW V_high^T = 0 and U_high^T dW = 0
    done       gradients of V_low and U_low are projected off V_high and U_high; the optimizer then takes its own step

`anchorlora.measurement.record_steps` records every step of the embedded base model learning the embedded news task. The second run
of each pair projects the displacement of V_low and U_low after the step. Run: python -m benchmarks.osf

python -m benchmarks.osf OUT     # the task sequences of mini instead, three orders and three seeds, as OUT/VARIANT/ORDER-SEED.json
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from peft import OSFConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from anchorlora import Subspace
from anchorlora.adapters import realized_weights
from anchorlora.continual.batches import example_mean, windows
from anchorlora.continual.data import TaskData
from anchorlora.continual.evaluate import Scorer
from anchorlora.data import Benchmark, Encoder, percents
from anchorlora.embedded import folder
from anchorlora.measurement import WeightDirections, record_steps
from anchorlora.measurement.directions import Protected
from anchorlora.models.load import load_base_model
from anchorlora.recipes import mini
from anchorlora.scores import Scores

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "sgd, momentum 0.9": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0),
    "adamw, decay 0.1": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
}


@contextmanager
def projected(optimizer: torch.optim.Optimizer, model: nn.Module, protected: Mapping[str, Protected]) -> Iterator[None]:
    """After every step: V_low <- V_0 + (V_low - V_0) P and the same for U_low on its side, V_0 and U_0 where they began."""
    rows: list[tuple[nn.Parameter, Tensor, Subspace]] = []
    columns: list[tuple[nn.Parameter, Tensor, Subspace]] = []
    for name, directions in protected.items():
        assert directions.left is not None
        low = model.get_submodule(name).osf_svd_params["default"]
        rows.append((low["V_low"], low["V_low"].detach().double().clone(), directions.right))
        columns.append((low["U_low"], low["U_low"].detach().double().clone(), directions.left))

    @torch.no_grad()
    def after(*_: object) -> None:
        for V, start, core in rows:
            V.copy_(start + core.outside(V.double() - start))
        for U, start, core in columns:
            U.copy_(start + core.outside((U.double() - start).T).T)

    hook = optimizer.register_step_post_hook(after)
    try:
        yield
    finally:
        hook.remove()


def audited(make, *, project: bool, steps: int, path: Path, every: int = 1) -> list[dict]:
    """Train OSF on q_proj and v_proj of the embedded base model and return the audit's lines."""
    torch.manual_seed(0)
    place = folder("embedded:mini", "base_model")
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, use_safetensors=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(model, OSFConfig(target_modules=["q_proj", "v_proj"]))
    layers = realized_weights(model)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    with torch.no_grad():
        protected = WeightDirections().on_weights({name: read() for name, read in layers.items()})
    holding = projected(optimizer, model, protected) if project else nullcontext()
    with record_steps(optimizer, layers, protected, path, every=every), holding:
        for ids in batches(place, steps):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [json.loads(line) for line in path.read_text().splitlines()]


def batches(place: Path | None, steps: int, *, size: int = 8, length: int = 48) -> Iterator[Tensor]:
    """Prompts with answers of the embedded news task, cut to one length."""
    tokenizer = AutoTokenizer.from_pretrained(place)
    benchmark = Benchmark(folder("embedded:mini", "data"))
    examples, task = benchmark.examples("news", "train"), benchmark.task("news")
    ids = [tokenizer(task.prompt(e.sentence) + e.label)["input_ids"] for e in examples]
    long = [row[-length:] for row in ids if len(row) >= length]
    for step in range(steps):
        yield torch.tensor([long[(size * step + i) % len(long)] for i in range(size)])


def report(steps: int = 200) -> None:
    """Print one row a run: the shares of the update after all steps, and of a single step."""
    print(f"{steps} steps; share of the realized update in the frozen directions; chance: an update aligned with nothing\n")
    print(f"{'optimizer':20}{'after the step':22}{'|dW V_high|':>13}{'|U_high dW|':>13}{'chance':>9}{'rounding':>10}")
    for name, make in OPTIMIZERS.items():
        for project in (False, True):
            with tempfile.TemporaryDirectory() as place:
                last = audited(make, project=project, steps=steps, path=Path(place) / "audit.jsonl", every=steps)[-1]
            what = "displacement projected" if project else "as PEFT has it"
            print(
                f"{name:20}{what:22}{last['rho']:13.2e}{last['left_rho']:13.2e}{last['chance']:9.3f}{last['rho_floor']:10.1e}",
                flush=True,
            )


def sequence(order: tuple[str, ...], seed: int, *, project: bool) -> dict:
    """Learn the tasks of mini one after another, decomposing the weights before each; return a record of scores."""
    recipe, data_folder = mini(), folder("embedded:mini", "data")
    assert data_folder is not None
    t, e = recipe.training, recipe.evaluation
    base = load_base_model(recipe.base_model)
    data = TaskData.of(Benchmark(data_folder), Encoder(base.tokenizer, max_tokens=t.max_tokens), recipe.tasks, order, seed)
    pad, plain, accuracy, stored = base.tokenizer.pad_token_id, base.model, [], 0
    for number, name in enumerate(order, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(plain, OSFConfig(target_modules=["q_proj", "v_proj"])).train()
        layers = realized_weights(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=t.learning_rate, weight_decay=0.0)
        with torch.no_grad():
            protected = WeightDirections().on_weights({layer: read() for layer, read in layers.items()})
        passed = windows(data.train[name], data.shuffled(name, 1), size=t.window, micro=t.micro_batch, pad=pad)
        with projected(optimizer, model, protected) if project else nullcontext():
            for window in passed:
                for batch in window.micro_batches:
                    outputs = model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False)
                    example_mean(outputs.logits, batch, window).backward()
                optimizer.step()
                optimizer.zero_grad()
        scorer = Scorer.of(model, base.tokenizer, e, device=base.device)
        tested = {seen: scorer.score(data.tasks[seen], data.test[seen]) for seen in order[:number]}
        accuracy.append([next(iter(percents(answers).values())) for answers in tested.values()])
        with torch.no_grad():
            weights = {layer.removeprefix("base_model.model."): read().float().clone() for layer, read in layers.items()}
            plain = model.unload()
            for layer, weight in weights.items():
                plain.get_submodule(layer).weight.copy_(weight)
        stored = sum(weight.numel() for weight in weights.values())
    scores = Scores.of(accuracy)
    named = {"AA": scores.average, "LA": scores.learning, "BWT": scores.backward_transfer, "FM": scores.forgetting}
    return {"order": order, "seed": seed, "accuracy": accuracy, "scores": named, "stored_parameters": stored}


def sequences(out: Path) -> None:
    """Run what is missing."""
    for name, order in mini().tasks.orders.items():
        for seed in (42, 38, 2026):
            for variant, project in (("osf", False), ("osf-projected", True)):
                path = out / variant / f"{name}-{seed}.json"
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    found = sequence(order, seed, project=project)
                    path.write_text(json.dumps(found) + "\n")
                    print(path, found["scores"], flush=True)


if __name__ == "__main__":
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    sequences(Path(sys.argv[1])) if sys.argv[1:] else report()
