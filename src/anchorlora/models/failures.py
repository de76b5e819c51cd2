"""Load a model through transformers: report what goes wrong in one line, and refuse what it would fill in or ignore."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from anchorlora.errors import InvalidValue, NotFinite
from anchorlora.models.families import ModelFamily

WRONG = (  # what transformers says of tensors, and in which words it is refused
    ("missing_keys", "its files lack {}"),
    ("mismatched_keys", "its files hold another shape of {}"),
    ("unexpected_keys", "its files hold {}, which this kind of model has not"),
    ("error_msgs", "{}"),
)
MADE_ANEW = re.compile(r"\.masked_bias$")  # a constant that GPT-2's older files hold
DAMAGED = re.compile("SafetensorError|no file named")  # what transformers says of weights that are cut or missing
PANIC = "PanicException"  # of a library written in Rust; it derives from BaseException


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn any exception of the block into one line, since libraries raise many kinds over other people's files."""
    try:
        yield
    except InvalidValue:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        line = first_line(error)
        again = "; fetch the model again" if DAMAGED.search(line) else ""
        raise InvalidValue(f"{what}: {line}{again}") from None


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message; also the second line where the first ends in a colon."""
    lines = str(error).strip().splitlines()
    message = " ".join(line.strip() for line in lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {message:.300}" if message else type(error).__name__


def cannot_be_loaded(model: str | None) -> str:
    """Return the start of a message about a model that cannot be loaded."""
    return f"the model {model} cannot be loaded"


def read_model(family: ModelFamily, source: Any, name: str | None, **how: Any) -> PreTrainedModel:
    """Load a model whose tensors all come from its files, with no tensor in the files left over."""
    with reading(cannot_be_loaded(name)), _without_warnings():
        model, info = family.load(source, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **how)
    for kind, words in WRONG:
        keys = sorted(key if isinstance(key, str) else str(key[0]) for key in info[kind])
        if kind == "unexpected_keys":
            keys = [key for key in keys if not MADE_ANEW.search(key)]
        if keys:
            more = f" ({len(keys)} such tensors)" if len(keys) > 1 else ""
            raise InvalidValue(f"{cannot_be_loaded(name)}: {words.format(keys[0])}{more}; fetch the model again")
    return model


def refuse_not_finite(model: PreTrainedModel, name: str | None) -> None:
    """Refuse a model that holds NaN or infinity."""
    # of these the bits may be stored as numbers of any type, and their scales are tested
    packed = {key for key, parameter in model.named_parameters() if hasattr(parameter, "quant_state")}
    for key, tensor in model.state_dict().items():
        # quantized weights consist of bytes
        is_wide = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.numel() > 0
        if is_wide and key not in packed:
            low, high = tensor.aminmax()
            if not (math.isfinite(low) and math.isfinite(high)):
                raise NotFinite(
                    f"the model {name} holds NaN or infinite values in {key}; fetch the model again, or give a wider dtype"
                )


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence the table of tensors that do not fit; the refusal says it better."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
