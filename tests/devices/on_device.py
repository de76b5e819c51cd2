"""What the tests of a second device do there, in a process of its own; and on the CPU, to compare.

kind: a key of KINDS. folder: holds the small benchmark and model, and what is done on the CPU in folder/cpu; what is done here goes
into folder/kind. job: a key of JOBS, with an argument behind a colon. folder/kind.json has what each job returned or failed with.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import traceback
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from unittest.mock import patch

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config, Qwen3ForCausalLM

import models
import oracle
import second_device
import small
from anchorlora import (
    METHODS,
    Freeze,
    GradientStart,
    ProjectDisplacement,
    ProtectionCallback,
    Subspace,
    Trace,
    measure,
    protect,
    run_sequence,
)
from anchorlora.adapters import AdapterStack
from anchorlora.cli.app import main
from anchorlora.constraints.sensitivity import INPUTS, OUTPUTS
from anchorlora.continual.batches import windows
from anchorlora.continual.evaluate import Scorer
from anchorlora.continual.learn import Learner, Rules, learning, refuse_wrong_gradients
from anchorlora.data import Encoded, Example
from anchorlora.errors import Interrupted
from anchorlora.measurement import FeatureCores, StepRecorder, WeightDirections, record_steps
from anchorlora.models import packing
from anchorlora.runs.autosave import Stop
from faults.runs import AskToStop
from loops.setting import SETTINGS, adamw, loss_of, tokens, trained

CPU, WHOLE, NARROW = "cpu", "whole", "narrow"
KINDS = {WHOLE: {"float64": True}, NARROW: {"float64": False}}  # how the second device is installed
POINTS = ({"task": 1, "batch": 1}, {"task": 2, "step": 2})  # where a run on the second device is stopped, to go on from there
STEPS = 12  # of a loop
TEXT = "".join(json.dumps({"text": f"an old pear, number {i}, of {i % 7} in all"}) + "\n" for i in range(30))


def run(folder, kind, method):
    """Two tasks with a method; on the second device with two stops on the way."""
    for point in POINTS if kind in KINDS else ():
        assert part(folder, folder / kind / method, method, point) is None, f"was not stopped at {point}"
    part(folder, folder / kind / method, method)


def part(folder, out, method, point=None, *, device="auto", tasks=2, **more):
    """The record of a run that goes on to its end, None of one that was stopped at a point."""
    recipe = small.recipe(folder / "data", folder / "model", device=device, trace_points=3)
    stop = Stop()
    more["callbacks"] = [AskToStop(stop, **point)] if point else []
    try:
        recipe = small.roomy(recipe, method)
        return run_sequence(recipe, METHODS[method], order=small.ORDER[:tasks], seed=42, out=out, stop=stop, **more)
    except Interrupted:
        return None


def stopped(folder, kind):
    """A run that is stopped within its second task."""
    return part(folder, folder / f"stopped-{kind}", "sfor", {"task": 2, "step": 2})


def gone_on(folder, kind, began):
    """What is said of a run that another kind of device has begun, and what its record says when it has gone on in spite of it."""
    out = folder / f"stopped-{began}"
    try:
        part(folder, out, "sfor")
    except ValueError as error:
        return str(error), part(folder, out, "sfor", allow_inexact=True).protocol["inexact"]


def back(folder, kind):
    """A run on the CPU, in the process of a device that has run something."""
    part(folder, folder / kind / "before", "seq-lora", tasks=1)
    record = part(folder, folder / kind / "back", "sfor", device="cpu", tasks=1)
    return record.host["device"]


def commands(folder, kind):
    """What is made of a finished run, the same one for all: files in a folder, and JSON by command."""
    out, run, text = folder / kind / "made", folder / CPU / "sfor", folder / "old.jsonl"
    out.mkdir(parents=True)
    text.write_text(TEXT)
    before, after, cores = run / "tasks/1-fruit/adapter", run / "tasks/2-mood/adapter", run / "tasks/1-fruit/cores.safetensors"
    for form, more in (("cat", []), ("svd", ["--rank", "2"]), ("merged", [])):
        said(["export", run, "--out", out / form, "--form", form, *more])
    said(["cores", folder / "model", before, text, "--out", out / "cores.safetensors"])
    on = {"cores": ["--cores", cores], "data": ["--data", text], "weights": ["--weights", "3"]}
    found = {
        f"audit {name}": said(["audit", before, after, *how, "--model", folder / "model", "--json"]) for name, how in on.items()
    }
    return found | {"measure": said(["measure", before, after, "--cores", cores, "--json"])}


def said(words):
    """What a command prints."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(list(map(str, words))) == 0, words
    return out.getvalue()


def loop(folder, kind, name):
    """A setting's second task in a loop of one's own, with cores that somebody has moved to the device."""
    setting, files = on(kind, name), folder / kind / f"loop-{name}"
    setting.cores = {layer: core.to(device=place(kind)) for layer, core in setting.cores.items()}
    files.mkdir(parents=True)
    anchor, ids, optimizer = setting.anchor(), tokens(2).to(place(kind)), adamw(trained(setting.model))
    looking = [Trace(files / "trace.jsonl", steps=STEPS, points=4), StepRecorder(files / "audit.jsonl", every=5)]
    with protect(optimizer, anchor, [*setting.constraints, *looking]) as held:
        for _ in range(STEPS):
            loss_of(setting.model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        held.look()
    return outcome(anchor, kind)


def trainer(folder, kind, name):
    """The same in transformers' Trainer, with accelerate under it."""
    from transformers import Trainer, TrainingArguments

    from loops.test_trainer import QUIET, data

    setting = on(kind, name)
    arguments = TrainingArguments(
        output_dir=str(folder / kind / f"trainer-{name}"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        optim="adamw_torch",
        learning_rate=3e-3,
        weight_decay=0.1,
        dataloader_pin_memory=False,
        **{**QUIET, "use_cpu": False},
    )
    callback = ProtectionCallback(setting.constraints, **setting.options())
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        Trainer(setting.model, arguments, train_dataset=data(), callbacks=[callback]).train()
    return outcome(callback.anchor, kind)


def on(kind, name):
    """A setting with its model moved to the device, cores on the CPU."""
    setting = SETTINGS[name]()
    setting.model.to(place(kind))
    return setting


def place(kind):
    return torch.device(second_device.NAME if kind in KINDS else "cpu")


def outcome(anchor, kind):
    """What `measure` says of a task, what copies of the factors say on the CPU, densely, and the factors' own bits."""
    layers, bits = [], hashlib.sha256()
    for layer in anchor.layers:
        assert layer.factor("A").device.type == place(kind).type
        A, B, A0, B0 = (x.detach().cpu() for x in (layer.current.A, layer.current.B, layer.start.A, layer.start.B))
        layers.append((oracle.change(A, B, A0, B0, layer.current.scale), layer.core.basis.cpu()))
        bits.update(A.numpy().tobytes() + B.numpy().tobytes())
    drift, dense = measure(anchor), oracle.drift(layers)
    return {
        "rho": drift.rho,
        "bound": drift.bound,
        "dense": float(dense["rho"]),
        "d_eff": float(dense["d_eff"]),
        "bits": bits.hexdigest(),
    }


def weights(folder, kind):
    """`record_steps` around full weights, on cores that lie on the CPU and on singular vectors that are made on the device."""
    draw = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 10), nn.Linear(10, 6))
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=draw)
    cores = {
        str(i): Subspace(torch.linalg.qr(torch.randn(layer.in_features, 3, generator=draw)).Q) for i, layer in enumerate(model)
    }
    x = torch.randn(5, 12, generator=draw).to(place(kind))
    model.to(place(kind))
    optimizer, lines = torch.optim.SGD(model.parameters(), lr=0.01), []
    for belief in (FeatureCores(cores), WeightDirections(2)):
        file = folder / kind / f"{type(belief).__name__}.jsonl"
        with record_steps(optimizer, dict(model.named_children()), belief, file):
            for _ in range(3):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        lines += [json.loads(line) for line in file.read_text().splitlines()]
    return lines


def copies(folder, kind):
    """How many tensors a protected step copies to the CPU, once the looks of the first two are over."""
    setting, device = on(kind, "sfor"), second_device.SimTensor.device_of_all
    optimizer, ids = adamw(trained(setting.model)), tokens(2).to(place(kind))
    with protect(optimizer, setting.anchor(), setting.constraints):
        for step in range(4):
            loss_of(setting.model, ids).backward()
            before = device.copied
            optimizer.step()
            counted = device.copied - before if step == 3 else None
    return counted


LAYERS = 72  # q_proj and v_proj of a model with 36 layers, as Qwen3-8B has


def launches(folder, kind, method):
    """Kernels that a method's constraints add to an optimizer step on 72 adapted layers, once the looks of the first two are over.

    With the largest displacement on a core that is left, over its layers, as a copy on the CPU has it.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3Config(vocab_size=48, num_hidden_layers=LAYERS // 2, **sizes)
    blocks = AdapterStack(Qwen3ForCausalLM(config).to(place(kind)), targets=("q_proj", "v_proj"), rank=4, alpha=16)
    blocks.open(torch.Generator().manual_seed(0))
    blocks.fold()
    blocks.open(torch.Generator().manual_seed(1))
    names = [layer.name for layer in blocks.anchor().layers]
    draw = torch.Generator().manual_seed(3)
    cores = {name: Subspace(torch.linalg.qr(torch.randn(32, 3 + i % 4, generator=draw)).Q) for i, name in enumerate(names)}
    wides = {name: Subspace(torch.linalg.qr(torch.randn(32, 8 + i % 3, generator=draw)).Q) for i, name in enumerate(names)}
    if any(isinstance(c, Freeze) for c in METHODS[method].at(2)):  # as after an earlier task: a B that is zero stays zero
        for layer in blocks.anchor().layers:
            layer.factor("B").data.add_(0.01)
    anchor, device, counted = blocks.anchor(cores=cores, wides=wides), second_device.SimTensor.device_of_all, {}
    optimizer = torch.optim.SGD(blocks.trainable(), lr=1e-3, foreach=True)
    known = {f"{kind}/{name}": torch.randn(32, 6, generator=draw) for kind in (INPUTS, OUTPUTS) for name in names}
    known |= {f"{place}/tail": torch.tensor(0.1, dtype=torch.float64) for place in list(known)}
    known = {place: t[:16] if place.startswith(OUTPUTS) and "v_proj" in place and t.ndim else t for place, t in known.items()}
    anchor = replace(anchor, past=known)
    # a start from the gradient needs examples, and adds nothing to a step
    constraints = [c for c in METHODS[method].at(2) if not isinstance(c, GradientStart)]

    def steps():
        for _ in range(3):
            for parameter in blocks.trainable():
                parameter.grad = torch.randn(parameter.shape, generator=draw).to(place(kind))
            before = device.launched
            optimizer.step()
            count = device.launched - before
        return count

    factors = {f"{name} at {layer.name}": layer.factor(name) for layer in anchor.layers for name in ("A", "B")}
    with protect(optimizer, anchor, constraints), optimizer.register_step_pre_hook(lambda *_: refuse_wrong_gradients(factors, 1)):
        counted["protected"] = steps()
    moved = [(layer.rows("A") - layer.start_rows("A")).detach().cpu().double() for layer in anchor.layers]
    left = max(float((each @ cores[layer.name].basis.double()).norm()) for each, layer in zip(moved, anchor.layers, strict=True))
    return counted | {"left": left, "bare": steps()}


def synchronizations(folder, kind):
    """How often an optimizer step of three packed rows waits for the device, once the looks of the first two are over.

    And how often the scores of a row of two examples do, and of one of twelve.
    """
    torch.manual_seed(0)
    stack = AdapterStack(models.qwen3().to(place(kind)), targets=("q_proj", "v_proj"), rank=4, alpha=16)
    stack.open(torch.Generator().manual_seed(0))
    layers, draw = stack.anchor().layers, torch.Generator().manual_seed(3)
    cores = {layer.name: Subspace(torch.linalg.qr(torch.randn(64, 3, generator=draw)).Q) for layer in layers}
    rows = [Encoded(Example(i, "", ""), "", tuple(range(4 + i, 14 + i)), (30 + i, 3, 0)[i % 2 :], False) for i in range(24)]
    how = {"size": 6, "micro": 2, "pad": 1, "row_tokens": 26}
    rules, counts = Rules(clip_norm=1.0), []
    device = second_device.SimTensor.device_of_all
    optimizer = torch.optim.AdamW(stack.trainable(), lr=1e-3, foreach=True)
    constraints = [ProjectDisplacement("A")]
    learner = Learner(stack.model, optimizer, stack.anchor(cores=cores), constraints, Accelerator())
    with learning(learner, rules) as training:
        for window in windows(rows, range(24), **how):
            assert len(window.micro_batches) == 3
            before = device.synchronized
            training.step(window)
            counts.append(device.synchronized - before)

    def scored(examples):
        before = device.synchronized
        Scorer(stack.model, range(64), 1, 16, place(kind), packed=True).losses(examples)
        return device.synchronized - before

    return {"step": counts[-1], "row": [scored(rows[:2]), scored(rows[:12])]}


def discipline(folder, kind):
    """What the device says to what a GPU, or Apple's, would not do either."""
    there, here = torch.ones(3, device=place(kind)), torch.ones(3)
    wide = torch.ones(3, dtype=torch.float64)
    tried = {
        "mixed": lambda: there + here,
        "mixed in place": lambda: there.add_(here),
        "a number": lambda: there + here[0],
        "a copy": lambda: there.cpu() + here,
        "written to": lambda: there.copy_(here),
        "float64": lambda: there.double(),
        "float64 made": lambda: torch.zeros(3, dtype=torch.float64, device=place(kind)),
        "float64 summed": lambda: there.sum(dtype=torch.float64),
        "float64 brought": lambda: wide.to(place(kind)),
        "float64 on its way": lambda: there.to("cpu", torch.float64),
        "float64 written": lambda: wide.copy_(there),
        "float64 after": lambda: there.cpu().double(),
        "float64 written to": lambda: there.copy_(wide),
    }
    return {name: failure(attempt) for name, attempt in tried.items()}


def failure(attempt):
    try:
        attempt()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return None


JOBS = {
    f.__name__: f
    for f in (run, stopped, gone_on, back, commands, loop, trainer, weights, copies, launches, synchronizations, discipline)
}


def work(folder, kind, jobs):
    """What each job returned, or the end of what it failed with."""
    (folder / kind).mkdir(exist_ok=True)
    found = {}
    for job in jobs:
        name, _, argument = job.partition(":")
        try:
            # the CPU has a fused one, and in packed rows a norm of its own, which round otherwise
            with (
                sdpa_kernel(SDPBackend.MATH),
                patch.object(packing, "_normalize", lambda module, x: type(module).forward(module, x)),
            ):
                found[job] = {"found": JOBS[name](folder, kind, *([argument] if argument else []))}
        except Exception:
            found[job] = {"failed": traceback.format_exc()[-3000:]}
    return json.loads(json.dumps(found))


def work_there(folder, kind, jobs):
    """The same in a process of its own, on a second device."""
    second_device.install(**KINDS[kind])
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{second_device.NAME}:0"  # accelerate knows the kinds of device by name
    (folder / f"{kind}.json").write_text(json.dumps(work(folder, kind, jobs)))
