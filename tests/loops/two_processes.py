"""Run by two processes over gloo: each row's result goes to a folder as JSON.  One launch for all rows."""

from __future__ import annotations

import json
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from anchorlora import ProtectionCallback, Subspace, measure, protect
from anchorlora.constraints import EffectiveResponse, EffectiveSparsity, FisherAnchor, KroneckerBrake, RoutingOverlap
from anchorlora.constraints.sensitivity import INPUTS, OUTPUTS
from loops.cases import FSDP2, ROWS, TWO, TWO_REFUSED, Row
from loops.setting import CLIP, SETTINGS, adamw, fresh, loss_of, schedule, steps_of, tokens, trained, verdict

ALWAYS = ("agreement", "penalties", "beside")
OPTIMIZERS = {
    "AdamW": adamw,
    "AdamW foreach": lambda p: adamw(p, foreach=True),
    "AdamW fused": lambda p: adamw(p, fused=True),
    "ZeroRedundancyOptimizer(AdamW)": lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=3e-3, weight_decay=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
}


def main(folder: Path, rows: list[str]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    work = {"agreement": agreement, "penalties": penalties, "beside": beside} | {
        str(row): (lambda row=row: tried(row)) for row in TWO
    }
    work |= {str(row): (lambda row=row: refused(row)) for row in TWO_REFUSED}
    assert set(work) <= {str(row) for row in ROWS} | {*ALWAYS}
    results = {}
    for name, job in [(name, job) for name, job in work.items() if name in (*rows, *ALWAYS)]:
        try:
            results[name] = job()
        except Exception:
            results[name] = traceback.format_exc()
        print(rank, name, flush=True)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def tried(row):
    rank = 3 if "rank 3" in row.loop else 1 if "rank 1" in row.loop else 4
    return {name: learn(row, build(rank=rank)) for name, build in SETTINGS.items()}


def learn(row, setting):
    """rho, its bound, and whether both processes ended with the same bits."""
    if "Trainer" in row.loop:
        anchor = by_trainer(row, setting)
    elif "Accelerate" in row.loop:
        anchor = by_accelerate(row, setting)
    else:
        model = wrapped(row, setting.model)
        optimizer = OPTIMIZERS[row.optimizer](trained(model))
        anchor = setting.anchor(model)
        following = schedule(optimizer, steps_of(row))
        more = [EffectiveSparsity(0.01)] if "penalty" in row.loop else []
        with protect(optimizer, anchor, [*more, *setting.constraints]):
            for _ in range(steps_of(row)):
                step(row, model, optimizer)
                following.step()
    rho, bound = verdict(anchor)
    return [rho, bound, alike(anchor)]


def step(row, model, optimizer):
    mine = tokens(2)[dist.get_rank() :: 2]
    if "no_sync" in row.loop:
        with model.no_sync():
            (loss_of(model, mine[:4]) / 2).backward()
        (loss_of(model, mine[4:]) / 2).backward()
    else:
        loss_of(model, mine).backward()
    torch.nn.utils.clip_grad_norm_(trained(model), CLIP)
    optimizer.step()
    optimizer.zero_grad()


def wrapped(row, model):
    if row.parallelism == "DDP":
        return DistributedDataParallel(model)
    if row.parallelism == "FSDP1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if "bfloat16" in row.loop else MixedPrecisionPolicy()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def by_accelerate(row, setting):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer = accelerator.prepare(setting.model, adamw(trained(setting.model)))
    following, anchor = schedule(optimizer.optimizer, steps_of(row)), setting.anchor(model)
    with protect(optimizer, anchor, setting.constraints):
        for ids in tokens(2)[dist.get_rank() :: 2].split(2) * steps_of(row):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, ids))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained(model), CLIP)
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    following.step()
    return anchor


def by_trainer(row, setting):
    from transformers import Trainer, TrainingArguments

    from loops.test_trainer import data

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps_of(row),
        per_device_train_batch_size=4,
        optim=row.optimizer,
        learning_rate=3e-3,
        weight_decay=0.1,
        max_grad_norm=CLIP,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
        logging_strategy="no",
    )
    assert arguments.world_size == 2
    callback = ProtectionCallback(setting.constraints, **setting.options())
    Trainer(setting.model, arguments, train_dataset=data(), callbacks=[callback]).train()
    return callback.anchor


def alike(anchor) -> bool:
    """Whether both processes hold bitwise equal factors; where factors are split, equal once gathered."""
    whole = [getattr(layer.current.whole(), name).detach().contiguous() for layer in anchor.layers for name in ("A", "B")]
    others = [x.clone() for x in whole]
    for x in others:
        dist.broadcast(x, 0)
    return all(torch.equal(a, b) for a, b in zip(whole, others, strict=True))


def refused(row):
    """What the refusal says."""
    try:
        refuse(row)
    except (TypeError, ValueError) as error:
        return str(error)
    return "it was not refused"


def refuse(row):
    setting = fresh()
    if "before fully_shard" in row.loop:
        anchor = setting.anchor()
        model = wrapped(row, setting.model)
        with protect(adamw(trained(model)), anchor, setting.constraints):
            return
    model = wrapped(row, setting.model)
    if "cores differ" in row.loop:
        turned = {layer: Subspace(core.basis.flip(0)) for layer, core in setting.cores.items()}
        setting.cores = turned if dist.get_rank() else setting.cores
    anchor = setting.anchor(model)
    with protect(adamw(trained(model)), anchor, setting.constraints):
        return


def agreement():
    """Largest relative difference of A and B after 20 float64 steps on one global batch, with and without DDP, by setting."""
    out = {}
    for name, build in SETTINGS.items():
        ends = []
        for parallel in (False, True):
            setting = build(dtype=torch.float64)
            model = DistributedDataParallel(setting.model) if parallel else setting.model
            optimizer, anchor = adamw(trained(setting.model)), setting.anchor(model)
            with protect(optimizer, anchor, setting.constraints):
                for _ in range(20):
                    ids = tokens(2)
                    loss_of(model, ids[dist.get_rank() :: 2] if parallel else ids).backward()
                    torch.nn.utils.clip_grad_norm_(trained(setting.model), CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
            ends.append([layer.factor(f).detach().clone() for layer in anchor.layers for f in ("A", "B")])
            moved = max(float(layer.change().norm()) for layer in anchor.layers)
        out[name] = [max(float((a - b).norm() / a.norm()) for a, b in zip(*ends, strict=True)), moved, alike(anchor)]
    return out


def beside():
    """What `measure` says is outside, before and after something writes to a norm and to an adapted layer's weight under FSDP2."""
    setting = fresh()
    model = wrapped(Row("plain loop", FSDP2, "AdamW"), setting.model)
    anchor, said = setting.anchor(model), []
    step(Row("plain loop", FSDP2, "AdamW"), model, adamw(trained(model)))
    said.append(measure(anchor).outside)
    inner = model.base_model.model.model
    with torch.no_grad():
        for parameter in (inner.norm.weight, inner.layers[0].self_attn.q_proj.base_layer.weight):
            parameter.add_(0.1)
            said.append(measure(anchor).outside)
            parameter.sub_(0.1)
    return said


def penalties():
    """Largest relative difference of a penalty's gradient with split and with whole factors, and its size, by penalty."""
    out = {}
    for penalty in (RoutingOverlap(0.5), EffectiveSparsity(0.1), EffectiveResponse(2.0), FisherAnchor(3.0), KroneckerBrake(2.0)):
        found = []
        for split in (False, True):
            setting = fresh()
            torch.manual_seed(1)
            for p in trained(setting.model):
                p.data += 0.1 * torch.randn(p.shape)
            model = wrapped(Row("plain loop", FSDP2, "AdamW"), setting.model) if split else setting.model
            anchor = setting.anchor(model)
            draw = torch.Generator().manual_seed(2)
            past = {"fisher_constant": torch.zeros((), dtype=torch.float64)}
            for layer in anchor.layers:
                for factor in ("A", "B"):
                    for sum_ in ("fisher", "fisher_start"):
                        past[f"{sum_}/{layer.name}.{factor}"] = torch.rand(layer.factor(factor).shape, generator=draw)
                for place, width in ((INPUTS, layer.factor("A").shape[1]), (OUTPUTS, layer.factor("B").shape[0])):
                    past[f"{place}/{layer.name}"] = torch.rand(width, 3, generator=draw)
                    past[f"{place}/{layer.name}/tail"] = torch.tensor(0.1, dtype=torch.float64)
            layers = tuple(replace(layer, wide=layer.core) for layer in anchor.layers)
            anchor = replace(anchor, layers=layers, past=past)
            active = penalty.begin_task(anchor)
            with torch.no_grad():
                for layer in layers:  # as a step has moved them
                    for factor in ("A", "B"):
                        layer.rows(factor).mul_(1.5)
                active.add_penalty_grads()
                active.add_penalty_grads()  # the second time is added to the first
            grads = [(layer.factor(f), layer.factor(f).grad) for layer in layers for f in ("A", "B")]
            found.append([getattr(grad, "full_tensor", lambda g=grad: g)() for _, grad in grads if grad is not None])
            assert all(hasattr(p, "placements") == split for p, _ in grads)
        size = max(float(a.norm()) for a in found[0])
        assert len(found[0]) == len(found[1])
        out[type(penalty).__name__] = [max(float((a - b).norm()) for a, b in zip(*found, strict=True)) / size, size]
    return out
