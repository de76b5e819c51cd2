"""A loop of one's own, in one process: every stock optimizer, closures, gradient scaler, autocast, torch.compile."""

import pytest
import torch

from anchorlora import Freeze, ProjectDisplacement, ProjectGradient, ProjectStep, RoutingOverlap, protect
from loops.cases import PLAIN, PLAIN_REFUSED
from loops.setting import CLIP, FEWER, SETTINGS, adamw, fresh, learned, loss_of, schedule, steps_of, tokens, trained, verdict

optim = torch.optim
MAKE = {
    "SGD": lambda p: optim.SGD(p, lr=0.3, weight_decay=0.1),
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": adamw,
    "AdamW foreach": lambda p: adamw(p, foreach=True),
    "AdamW fused": lambda p: adamw(p, fused=True),
    "AdamW with amsgrad": lambda p: adamw(p, amsgrad=True),
    "Adam": lambda p: optim.Adam(p, lr=3e-3, weight_decay=0.1),
    "Adagrad": lambda p: optim.Adagrad(p, lr=3e-2, weight_decay=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=3e-3, weight_decay=0.1),
    "Adadelta": lambda p: optim.Adadelta(p, lr=1.0, weight_decay=0.1),
    "NAdam": lambda p: optim.NAdam(p, lr=3e-3, weight_decay=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=3e-3, weight_decay=0.1),
    "Adamax": lambda p: optim.Adamax(p, lr=3e-3, weight_decay=0.1),
    "ASGD": lambda p: optim.ASGD(p, lr=0.3, weight_decay=0.1),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-3),
    "Muon": lambda p: optim.Muon(p, lr=3e-3, weight_decay=0.1),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2, weight_decay=0.1),
}


def make(name, parameters):
    if name == "AdamW8bit (bitsandbytes)":
        bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
        return bnb.optim.AdamW8bit(parameters, lr=3e-3, weight_decay=0.1)
    if name == "Muon" and not hasattr(optim, "Muon"):
        pytest.skip("this torch has no Muon; 2.9 has")
    return MAKE[name](parameters)


def learn(row, setting):
    model, optimizer = setting.model, make(row.optimizer, trained(setting.model))
    following, ids, anchor = schedule(optimizer, steps_of(row)), tokens(2), setting.anchor()
    run, step_of = model, optimizer.step
    if "compile" in row.loop:
        run, step_of = (torch.compile(part, backend="eager") for part in (model, optimizer.step))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if "scaler" in row.loop else None
    with protect(optimizer, anchor, setting.constraints):
        for step in range(steps_of(row)):
            if "closure" in row.loop:
                optimizer.step(lambda: backward(run, optimizer, ids))
            elif scaler:
                scaled(run, optimizer, scaler, ids, spoiled=step % 7 == 3)
            else:
                with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in row.loop):
                    loss = loss_of(run, ids)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(trained(model), CLIP)
                step_of()
                optimizer.zero_grad()
            following.step()
    return verdict(anchor)


def backward(model, optimizer, ids):
    optimizer.zero_grad()
    loss = loss_of(model, ids)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained(model), CLIP)
    return loss


def scaled(model, optimizer, scaler, ids, *, spoiled):
    scaler.scale(loss_of(model, ids)).backward()
    if spoiled:
        trained(model)[0].grad[0, 0] = float("inf")
    fused = optimizer.param_groups[0].get("fused")
    if not fused:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained(model), CLIP)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.drawn(3)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # a skipped first step is the scaler's doing
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method")  # of torch.compile itself
@pytest.mark.parametrize("row", PLAIN, ids=str)
def test_protection_is_kept(row, note):
    if "compile" in row.loop:
        torch._dynamo.reset()
    note(row, {name: learn(row, build()) for name, build in SETTINGS.items()})


def refuse(row):
    setting = fresh() if "bfloat16" not in row.loop else fresh(dtype=torch.bfloat16)
    parameters, anchor, constraints = trained(setting.model), setting.anchor(), setting.constraints
    if row.parallelism == "DeepSpeed ZeRO":
        home = {"__module__": "deepspeed.runtime.zero.stage_1_and_2"}  # DeepSpeed's own class; not installed
        optimizer = type("DeepSpeedZeroOptimizer", (), home)()
    elif row.optimizer == "LBFGS":
        optimizer = optim.LBFGS(parameters)
    elif "differentiable" in row.optimizer:
        optimizer = adamw(parameters, differentiable=True)
    elif "twice" in row.loop:
        optimizer = Twice(parameters, lr=0.1)
    else:
        optimizer = adamw(parameters, fused="fused" in row.optimizer)
    if "penalty" in row.loop:
        constraints = [RoutingOverlap(0.5), *constraints]
    with protect(optimizer, anchor, constraints):
        if "scaler" in row.loop:
            scaled(setting.model, optimizer, torch.amp.GradScaler("cpu"), tokens(2), spoiled=False)
        else:
            optimizer.step(lambda: backward(setting.model, optimizer, tokens(2)))


class Twice(optim.SGD):
    """An optimizer that looks twice, as sharpness-aware ones do."""

    def step(self, closure):
        closure()
        return super().step(closure)


@pytest.mark.parametrize("row", PLAIN_REFUSED, ids=str)
def test_what_cannot_be_kept_is_refused(row, note):
    with pytest.raises((TypeError, ValueError), match=row.says) as error:
        refuse(row)
    note(row, str(error.value))


OPEN = {
    r'A may move on protected directions at .*; add ProjectDisplacement\("A"\)': (learned, [Freeze("B")]),
    r'B trains, and A reads protected directions at .*; add Freeze\("B"\)': (learned, [ProjectDisplacement("A")]),
    r'.*; add Retract\("A"\)$': (fresh, [ProjectDisplacement("A")]),
    r'A may move on .* while B trains, at .*; add Freeze\("B"\) and ProjectDisplacement\("A"\)': (learned, [ProjectGradient("A")]),
    r'B trains, .*; add Freeze\("B"\)$': (learned, [ProjectStep("A")]),
    r'.*; add Retract\("A"\) and ProjectDisplacement\("A"\)': (fresh, [ProjectGradient("A")]),
}


@pytest.mark.parametrize("words", OPEN)
def test_half_protected_the_same_training_writes_on_the_core_and_what_is_open_is_named(words):
    """The premise: what is kept above is really at stake."""
    start, constraints = OPEN[words]
    setting = start()
    optimizer, anchor = adamw(trained(setting.model)), setting.anchor()
    with pytest.warns(UserWarning, match=words):
        block = protect(optimizer, anchor, constraints)
    with block:
        for _ in range(FEWER):
            backward(setting.model, optimizer, tokens(2))
            optimizer.step()
    rho, bound = verdict(anchor)
    assert rho > 1e4 * bound


@pytest.mark.parametrize("form", [ProjectGradient, ProjectStep])
def test_what_projects_gradients_under_plain_sgd_or_each_step_is_enough_and_nothing_is_named(form):
    setting = learned()
    make = optim.SGD if form is ProjectGradient else optim.Adam
    optimizer, anchor = make(trained(setting.model), lr=1e-2), setting.anchor()
    with protect(optimizer, anchor, [form("A"), Freeze("B")]):
        for _ in range(10):
            backward(setting.model, optimizer, tokens(2))
            optimizer.step()
    rho, bound = verdict(anchor)
    assert rho < 10 * bound


@pytest.mark.parametrize("name", SETTINGS)
def test_a_process_that_is_wrapped_alone_learns_what_one_without_a_wrapper_does(name):
    """As with `torchrun --nproc-per-node 1`: DistributedDataParallel waits for the gradient of a frozen factor there too."""
    ends = []
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for wrap in (torch.nn.parallel.DistributedDataParallel, lambda model: model):
            setting = SETTINGS[name]()
            run, anchor = wrap(setting.model), setting.anchor()
            optimizer = adamw(trained(run))
            with protect(optimizer, anchor, setting.constraints):
                for _ in range(3):
                    loss_of(run, tokens(2)).backward()
                    torch.nn.utils.clip_grad_norm_(trained(run), CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
            rho, bound = verdict(anchor)
            assert rho <= bound
            ends.append([p.detach().clone() for layer in anchor.layers for p in (layer.factor("A"), layer.factor("B"))])
    finally:
        torch.distributed.destroy_process_group()
    assert all(torch.allclose(one, other, rtol=0, atol=1e-6) for one, other in zip(*ends, strict=True))
