"""What `protect` refuses before the first step, by name."""

import pickle
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model

import models
from anchorlora import (
    Anchor,
    AnswerSensitivity,
    FeatureStore,
    Freeze,
    KroneckerBrake,
    ProjectDisplacement,
    ProjectGradient,
    Retract,
    SensitiveCore,
    Subspace,
    measure,
    protect,
)
from anchorlora.adapters import AdapterStack, lora_layers
from anchorlora.errors import NotFinite
from anchorlora.integrations.base import CallbackBase
from toys import anchor_of, displacement, norm, on_core, optimizer_for, train

SFOR = [ProjectGradient("A"), Freeze("B"), ProjectDisplacement("A")]


def hooks_of(optimizer):
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def test_factors_that_hold_nan_are_refused_at_attach_with_the_layer():
    anchor = anchor_of()
    with torch.no_grad():
        anchor.layers[1].factor("B")[0, 0] = float("nan")
    lost = pytest.raises(NotFinite, match="factor B at layer1 holds NaN or infinite values before step 4")
    with lost, protect(optimizer_for(anchor, "adamw"), anchor, SFOR, step=3):
        pass


@pytest.mark.parametrize("kind", ["core", "wide"])
def test_directions_that_were_written_to_are_refused_at_attach_with_layer_numbers_and_remedy(kind):
    """Constraints that read them and constraints that do not: what is measured on them would be wrong as well."""
    for damage, error, message in (
        (1e-2, ValueError, r"at layer1: .*\|V\^T V - I\| = \d\.\de-0\d, allowed 1e-05; orthonormalize it first"),
        (float("nan"), NotFinite, "at layer1 holds NaN or infinite values before step 1; .*make it again"),
        (float("inf"), NotFinite, "at layer1 holds NaN or infinite values before step 1; .*make it again"),
    ):
        for constraints in (SFOR, [Freeze("B")]):
            anchor = anchor_of(wide=8)
            getattr(anchor.layers[1], kind).basis[0, 0] += damage
            optimizer = optimizer_for(anchor, "adamw")
            with pytest.raises(error, match=message), protect(optimizer, anchor, constraints):
                pass
            assert hooks_of(optimizer) == 0


def test_a_damaged_wide_basis_is_refused_also_where_a_layer_has_no_core():
    anchor = anchor_of(wide=8)
    anchor.layers[1].wide.basis[0, 0] += 1e-2
    bare = Anchor(tuple(replace(layer, core=None) for layer in anchor.layers))
    refused = pytest.raises(ValueError, match="the wide basis at layer1: .*not orthonormal")
    with refused, protect(optimizer_for(bare, "adamw"), bare, [Freeze("B")]):
        pass


def adapted():
    """A model with an adapter, its scope with cores, and an optimizer of all that trains."""
    blocks = AdapterStack(models.qwen3(), targets=("q_proj", "v_proj"), rank=4, alpha=16)
    blocks.open(torch.Generator().manual_seed(1))
    cores = {layer.name: Subspace(torch.linalg.qr(torch.randn(64, 4)).Q) for layer in blocks.anchor().layers}
    return blocks, cores


def test_a_scope_made_before_the_model_got_other_parameters_is_refused_at_attach():
    blocks, cores = adapted()
    anchor = blocks.anchor(cores=cores)
    optimizer = torch.optim.AdamW(blocks.trainable())
    layer = lora_layers(blocks.model)["model.layers.1.self_attn.v_proj"]
    layer.lora_A["default"].weight = torch.nn.Parameter(layer.lora_A["default"].weight.detach().clone())
    refused = pytest.raises(
        ValueError, match="factors of model.layers.1.self_attn.v_proj in the model are not those of this anchor"
    )
    with refused, protect(optimizer, anchor, SFOR):
        pass


@pytest.mark.parametrize("factor", ["A", "B"])
@pytest.mark.parametrize("early", [True, False], ids=["before the anchor", "after it"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_factors_of_a_model_that_are_not_finite_are_refused_as_such(factor, early, value):
    """As after a first task that diverged: the layer's answers are NaN too, which is no other layer."""
    blocks, cores = adapted()
    anchor = blocks.anchor(cores=cores)
    with torch.no_grad():
        anchor.layers[1].factor(factor)[0, 0] = value
    anchor = blocks.anchor(cores=cores) if early else anchor
    refused = pytest.raises(
        NotFinite, match=f"factor {factor} at {anchor.layers[1].name} holds NaN or infinite values before step 1"
    )
    with refused, protect(torch.optim.AdamW(blocks.trainable()), anchor, SFOR):
        pass


def test_a_callback_and_an_anchor_go_with_their_model_to_another_process():
    """As where a trainer starts its processes itself, and pickles what they are given."""
    blocks, cores = adapted()
    given = CallbackBase(cores=cores), blocks.anchor(cores=cores)
    callback, anchor = pickle.loads(pickle.dumps(given))
    optimizer = torch.optim.AdamW([p for p in anchor.model.parameters() if p.requires_grad])
    callback.begin(anchor.model, optimizer)
    with protect(optimizer, anchor, [Retract("A"), ProjectDisplacement("A")], check_every=1):
        for layer in anchor.layers:
            layer.factor("A").grad = torch.ones_like(layer.factor("A"))
        optimizer.step()
    callback.end()
    assert measure(callback.anchor).exact


def test_an_iterator_of_constraints_and_one_alone_protect_and_a_class_is_refused():
    """An iterator was read to its end before the first constraint began: nothing was protected, without a word."""
    for given in (iter(SFOR), ProjectDisplacement("A")):
        anchor = anchor_of()
        optimizer = optimizer_for(anchor, "adamw")
        with protect(optimizer, anchor, given) as active:
            train(anchor, optimizer, 3)
        assert len(active) == (1 if isinstance(given, ProjectDisplacement) else len(SFOR))
        assert all(on_core(layer, displacement(layer)) < 1e-6 < norm(displacement(layer)) for layer in anchor.layers)
    for given in (ProjectDisplacement, [ProjectDisplacement]):
        refused = pytest.raises(TypeError, match=r"ProjectDisplacement is a class .* give ProjectDisplacement\(\.\.\)")
        with refused, protect(optimizer_for(anchor, "adamw"), anchor, given):
            pass
    assert CallbackBase(ProjectDisplacement("A")).constraints == (ProjectDisplacement("A"),)


@pytest.mark.parametrize("constraint", [ProjectDisplacement, ProjectGradient, Retract])
def test_a_core_of_another_width_than_the_factor_reads_is_refused(constraint):
    blocks, cores = adapted()
    anchor = blocks.anchor(cores=cores)
    refused = pytest.raises(ValueError, match=f"the core at {anchor.layers[0].name} has width 64, but its B reads 4 inputs")
    with refused, protect(torch.optim.AdamW(blocks.trainable()), anchor, [constraint("B")]):
        pass


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_anchor_that_is_made_under_another_default_dtype_or_without_gradients_protects(dtype, mode):
    blocks, cores = adapted()
    torch.set_default_dtype(dtype)
    try:
        with mode():
            anchor = blocks.anchor(cores=cores)
        with protect(torch.optim.SGD(blocks.trainable(), lr=0.1), anchor, [Retract("A"), ProjectDisplacement("A")]) as active:
            for p in blocks.trainable():
                p.grad = torch.randn_like(p)
            active.watch.optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert measure(anchor).exact


def test_a_loop_under_another_default_device_is_protected():
    """Here "meta" stands for an accelerator: torch refuses a CPU's generator there, and what is made on it cannot be read."""
    blocks, _ = adapted()
    ids = models.tokens(4)

    def losses(count):
        for row in ids[:count]:
            yield blocks.model(input_ids=row[None], labels=row[None], use_cache=False).loss

    torch.set_default_device("meta")
    try:
        store = FeatureStore(limit=16, held_out=4)
        with store.collect(blocks.model):
            list(losses(4))
        assert store.cores()
        past = AnswerSensitivity(examples=4).end_task(Anchor.of(blocks.model, losses=losses))
        blocks.open(torch.Generator().manual_seed(1))
        anchor = blocks.anchor(cores=SensitiveCore(1.0, 8, 8).cores(past), past=past)
        optimizer = torch.optim.SGD(blocks.trainable(), lr=0.1)
        with protect(optimizer, anchor, [Retract("A"), ProjectDisplacement("A"), KroneckerBrake()]):
            for loss in losses(3):
                loss.backward()
                optimizer.step()
        drift = measure(anchor)
    finally:
        torch.set_default_device(None)
    assert drift.exact
    assert drift.d_eff > 0


def test_cores_of_other_layers_are_refused_by_name():
    blocks, cores = adapted()
    layer, core = cores.popitem()
    with pytest.raises(LookupError, match=f"no cores for {layer} and 0 others; cores for elsewhere"):
        blocks.anchor(cores={**cores, "elsewhere": core})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cores": "old.safetensors"}, r"cores is a str; .* read_cores\(FILE\)"),
        ({"past": AnswerSensitivity()}, "past is a .*end_task"),
    ],
)
def test_what_is_no_mapping_is_refused_with_what_makes_one(given, said):
    blocks, _ = adapted()
    with pytest.raises(TypeError, match=said):
        Anchor.of(blocks.model, **given)
    with pytest.raises(TypeError, match=said):
        CallbackBase(**given).begin(blocks.model, torch.optim.AdamW(blocks.trainable()))


@pytest.mark.filterwarnings("ignore")  # PEFT's own, of the second adapter
def test_a_model_that_was_adapted_twice_is_refused_with_the_remedy():
    """As where a cell of a notebook is run again."""
    config = LoraConfig(r=2, target_modules=["q_proj"])
    twice = get_peft_model(get_peft_model(models.qwen3(), config), config)
    with pytest.raises(LookupError, match="holds 2 PEFT models; .* load the base model anew if get_peft_model was called twice"):
        Anchor.of(twice)


@pytest.mark.parametrize("every", [0, -3])
def test_looking_every_zero_steps_is_refused(every):
    anchor = anchor_of()
    optimizer = optimizer_for(anchor, "adamw")
    refused = pytest.raises(ValueError, match=f"check_every is {every}; give the number")
    with refused, protect(optimizer, anchor, SFOR, check_every=every):
        pass
    assert hooks_of(optimizer) == 0
