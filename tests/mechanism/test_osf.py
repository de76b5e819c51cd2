"""PEFT's OSF projects gradients; what AdamW makes of them leaves the space, and a projection after the step keeps it."""

import json
import warnings

import pytest
import torch
from peft import OSFConfig, get_peft_model

import models
from anchorlora.adapters import realized_weights
from anchorlora.measurement import WeightDirections, record_steps


def audited(path, make, *, project):
    """(the audit's last line, the dense shares on both sides), after 10 steps."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(models.qwen3(), OSFConfig(target_modules=["q_proj", "v_proj"]))
    layers = realized_weights(model)
    starts = {name: read().detach().double() for name, read in layers.items()}
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    protected = WeightDirections().on_weights(starts)
    lows = {name: model.get_submodule(name).osf_svd_params["default"] for name in layers}
    began = {name: (low["U_low"].detach().double().clone(), low["V_low"].detach().double().clone()) for name, low in lows.items()}

    @torch.no_grad()
    def keep(*_):
        for name, low in lows.items():
            U0, V0 = began[name]
            low["V_low"].copy_(V0 + protected[name].right.outside(low["V_low"].double() - V0))
            low["U_low"].copy_(U0 + protected[name].left.outside((low["U_low"].double() - U0).T).T)

    with record_steps(optimizer, layers, protected, path, every=10):
        hook = optimizer.register_step_post_hook(keep) if project else None
        for step in range(10):
            ids = models.tokens(4, 12, seed=step)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if hook:
        hook.remove()
    reads, writes, size = 0.0, 0.0, 0.0
    for name, read in layers.items():
        U, _, Vt = torch.linalg.svd(starts[name])
        k = min(starts[name].shape) // 2
        dW = read().detach().double() - starts[name]
        reads += float((dW @ Vt[:k].T).square().sum())
        writes += float((U[:, :k].T @ dW).square().sum())
        size += float(dW.square().sum())
    return json.loads(path.read_text().splitlines()[-1]), (reads / size) ** 0.5, (writes / size) ** 0.5


ADAMW = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)  # noqa: E731
SGD = lambda parameters: torch.optim.SGD(parameters, lr=1.0)  # noqa: E731


@pytest.mark.parametrize(
    ("make", "project", "low", "high"), [(ADAMW, False, 0.05, 1.0), (ADAMW, True, 0.0, 1e-5), (SGD, False, 0.0, 1e-5)]
)
def test_osf_leaks_under_adamw_and_only_there_and_a_projected_step_keeps_it(make, project, low, high, tmp_path):
    line, reads, writes = audited(tmp_path / "a.jsonl", make, project=project)
    for name, dense in (("rho", reads), ("left_rho", writes)):
        assert low <= line[name] <= high, (name, line[name])
        assert line[name] == pytest.approx(dense, rel=1e-6, abs=1e-8)
    if make is ADAMW:
        assert line["violation_before"] > 1e-4
    if project:
        assert line["violation_after"] < 1e-3 * line["violation_before"]
