"""transformers' Trainer and TRL's SFTTrainer, which build the optimizer themselves: ProtectionCallback."""

import gc
import json
import math
import warnings
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import pre_tokenizers
from torch.utils.checkpoint import CheckpointError
from transformers import Trainer, TrainerCallback, TrainingArguments

from anchorlora import (
    Anchor,
    AnswerSensitivity,
    Distillation,
    Freeze,
    KroneckerBrake,
    ProjectDisplacement,
    ProtectionCallback,
    measure,
)
from anchorlora.adapters import activate, realized_weights
from anchorlora.adapters.stack import HISTORY
from anchorlora.config import BaseModelSettings
from anchorlora.errors import InvalidValue, NotFinite, ProtectionLost
from anchorlora.integrations.trainer import StepRecorderCallback
from anchorlora.measurement import StepRecorder, WeightDirections
from anchorlora.models.load import load_base_model
from loops.cases import STAGES, STAGES_REFUSED, TRAINER, TRAINER_REFUSED
from loops.setting import CLIP, SETTINGS, Setting, base_model, learned, loss_of, steps_of, tokens, verdict

RATES = {"sgd": 0.3, "adafactor": 1e-2}
QUIET = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}


def data():
    return Dataset.from_dict({"input_ids": tokens(2).tolist(), "labels": tokens(2).tolist()})


def arguments(folder, row, **more):
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps_of(row),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2 if "accumulation" in row.loop else 1,
        optim=row.optimizer,
        learning_rate=RATES.get(row.optimizer, 3e-3),
        weight_decay=0.1,
        max_grad_norm=CLIP,
        lr_scheduler_type="linear",
        **{**QUIET, **more},
    )


def learn(row, setting, folder):
    callback = ProtectionCallback(setting.constraints, **setting.options())
    trainer_of(row, setting, folder, callback).train()
    return verdict(callback.anchor)


def trainer_of(row, setting, folder, callback):
    if "SFTTrainer" not in row.loop:
        more = {"eval_strategy": "steps", "eval_steps": 25} if "evaluation" in row.loop else {}
        return Trainer(
            setting.model, arguments(folder, row, **more), train_dataset=data(), eval_dataset=data(), callbacks=[callback]
        )
    trl = pytest.importorskip("trl", reason="trl is not installed")
    settings = arguments(folder, row).to_dict()
    kept = {
        k: settings[k] for k in ("output_dir", "max_steps", "per_device_train_batch_size", "optim", "learning_rate", "weight_decay")
    }
    config = trl.SFTConfig(**kept, **QUIET, bf16=False, gradient_checkpointing=False, max_grad_norm=CLIP)
    return trl.SFTTrainer(setting.model, config, train_dataset=data(), processing_class=tokenizer(), callbacks=[callback])


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(48)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0")


@pytest.mark.drawn(2)
@pytest.mark.filterwarnings("ignore")  # what the trainers themselves warn of is theirs
@pytest.mark.parametrize("row", TRAINER, ids=str)
def test_protection_is_kept(row, note, tmp_path):
    if "schedule_free" in row.optimizer:
        pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    note(row, {name: learn(row, build(), tmp_path) for name, build in SETTINGS.items()})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", TRAINER_REFUSED, ids=str)
def test_a_half_precision_adapter_is_refused_when_training_begins(row, note, tmp_path):
    setting = learned()
    setting.model.to(torch.bfloat16)
    callback = ProtectionCallback(setting.constraints, **setting.options())
    before = {name: p.detach().clone() for name, p in setting.model.named_parameters()}
    with pytest.raises(TypeError, match=row.says) as error:
        trainer_of(row, setting, tmp_path, callback).train()
    assert all(torch.equal(before[name], p) for name, p in setting.model.named_parameters())
    note(row, str(error.value))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["fresh", "learned", "learned, with an anchor", "a head beside", "a head beside, with an anchor"])
def test_an_adapter_over_a_quantized_model_trains_in_float32_though_trl_casts_it(how, small_model, tmp_path):
    """TRL's trainers cast what trains over a quantized model to bfloat16 in their constructor; the remedy led to the same error."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    trl = pytest.importorskip("trl", reason="trl is not installed")
    base = load_base_model(BaseModelSettings(model=str(small_model), quantized="nf4")).model
    saved = ["lm_head"] if "head" in how else None
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", modules_to_save=saved)
    model = get_peft_model(base, config)
    draw = torch.Generator().manual_seed(0)
    for layer in Anchor.of(model).layers if "learned" in how else ():
        layer.factor("B").data.normal_(0.0, 0.05, generator=draw)
    width = model.config.hidden_size
    names = [*(x.name for x in Anchor.of(model).layers), *(saved or ())]
    cores = {name: torch.linalg.qr(torch.randn(width, 4, generator=draw)).Q for name in names}
    anchor = Anchor.of(model, cores=cores) if "anchor" in how else None
    callback = ProtectionCallback(**({"anchor": anchor} if anchor else {"cores": cores}))
    config = trl.SFTConfig(str(tmp_path), max_steps=2, **QUIET, bf16=False, gradient_checkpointing=False)

    def trainer():
        return trl.SFTTrainer(model, config, train_dataset=data(), processing_class=tokenizer(), callbacks=[callback])

    if how in ("learned", "a head beside"):
        what = r"lm_head\S+ beside the adapter" if saved else r"a learned adapter at \S+q_proj"
        with pytest.raises(TypeError, match=rf"{what} was rounded to bfloat16, as TRL does .* anchor=Anchor\.of"):
            trainer()
        return
    trainer().train()
    assert measure(callback.anchor).exact
    assert all(layer.factor(name).dtype == torch.float32 for layer in callback.anchor.layers for name in layer.names)


@pytest.mark.filterwarnings("ignore")
def test_everything_is_given_back_and_a_second_training_has_an_anchor_of_its_own(tmp_path):
    setting, row = learned(), TRAINER[0]
    callback = ProtectionCallback(setting.constraints, **setting.options())
    flags = [p.requires_grad for p in setting.model.parameters()]
    trainer = trainer_of(row, setting, tmp_path, callback)
    trainer.train()
    assert [p.requires_grad for p in setting.model.parameters()] == flags
    inner = trainer.optimizer.optimizer
    assert not inner._optimizer_step_pre_hooks
    assert not inner._optimizer_step_post_hooks
    first = measure(callback.anchor).d_eff
    trainer_of(row, setting, tmp_path, callback).train()
    assert callback.anchor.layers[0].start_factor("A") is not setting.anchor().layers[0].start_factor("A")
    assert 0 < measure(callback.anchor).d_eff < 2 * first  # since the second start, not since the first


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", [True, False])
def test_training_that_is_taken_up_again_keeps_a_fresh_blocks_protection(given, tmp_path):
    """The trainer loads the checkpoint first: the block's start is feasible, though B is no longer zero."""
    setting, row = SETTINGS["hard"](), TRAINER[1]
    stop = tmp_path / "stopped"
    half = arguments(stop, row, save_strategy="steps", save_steps=10)
    half.max_steps = 10
    callback = ProtectionCallback(setting.constraints if given else None, **setting.options())
    Trainer(setting.model, half, train_dataset=data(), callbacks=[callback]).train()
    again = SETTINGS["hard"]()
    callback = ProtectionCallback(again.constraints if given else None, **again.options())
    whole = arguments(stop, row)
    whole.max_steps = 20
    trainer = Trainer(again.model, whole, train_dataset=data(), callbacks=[callback])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Converting a tensor with requires_grad")  # a check beside the steps made a graph
        trainer.train(resume_from_checkpoint=str(stop / "checkpoint-10"))
    assert trainer.state.global_step == 20
    for layer in callback.anchor.layers:
        A = layer.factor("A").detach().double()
        assert float((A @ layer.core.basis.double()).norm()) <= 2 * torch.finfo(torch.float32).eps * float(A.norm())
        assert not torch.equal(layer.factor("B"), layer.start_factor("B"))  # it goes on training


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting_name", SETTINGS)
@pytest.mark.parametrize("how", ["anew", "anchored", "loaded"])
def test_a_braked_adapter_that_is_taken_up_again_ends_where_an_uninterrupted_one_does(how, setting_name, tmp_path):
    """The penalty, and what is measured, count from where training began, from the empty block if that was new; an anchor of one's
    own may have drawn another A for it, and the model may be the checkpoint's already.
    """
    ends, own = [], how == "anchored"
    for again in (False, True):
        setting = SETTINGS[setting_name]()
        past = AnswerSensitivity(examples=4).end_task(replace(setting.anchor(), losses=old_losses(setting.model)))
        options = {**setting.options(), "past": past}
        if own and again and setting.history:
            for layer in setting.anchor().layers:
                layer.factor("A").data.normal_()
        if how == "loaded" and again:
            setting.model.load_adapter(str(tmp_path / "run/checkpoint-3"), "default", is_trainable=True)
            activate(setting.model, "default", history=setting.history)
        options = {"anchor": Anchor.of(setting.model, **options)} if own else options
        callback = ProtectionCallback([*setting.constraints, KroneckerBrake()], **options)
        saving = {} if again else {"save_strategy": "steps", "save_steps": 3}
        settings = arguments(tmp_path / "run", TRAINER[1], **saving)
        settings.max_steps = 6
        trainer = Trainer(setting.model, settings, train_dataset=data(), callbacks=[callback])
        trainer.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-3") if again else None)
        ends.append([layer.factor(f).detach().clone() for layer in callback.anchor.layers for f in ("A", "B")])
        drift = measure(callback.anchor)
        assert drift.exact
        ends[-1].append(torch.tensor(drift.d_eff))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*ends, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_a_head_that_trains_beside_the_adapter_counts_from_where_training_began_too(tmp_path):
    moved, cores = [], {**learned().cores, "lm_head": torch.eye(32)[:, :4]}
    for again in (False, True):
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
        model = get_peft_model(base_model(), config)
        settings = arguments(tmp_path, TRAINER[1], **({} if again else {"save_strategy": "steps", "save_steps": 3}))
        settings.max_steps = 6
        callback = ProtectionCallback(cores=cores)
        trainer = Trainer(model, settings, train_dataset=data(), callbacks=[callback])
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3") if again else None)
        assert measure(callback.anchor).exact
        moved.append(measure(callback.anchor).layers["lm_head"].d_eff)
    assert moved[1] == pytest.approx(moved[0], rel=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_was_trained_with_other_cores_is_refused(tmp_path):
    for again in (False, True):
        setting = learned()
        options = setting.options()
        if again:
            options["cores"] = {name: torch.linalg.qr(torch.randn(32, 4)).Q for name in setting.cores}
        callback = ProtectionCallback(setting.constraints, **options)
        settings = arguments(tmp_path, TRAINER[1], **({} if again else {"save_strategy": "steps", "save_steps": 3}))
        settings.max_steps = 6
        trainer = Trainer(setting.model, settings, train_dataset=data(), callbacks=[callback])
        if not again:
            trainer.train()
    with pytest.raises(InvalidValue, match=r"trained with other cores: \|dA V\| at .*q_proj is .* began with"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    layer = next(iter(callback.anchor.layers))
    layer.factor("A").data.fill_(torch.nan)
    callback.starts = {f"{layer.name}.A": torch.zeros_like(layer.factor("A"))}
    with pytest.raises(NotFinite, match=r"factor A at .*q_proj holds NaN"):
        callback.begin(setting.model, torch.optim.AdamW(p for p in setting.model.parameters() if p.requires_grad))


def old_losses(model):
    def losses(count):
        for ids in tokens(1)[:count]:
            yield loss_of(model, ids[None])

    return losses


class OutOfMemoryOnce(Trainer):
    """A trainer whose third batch does not fit into memory."""

    batches = 0

    def training_step(self, *args, **named):
        self.batches += 1
        if self.batches == 3:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(*args, **named)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_starts_over_with_smaller_batches_keeps_a_fresh_blocks_protection(tmp_path):
    """The block has learned by then, but its constraints are those that were chosen before."""
    setting = SETTINGS["hard"]()
    callback = ProtectionCallback(**setting.options())
    settings = arguments(tmp_path, TRAINER[1], auto_find_batch_size=True)
    settings.max_steps = 20
    trainer = OutOfMemoryOnce(setting.model, settings, train_dataset=data(), callbacks=[callback])
    trainer.train()
    assert (trainer.state.global_step, trainer._train_batch_size) == (settings.max_steps, 3)
    assert measure(callback.anchor).exact
    assert not torch.equal(callback.anchor.layers[0].factor("B"), callback.anchor.layers[0].start_factor("B"))


class Replaces(TrainerCallback):
    """A callback of somebody else's that puts a new parameter into the model in the middle of training."""

    def on_step_end(self, args, state, control, *, model, **_):
        if state.global_step == 1:
            layer = model.base_model.model.model.layers[0].self_attn.q_proj
            layer.lora_A["default"].weight = torch.nn.Parameter(layer.lora_A["default"].weight.detach().clone())


@pytest.mark.filterwarnings("ignore")
def test_parameters_replaced_in_the_middle_stop_the_training(tmp_path):
    setting = learned()
    callback = ProtectionCallback(setting.constraints, **setting.options())
    trainer = trainer_of(TRAINER[0], setting, tmp_path, callback)
    trainer.add_callback(Replaces())
    with pytest.raises(ProtectionLost, match="by step 2: the factors of model.layers.0.self_attn.q_proj in the model are other"):
        trainer.train()


class Fails(TrainerCallback):
    """A callback of somebody else's that raises in the middle of training."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3:
            raise KeyError("of the loop")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lost", [False, True])
def test_an_exception_in_train_gives_everything_back_and_says_if_a_promise_was_broken(lost, tmp_path):
    setting = learned()
    callback = ProtectionCallback(setting.constraints, **setting.options())
    trainer = trainer_of(TRAINER[0], setting, tmp_path, callback)
    trainer.add_callback(Fails())
    B = setting.anchor().layers[0].factor("B")

    class Writes(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if lost and state.global_step == 2:
                B.data.add_(1e-3)

    trainer.add_callback(Writes())
    with pytest.raises(KeyError, match="of the loop") as raised:
        trainer.train()
    assert all(layer.factor(name).requires_grad for layer in setting.anchor().layers for name in ("A", "B"))
    inner = trainer.optimizer.optimizer
    assert not inner._optimizer_step_pre_hooks
    assert not inner._optimizer_step_post_hooks
    notes = getattr(raised.value, "__notes__", [])
    assert bool(notes) == lost
    assert all("the frozen factor B at model.layers.0.self_attn.q_proj has moved" in note for note in notes)


class Average(TrainerCallback):
    """An average of the weights that began before the protection, and is written at the end."""

    def __init__(self, model):
        self.kept = [(p, p.detach().clone()) for p in model.parameters() if p.requires_grad]

    def on_train_end(self, args, state, control, **_):
        for parameter, kept in self.kept:
            parameter.data.lerp_(kept, 0.5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", [True, False])
def test_an_average_that_began_before_the_callback_is_found_whatever_the_order(first, tmp_path):
    setting = SETTINGS["hard"]()
    callbacks = [ProtectionCallback(setting.constraints, **setting.options()), Average(setting.model)]
    settings = arguments(tmp_path, TRAINER[1])
    settings.max_steps = 3
    trainer = Trainer(setting.model, settings, train_dataset=data(), callbacks=callbacks if first else callbacks[::-1])
    with pytest.raises(ProtectionLost, match=r"by step 3: \|dA V\| at .* was written outside the optimizer's steps"):
        trainer.train()
    assert not trainer.optimizer.optimizer._optimizer_step_post_hooks


@pytest.mark.filterwarnings("ignore")
def test_a_callback_that_is_added_later_does_not_go_on_from_a_checkpoint_without_a_word(tmp_path):
    """It would count from the checkpoint."""
    for steps, checkpoint in ((3, None), (6, tmp_path / "checkpoint-3")):
        setting = learned()
        settings = arguments(tmp_path, TRAINER[1], save_strategy="steps", save_steps=3)
        settings.max_steps = steps
        trainer = Trainer(setting.model, settings, train_dataset=data())
        trainer.add_callback(ProtectionCallback(setting.constraints, **setting.options()))
        if checkpoint is None:
            trainer.train()
    with pytest.raises(InvalidValue, match="a callback that is added later does not know the checkpoint"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.filterwarnings("ignore")
def test_a_callback_of_one_trainer_that_is_added_to_another_ends_with_its_training(tmp_path):
    """It waited for the first trainer's `train` to end it: hooks and frozen factors stayed, and nothing was verified at the end."""
    setting, settings = learned(), arguments(tmp_path, TRAINER[1], save_strategy="steps", save_steps=3)
    settings.max_steps = 3
    callback = ProtectionCallback(setting.constraints, **setting.options())
    Trainer(setting.model, settings, train_dataset=data(), callbacks=[callback]).train()
    later = Trainer(setting.model, settings, train_dataset=data())
    later.add_callback(callback)
    later.train()
    assert not callback.active
    assert not later.optimizer.optimizer._optimizer_step_post_hooks
    assert all(layer.factor("B").requires_grad for layer in callback.anchor.layers)
    settings.max_steps = 6
    with pytest.raises(InvalidValue, match="a callback that is added later does not know the checkpoint"):
        later.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.filterwarnings("ignore")
def test_a_constraint_on_the_loss_is_refused_at_once(tmp_path):
    setting = learned()
    callback = ProtectionCallback([Freeze("B"), Distillation(1.0)], **setting.options())
    trainer = trainer_of(TRAINER[0], setting, tmp_path, callback)
    with pytest.raises(TypeError, match="Distilling adds to the loss, and no callback can do that"):
        trainer.train()
    assert all(layer.factor("B").requires_grad for layer in setting.anchor().layers)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_is_audited_whatever_it_trains(tmp_path):
    """Unprotected LoRA: what it wrote into the upper singular directions of each weight, against a dense difference."""
    setting, path = learned(), tmp_path / "audit.jsonl"
    start = {name: read().detach().double() for name, read in realized_weights(setting.model).items()}
    trainer = trainer_of(TRAINER[0], setting, tmp_path, StepRecorderCallback(realized_weights, WeightDirections(4), path, every=20))
    trainer.train()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [20, 40, 60]
    for name, read in realized_weights(setting.model).items():
        right = torch.linalg.svd(start[name])[2][:4].T
        moved = read().detach().double() - start[name]
        assert lines[-1]["layers"][name]["rho"] == pytest.approx(float((moved @ right).norm() / moved.norm()), rel=1e-4)
    assert not trainer.optimizer.optimizer._optimizer_step_post_hooks


@pytest.mark.filterwarnings("ignore")
def test_protection_is_audited_step_by_step_inside_a_trainer(tmp_path):
    setting, path = learned(), tmp_path / "audit.jsonl"
    callback = ProtectionCallback([*setting.constraints, StepRecorder(path, every=30)], **setting.options())
    trainer_of(TRAINER[0], setting, tmp_path, callback).train()
    for line in map(json.loads, path.read_text().splitlines()):
        assert line["violation_before"] > 100 * line["violation_after"] > 0  # the optimizer bends, the projection repairs
        assert line["rho"] <= max(1e-7, 3 * line["rho_floor"])


# Second stages: TRL's trainers switch adapters for their reference model.


def stage_of(name, setting, folder, callbacks=(), **more):
    """One of TRL's trainers on a setting, at the size of the tests."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    words = tokenizer()
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    words.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    own, rows, given = {}, [], {}
    if name == "DPO":
        rows = [{"prompt": "w2 w3", "chosen": f" w{i + 5} w6", "rejected": " w7 w8"} for i in range(8)]
    elif name == "KTO":
        rows = [{"prompt": "w2 w3", "completion": f" w{i + 5} w6", "label": i % 2 == 0} for i in range(8)]
    elif name == "SFT":
        rows = [{"text": f"w2 w3 w{i + 5} w6"} for i in range(8)]
    elif name == "GRPO":
        rows = [{"prompt": f"w{i + 5} w3"} for i in range(8)]
        own = {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}
        given = {"reward_funcs": lambda completion_ids, **_: [float(sum(ids)) for ids in completion_ids]}
    else:
        from trl.experimental import sdft as experimental

        rows = [{"prompt": f"w{i + 5} w3", "privileged_context": "w9 w10"} for i in range(8)]
        own = {"num_generations": 2, "max_completion_length": 4, "teacher_model_kind": "base", "distillation_topk": 8}
    home = experimental if name == "SDFT" else trl
    try:
        trainer = getattr(home, f"{name}Trainer")
    except RuntimeError as error:  # TRL 0.24's DPOTrainer beside transformers 5
        pytest.skip(f"TRL's own {name}Trainer does not import here: {' '.join(str(error).split())[-60:]}")
    settings = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "optim": "adamw_torch",
        "bf16": False,
        "gradient_checkpointing": False,
        **QUIET,
        **own,
    }
    config = getattr(home, f"{name}Config")(**{**settings, **more})
    given |= {"args": config, "train_dataset": Dataset.from_list(rows), "processing_class": words}
    return trainer(setting.model, callbacks=list(callbacks), **given)


STAGE_OPTIONS = {
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "checkpointing, reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "accumulation 2": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
}


def staged(row, setting, folder, callbacks):
    name, _, how = row.loop.removeprefix("TRL ").partition(", ")
    return stage_of(name.removesuffix("Trainer"), setting, folder, callbacks, **STAGE_OPTIONS.get(how, {}))


def history_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if f".{HISTORY}." in name}


@pytest.mark.drawn(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", STAGES, ids=str)
def test_a_second_stage_keeps_the_first_and_leaks_without_the_callback(row, note, tmp_path):
    """A shared adapter, and a fresh block whose frozen history stays bitwise what it was and active."""
    found = {}
    for name, build in SETTINGS.items():
        setting, bare = build(), build()
        callback = ProtectionCallback(setting.constraints, **setting.options(), check_every=1)
        history = history_of(setting.model)
        staged(row, setting, tmp_path, [callback]).train()
        found[name] = verdict(callback.anchor, unmoved=1e-5)
        assert measure(callback.anchor).outside == ()
        assert bool(history) == (name == "hard")
        assert all(torch.equal(p, history[n]) for n, p in history_of(setting.model).items())
        anchor = bare.anchor()
        with suppress(CheckpointError):  # without the callback, DPO loses the history between forward and backward
            staged(row, bare, tmp_path, []).train()
            assert measure(anchor).rho > 1000 * found[name][1]
    note(row, found)


@pytest.mark.filterwarnings("ignore")
def test_the_reference_of_a_switching_trainer_is_the_base_with_the_history(tmp_path):
    """So the first DPO loss of a block with B = 0 is log 2, and the adapter switched off computes what it computed before."""
    setting = SETTINGS["hard"]()
    callback = ProtectionCallback(setting.constraints, **setting.options())
    setting.model.eval()
    ids, found = tokens(2), []
    with torch.no_grad():
        before = setting.model(input_ids=ids).logits

    class Switches(TrainerCallback):
        def on_step_end(self, args, state, control, *, model, **_):
            model.eval()
            with torch.no_grad(), model.disable_adapter():
                found.append(model(input_ids=ids).logits)
            model.train()

    trainer = stage_of("DPO", setting, tmp_path, [callback, Switches()], logging_strategy="steps", logging_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert all(torch.allclose(logits, before, atol=1e-6) for logits in found)
    with torch.no_grad():
        assert not torch.allclose(setting.model(input_ids=ids).logits, before, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_reference_computed_before_training_would_miss_the_history_and_is_refused(tmp_path):
    setting = SETTINGS["hard"]()
    callback = ProtectionCallback(setting.constraints, **setting.options())
    trainer = stage_of("DPO", setting, tmp_path, [callback], precompute_ref_log_probs=True)
    with pytest.raises(InvalidValue, match="precompute_ref_log_probs leaves the history out of the reference"):
        trainer.train()


def test_the_best_model_would_be_loaded_into_the_history_and_is_refused(tmp_path):
    setting = SETTINGS["hard"]()
    args = arguments(tmp_path, TRAINER[0], load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps")
    trainer = Trainer(setting.model, args, train_dataset=data(), eval_dataset=data())
    trainer.add_callback(ProtectionCallback(setting.constraints, **setting.options()))
    with pytest.raises(InvalidValue, match="load_best_model_at_end loads into the first of the active adapters, "):
        trainer.train()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_model_that_is_saved_apart_from_its_history_is_named_and_a_checkpoint_is_not(name, tmp_path):
    """Of the saved folder, PEFT loads the block alone, which computes something else."""
    setting = SETTINGS[name]()
    callback = ProtectionCallback(setting.constraints, **setting.options())
    args = arguments(tmp_path, TRAINER[0], save_strategy="steps", save_steps=2)
    args.max_steps = 2
    trainer = Trainer(setting.model, args, train_dataset=data(), callbacks=[callback])
    trainer.train()
    apart = pytest.warns(UserWarning, match="loads the block alone; AdapterStack.save writes both as one adapter")
    with apart if setting.history else nullcontext():
        trainer.save_model(str(tmp_path / "model"))
    loaded = PeftModel.from_pretrained(base_model(), str(tmp_path / "model")).eval()
    same = torch.allclose(*(model.eval()(input_ids=tokens(1)).logits for model in (setting.model, loaded)), atol=1e-5)
    assert same == (name == "sfor")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", STAGES_REFUSED, ids=str)
def test_trl_itself_refuses_another_name_than_default(row, note, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(base_model(), config, adapter_name="block")
    callback = ProtectionCallback([ProjectDisplacement("A")])
    with pytest.raises(KeyError, match=row.says) as error:
        stage_of("DPO", Setting(model, {}, [], "block"), tmp_path, [callback])
    note(row, f"KeyError: {error.value}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_no_graph_is_kept_from_one_step_to_the_next(name, checkpointing, tmp_path):
    setting, alive = SETTINGS["hard"](), []

    class Looks(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            gc.collect()
            tensors = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
            alive.append(sum(x.grad_fn is not None for x in tensors))

    callback = ProtectionCallback(setting.constraints, **setting.options())
    gc.freeze()  # what was there before is not looked through
    stage_of(name, setting, tmp_path, [callback, Looks()], gradient_checkpointing=checkpointing).train()
    assert alive == [alive[0]] * 4


@pytest.mark.drawn(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting_name", SETTINGS)
@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "GRPO", "SDFT"])
def test_a_second_stage_that_is_taken_up_again_ends_where_an_uninterrupted_one_does(name, setting_name, tmp_path):
    """With its history and its reference beside it, which transformers saves in folders of their own."""
    ends = []
    for again in (False, True):
        setting, folder = SETTINGS[setting_name](), tmp_path / "run"
        callback = ProtectionCallback(setting.constraints, **setting.options(), check_every=1)
        more = {} if again else {"save_strategy": "steps", "save_steps": 2}
        trainer = stage_of(name, setting, folder, [callback], **more)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if again else None)
        assert trainer.state.global_step == 4
        ends.append([layer.factor(f).detach().clone() for layer in callback.anchor.layers for f in ("A", "B")])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*ends, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_loads_the_other_adapters_of_a_checkpoint_alone_still_goes_on_from_the_one_that_trains(
    tmp_path, monkeypatch
):
    """As transformers up to 5.16, at least: training began anew, without a word."""
    ends, callbacks = [], []
    for again in (False, True):
        setting = SETTINGS["hard"]()
        callbacks.append(ProtectionCallback(setting.constraints, **setting.options()))
        more = {} if again else {"save_strategy": "steps", "save_steps": 2}
        trainer = stage_of("SFT", setting, tmp_path, callbacks[-1:], **more)
        if again:
            monkeypatch.setattr(trainer, "_load_from_checkpoint", lambda *_, **__: None)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if again else None)
        ends.append([layer.factor(f).detach().clone() for layer in callbacks[-1].anchor.layers for f in ("A", "B")])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*ends, strict=True))
