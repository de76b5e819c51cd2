"""A base model that is opened once, to be read, trained and scored in turn, with one adapter or another on it.

No adapter writes to the weights below it, so the model without one is bitwise as it was loaded, however often they came and went.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from anchorlora.adapters import AdapterStack, attach, detach, usual_targets
from anchorlora.config import BaseModelSettings, Targets
from anchorlora.errors import InvalidValue
from anchorlora.models.load import LoadedModel, load_base_model, warn_of_other_files


class Session:
    """A base model and its tokenizer, loaded when they are first asked for, and never again.

    Args:
        settings: Model, type, device and quantization.
        adapter: Folder of an adapter whose tokenizer and chat template count if it has them.

    Example:
        >>> from anchorlora.config import BaseModelSettings
        >>> session = Session(BaseModelSettings(model="embedded:mini", dtype="float32", device="cpu"))
        >>> session.adapted(targets=("q_proj",)).peft_config["default"].r
        1
        >>> session.bare().model is session.loaded.model
        True
    """

    def __init__(self, settings: BaseModelSettings, *, adapter: Path | None = None) -> None:
        self.settings, self.adapter = settings, adapter

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model with its tokenizer, as it stands: with the adapter that was put on it last."""
        loaded = load_base_model(self.settings, adapter=self.adapter)
        if self.adapter is not None:
            warn_of_other_files(loaded, self.adapter)
        return loaded

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model, or that of the adapter."""
        return self.loaded.tokenizer

    def bare(self) -> LoadedModel:
        """Return the model without adapters, in evaluation mode, with nothing that training left behind."""
        model: Any = self.loaded.model
        detach(model)
        if any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
            # transformers drops the older name in version 6
            (getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable)()
        model.eval()
        return self.loaded

    def adapted(self, adapter: Path | None = None, *, targets: Targets | None = None) -> Any:
        """Return the model with a saved adapter alone, or with empty ones, which change nothing.

        Args:
            adapter: Folder of a PEFT LoRA adapter; None for empty ones.
            targets: Modules that get empty ones; None takes the usual ones of the architecture.
        """
        model = self.bare().model
        if adapter is not None:
            return attach(model, adapter, only_text=True)
        return AdapterStack(model, targets or usual_targets(model), rank=1, alpha=1).model.eval()

    def room(self, max_tokens: int) -> int:
        """Return how many tokens of an example are read: no more than the model has positions.

        Args:
            max_tokens: The most that are asked for.
        """
        return min(max_tokens, getattr(self.loaded.model.config.get_text_config(), "max_position_embeddings", None) or max_tokens)

    def refuse_other(self, settings: BaseModelSettings) -> None:
        """Refuse settings that would load another model, or this one in another way.

        Args:
            settings: Those of a recipe; its revision and date may differ, which a run settles when it begins.

        Raises:
            InvalidValue: They differ from the session's in anything else.
        """
        undated = {"revision": None, "date": None}
        ours, other = self.settings.model_copy(update=undated), settings.model_copy(update=undated)
        if ours != other:
            raise InvalidValue(f"the model that is open is {ours.model}, loaded by other settings than {other.model} is asked for")
