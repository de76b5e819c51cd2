"""Lightning, which hands every optimizer a closure: LightningProtection."""

import logging
import warnings

import pytest
import torch

from anchorlora import measure
from anchorlora.errors import ProtectionLost
from loops.cases import LIGHTNING
from loops.setting import CLIP, SETTINGS, adamw, learned, loss_of, schedule, steps_of, tokens, trained, verdict

lightning = pytest.importorskip("lightning", reason="lightning is not installed")
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher  # noqa: E402

from anchorlora.integrations.lightning import LightningProtection  # noqa: E402  # needs lightning

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Learner(lightning.LightningModule):
    def __init__(self, model, row):
        super().__init__()
        self.model, self.row = model, row
        self.automatic_optimization = "manual" not in row.loop

    def training_step(self, batch, index):
        loss = loss_of(self.model, batch)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()
        return None

    def configure_optimizers(self):
        optimizer = adamw(trained(self.model))
        interval = {"scheduler": schedule(optimizer, steps_of(self.row)), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": interval}


def fit(row, setting, callback, folder, *, steps=None, checkpoint=None, more=()):
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps or steps_of(row),
        max_epochs=-1,
        callbacks=[callback, *more],
        gradient_clip_val=None if "manual" in row.loop else CLIP,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=folder,
    )
    batches = torch.utils.data.DataLoader(tokens(2), batch_size=8)
    trainer.fit(Learner(setting.model.train(), row), batches, ckpt_path=checkpoint)
    return trainer


def learn(row, setting, folder):
    callback = LightningProtection(setting.constraints, **setting.options())
    fit(row, setting, callback, folder)
    return verdict(callback.anchor)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.drawn(1)
@pytest.mark.parametrize("row", LIGHTNING, ids=str)
def test_protection_is_kept(row, note, tmp_path):
    note(row, {name: learn(row, build(), tmp_path) for name, build in SETTINGS.items()})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("given", "loaded"), [(True, False), (False, False), (True, True)])
def test_a_stopped_training_goes_on_from_a_checkpoint_with_the_constraints_that_it_began_with(given, loaded, tmp_path):
    """Without constraints, too: B of a block that was new when training began goes on training, and counts from zero, also where
    the model is the checkpoint's already.
    """
    setting = SETTINGS["hard"]()
    for steps, checkpoint in ((20, None), (40, tmp_path / "half.ckpt")):
        setting = setting if loaded else SETTINGS["hard"]()
        callback = LightningProtection(setting.constraints if given else None, **setting.options())
        trainer = fit(LIGHTNING[0], setting, callback, tmp_path, steps=steps, checkpoint=checkpoint)
        trainer.save_checkpoint(tmp_path / "half.ckpt")
    assert trainer.global_step == 40
    for layer in callback.anchor.layers:
        A = layer.factor("A").detach().double()
        assert float((A @ layer.core.basis.double()).norm()) <= 2 * torch.finfo(torch.float32).eps * float(A.norm())
        assert not layer.start_factor("B").any()  # as training began
        assert layer.factor("B").any()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loaded", [True, False])
def test_a_learned_adapter_that_is_taken_up_again_counts_from_where_training_began(loaded, tmp_path):
    setting, starts = learned(), []
    for steps, checkpoint in ((20, None), (40, tmp_path / "half.ckpt")):
        setting = setting if loaded else learned()
        callback = LightningProtection(setting.constraints, **setting.options())
        trainer = fit(LIGHTNING[0], setting, callback, tmp_path, steps=steps, checkpoint=checkpoint)
        trainer.save_checkpoint(tmp_path / "half.ckpt")
        starts.append([layer.start_factor("A") for layer in callback.anchor.layers])
    assert all(torch.equal(one, other) for one, other in zip(*starts, strict=True))
    assert measure(callback.anchor).exact


@pytest.mark.filterwarnings("ignore")
def test_an_average_that_began_before_the_callback_and_is_written_after_it_is_found(tmp_path):
    setting = SETTINGS["hard"]()
    kept = [(p, p.detach().clone()) for p in trained(setting.model)]

    class Average(lightning.Callback):
        def on_train_end(self, *_):
            for parameter, before in kept:
                parameter.data.lerp_(before, 0.5)

    callback = LightningProtection(setting.constraints, **setting.options())
    with pytest.raises(ProtectionLost, match="was written outside the optimizer's steps"):
        fit(LIGHTNING[0], setting, callback, tmp_path, steps=3, more=[Average()])


@pytest.mark.parametrize("own", [True, False])
def test_an_anchor_that_stays_in_processes_which_lightning_starts_is_warned_of(own, tmp_path):
    setting = learned()

    class Starts(lightning.Callback):  # as in a process of ddp_spawn
        def on_fit_start(self, trainer, _):
            trainer.strategy._launcher = _MultiProcessingLauncher(trainer.strategy, start_method="spawn")

    callback = LightningProtection(setting.constraints, **({"anchor": setting.anchor()} if own else setting.options()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(LIGHTNING[0], setting, callback, tmp_path, steps=2, more=[Starts()])
    assert any("give the callback anchor=Anchor.of" in str(warning.message) for warning in caught) != own


@pytest.mark.filterwarnings("ignore")
def test_an_exception_in_the_loop_gives_frozen_factors_back(tmp_path):
    setting = learned()

    class Fails(lightning.Callback):
        def on_train_batch_end(self, *_):
            raise KeyError("stop")

    callback = LightningProtection(setting.constraints, **setting.options())
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=3, callbacks=[callback, Fails()], logger=False, enable_progress_bar=False
    )
    with pytest.raises(KeyError):
        trainer.fit(Learner(setting.model, LIGHTNING[0]), torch.utils.data.DataLoader(tokens(2), batch_size=8))
    assert all(layer.factor("B").requires_grad for layer in setting.anchor().layers)
