"""Load the base model and its tokenizer from a folder or a hub name, as data only: no remote code, no pickle."""

from __future__ import annotations

import hashlib
import re
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import Embedding
from transformers import AutoConfig, BitsAndBytesConfig, DynamicCache, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import cached_file, find_adapter_config_file

from anchorlora import embedded
from anchorlora.adapters import keep_unpacked
from anchorlora.config import BaseModelSettings
from anchorlora.data.templates import stop_ids
from anchorlora.devices import chosen, has_bfloat16, reuse_freed_memory, type_name
from anchorlora.errors import InvalidValue, MissingExtra, message_of
from anchorlora.models.failures import cannot_be_loaded, read_model, reading, refuse_not_finite
from anchorlora.models.families import family_of
from anchorlora.models.hub import is_path, refuse_no_model
from anchorlora.models.tokenizer import of_adapter, read_tokenizer, with_template
from anchorlora.models.trust import refuse_foreign
from anchorlora.paths import expanded
from anchorlora.processes import sharding
from anchorlora.store.adapter_config import CONFIG_FILE
from anchorlora.store.record import read_record
from anchorlora.store.run_folder import run_of
from anchorlora.store.seal import sha256

WEIGHTS = "*.safetensors"
TEMPLATES = ("*.jinja", "additional_chat_templates/*.jinja")  # of chats


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A loaded model, with what a record says about it."""

    model: PreTrainedModel
    tokenizer: Any
    name: str  # name as given: a folder, a hub name or "embedded:<name>"
    revision: str | None  # commit on the hub, or the revision that was asked for
    sha256: str | None  # over the hashes of its safetensors, configuration and tokenizer files
    dtype: str  # type of its weights, such as "float32" or "float32 over nf4"
    device: torch.device
    parameters: int  # of the model alone, before any adapter
    files: dict[str, str]  # SHA-256 of each of its files by name; empty for a model from the hub, which has its commit

    def facts(self) -> dict[str, Any]:
        """Return the fields that a record has of the model."""
        return {name: getattr(self, name) for name in ("name", "revision", "sha256", "parameters", "dtype")}


def load_base_model(settings: BaseModelSettings, *, adapter: Path | None = None) -> LoadedModel:
    """Load the base model of the settings: in evaluation mode, on its device, with greedy generation.

    Args:
        settings: Model, type, device and quantization.
        adapter: Folder of an adapter that is used with it, whose tokenizer and chat template count if it has them.

    Raises:
        InvalidValue: The model cannot be loaded, or the device cannot be used.
        NotFinite: The weights hold NaN or infinity.
        MissingExtra: The model is quantized and bitsandbytes is not installed.

    Example:
        >>> from anchorlora.config import BaseModelSettings
        >>> load_base_model(BaseModelSettings(model="embedded:mini", dtype="float32", device="cpu")).dtype
        'float32'
    """
    origin, device, dtype = _origin(settings), device_of(settings), dtype_of(settings)
    _refuse_absent(device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if device.type == "cpu":
        reuse_freed_memory()
    commit = _commit(settings, origin)  # a branch may move while its files are read: what follows is of one commit
    config = _config(settings, origin, commit)
    how = quantization(settings, config)
    tokenizer, model = _load(config, settings, origin, commit, dtype=dtype, **(_quantizing(settings, device, dtype) if how else {}))
    tokenizer = of_adapter(tokenizer, adapter, settings)
    with reading(cannot_be_loaded(settings.model)):
        tokenizer.padding_side = "left"
        if (tokenizer.pad_token_id or 0) >= (size_in(config) or sys.maxsize):  # it was added to the tokenizer alone
            tokenizer.pad_token = tokenizer.eos_token
        # the model's own generation settings (sampling, penalties) would otherwise fill in what we leave open
        model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=stops_of(model, tokenizer), pad_token_id=pad_of(tokenizer)
        )
        model.eval()
        if not how and not sharding():  # bitsandbytes has put its weights where they belong, and FSDP will
            model.to(device)
    if how:
        keep_unpacked(model)
    refuse_not_finite(model, settings.model)
    parameters = model.num_parameters() if how else sum(p.numel() for p in model.parameters())
    kind = f"{type_name(dtype)} over {how}" if how else type_name(dtype)
    hashes = file_hashes(origin, settings) if isinstance(origin, Path) else {}
    fingerprint = _fingerprint(hashes) if hashes else commit
    revision = commit or settings.revision
    return LoadedModel(model, tokenizer, str(settings.model), revision, fingerprint, kind, device, parameters, hashes)


def same_files(sha256: str | None, other: str | None) -> bool | None:
    """Return whether two models have the same files; None if nobody knows, as of a folder and a commit of the hub."""
    return sha256 == other if sha256 and other and len(sha256) == len(other) else None


def warn_of_other_files(loaded: LoadedModel, adapter: Path) -> None:
    """Warn if a run trained an adapter on a model of other files than one that is loaded; it may be the same, stored otherwise."""
    run = run_of(adapter)
    if run is None:
        return
    with suppress(InvalidValue):  # whoever reads the record says what is wrong with it
        if same_files(read_record(run.record_file).base_model.sha256, loaded.sha256) is False:
            warnings.warn(
                f"the files of {loaded.name} are not those that {adapter} was trained on; if the weights differ, nothing that was "
                "measured there holds here",
                stacklevel=3,
            )


def ends_of(model: Any) -> tuple[int, ...]:
    """Return the tokens at which a model's generation configuration stops."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return () if ends is None else tuple(map(int, ends)) if isinstance(ends, (list, tuple)) else (int(ends),)


def stops_of(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens at which answers of a model stop: its own, its tokenizer's, and the end of the assistant's turn."""
    return sorted(stop_ids(tokenizer, ends_of(model)))


def stops_beyond(tokenizer: Any, settings: BaseModelSettings, *, folder: Path | None = None) -> list[int]:
    """Return the tokens at which answers by another tokenizer stop, and at which servers of a model do not."""
    own = tokenizer_of(settings, folder=folder).eos_token_id
    ends = {*configured_ends(settings, folder=folder), *([] if own is None else [own])}
    return sorted(stop_ids(tokenizer, ends) - ends)


def configured_ends(settings: BaseModelSettings, *, folder: Path | None = None) -> tuple[int, ...]:
    """Return the tokens at which the generation configuration beside a model's weights stops; no weight is read."""
    origin = _origin(settings, folder)
    with reading(cannot_be_loaded(settings.model)):
        try:
            configuration = GenerationConfig.from_pretrained(origin, **source_of(settings))
        except OSError:  # there is none: transformers takes the model's configuration
            configuration = GenerationConfig.from_model_config(_config(settings, origin, _commit(settings, origin)))
    return ends_of(SimpleNamespace(generation_config=configuration))


def limits_in(model: Any) -> dict[str, int | None]:
    """Return how many tokens a model has, and how many positions, where these have embeddings of their own as in GPT-2."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    tokens = model.get_input_embeddings()
    tables = {part.num_embeddings for part in model.modules() if isinstance(part, Embedding) and part is not tokens}
    learned = most and tables & {most, most + 2}  # OPT has two more
    return {"size": size_in(model.config), "positions": most if learned else None}


def size_in(config: Any) -> int | None:
    """Return how many tokens a model of a configuration has; None where it does not say."""
    return getattr(config.get_text_config(), "vocab_size", None) if isinstance(config, PretrainedConfig) else None


def pad_of(tokenizer: Any) -> int:
    """Return the token that fills rows up: the tokenizer's own, or its end."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def cache_argument(function: Any) -> str:
    """Return a function's name for its cache: `cache` as in transformers from 5.24 on, or `past_key_values`. The function is asked,
    not the version, because code that comes with a model may use either.
    """
    return "cache" if "cache" in signature(function).parameters else "past_key_values"


def whole_cache(model: Any) -> dict[str, Any]:
    """Return an empty cache in which no layer forgets; one with a sliding window would keep a packed row's last tokens alone."""
    return {cache_argument(_forward_of(model)): DynamicCache()}


def may_be_masked(model: Any, cache: Any) -> bool:
    """Return True if tokens that a model keeps may be masked with others behind: none is forgotten, and it is told their places."""
    whole = type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)
    return whole and "position_ids" in signature(_forward_of(model)).parameters


def _forward_of(model: Any) -> Any:
    return type(next((part for part in model.modules() if isinstance(part, PreTrainedModel)), model)).forward


def cache_in(outputs: Any) -> Any:
    """Return the cache of what a model returned, under either name; None if it keeps something else."""
    return outputs["cache"] if "cache" in outputs else outputs.get("past_key_values")


def load_weights(settings: BaseModelSettings) -> tuple[PreTrainedModel, Any, str | None]:
    """Load a model as it is stored: the weights' own type, the model's own generation settings, on the CPU."""
    origin = _origin(settings)
    commit = _commit(settings, origin)
    config = _config(settings, origin, commit)
    how = _storage(config) or settings.quantized
    if how:
        raise InvalidValue(
            f"the model {settings.model} is quantized ({how}), and its weights take no update without being quantized again; "
            "export with --form cat or svd, or give the model in full precision with --model"
        )
    tokenizer, model = _load(config, settings, origin, commit, dtype="auto")
    refuse_not_finite(model, settings.model)
    return model.eval(), tokenizer, _sha256(settings, origin, commit)


def quantization(settings: BaseModelSettings, config: PretrainedConfig) -> str | None:
    """Return how the weights are held: "nf4", "fp4" or "int8", as stored or as the settings ask; None for full precision."""
    stored = _storage(config)
    if stored and settings.quantized:
        raise InvalidValue(f"the model {settings.model} is stored in {stored} already; leave quantized={settings.quantized} out")
    if (stored or settings.quantized) and find_spec("bitsandbytes") is None:
        raise MissingExtra("a quantized model needs bitsandbytes, which is not installed: pip install 'anchorlora[quantized]'")
    return stored or settings.quantized


def _quantizing(settings: BaseModelSettings, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments for transformers; a model that is stored quantized needs only its device."""
    in_4_bits: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    in_4_bits |= {"bnb_4bit_quant_storage": dtype} if sharding() else {}  # FSDP splits no integers
    kind = {"nf4": in_4_bits, "int8": {"load_in_8bit": True}}.get(settings.quantized or "")
    return {"device_map": {"": device}, **({"quantization_config": BitsAndBytesConfig(**kind)} if kind else {})}


def _storage(config: PretrainedConfig) -> str | None:
    stored: Any = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    if not isinstance(stored, dict) and not hasattr(stored, "to_dict"):
        raise InvalidValue("the model's quantization_config is not an object; fetch the model again")
    fields = stored if isinstance(stored, dict) else stored.to_dict()
    method = str(getattr(fields.get("quant_method"), "value", fields.get("quant_method")))
    if method != "bitsandbytes":
        raise InvalidValue(f"the model is quantized with {method}; only bitsandbytes and full precision are supported")
    return "int8" if fields.get("load_in_8bit") else str(fields.get("bnb_4bit_quant_type", "fp4"))


def _origin(settings: BaseModelSettings, folder: Path | None = None) -> str | Path:
    """The folder of a model, as given or as its name says, or its name on the hub."""
    if settings.model is None:
        raise InvalidValue("no model is named; give one with --model")
    folder = folder or embedded.folder(settings.model, "base_model")
    if folder is not None or not is_path(settings.model):
        return folder or settings.model
    refuse_no_model(settings.model)
    return expanded(settings.model)


def _config(settings: BaseModelSettings, origin: str | Path, commit: str | None) -> PretrainedConfig:
    if isinstance(origin, Path):
        refuse_foreign(origin, code=settings.trust_remote_code is not None)
    with reading(cannot_be_loaded(settings.model)):
        adapter = find_adapter_config_file(str(origin), revision=commit)
    if adapter is not None:  # transformers would put it on the weights, or on those of a model that it names
        raise InvalidValue(
            f"the model {settings.model} holds an adapter ({CONFIG_FILE}), which would change its weights; "
            "merge the adapter into them, or move its files out of the folder"
        )
    with reading(cannot_be_loaded(settings.model)):
        return AutoConfig.from_pretrained(origin, **source_of(settings, commit))


def source_of(settings: BaseModelSettings, commit: str | None = None) -> dict[str, Any]:
    """Return what loaders are told about the source of files, of `commit` where it is known: no code, unless it is allowed."""
    code = settings.trust_remote_code
    if code is None:
        return {"revision": commit or settings.revision, "trust_remote_code": False}
    if settings.revision not in (None, code):
        raise InvalidValue(f"revision {settings.revision} and trust_remote_code {code} are different commits; leave out revision")
    return {"revision": commit or code, "code_revision": code, "trust_remote_code": True}


def commit_of(settings: BaseModelSettings) -> str | None:
    """Return the commit that a model's revision stands for on the hub; None for a folder."""
    return _commit(settings, _origin(settings))


def _commit(settings: BaseModelSettings, origin: str | Path) -> str | None:
    """Commit that the settings' revision stands for now; None for a folder."""
    if isinstance(origin, Path):
        return None
    with reading(cannot_be_loaded(settings.model)):
        file = cached_file(origin, "config.json", revision=source_of(settings)["revision"])
    named = re.search(r"[/\\]snapshots[/\\]([0-9a-f]{40})[/\\]", str(file))
    return named[1] if named else None


def _load(
    config: PretrainedConfig, settings: BaseModelSettings, origin: str | Path, commit: str | None, **how: Any
) -> tuple[Any, Any]:
    family, source = family_of(config, settings.model), source_of(settings, commit)
    with reading(cannot_be_loaded(settings.model)):
        tokenizer = with_template(read_tokenizer(origin, **source), settings)
    return tokenizer, read_model(family, origin, settings.model, **how, **source)


def tokenizer_of(settings: BaseModelSettings, *, folder: Path | None = None, adapter: Path | None = None) -> Any:
    """Return the tokenizer of a model."""
    origin = _origin(settings, folder)
    if isinstance(origin, Path) and not any(origin.glob("tokenizer*")):  # transformers may make one that knows no word
        raise InvalidValue(f"no tokenizer at {origin}; fetch the model again")
    with reading(cannot_be_loaded(settings.model)):
        tokenizer = with_template(read_tokenizer(origin, **source_of(settings)), settings)
    return of_adapter(tokenizer, adapter, settings)


def template_note(settings: BaseModelSettings, tokenizer: Any, adapter: Path | None) -> str | None:
    """Return a sentence where an adapter's chat template is used instead of another that the model has; else None."""
    own = tokenizer_of(settings).chat_template if adapter is not None and settings.chat_template is None else None
    if own and own != tokenizer.chat_template:
        return f"the chat template is that in {adapter}; the one of {settings.model} differs"
    return None


def module_names(settings: BaseModelSettings, *, folder: Path | None = None) -> list[str]:
    """Return the paths of all modules of a model. Reads its configuration and no weights."""
    return [name for name, _ in empty_model(settings, folder=folder).named_modules() if name]


def empty_model(settings: BaseModelSettings, *, folder: Path | None = None) -> PreTrainedModel:
    """Return a model without its weights: shapes and configuration, on torch's meta device."""
    origin = _origin(settings, folder)
    config = _config(settings, origin, _commit(settings, origin))
    family = family_of(config, settings.model)
    with reading(cannot_be_loaded(settings.model)), torch.device("meta"):
        return family.empty(config)


def fingerprint_of(settings: BaseModelSettings) -> str | None:
    """Return the fingerprint of a model in a folder; None where it lies on the hub or is gone."""
    with suppress(InvalidValue):
        return _sha256(settings, _origin(settings), None)
    return None


def _sha256(settings: BaseModelSettings, origin: str | Path, commit: str | None) -> str | None:
    return _fingerprint(file_hashes(origin, settings)) if isinstance(origin, Path) else commit


def device_of(settings: BaseModelSettings) -> torch.device:
    """Return the device that the model goes to."""
    return chosen(settings.device)


def _refuse_absent(device: torch.device) -> None:
    try:
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise InvalidValue(f"the device {device} cannot be used here: {message_of(error)}; give cpu or auto") from None


def dtype_of(settings: BaseModelSettings) -> torch.dtype:
    """Return the type of the frozen weights; "auto" is bfloat16 on a GPU that has it, else float32."""
    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    return torch.bfloat16 if has_bfloat16(device_of(settings)) else torch.float32


def file_hashes(folder: Path, settings: BaseModelSettings) -> dict[str, str]:
    """Return the SHA-256 of each weight, configuration and tokenizer file of a model, and of code that is run."""
    read = (WEIGHTS, "*.json", "*.model", "*.txt", *TEMPLATES, *(("*.py",) if settings.trust_remote_code else ()))
    return {
        path.relative_to(folder).as_posix(): sha256(path) for path in sorted(p for pattern in read for p in folder.glob(pattern))
    }


def _fingerprint(hashes: dict[str, str]) -> str:
    """SHA-256 over name and SHA-256 of each file."""
    return hashlib.sha256("".join(f"{name} {value}\n" for name, value in hashes.items()).encode()).hexdigest()
