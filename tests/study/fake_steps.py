"""Peak memory of a training step and of reading prompts, on tensors without storage, as torch's memory tracker counts it."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

from anchorlora.adapters import AdapterStack
from anchorlora.models.load import cache_in

ANSWER = 5  # positions whose logits training needs


class Tracker(MemTracker):
    """torch's own puts hooks on frozen parameters too, which is an error."""

    def _track_module_params_and_buffers(self, module, install_grad_hooks=True):
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)


def traced(recipe):
    """Bytes at the peak of (training, evaluating), and of those the parameters."""
    dtype = getattr(torch, recipe.base_model.dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(recipe.base_model.model), dtype=dtype)
        a = recipe.adapter
        stack = AdapterStack(model, targets=a.targets, rank=a.rank, alpha=a.alpha, dropout=a.dropout)
        stack.open(torch.Generator().manual_seed(0))
    with FakeTensorMode():
        _fake(stack.model)
        optimizer = torch.optim.AdamW(list(stack.trainable()), lr=1e-3)
        for p in stack.trainable():
            p.grad = torch.zeros_like(p)
        optimizer.step()  # its moments are there
        optimizer.zero_grad()
        training = _peak(lambda: _train(stack.model, optimizer, recipe.training), stack.model, optimizer)
        with torch.no_grad():
            evaluating = _peak(lambda: _evaluate(stack.model, recipe), stack.model, optimizer)
    return training, evaluating


def _fake(model: nn.Module) -> None:
    """Tensors on the meta device become fake ones on the CPU; those that are shared stay shared."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                fake = torch.empty(p.shape, dtype=p.dtype, device="cpu")
                module._parameters[name] = made.setdefault(id(p), nn.Parameter(fake, requires_grad=p.requires_grad))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


def _train(model, optimizer, settings):
    model.train()
    ids = torch.zeros(settings.micro_batch, settings.max_tokens, dtype=torch.long)
    outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=ids, logits_to_keep=ANSWER, use_cache=False)
    predicted = outputs.logits[:, :-1].flatten(0, 1).float()
    torch.nn.functional.cross_entropy(predicted, torch.zeros(len(predicted), dtype=torch.long)).backward()
    optimizer.step()


def _evaluate(model, recipe):
    model.eval()
    ids = torch.zeros(recipe.evaluation.eval_batch, recipe.training.max_tokens, dtype=torch.long)
    return cache_in(model(input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=1, use_cache=True))


def _peak(step, model, optimizer):
    tracker = Tracker()
    tracker.track_external(model, optimizer)
    with tracker:
        kept = step()
    del kept
    (on_cpu,) = tracker.get_tracker_snapshot("peak").values()
    return on_cpu["Total"]
