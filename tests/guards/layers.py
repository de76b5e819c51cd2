"""What a layer really computes, dense in float64 with everything that is in it, and the story in which it is tried.

Independent of the project: a layer is a function, asked for the identity and for its core, before and after.
"""

from __future__ import annotations

import copy
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from anchorlora import Anchor, Freeze, ProjectDisplacement, ProjectGradient, Retract, Subspace, protect
from anchorlora.adapters import anchor as anchors
from anchorlora.adapters import lora_layers
from anchorlora.constraints.protect import Protection, StepWatch
from anchorlora.constraints.steps import StepHooks

SFOR = [ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")]
HARD = [Retract("A"), ProjectGradient("A"), ProjectDisplacement("A")]
WIDTH, K, STEPS = 32, 6, 12


def config(**options):
    return LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options})


def adapted(*, learned=True, bias_in_base=False, tied=False, **options):
    """A PEFT model of two layers with the adapter "default"; learned: with a B as if it had been trained."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    settings = {"vocab_size": 48, "head_dim": 8, "tie_word_embeddings": tied, "bos_token_id": None, "eos_token_id": None}
    base = LlamaForCausalLM(LlamaConfig(attention_bias=bias_in_base, **sizes, **settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(base, config(**options))
    if learned:
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for module in linear(model).values():
                B = module.lora_B["default"].weight
                B.copy_(0.05 * torch.randn(B.shape, generator=draw))
    return model.train()


def linear(model):
    """The adapted layers whose function is a matrix."""
    return {name: module for name, module in lora_layers(model).items() if isinstance(module.get_base_layer(), nn.Linear)}


def directions(model):
    """A core for every adapted linear layer; any orthonormal basis serves."""
    draw = torch.Generator().manual_seed(7)
    return {name: Subspace(torch.linalg.qr(torch.randn(m.in_features, K, generator=draw)).Q) for name, m in linear(model).items()}


@dataclass
class Truth:
    """What the layers compute at one moment, by layer: f(I) (d_in, d_out) and f(V) (k, d_out), float64."""

    identity: dict
    core: dict

    @classmethod
    def of(cls, model, cores):
        layers = lora_layers(model)
        whole = {name: asked(layers[name], torch.eye(core.d, dtype=torch.float64)) for name, core in cores.items()}
        return cls(whole, {name: asked(layers[name], core.basis.double().T) for name, core in cores.items()})

    def rho(self, later):
        """|change on the core| / |change|, over all layers; 0 where nothing moved."""
        eff, old = (sum(float((b[n] - a[n]).square().sum()) for n in a) ** 0.5 for a, b in self._pairs(later))
        return old / eff if eff else 0.0

    def _pairs(self, later):
        return (self.identity, later.identity), (self.core, later.core)


@torch.no_grad()
def asked(module, rows):
    """A layer's own forward in float64, on a copy and without dropout."""
    return copy.deepcopy(module).double().eval()(rows)


class Story:
    """A model whose second task begins, and what somebody does with it."""

    def __init__(self, model):
        self.model, self.cores, self.anchor = model, directions(model), None
        self.before = Truth.of(model, self.cores)
        self.layer = next(iter(linear(model).values()))

    def make_anchor(self, **how):
        self.anchor = Anchor.of(self.model, cores=self.cores, **how)

    def adamw(self):
        return torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=3e-3)

    def learn(self, constraints=SFOR, *, optimizer=None, steps=STEPS, after=None, do=None, **how):
        """Train under protection; after: the step behind which something is done."""
        if self.anchor is None:
            self.make_anchor()
        optimizer = optimizer or self.adamw()
        with protect(optimizer, self.anchor, constraints, **how):
            for step in range(1, steps + 1):
                self.step(optimizer)
                if step == after:
                    do(optimizer)

    def step(self, optimizer):
        ids = torch.randint(48, (8, 10), generator=torch.Generator().manual_seed(3))
        self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def rho(self):
        """The true one."""
        return self.before.rho(Truth.of(self.model, self.cores))

    def moved(self):
        """Whether any layer computes something else than before."""
        now = Truth.of(self.model, self.cores)
        return any(not torch.equal(now.identity[name], was) for name, was in self.before.identity.items())


@contextmanager
def unguarded(monkeypatch):
    """The constraints alone, without a look at anything else: what a layer did before somebody looked."""
    place = sys.modules["anchorlora.constraints.protect"]  # the package has a function of this name
    with monkeypatch.context() as patch:
        patch.setattr(Anchor, "changed", lambda self: [])
        patch.setattr(anchors, "refuse_unprotectable", lambda *_: None)
        for name in ("refuse_unprotected", "refuse_moved", "refuse_stuck"):
            patch.setattr(place, name, lambda *_: None)
        patch.setattr("anchorlora.constraints.steps.project_copies", lambda *_: None)
        patch.setattr(sys.modules["anchorlora.constraints.optimizers"], "keeps_copies", lambda _: False)
        patch.setattr(Protection, "look", lambda self, step=None: None)
        patch.setattr(StepWatch, "look", lambda self, step=None: None)
        patch.setattr(StepHooks, "settle", lambda self: None)
        yield
