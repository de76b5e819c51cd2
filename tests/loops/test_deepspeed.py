"""DeepSpeed ZeRO 1, 2 and 3, where it is installed: refused, or stopped at the second step; in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PLACES = {
    "optimizer of the engine": r"TypeError: .*flat partitions",
    "own optimizer": r"(ValueError: .* is not in this optimizer|TypeError: .*flat partitions)",
    "protected before deepspeed.initialize": r"(ProtectionLost: .* no longer holds the factors|TypeError: .*flat partitions)",
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_zero_is_never_silently_unprotected(stage, place):
    pytest.importorskip("deepspeed", reason="deepspeed is not installed; the test extra does without")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29600 + 10 * stage + list(PLACES).index(place))}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    code = f"from loops.test_deepspeed import attach; attach({stage}, {place!r})"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(PLACES[place], done.stderr), done.stderr[-2000:]


def attach(stage, place):
    import deepspeed

    from anchorlora import protect
    from loops.setting import adamw, learned, loss_of, tokens, trained

    setting = learned()
    own, anchor = adamw(trained(setting.model)), setting.anchor()
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if place.startswith("protected before"):
        with protect(own, anchor, setting.constraints):
            engine, *_ = deepspeed.initialize(model=setting.model, optimizer=own, config=config)
            for _ in range(3):
                engine.backward(loss_of(engine, tokens(2)))
                engine.step()
        return
    engine, theirs, *_ = deepspeed.initialize(model=setting.model, optimizer=own, config=config)
    with protect(theirs if place == "optimizer of the engine" else own, setting.anchor(), setting.constraints):
        pass
