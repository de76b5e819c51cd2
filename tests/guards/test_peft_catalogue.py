"""Every option and every start that PEFT has for LoRA: protected, true rho zero to rounding, or refused in words.

The list must name each field of `LoraConfig`, so a PEFT with a new one fails here until somebody has tried it.
"""

import dataclasses
import warnings

import pytest
from peft import LoraConfig

from anchorlora.errors import ProtectionLost
from golden import note_row
from guards.layers import HARD, SFOR, Story, adapted, linear

ZERO = 1e-6
PRESERVED = "preserved"


# field -> how it is tried: (options, what comes of it); None: a field that says nothing of the function
TRIED = {
    "r": ({"r": 3}, PRESERVED),
    "lora_alpha": ({"lora_alpha": 1}, PRESERVED),
    "lora_dropout": ({"lora_dropout": 0.2}, PRESERVED),
    "target_modules": ({"target_modules": "all-linear"}, PRESERVED),
    "exclude_modules": ({"exclude_modules": ["v_proj"]}, PRESERVED),
    "layers_to_transform": ({"layers_to_transform": [1]}, PRESERVED),
    "layers_pattern": ({"layers_to_transform": [1], "layers_pattern": "layers"}, PRESERVED),
    "rank_pattern": ({"rank_pattern": {"v_proj": 2}}, PRESERVED),
    "alpha_pattern": ({"alpha_pattern": {"v_proj": 3}}, PRESERVED),
    "use_rslora": ({"use_rslora": True}, PRESERVED),
    "layer_replication": ({"layer_replication": [[0, 2], [1, 2]]}, PRESERVED),
    "bias": ({"bias": "all", "bias_in_base": True}, "base_layer.bias at .* trains beside the protected factors"),
    "lora_bias": ({"lora_bias": True, "bias_in_base": True}, "lora_B.default.bias at .* trains beside the protected factors"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "lm_head.* trains beside the protected layers.*also_training"),
    "trainable_token_indices": ({"trainable_token_indices": [3]}, "trainable_tokens_delta.* trains beside the protected layers"),
    "ensure_weight_tying": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, "embed_tokens.* trains beside"),
    "target_parameters": ({"target_modules": [], "target_parameters": ["q_proj.weight"]}, "PEFT's ParamWrapper, whose update"),
    "use_dora": ({"use_dora": True}, "uses DoRA, whose update is not a product"),
    "use_qalora": ({"use_qalora": True}, PRESERVED),  # acts on GPTQ layers only
    "qalora_group_size": ({"use_qalora": True, "qalora_group_size": 8}, PRESERVED),
    "use_bdlora": ({"use_bdlora": lambda: _bdlora()}, "PEFT's BdLoraLinearVariant, whose update"),
    "arrow_config": None,  # routes between finished adapters, which it needs
    "kasa_config": ({"kasa_config": lambda: _named("KasaConfig")}, "PEFT's KasaLinearVariant, whose update"),
    "velora_config": ({"velora_config": lambda: _named("VeloraConfig")}, "PEFT's VeloraLinearVariant, whose update"),
    "monteclora_config": ({"monteclora_config": lambda: _named("MontecloraConfig")}, "PEFT's MontecloraLinearVariant, whose"),
    "alora_invocation_tokens": ({"alora_invocation_tokens": [1]}, "PEFT's ALoraLinearVariant, whose update"),
    "fan_in_fan_out": None,  # of Conv1D layers, which test_elsewhere tries
    "runtime_config": None,
    "task_type": None,
    "peft_type": None,
    "auto_mapping": None,
    "peft_version": None,
    "base_model_name_or_path": None,
    "revision": None,
    "inference_mode": None,
    "megatron_config": None,  # layers of Megatron
    "megatron_core": None,
    "init_lora_weights": None,  # below
    "loftq_config": None,
    "eva_config": None,
    "corda_config": None,
    "lora_ga_config": None,
}
STARTS = [True, False, "gaussian", "eva", "olora", "pissa", "pissa_niter_4", "orthogonal"]
VARIANT_STARTS = {"mica": "PEFT's MiCALinearVariant, whose update"}


def _named(name):
    from peft.tuners.lora import config

    return getattr(config, name)()


def _bdlora():
    from peft.tuners.lora.config import BdLoraConfig

    return BdLoraConfig(target_modules_bd_a=["q_proj"], target_modules_bd_b=["v_proj"], nblocks=2)


def story(options, *, learned):
    made = {name: value() if callable(value) else value for name, value in options.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Story(adapted(learned=learned, **made))


def test_every_field_of_peft_is_tried():
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields == set(TRIED) & fields, f"PEFT has new options: {sorted(fields - set(TRIED))}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, tried in TRIED.items() if tried])
def test_an_option_is_protected_or_refused(name):
    options, outcome = TRIED[name]
    if name not in {field.name for field in dataclasses.fields(LoraConfig)}:
        pytest.skip(f"this PEFT has no {name}")
    tried(f"`{name}`", options, outcome)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", [*STARTS, *VARIANT_STARTS], ids=str)
def test_a_start_is_protected_or_refused(start):
    if isinstance(start, str) and start not in f"pissa_niter_4 {LoraConfig.__annotations__['init_lora_weights']}":
        pytest.skip(f"this PEFT has no {start}")
    tried(f"`init_lora_weights={start!r}`", {"init_lora_weights": start}, VARIANT_STARTS.get(start, PRESERVED), learned=False)


def tried(what, options, outcome, *, learned=True):
    now = story(options, learned=learned)
    fresh = not any(bool(layer.lora_B["default"].weight.any()) for layer in linear(now.model).values())
    if outcome == PRESERVED:
        now.learn(HARD if fresh else SFOR)
        leak = now.rho()
        assert now.moved()
        assert leak <= ZERO
        note_row("guards", what=f"PEFT: {what}", rho=leak, outcome=outcome, said="")
        return
    with pytest.raises((TypeError, ValueError, ProtectionLost), match=outcome) as raised:
        now.learn(SFOR)
    note_row("guards", what=f"PEFT: {what}", rho=None, outcome="refused", said=str(raised.value))
