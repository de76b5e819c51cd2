"""Rows that say how good an answer is, and would be learned as if each were good: refused, with the trainers that learn them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anchorlora.data.forms.base import Form

PAIRS = (
    "are a preference pair, for TRL's DPOTrainer with ProtectionCallback; to learn the chosen answers alone, name them, with "
    "--columns prompt=prompt,completion=chosen or --columns messages=chosen"
)
KTO = (
    "is true or false, as in rows for KTO, and every answer would be learned as good; keep the good rows, without this column, "
    "or train with TRL's KTOTrainer and ProtectionCallback"
)


def _kto(column: str) -> Form:
    def holds(columns: Mapping[str, Any]) -> bool:
        return str(columns[column]).strip().lower() in ("true", "false")

    return Form("kto", (column,), "refused: KTO judges whole answers", refuses=KTO, holds=holds, even_named=True)


FORMS = (
    Form("preferences", ("chosen", "rejected"), "refused: DPO learns from pairs", refuses=PAIRS),
    _kto("label"),
    _kto("kto_tag"),
)
