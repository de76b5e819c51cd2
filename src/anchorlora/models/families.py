"""Families of models: how a model of a kind is loaded, and built without weights for an estimate.

To use models that transformers does not load as causal language models, append a `ModelFamily` to `MODEL_FAMILIES`
(docs/extend.md).
"""

from __future__ import annotations

from typing import Any, Protocol

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from anchorlora.errors import InvalidValue


class ModelFamily(Protocol):
    """A family of models, told apart by their configuration.

    Its models take `input_ids` and `attention_mask`, return logits of the next token, and generate. They are frozen: adapters go
    on their linear layers.

    Example:
        >>> from transformers import Qwen3Config
        >>> from anchorlora.models.families import family_of
        >>> type(family_of(Qwen3Config(), "tiny")).__name__
        'CausalLM'
    """

    def owns(self, config: PretrainedConfig) -> bool:
        """Return True if a configuration is of this family.

        Args:
            config: Configuration of a model, as transformers reads it.
        """

    def load(self, source: Any, **how: Any) -> Any:
        """Return what `from_pretrained` of the family's class returns.

        Args:
            source: Folder or hub name.
            how: Arguments of `from_pretrained`; among them `output_loading_info=True`, so the result is a model and a dictionary.
        """

    def empty(self, config: PretrainedConfig, **how: Any) -> PreTrainedModel:
        """Return a model without weights, made on the device "meta" for an estimate.

        Args:
            config: Configuration of the model.
            how: Arguments of the class, such as `dtype`.
        """


class CausalLM:
    """Models that transformers loads with AutoModelForCausalLM."""

    def owns(self, config: PretrainedConfig) -> bool:
        """Return True for what that class knows, or the model's own code tells it, unless the model has an encoder of its own."""
        known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in str(getattr(config, "auto_map", ""))
        return known and not config.is_encoder_decoder

    def load(self, source: Any, **how: Any) -> Any:
        """Load with AutoModelForCausalLM."""
        return AutoModelForCausalLM.from_pretrained(source, **how)

    def empty(self, config: PretrainedConfig, **how: Any) -> PreTrainedModel:
        """Build with AutoModelForCausalLM."""
        return AutoModelForCausalLM.from_config(config, **how)


MODEL_FAMILIES: list[ModelFamily] = [CausalLM()]


def family_of(config: PretrainedConfig, name: str | None) -> ModelFamily:
    """Return the first family in `MODEL_FAMILIES` that owns a configuration."""
    owner = next((family for family in MODEL_FAMILIES if family.owns(config)), None)
    if owner is None:
        if config.is_encoder_decoder:
            raise InvalidValue(
                f"encoder-decoder models are not supported: the model {name} ({config.model_type}) is one; give a causal language "
                "model"
            )
        raise InvalidValue(
            f"the model {name} is a model of type {config.model_type}, and only causal language models are supported; give one, or "
            "write a ModelFamily"
        )
    return owner
