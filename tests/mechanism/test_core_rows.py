"""The cores of benchmarks/core_rows.py are made of the rows that they name."""

from pathlib import Path

import pytest
import torch

import models
from anchorlora import Anchor
from anchorlora.adapters import AdapterStack
from anchorlora.continual.batches import Window, example_mean, micro_batch
from anchorlora.data import Encoded, Example

PROMPT, ANSWER = (5, 6, 7, 8, 9), (3, 4)


@pytest.fixture
def core_rows(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks import core_rows

    return core_rows


@pytest.mark.parametrize("which", ["first", "spread", "answers"])
def test_rows_are_those_that_the_finished_model_reads(which, core_rows):
    blocks = AdapterStack(models.qwen3(), targets=("q_proj",), rank=2, alpha=4)
    blocks.open(torch.Generator().manual_seed(0))
    model = blocks.model.eval()
    read = []
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.1.self_attn.q_proj"))

    def losses(count):
        for i in range(count):
            batch = micro_batch([Encoded(Example(i, "", ""), "", (10 + i, *PROMPT), ANSWER, False)], pad=1)
            yield example_mean(model(**batch.inputs, logits_to_keep=batch.keep).logits, batch, Window((batch,), 1, len(ANSWER), 1))

    hook = layer.register_forward_hook(lambda module, args, output: read.append(args[0][0].detach()))
    constraint = core_rows.CoreOfRows(which, rows=12, examples=3, at_least=1, energy=1.0, at_most=12)
    past = constraint.end_task(Anchor.of(model, losses=losses))
    hook.remove()
    (found,) = [rows for name, rows in past.items() if name.endswith("layers.1.self_attn.q_proj")]
    whole = torch.cat([x[-3:-1] for x in read] if which == "answers" else read)
    expected = {"first": whole[:12], "answers": whole[:12], "spread": found}[which]
    assert torch.allclose(found, expected, atol=1e-6)
    assert all(float((whole - row).norm(dim=1).min()) < 1e-5 for row in found)
    core = next(made.core for name, made in constraint.cores(past).items() if name.endswith("layers.1.self_attn.q_proj"))
    assert core.k == torch.linalg.matrix_rank(found.double())
    inside = found.double() @ core.basis.double() @ core.basis.double().T
    assert torch.allclose(inside, found.double(), atol=1e-4)
