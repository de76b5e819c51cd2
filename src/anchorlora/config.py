"""Configuration: a recipe has everything about a run but its method, order and seed; a run's configuration adds those three.

pydantic validates the fields: it refuses an unknown name or a value of another type, and the message names the nearest correct
one. Leaf names are unique, so `--set rank=16` needs no path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from anchorlora.errors import InvalidValue, UnknownName
from anchorlora.schemas.text import expanded, name_of_task, without_secrets

# no real use comes near these limits; a larger value is a slip or a trap that would show after hours, or never
WIDEST = 65_536  # of a layer
MANY = 10**6
Count = Annotated[int, Field(ge=1, le=MANY)]
Directions = Annotated[int, Field(ge=1, le=WIDEST)]
Examples = Annotated[int, Field(ge=1, le=10**9)]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=10**9)]
ALL_LINEAR = "all-linear"


def _within_reach(place: str) -> str:
    if without_secrets(place) != place:
        raise InvalidValue("contains a password or a token, which would be written to every record; leave it out")
    if "\0" in place:
        raise InvalidValue("contains a NUL character, which no folder name can have")
    expanded(place)
    return place


def names_of_modules(targets: tuple[str, ...] | str) -> tuple[str, ...] | str:
    """Accept names only: matching a stranger's regular expression can take forever."""
    names = tuple(name.strip() for name in targets.split(",")) if isinstance(targets, str) else targets
    if names == (ALL_LINEAR,):
        return ALL_LINEAR
    if not names:
        raise InvalidValue(f"names no module; list names such as q_proj, or give {ALL_LINEAR}")
    odd = next((name for name in names if not re.fullmatch(r"[\w.-]+", name)), None)
    if odd is not None:
        raise InvalidValue(f"{odd!r:.60} is not the name of a module; list names such as q_proj, or give {ALL_LINEAR}")
    return names


def _with_numbers(device: str) -> str:
    if device.split(":")[0] == "meta":
        raise InvalidValue("nothing is computed on meta; give cpu, cuda, cuda:0, xpu, mps or auto")
    return device


Place = Annotated[str, Field(max_length=4096), AfterValidator(_within_reach)]
Targets = Annotated[tuple[str, ...] | str, Field(max_length=10_000), AfterValidator(names_of_modules)]
TaskName = Annotated[str, AfterValidator(name_of_task)]
Order = Annotated[tuple[TaskName, ...], Field(min_length=1)]


class Settings(BaseModel):
    """Base class of all parts of a configuration: immutable, with no unknown fields and no infinite numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, hide_input_in_errors=True
    )  # input is hidden in errors: it may contain a password


class TaskSettings(Settings):
    """Data of a run: source, orders of the tasks, and how many examples.

    Attributes:
        data: A folder in the layout of CL_Benchmark, TRACE, SAPT or LLaMA-Factory, a YAML list of files, or "embedded:<name>".
        orders: Name of an order -> names of its tasks.
        train_limit: Training examples per task, the first of the file; None for all.
        test_limit: Test examples per task; None for all.
        tested_on: "test", or "holdout" for a tenth of the training data; with "holdout", no test file is opened.
    """

    data: Place | None = None
    orders: dict[str, Order] = {}
    train_limit: Examples | None = None
    test_limit: Examples | None = None
    tested_on: Literal["test", "holdout"] = "test"


class BaseModelSettings(Settings):
    """The frozen base model, a causal language model, and how it is loaded.

    Attributes:
        model: A folder, a Hugging Face name, or "embedded:<name>".
        revision: Revision of a Hugging Face name.
        trust_remote_code: Commit whose model code may run; None never runs any.
        dtype: "auto" is bfloat16 on a GPU that has it, else float32.
        quantized: Store the weights in 4 ("nf4") or 8 bits ("int8") by bitsandbytes; None leaves them as they are.
        chat_template: A Jinja file with the chat template of a tokenizer that has none.
        date: Day that a chat template sees which writes the date, as 2026-11-25; None is the day on which the run began.
        device: "auto" is the accelerator that torch finds, else the CPU.
        threads: CPU threads; None is torch's choice.
    """

    model: Place | None = None
    revision: Place | None = None
    trust_remote_code: Commit | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantized: Literal["nf4", "int8"] | None = None
    chat_template: Place | None = None
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] | None = None
    device: Annotated[str, AfterValidator(_with_numbers)] = "auto"
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None


class Adapter(Settings):
    """LoRA settings.

    Attributes:
        targets: Ends of module paths, or "all-linear".
        rank: Rank r of a task's adapter.
        alpha: LoRA's alpha; the scale is alpha / r.
        rslora: Use the scale alpha / sqrt(r) instead.
        dropout: Dropout on the adapter's input.
        history_dropout: Dropout on frozen earlier adapters: "off", or "shared" for one mask over them and the current one.
    """

    targets: Targets
    rank: Directions
    alpha: Positive
    rslora: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)]
    history_dropout: Literal["off", "shared"] = "off"


class Features(Settings):
    """Feature rows, and the rule that makes protected subspaces from them (paper, eqs. 3-4).

    Attributes:
        rows: Rows per layer input and task.
        held_out_rows: Further rows per layer input and task, for measuring only.
        energy: Share of the squared singular values that a core holds.
        at_least: Smallest number of directions per layer.
        at_most: Largest number of directions per layer; it wins over `energy`.
        wide: Number of directions in the wide basis.
    """

    rows: Count
    held_out_rows: Annotated[int, Field(ge=0, le=MANY)]
    energy: Share
    at_least: Directions
    at_most: Directions
    wide: Directions

    @model_validator(mode="after")
    def _in_order(self) -> Features:
        if not self.at_least <= self.at_most <= self.wide:
            raise InvalidValue(f"at_least {self.at_least}, at_most {self.at_most} and wide {self.wide} must not decrease")
        if self.rows < self.at_least:
            raise InvalidValue(
                f"{self.rows} rows make no core of at least {self.at_least} directions; raise rows or lower at_least"
            )
        return self


class Training(Settings):
    """Training of one task.

    Attributes:
        epochs: Passes over the task's examples.
        window: Examples per optimizer step.
        micro_batch: Examples per forward pass, if they are padded.
        batching: "padded": one row per example. "packed": one row for many; the beginning that their prompts share is computed
            once, and each example attends to it and to itself. The loss is the same; dropout draws other numbers.
        row_tokens: Most tokens of a packed row.
        learning_rate: AdamW's learning rate; 0 trains nothing, and the run tests the base model.
        betas: AdamW's betas.
        eps: AdamW's epsilon.
        weight_decay: AdamW's weight decay.
        schedule: Learning rate over the steps of a task, after warm-up: "constant", or falling to 0 as a line or as a cosine.
        warmup: Share of a task's steps in which the learning rate rises from 0.
        clip_norm: Gradient norm to clip to, before penalties and projections; None does not clip.
        loss: Mean over examples ("example_mean") or over tokens ("token_mean").
        max_tokens: Most tokens of an example, prompt and answer together.
        gradient_checkpointing: Compute activations again in the backward pass instead of storing them: slower, in less memory.
    """

    epochs: Count
    window: Count
    micro_batch: Count
    batching: Literal["padded", "packed"] = "padded"
    row_tokens: Count = 8192
    learning_rate: Annotated[float, Field(ge=0, le=10**9)]
    betas: tuple[Share, Share]
    eps: Positive
    weight_decay: Annotated[float, Field(ge=0, le=10**9)]
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    clip_norm: Positive | None = None
    loss: Literal["example_mean", "token_mean"]
    max_tokens: Annotated[int, Field(ge=1, le=10**8)]
    gradient_checkpointing: bool = False


class EvaluationSettings(Settings):
    """Evaluation of a task: greedy decoding, exact match.

    Attributes:
        max_new_tokens: Most tokens of an answer.
        eval_batch: Examples decoded together; sorted by length, padded on the left.
        share_prefix: Compute the common beginning of a task's prompts only once.
        backend: "transformers", or "vllm" for answers of a large model by vLLM, of which a sample is compared.
    """

    max_new_tokens: Count
    eval_batch: Count
    share_prefix: bool = True
    backend: Literal["transformers", "vllm"] = "transformers"


class Tracing(Settings):
    """Measurements of each later task that change nothing in it.

    Attributes:
        trace_points: Measurements per task, both ends included; None writes no trace.jsonl.
        trace_layers: Record every layer's numbers too.
        predicted_kl: Also forecast what a task does to earlier answers: one more pass over 64 examples at the end of each task.
    """

    trace_points: Annotated[int, Field(ge=2, le=MANY)] | None = None
    trace_layers: bool = False
    predicted_kl: bool = False


class Start(Settings):
    """What a run goes on from, where it was not this program that trained it.

    Attributes:
        old_adapter: Folder of a PEFT LoRA adapter; its layers are the targets. Methods with a block per task keep it frozen beside
            theirs, and methods with a shared adapter train it further.
        old_cores: File of cores, which the first task must keep already.
        old_memory: File of what constraints remember of earlier tasks: `remembered.safetensors` in the state of a run's last
            task, or `memory.safetensors` of a skill.
    """

    old_adapter: Place | None = None
    old_cores: Place | None = None
    old_memory: Place | None = None


class Recipe(Settings):
    """A named protocol: everything about a run but the method, the order and the seed.

    Recipes that come with the package are functions in `anchorlora.recipes`. A recipe is immutable; `changed` returns a new one.

    Args:
        name: Name in records and tables.
        tasks: Data, orders and limits.
        base_model: The frozen model.
        adapter: LoRA settings.
        features: Feature rows and the rule for cores.
        training: Optimizer, batches and lengths.
        evaluation: Decoding.
        trace: Measurements beyond those of every run; by default none.
        start: What the run goes on from; by default the base model alone.

    Example:
        >>> from anchorlora.recipes import mini
        >>> recipe = mini().changed({"rank": 16, "training.learning_rate": "3e-4"})
        >>> recipe.adapter.rank, recipe.training.learning_rate
        (16, 0.0003)
        >>> recipe.steps(examples=100)  # 8 per optimizer step
        13
    """

    name: str
    tasks: TaskSettings
    base_model: BaseModelSettings
    adapter: Adapter
    features: Features
    training: Training
    evaluation: EvaluationSettings
    trace: Tracing = Tracing()
    start: Start = Start()

    def changed(self, settings: Mapping[str, Any], *, where: str = "--set") -> Recipe:
        """Return this recipe with some fields changed.

        Args:
            settings: Leaf name or dotted path -> value, or text as on the command line: "none" for None, commas between list items.
            where: Source of the settings, for the error message.

        Returns:
            The new recipe, validated.

        Raises:
            UnknownName: The recipe has no such field; the message offers the nearest names.
            ValueError: A value is refused; the message is one line with field, value and reason.

        Example:
            >>> from anchorlora.recipes import standard_cl
            >>> standard_cl().changed({"targets": "q_proj,k_proj", "clip_norm": "1.0"}).adapter.targets
            ('q_proj', 'k_proj')
            >>> standard_cl().changed({"ranks": 16})
            Traceback (most recent call last):
                ...
            anchorlora.errors.UnknownName: --set: the recipe has no field 'ranks'; nearest: rank, ...
        """
        return _changed(self, settings, where)

    def steps(self, examples: int) -> int:
        """Return the optimizer steps of one task.

        Args:
            examples: Number of training examples.

        Example:
            >>> from anchorlora.recipes import standard_cl
            >>> standard_cl().steps(10_000)
            1250
        """
        return self.training.epochs * -(-examples // self.training.window)


class RunConfig(Settings):
    """Configuration of one run, the contents of its config.yaml: a method, an order and a seed on a recipe.

    Args:
        method: Name of a method, or "file.py:variable".
        settings: Numbers of the method's parts that differ from its definition, by "Part.field".
        selection: SHA-256 of the selection.json that chose a setting, or None.
        order: Names of the tasks, first to last.
        seed: Seed of everything random in the run.
        recipe: Everything else.

    Example:
        >>> from anchorlora.config import RunConfig
        >>> from anchorlora.recipes import mini
        >>> recipe = mini()
        >>> config = RunConfig(method="sfor", order=recipe.tasks.orders["order1"], seed=42, recipe=recipe)
        >>> config.order
        ('entities', 'reviews', 'questions', 'news')
    """

    method: str
    settings: dict[str, float] = {}
    selection: str | None = None
    order: Order
    seed: int
    recipe: Recipe


def base_model_of(where: str, **settings: Any) -> BaseModelSettings:
    """Return the settings of a base model that a file or the command line names.

    Args:
        where: Source of the settings, for the error message.
        **settings: Fields of `BaseModelSettings`.

    Raises:
        ValueError: A field is refused; the message is one line and repeats no password or token.

    Example:
        >>> from anchorlora.config import base_model_of
        >>> base_model_of("--model", model="Qwen/Qwen3-8B").dtype
        'auto'
    """
    try:
        return BaseModelSettings.model_validate(settings)
    except ValidationError as error:
        raise explained(error, where) from None


def on_model(settings: BaseModelSettings, model: str, *, where: str = "--model", **settings_too: Any) -> BaseModelSettings:
    """Return settings for another model; the earlier model's revision and code are dropped.

    Args:
        settings: Settings of the earlier model.
        model: A folder, a Hugging Face name, or "embedded:<name>".
        where: Source of the name, for the error message.
        **settings_too: Further fields of `BaseModelSettings` to change.

    Raises:
        ValueError: A field is refused, as in `base_model_of`.
    """
    other = {"model": model, "revision": None, "trust_remote_code": None}
    return base_model_of(where, **{**settings.model_dump(), **other, **settings_too})


def leaves(part: BaseModel, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every field with its dotted path; nested parts are opened, dictionaries are not.

    Args:
        part: A configuration or a part of one.
        path: Prefix of the paths, ending in a dot.

    Yields:
        Path and value.

    Example:
        >>> from anchorlora.config import BaseModelSettings, leaves
        >>> dict(leaves(BaseModelSettings(), "base_model."))["base_model.device"]
        'auto'
    """
    for name in type(part).model_fields:
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def differences(ours: BaseModel, theirs: BaseModel) -> list[str]:
    """Return the fields in which two configurations differ.

    Args:
        ours: A configuration.
        theirs: Another one of the same type.

    Returns:
        One "path: ours -> theirs" per field.

    Example:
        >>> from anchorlora.config import differences
        >>> from anchorlora.recipes import mini
        >>> differences(mini(), mini().changed({"rank": 4}))
        ['adapter.rank: 8 -> 4']
    """
    mine, other = dict(leaves(ours)), dict(leaves(theirs))
    return [f"{path}: {mine[path]!r} -> {other[path]!r}" for path in mine if mine[path] != other[path]]


def explained(error: ValidationError, where: str) -> InvalidValue:
    """Return pydantic's report as an error with one line: field, reason and value.

    Args:
        error: pydantic's report, of which the first entry counts.
        where: Source of the values, such as a file.
    """
    first = error.errors()[0]
    path = ".".join(str(step) for step in first["loc"])
    value = "" if first["type"] in ("missing", "value_error") else f" (found {without_secrets(str(first['input']))!r:.60})"
    said = first["msg"].removeprefix("Value error, ")  # pydantic puts this before our own messages
    return InvalidValue(f"{where}: {path}: {said}{value}")


def _changed(recipe: Recipe, settings: Mapping[str, Any], where: str) -> Recipe:
    content = recipe.model_dump()
    paths = {path: path for path, _ in leaves(recipe)}
    paths |= {path.rsplit(".", 1)[-1]: path for path in paths}
    for name, value in settings.items():
        if name not in paths:
            near = get_close_matches(name, paths, n=3, cutoff=0.5) or sorted(p for p in paths if "." not in p)
            raise UnknownName(f"{where}: the recipe has no field {name!r:.80}; nearest: {', '.join(near)}")
        *parents, leaf = paths[name].split(".")
        place = content
        for parent in parents:
            place = place[parent]
        place[leaf] = None if value in ("none", "null", "None") else _listed(value, place[leaf])
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise explained(error, where if settings else recipe.name) from None


def _listed(value: Any, old: Any) -> Any:
    """Split text at commas for a field that holds a list."""
    return tuple(value.split(",")) if isinstance(value, str) and isinstance(old, tuple) else value
