"""What each method promises for every optimizer, as data: the table that `check`, the tests and the documents share.

displacement  dA V = 0    the block's move does not touch the core
state         A V = 0     the block itself does not touch the core
companion     dB = 0      B does not move
response      dW V = 0    the layer's effective change does not touch the core: rho is zero to rounding
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Claims:
    """Which of the four conditions a method keeps from its second task on."""

    displacement: bool = False
    state: bool = False
    companion: bool = False
    response: bool = False

    def condition(self) -> str:
        """The condition in words, as tables print it."""
        kept = [field.name for field in fields(self) if getattr(self, field.name)]
        return ", ".join(kept) if kept else "none"


NONE = Claims()
CLAIMS: dict[str, Claims] = {
    "seq-lora": NONE,
    "replay": NONE,
    "ewc": NONE,
    "lwf": NONE,
    "projected-lora": NONE,
    "projected-lora-wrp": Claims(displacement=True),
    "projected-lora-freeze-b": Claims(companion=True),
    "sfor": Claims(displacement=True, companion=True, response=True),
    "inc-lora": NONE,
    "n-lora": NONE,
    "sd-lora": NONE,
    "o-lora": NONE,
    "o-lora-retract": NONE,
    "o-lora-retract-gradient": NONE,
    "o-lora-hard": Claims(displacement=True, state=True, response=True),
    "o-lora-effective": NONE,
    "o-lora-bsr": Claims(displacement=True, state=True, response=True),
    "o-lora-bsr-strong": Claims(displacement=True, state=True, response=True),
}
