"""What libraries log and warn of while a command runs: names of strangers stay words, and no secret is in them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anchorlora.shown import shown


class ShownRecord(logging.LogRecord):
    """A message of any logger, also of one that a library makes later with a handler of its own."""

    def getMessage(self) -> str:  # noqa: N802  # the name is logging's
        return shown(super().getMessage())


@contextmanager
def libraries_in_words() -> Iterator[None]:
    """Every message that is logged and every warning within the block is shown as words."""
    record, warning = logging.getLogRecordFactory(), warnings.formatwarning

    def in_words(*args: Any, **how: Any) -> str:
        return shown(warning(*args, **how))

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it says which of its kernels are not there, whatever is asked
    logging.setLogRecordFactory(ShownRecord)
    warnings.formatwarning = in_words
    try:
        yield
    finally:
        logging.setLogRecordFactory(record)
        warnings.formatwarning = warning
