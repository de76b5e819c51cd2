"""Configuration: a recipe has everything about a run but its method, order and seed; a run's configuration adds those three.

pydantic validates the fields: it refuses an unknown name or a value of another type, and the message names the nearest correct
one. Leaf names are unique, so `--set rank=16` needs no path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from operator import eq
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from anchorlora.errors import InvalidValue, UnknownName
from anchorlora.paths import expanded, module_pattern, name_of_task
from anchorlora.text import without_secrets

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
FOREIGN = {  # what other trainers call a field -> the field
    foreign: field
    for field, names in {
        "learning_rate": "lr",
        "window": "batch_size train_batch_size gradient_accumulation_steps",
        "micro_batch": "per_device_train_batch_size micro_batch_size",
        "rank": "r lora_r lora_rank",
        "alpha": "lora_alpha",
        "dropout": "lora_dropout",
        "targets": "target_modules lora_target all_linear",
        "epochs": "num_epochs num_train_epochs",
        "max_tokens": "max_length max_seq_length max_seq_len model_max_length cutoff_len sequence_len",
        "warmup": "warmup_ratio",
        "schedule": "lr_scheduler_type",
        "clip_norm": "max_grad_norm",
    }.items()
    for foreign in names.split()
}


def _within_reach(place: str) -> str:
    if without_secrets(place) != place:
        raise InvalidValue("contains a password or a token, which would be written to every record; leave it out")
    if "\0" in place:
        raise InvalidValue("contains a NUL character, which no folder name can have")
    expanded(place)
    return place.rstrip("/") or place  # as shells complete the name of a folder


def names_of_modules(targets: tuple[str, ...] | str) -> tuple[str, ...] | str:
    """Accept names, "all-linear", or a regular expression over whole paths that no path can keep busy."""
    if isinstance(targets, str) and re.search(r"[\\()\[\]*+?|^$]", targets):
        return module_pattern(targets).pattern
    names = tuple(name.strip() for name in targets.split(",")) if isinstance(targets, str) else targets
    if names == (ALL_LINEAR,):
        return ALL_LINEAR
    if not names:
        raise InvalidValue(f"names no module; list names such as q_proj, or give {ALL_LINEAR}")
    if (odd := next((name for name in names if not re.fullmatch(r"[\w.-]+", name)), None)) is not None:
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


Part = TypeVar("Part", bound="Settings")


class Settings(BaseModel):
    """Base class of all parts of a configuration: immutable, with no unknown fields and no infinite numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, hide_input_in_errors=True
    )  # input is hidden in errors: it may contain a password

    @classmethod
    def read(cls: type[Part], content: Any, where: str) -> Part:
        """Return content as a value of this class, or refuse it in one line that begins with where it is from."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise explained(error, where) from None


class TaskSettings(Settings):
    """Data of a run: source, orders of the tasks, and how many examples."""

    data: Place | None = None  # folder, list of files, or dataset with the tasks
    orders: dict[str, Order] = {}  # name of an order -> names of its tasks
    train_limit: Examples | None = None  # training examples per task, the first of the file; None for all
    test_limit: Examples | None = None  # test examples per task; None for all
    tested_on: Literal["test", "holdout"] = "test"  # "holdout" tests on a part of the training data


class BaseModelSettings(Settings):
    """The frozen base model, a causal language model, and how it is loaded."""

    model: Place | None = None  # folder, Hugging Face name, or "embedded:<name>"
    revision: Place | None = None  # revision of a Hugging Face name
    trust_remote_code: Commit | None = None  # commit whose model code may run; None never runs any
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # "auto" is bfloat16 on a GPU that has it, else float32
    quantized: Literal["nf4", "int8"] | None = None  # 4 or 8 bits, by bitsandbytes
    chat_template: Place | None = None  # Jinja file with the chat template of a tokenizer that has none
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] | None = None  # day that a chat template sees
    device: Annotated[str, AfterValidator(_with_numbers)] = "auto"  # "auto" is the accelerator that torch finds, else the CPU
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None  # CPU threads; None is torch's choice


class Adapter(Settings):
    """LoRA settings."""

    targets: Targets  # ends of module paths, or "all-linear"
    rank: Directions  # rank r of a task's adapter
    alpha: Positive  # LoRA's alpha; the scale is alpha / r
    rslora: bool = False  # use the scale alpha / sqrt(r) instead
    dropout: Annotated[float, Field(ge=0, lt=1)]  # dropout on the adapter's input
    history_dropout: Literal["off", "shared"] = "off"  # "shared" gives history and block one mask


class Features(Settings):
    """Feature rows, and the rule that makes protected subspaces from them (paper, eqs. 3-4)."""

    rows: Count  # rows per layer input and task
    held_out_rows: Annotated[int, Field(ge=0, le=MANY)]  # further rows per layer input and task, for measuring only
    energy: Share  # share of the squared singular values that a core holds
    at_least: Directions  # smallest number of directions per layer
    at_most: Directions  # largest number of directions per layer; it wins over `energy`
    wide: Directions  # number of directions in the wide basis

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
    """Training of one task."""

    epochs: Count  # passes over the task's examples
    window: Count  # examples per optimizer step
    micro_batch: Count  # examples per forward pass, if they are padded
    batching: Literal["padded", "packed"] = "padded"  # "packed" puts the examples of a step into one row
    row_tokens: Count = 8192  # most tokens of a packed row
    learning_rate: Annotated[float, Field(ge=0, le=10**9)]  # AdamW's, at the peak of the schedule
    betas: tuple[Share, Share]  # AdamW's
    eps: Positive  # AdamW's
    weight_decay: Annotated[float, Field(ge=0, le=10**9)]  # AdamW's
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "constant"  # the last falls over a fifth of steps
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of a task's steps in which the learning rate rises from 0
    clip_norm: Positive | None = None  # gradient norm to clip to, before penalties and projections; None does not clip
    loss: Literal["example_mean", "token_mean"]  # mean over examples ("example_mean") or over tokens ("token_mean")
    token_weights: Literal["dft", "eaft"] | None = None  # weight of each token: its probability, or how unsure the model is
    max_tokens: Annotated[int, Field(ge=1, le=10**8)]  # most tokens of an example, prompt and answer together
    gradient_checkpointing: bool = False  # compute activations again in the backward pass


class EvaluationSettings(Settings):
    """Evaluation of a task: greedy decoding, exact match."""

    max_new_tokens: Count  # most tokens of an answer
    eval_batch: Count  # examples decoded together; sorted by length, padded on the left
    share_prefix: bool = True  # compute the common beginning of a task's prompts only once, in packed rows
    backend: Literal["transformers", "vllm"] = "transformers"  # what answers the test examples


class Tracing(Settings):
    """Measurements of each later task that change nothing in it."""

    trace_points: Annotated[int, Field(ge=2, le=MANY)] | None = None  # steps of a later task to record
    trace_layers: bool = False  # record every layer's numbers too
    predicted_kl: bool = False  # forecast what each task does to earlier answers


class Start(Settings):
    """The adapter, cores and text that a run goes on from, where another program trained them."""

    old_adapter: Place | None = None  # folder of a trained adapter
    old_cores: Place | None = None  # file of cores, which the first task must keep already
    old_memory: Place | None = None  # file of statistics of earlier texts
    old_text: Place | None = None  # rows that rehearsal draws on, as if an earlier task had left them


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
        content = self.model_dump()
        paths = {path: path for path, _ in leaves(self)}
        paths |= {path.rsplit(".", 1)[-1]: path for path in paths}
        given: dict[str, str] = {}  # path -> the name that it was given by
        for name, value in settings.items():
            if name not in paths:
                foreign = FOREIGN.get(name.rsplit(".", 1)[-1].replace("-", "_").lower())
                near = [foreign] if foreign else get_close_matches(name, paths, n=3, cutoff=0.5)
                near = near or sorted(p for p in paths if "." not in p)
                raise UnknownName(f"{where}: the recipe has no field {name!r:.80}; nearest: {', '.join(near)}")
            if (first := given.setdefault(paths[name], name)) != name:
                raise InvalidValue(f"{where}: {first} and {name} are one field; give it once")
            *parents, leaf = paths[name].split(".")
            place = content
            for parent in parents:
                place = place[parent]
            place[leaf] = None if value in ("none", "null", "None") else _listed(value, place[leaf])
        return Recipe.read(content, where if settings else self.name)

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
    """Return the settings of a base model that a file or the command line names."""
    return BaseModelSettings.read(settings, where)


def on_model(settings: BaseModelSettings, model: str) -> BaseModelSettings:
    """Return settings for another model; the earlier model's revision and code are dropped."""
    return base_model_of("--model", **settings.model_dump() | {"model": model, "revision": None, "trust_remote_code": None})


def leaves(part: BaseModel, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every field with its dotted path; nested parts are opened, dictionaries are not."""
    for name in type(part).model_fields:
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def differences(ours: BaseModel, theirs: BaseModel, same: Callable[[Any, Any], bool] = eq) -> list[str]:
    """Return the fields in which two configurations differ."""
    other = dict(leaves(theirs))
    return [f"{path}: {value!r} -> {other[path]!r}" for path, value in leaves(ours) if not same(value, other[path])]


def explained(error: ValidationError, where: str) -> InvalidValue:
    """Return pydantic's report as an error with one line: field, reason and value."""
    first = error.errors()[0]
    path = ".".join(str(step) for step in first["loc"])
    value = "" if first["type"] in ("missing", "value_error") else f" (found {without_secrets(str(first['input']))!r:.60})"
    said = first["msg"].removeprefix("Value error, ")  # pydantic puts this before our own messages
    return InvalidValue(f"{where}: {path}: {said}{value}")


def _listed(value: Any, old: Any) -> Any:
    """Split text at commas for a field that holds a list."""
    return tuple(value.split(",")) if isinstance(value, str) and isinstance(old, tuple) else value
