"""What moves a protected layer besides its two factors: each is refused, stopped, or projected as well.

Every case is told twice. Without the guard, its true rho, dense over everything that is in the layer, shows that it matters. With
it, training ends in words, or the true rho is zero to rounding. A new case is one function; `make tables` puts it into
docs/supported.md.
"""

import copy
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from anchorlora import AdaptedLayer, Anchor, FeatureStore, measure, protect
from anchorlora.errors import ProtectionLost
from anchorlora.geometry import Factors
from golden import note_row
from guards.layers import HARD, SFOR, STEPS, Story, adapted, config, linear, unguarded

LEAKS = 1e-3  # a true rho that nobody would call rounding; float32 storage explains about 1e-7 here
ZERO = 1e-6
STEP = 5  # behind which something is done
CASES = {}


def case(what, outcome, says="", *, measured=True):
    """what: the row of the table; outcome: refused before the first step, stopped at the next look, or kept; says: a regex;
    measured: whether `measure` has to tell of it.
    """

    def added(tell):
        CASES[tell.__name__] = (tell, what, outcome, says, measured)
        return tell

    return added


# -- before the first step --------------------------------------------------------------------------------------------------------


@case("another adapter is active and trains", "refused", "the adapter 'default' is not active at .*active: task2", measured=False)
def another_adapter_trains():
    story = Story(adapted())
    story.model.add_adapter("task2", config())
    story.model.set_adapter("task2")
    with torch.no_grad():
        for layer in linear(story.model).values():
            layer.lora_B["task2"].weight.normal_(std=0.05)
    yield story
    story.make_anchor(adapter_name="default")
    story.learn()


@case("two active adapters train, one is protected", "refused", r"lora_A.task2.weight at .* trains beside the protected factors")
def two_adapters_train():
    story = Story(adapted())
    story.model.add_adapter("task2", config())
    story.model.base_model.set_adapter(["default", "task2"])
    yield story
    story.make_anchor(adapter_name="default")
    story.learn()


@case("the base weight of a protected layer trains", "refused", r"base_layer.weight at .* trains beside the protected factors")
def base_weight_trains():
    story = Story(adapted())
    yield story
    story.layer.get_base_layer().weight.requires_grad_(True)
    story.learn()


@case("a bias of LoRA trains (`lora_bias`)", "refused", r"lora_B.default.bias at .* trains beside the protected factors")
def lora_bias_trains():
    story = Story(adapted(lora_bias=True, bias_in_base=True))
    yield story
    story.learn()


@case("the bias of the base layer trains (`bias='lora_only'`)", "refused", r"base_layer.bias at .* trains beside the protected")
def base_bias_trains():
    story = Story(adapted(bias="lora_only", bias_in_base=True))
    yield story
    story.learn()


@case(
    "steps are made between the anchor and `protect`",
    "refused",
    r"have moved since their anchor was made: .* at .*; make the Anchor anew",
)
def warm_up_steps():
    story = Story(adapted())
    yield story
    story.make_anchor()
    optimizer = story.adamw()
    story.step(optimizer)
    story.learn(optimizer=optimizer)


@case(
    "a block without Freeze, then SFOR on its anchor", "refused", "have moved since their anchor was made: the frozen factor B at"
)
def another_method_before():
    story = Story(adapted())
    yield story
    story.learn([SFOR[2]])
    story.learn(SFOR)


@case(
    "an optimizer with weights of its own for serving, of an unknown kind",
    "refused",
    "has a mode of its own for serving",
    measured=False,
)
def averaging_optimizer():
    class Averaging(torch.optim.AdamW):
        """Serves the average of what it trains."""

        def step(self, closure=None):
            before = [(p, p.detach().clone()) for group in self.param_groups for p in group["params"]]
            super().step(closure)
            for p, old in before:
                self.state[p]["served"] = self.state[p].get("served", old) + 0.5 * torch.randn_like(old)

        def eval(self):
            for group in self.param_groups:
                for p in group["params"]:
                    if "served" in self.state[p]:
                        p.data.copy_(self.state[p]["served"])

        def train(self):
            pass

    story = Story(adapted())
    yield story
    optimizer = Averaging([p for p in story.model.parameters() if p.requires_grad], lr=3e-3)
    story.learn(optimizer=optimizer)
    optimizer.eval()


# -- while it trains --------------------------------------------------------------------------------------------------------------


def during(do, *, at=STEP, **options):
    story = Story(adapted(**options))
    yield story
    story.learn(after=at, do=lambda optimizer: do(story, optimizer))


@case("the base weight joins the optimizer (`add_param_group`)", "stopped", "base_layer.weight at .* trains now")
def base_weight_joins():
    def do(story, optimizer):
        weight = story.layer.get_base_layer().weight.requires_grad_(True)
        optimizer.add_param_group({"params": [weight]})

    return during(do)


@case(
    "the scale of the adapter is changed (`set_scale`)", "stopped", r"the scale of the adapter 'default' at .* was 4 and is 12 now"
)
def scale_changes():
    return during(lambda story, _: story.layer.set_scale("default", 3.0))


@case("base weights are loaded (`load_state_dict`)", "stopped", "base_layer.weight at .* was written to or replaced")
def base_weight_is_loaded():
    def do(story, _):
        weight = story.layer.get_base_layer().weight
        story.layer.get_base_layer().load_state_dict({"weight": weight + 0.01 * torch.randn_like(weight)})

    return during(do)


@case(
    "base weights are written to through `.data`",
    "stopped",
    "computes something else than at the anchor, apart from the protected factors",
)
def base_weight_is_written_to():
    return during(lambda story, _: story.layer.get_base_layer().weight.data.add_(0.01))


@case("the base layer is replaced by another module", "stopped", "the layer at .* was replaced by another")
def base_layer_is_replaced():
    def do(story, _):
        other = copy.deepcopy(story.layer.get_base_layer())
        nn.init.normal_(other.weight, std=0.02)
        story.layer.base_layer = other

    return during(do)


@case("the layer's forward is replaced", "stopped", "(computes something else|is not s B A x)")
def forward_is_replaced():
    def do(story, _):
        class Shifted(type(story.layer)):
            def forward(self, x):
                return super().forward(x) + 0.1 * x[..., : self.out_features]

        story.layer.__class__ = Shifted

    return during(do)


@case("a second adapter is activated", "stopped", "the adapter 'other' became active at")
def a_second_adapter_is_activated():
    def do(story, _):
        story.model.add_adapter("other", config(init_lora_weights=False))
        story.model.base_model.set_adapter(["default", "other"])

    return during(do)


@case("another adapter is activated instead", "stopped", "the adapter '(other' became|default' is no longer) active at")
def another_adapter_is_activated():
    def do(story, _):
        story.model.add_adapter("other", config(init_lora_weights=False))
        story.model.set_adapter("other")

    return during(do)


@case("the adapters are switched off and left so", "stopped", "the adapters at .* are switched off")
def adapters_are_switched_off():
    return during(lambda story, _: story.model.base_model.disable_adapter_layers(), at=STEPS)


@case("a frozen adapter that is active beside it is written to", "stopped", "lora_B.old.weight at .* was written to or replaced")
def frozen_adapter_is_written_to():
    story = Story(adapted())
    story.model.add_adapter("old", config())
    story.model.base_model.set_adapter(["old", "default"])
    story.model.set_requires_grad(["old"], requires_grad=False)

    def do(optimizer):
        with torch.no_grad():
            story.layer.lora_B["old"].weight.normal_()

    yield story
    story.learn(after=STEP, do=do)


@case("the bias of the base layer is written to", "stopped", "base_layer.bias at .* was written to or replaced")
def base_bias_is_written_to():
    def do(story, _):
        with torch.no_grad():
            story.layer.get_base_layer().bias.add_(0.5)

    return during(do, bias_in_base=True)


# -- at a step, and after it ------------------------------------------------------------------------------------------------------


class Raising(torch.optim.AdamW):
    """An exception out of the middle of a step, behind the move: none of torch's hooks runs behind it."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps < STEP:
            return super().step(closure)
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data.add_(torch.sign(p.grad), alpha=-3e-3)
        raise RuntimeError("out of memory")


@case("the optimizer's step raises after it has moved the factors", "preserved")
def step_raises():
    story = Story(adapted())
    yield story
    with pytest.raises(RuntimeError, match="out of memory"):
        story.learn(optimizer=Raising([p for p in story.model.parameters() if p.requires_grad], lr=3e-3))


@case("the loop raises, and the frozen factor was written to", "stopped", "the frozen factor B at .* has moved", measured=False)
def loop_raises():
    story = Story(adapted())

    def do(optimizer):
        with torch.no_grad():
            story.layer.lora_B["default"].weight.add_(0.01)
        raise KeyError("of the loop")

    yield story
    try:
        story.learn(after=STEP, do=do)
    except KeyError as error:
        for note in getattr(error, "__notes__", ()):
            raise ProtectionLost(note) from None


@case("schedule-free AdamW: `optimizer.eval()` after the block", "preserved")
def schedule_free_adamw():
    return schedule_free(SFOR)


@case("schedule-free AdamW on a fresh block: `optimizer.eval()` after it", "preserved")
def schedule_free_on_a_fresh_block():
    return schedule_free(HARD)


def schedule_free(constraints):
    story = Story(adapted(learned=constraints is SFOR))
    yield story
    schedulefree = pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    optimizer = schedulefree.AdamWScheduleFree([p for p in story.model.parameters() if p.requires_grad], lr=3e-3)
    optimizer.train()
    story.learn(constraints, optimizer=optimizer)
    optimizer.eval()


# -- the tests --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_what_else_moves_a_layer_is_refused_stopped_or_projected(name, monkeypatch):
    tell, what, outcome, says, measured = CASES[name]
    story = None
    with unguarded(monkeypatch):
        story = told(tell)
    leak = story.rho()
    assert leak > LEAKS, f"this case moves nothing: rho {leak:.1e}"
    if measured and story.anchor is not None:
        drift = measure(story.anchor)
        assert drift.outside or drift.rho == pytest.approx(leak, rel=0.05), f"measure says {drift.rho:.1e}, and it is {leak:.1e}"
    said = ""
    if outcome == "preserved":
        story = told(tell)
        assert story.rho() <= ZERO
    else:
        kind = (ValueError, TypeError, LookupError) if outcome == "refused" else ProtectionLost
        with pytest.raises(kind, match=says) as raised:
            told(tell)
        said = str(raised.value)
        if outcome == "stopped":
            assert re.match(r"protection was lost by step \d+: ", said)
    note_row("guards", what=what, rho=leak, outcome=outcome, said=said)


def told(tell):
    """The story, to its end."""
    parts = tell()
    story = next(parts)
    for _ in parts:
        pass
    return story


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "named", "moved"),
    [
        ({"modules_to_save": ["lm_head"]}, "lm_head", "lm_head.modules_to_save.default.weight"),
        ({"trainable_token_indices": [1, 2]}, "embed_tokens", "embed_tokens.token_adapter.trainable_tokens_delta.default"),
        ({"target_modules": ["q_proj", "v_proj", "embed_tokens"]}, "embed_tokens", "embed_tokens.lora_embedding_A.default"),
    ],
    ids=["modules_to_save", "trainable_token_indices", "LoRA on embeddings"],
)
def test_what_trains_outside_the_protected_layers_is_refused_unless_it_is_named(options, named, moved):
    story = Story(adapted(**options))
    with pytest.raises(ValueError, match=rf"{re.escape(moved)}.* trains? beside the protected layers.*also_training") as raised:
        story.learn()
    what = "`" + next(iter(options)) + "`" + (" with embeddings" if "target_modules" in options else "")
    note_row("guards", what=f"{what} trains beside the protected layers", rho=None, outcome="refused", said=str(raised.value))
    story = Story(adapted(**options))
    story.learn(also_training=(named,))
    assert story.rho() <= ZERO, "the protected layers themselves keep their promise"


@pytest.mark.filterwarnings("ignore")
def test_what_is_named_as_training_covers_no_protected_layer():
    story = Story(adapted())
    story.layer.get_base_layer().weight.requires_grad_(True)
    with pytest.raises(ValueError, match="base_layer.weight at .* trains beside the protected factors"):
        story.learn(also_training=("q_proj", "base_layer"))


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_stays_what_it_was_is_left_alone():
    """Modes, dropout, hooks that only read, a second look, an adapter that is not active: none of it is a change."""
    story = Story(adapted(lora_dropout=0.3, bias_in_base=True))
    story.model.add_adapter("idle", config(init_lora_weights=False))
    read = []
    story.layer.register_forward_hook(lambda module, args, output: read.append(output.shape))

    def do(optimizer):
        with torch.no_grad():
            story.layer.lora_A["idle"].weight.zero_()
        story.model.eval()
        story.step(optimizer)
        story.model.train()

    story.learn(after=STEP, do=do, check_every=1)
    assert measure(story.anchor).outside == ()
    assert len(read) == STEPS + 1, "a look asks the layer without the hooks of others"
    assert story.rho() <= ZERO


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_is_left_merged_stops_the_block():
    """It computes the same, but what trains from then on is no longer what the layer adds."""
    story = Story(adapted())
    with pytest.raises(ProtectionLost, match="the adapters at .* are merged"):
        story.learn(after=STEPS, do=lambda _: story.layer.merge())


def test_the_adapter_that_trains_is_found_and_several_are_asked_for():
    model = adapted()
    model.add_adapter("task2", config())
    model.set_adapter("task2")
    assert Anchor.of(model).adapter_name == "task2"
    model.base_model.set_adapter(["default", "task2"])
    with pytest.raises(LookupError, match=r"give the name of the adapter to protect: 2 adapters train \('default', 'task2'\)"):
        Anchor.of(model)
    model.set_requires_grad(["default"], requires_grad=False)
    assert Anchor.of(model).adapter_name == "task2"
    with pytest.raises(ValueError, match="'default' is not active"):
        model.set_adapter("task2")
        Anchor.of(model, adapter_name="task2", history="default")


def test_measure_knows_the_scale_that_the_model_computes_with():
    story = Story(adapted())
    story.make_anchor()
    for layer in linear(story.model).values():
        layer.set_scale("default", 1.5)
    drift = measure(story.anchor)
    assert drift.rho == pytest.approx(story.rho(), rel=1e-5)
    assert not drift.exact
    assert re.match("the scale of the adapter 'default' at .* was 4 and is 6 now", drift.outside[0])


# -- outside the protected layers ------------------------------------------------------------------------------------------------


def norms(model):
    return [p for name, p in model.named_parameters() if "norm" in name]


@pytest.mark.filterwarnings("ignore")
def test_an_anchor_of_a_part_of_the_model_refuses_the_other_factors_of_the_optimizer():
    story = Story(adapted())
    part = story.model.base_model.model.model.layers[0]
    cores = {name.split("layers.0.")[1]: core for name, core in story.cores.items() if "layers.0." in name}
    anchor = Anchor.of(part, cores=cores, adapter_name="default")
    refused = pytest.raises(ValueError, match=r"a parameter of shape \(4, 32\) outside the anchor's model and 3 more")
    with refused, protect(story.adamw(), anchor, SFOR):
        pass


@pytest.mark.filterwarnings("ignore")
def test_a_convolution_is_refused_by_name_wherever_it_is_met():
    class Convolved(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv1d(8, 8, 3), nn.Linear(8, 8)

    model = get_peft_model(Convolved(), LoraConfig(r=4, target_modules=["conv", "out"]))
    refused = pytest.raises(TypeError, match="conv is adapted through PEFT's Conv1d, .* leave it out of the targets")
    with refused:
        Anchor.of(model)
    with refused, FeatureStore().collect(model):
        pass


@pytest.mark.filterwarnings("ignore")
def test_a_head_outside_the_model_is_named_where_the_optimizer_knows_its_name():
    story = Story(adapted())
    named = [("value_head.weight", nn.Parameter(torch.zeros(1, 32)))]
    named += [(name, p) for name, p in story.model.named_parameters() if p.requires_grad]
    anchor = Anchor.of(story.model, cores=story.cores)
    with (
        pytest.raises(ValueError, match=r"shape \(1, 32\) outside .* in also_training, which takes an optimizer of pairs"),
        protect(torch.optim.AdamW([p for _, p in named]), anchor, SFOR, also_training="value_head"),
    ):
        pass
    with protect(torch.optim.AdamW(named), anchor, SFOR, also_training="value_head"):
        pass


@pytest.mark.filterwarnings("ignore")
def test_what_another_optimizer_trains_beside_the_layers_is_refused_unless_it_is_named():
    story = Story(adapted())
    optimizer = story.adamw()
    for p in norms(story.model):
        p.requires_grad_(True)
    with pytest.raises(ValueError, match="norm.weight and 4 more parameters train beside the protected layers"):
        story.learn(optimizer=optimizer)
    other = torch.optim.SGD(norms(story.model), lr=0.1)
    story.learn(optimizer=optimizer, after=STEP, do=lambda _: other.step(), also_training=("input_layernorm", "norm", NORM))


NORM = "post_attention_layernorm"


@pytest.mark.filterwarnings("ignore")
def test_what_is_written_outside_the_protected_layers_stops_the_block_and_stands_in_outside():
    story = Story(adapted())

    def do(_):
        with torch.no_grad():
            norms(story.model)[0].add_(0.1)

    with pytest.raises(ProtectionLost, match="input_layernorm.weight has changed outside the protected layers"):
        story.learn(after=STEP, do=do)
    drift = measure(story.anchor)
    assert not drift.exact
    assert "input_layernorm.weight outside the protected layers changed" in str(drift)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["trains", "is frozen again"])
def test_what_any_optimizer_writes_outside_the_protected_layers_stands_in_outside(how, frozen):
    """A fused one writes without torch's count of writes."""
    story = Story(adapted(modules_to_save=["lm_head"]))
    head = next(p for name, p in story.model.named_parameters() if "lm_head" in name and p.requires_grad)
    story.learn(
        optimizer=torch.optim.AdamW([p for p in story.model.parameters() if p.requires_grad], **how), also_training=("lm_head",)
    )
    head.requires_grad_(not frozen)
    assert "outside the protected layers changed" in str(measure(story.anchor))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trains", [True, False], ids=["train", "eval"])
def test_statistics_that_a_model_keeps_outside_the_protected_layers_stop_the_block(trains):
    model = get_peft_model(
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), LoraConfig(r=2, target_modules=["0", "2"])
    )
    model.train(trains)
    anchor = Anchor.of(model, cores={name: torch.eye(8)[:, :2] for name in ("0", "2")})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    lost = pytest.raises(ProtectionLost, match="running_mean has changed outside the protected layers")
    with lost if trains else nullcontext(), protect(optimizer, anchor, HARD):
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) + 1).square().sum().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore")
def test_measure_says_in_words_which_layers_are_not_protected_at_all():
    story = Story(adapted(modules_to_save=["lm_head"]))
    story.learn(also_training="lm_head")  # one name alone is no sequence of letters
    drift = measure(story.anchor)
    assert any("lm_head" in path for path in drift.unprotected)
    assert re.search(r"Not protected at all: \S*lm_head", str(drift))
    assert not drift.exact, "it has moved"


@pytest.mark.filterwarnings("ignore")
def test_a_change_for_texts_alone_is_seen():
    """A layer is asked with rows and with texts: what it does to one of them says nothing about the other."""
    story = Story(adapted())

    def do(_):
        class Shifted(type(story.layer)):
            def forward(self, x):
                return super().forward(x) + (0.1 * x[..., : self.out_features] if x.ndim == 3 else 0.0)

        story.layer.__class__ = Shifted

    with pytest.raises(ProtectionLost, match="computes something else than at the anchor"):
        story.learn(after=STEP, do=do)


@pytest.mark.filterwarnings("ignore")
def test_merging_and_unmerging_rounds_and_is_no_change():
    story = Story(adapted())

    def do(_):
        for layer in linear(story.model).values():
            layer.merge()
            layer.unmerge()
            layer.get_base_layer().weight.mul_(1 + 2**-23)  # as an observer of quantization rounds it

    story.learn(after=STEP, do=do, check_every=1)
    assert measure(story.anchor).exact


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_cast_is_measured():
    story = Story(adapted())
    story.learn()
    story.model.to(torch.float64)
    assert measure(story.anchor).exact
    story.model.to(torch.bfloat16)
    drift = measure(story.anchor)
    assert not drift.exact
    assert any("written to or replaced" in sentence for sentence in drift.outside)


@pytest.mark.filterwarnings("ignore")
def test_a_half_precision_layer_that_is_moved_to_another_device_is_no_other_layer():
    """A trainer moves a model whose anchor was made on the CPU, and the device rounds sums in its own way."""
    model = adapted()
    for layer in linear(model).values():
        layer.get_base_layer().to(torch.bfloat16)
    whole = Anchor.of(model).layers[0].whole
    parts = {name: replace(part, device=torch.device("meta"), place=0) for name, part in whole.parts.items()}
    answers = tuple(answer * (1 + 2**-7 * (torch.arange(answer.shape[-1]) % 5 == 0)) for answer in whole.answers)
    moved = replace(whole, parts=parts, answers=tuple(answer.bfloat16() for answer in answers))
    assert moved.changed(moved.module) is None
    with torch.no_grad():
        moved.base.weight.add_(0)
    assert "written to or replaced" in moved.changed(moved.module)


def test_what_is_remembered_of_the_start_follows_the_factors_to_their_device():
    kept = Factors(torch.ones(2, 4), torch.ones(3, 2), 2.0)
    layer = AdaptedLayer("layer", Factors(kept.A.to("meta"), kept.B.to("meta"), 2.0), kept.copy())
    assert layer.start_factor("B").device.type == layer.start_rows("A").device.type == "meta"
    layer = replace(layer, start=kept.copy())
    assert layer.change().right.device.type == "meta"
