"""Accelerate: the optimizer is wrapped, and steps once in four micro-batches."""

import pytest
from accelerate import Accelerator

from anchorlora import protect
from loops.cases import ACCELERATE
from loops.setting import CLIP, SETTINGS, adamw, loss_of, schedule, steps_of, tokens, trained, verdict


def learn(row, setting):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    optimizer = adamw(trained(setting.model), fused="fused" in row.optimizer)
    model, optimizer, following = accelerator.prepare(setting.model, optimizer, schedule(optimizer, steps_of(row)))
    anchor = setting.anchor(model)
    with protect(optimizer, anchor, setting.constraints):
        for ids in tokens(2).split(4) * steps_of(row):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, ids))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained(model), CLIP)
                optimizer.step()
                following.step()
                optimizer.zero_grad()
    return verdict(anchor)


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize("row", ACCELERATE, ids=str)
def test_protection_is_kept(row, note):
    note(row, {name: learn(row, build()) for name, build in SETTINGS.items()})
