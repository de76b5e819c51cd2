"""A recipe: everything about a run but the method, the order and the seed.  A cell: a recipe with those three.

Fields are validated by pydantic: an unknown name or a value of another kind is refused with the nearest right one. Leaf names
are unique, so `--set rank=16` needs no path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from anchorlora.errors import InvalidValue, UnknownName
from anchorlora.schemas.text import expanded, name_of_task, without_secrets

# no use of any field comes near these; what lies beyond is a slip or a trap, and would be found out after hours or not at all
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
        raise InvalidValue("holds a password or a token, which would be written into every record; leave it out")
    if "\0" in place:
        raise InvalidValue("holds a NUL character, which no folder has in its name")
    expanded(place)
    return place


def _names_of_modules(targets: tuple[str, ...] | str) -> tuple[str, ...] | str:
    """Names, and never a regular expression: one that a stranger wrote can take for ever."""
    names = tuple(name.strip() for name in targets.split(",")) if isinstance(targets, str) else targets
    if names == (ALL_LINEAR,):
        return ALL_LINEAR
    if not names:
        raise InvalidValue(f"names no module; list their names, such as q_proj, or give {ALL_LINEAR}")
    odd = next((name for name in names if not re.fullmatch(r"[\w.-]+", name)), None)
    if odd is not None:
        raise InvalidValue(f"{odd!r:.60} is no name of a module; list their names, such as q_proj, or give {ALL_LINEAR}")
    return names


def _with_numbers(device: str) -> str:
    if device.split(":")[0] == "meta":
        raise InvalidValue("on meta nothing is computed; give cpu, cuda, cuda:0, xpu, mps or auto")
    return device


Place = Annotated[str, Field(max_length=4096), AfterValidator(_within_reach)]
Targets = Annotated[tuple[str, ...] | str, Field(max_length=10_000), AfterValidator(_names_of_modules)]
TaskName = Annotated[str, AfterValidator(name_of_task)]
Order = Annotated[tuple[TaskName, ...], Field(min_length=1)]


class Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, hide_input_in_errors=True
    )  # what was given may hold a password


class Tasks(Part):
    """Which data, in which orders, and how much of it."""

    data: Place | None = None  # a CL_Benchmark folder, or "embedded:<name>"
    orders: dict[str, Order] = {}
    train_limit: Examples | None = None  # examples a task, the first of the file
    test_limit: Examples | None = None
    tested_on: Literal["test", "holdout"] = "test"  # holdout: a tenth of the training data, and no test file is opened


class LoadedModel(Part):
    """The frozen causal language model."""

    model: Place | None = None  # a folder, a hub name, or "embedded:<name>"
    revision: Place | None = None  # of a hub name
    trust_remote_code: Commit | None = None  # run the code that comes with the model, as it was at this commit; none: never
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 where a GPU has it, else float32
    quantized: Literal["nf4", "int8"] | None = None  # weights stored in 4 or 8 bits by bitsandbytes; none: as they are
    device: Annotated[str, AfterValidator(_with_numbers)] = "auto"  # auto: the accelerator that torch finds, if there is one
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None  # CPU threads; none: as torch finds them


class Adapter(Part):
    """The LoRA blocks."""

    targets: Targets  # the ends of modules' paths, or "all-linear"
    rank: Directions
    alpha: Positive
    rslora: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)]
    history_dropout: Literal["off", "shared"] = "off"  # on frozen blocks; shared: one mask for them and the current block


class Features(Part):
    """Feature rows, and the rule that makes cores of them."""

    rows: Count  # a layer input and task
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


class Training(Part):
    """How a task is learned."""

    epochs: Count
    window: Count  # examples an optimizer step
    micro_batch: Count  # examples a forward
    learning_rate: Positive
    betas: tuple[Share, Share]
    eps: Positive
    weight_decay: Annotated[float, Field(ge=0, le=10**9)]
    schedule: Literal["constant"] = "constant"
    clip_norm: Positive | None = None  # before penalties and projections; none: no clipping
    loss: Literal["example_mean", "token_mean"]
    max_tokens: Annotated[int, Field(ge=1, le=10**8)]  # prompt and answer together


class Evaluation(Part):
    """How a task is tested: greedy decoding, exact match."""

    max_new_tokens: Count
    eval_batch: Count  # examples decoded together; sorted by length, padded left
    share_prefix: bool = True  # read the common beginning of a task's prompts once


class Tracing(Part):
    """What is recorded of each later task while it is learned."""

    trace_points: Annotated[int, Field(ge=2, le=MANY)] | None = (
        None  # measurements a task, both ends included; none: no trace.jsonl
    )
    trace_layers: bool = False  # every layer's numbers as well


class Recipe(Part):
    """A named protocol."""

    name: str
    tasks: Tasks
    base_model: LoadedModel
    adapter: Adapter
    features: Features
    training: Training
    evaluation: Evaluation
    trace: Tracing = Tracing()

    def changed(self, settings: Mapping[str, Any], *, where: str = "--set") -> Recipe:
        """This recipe with some fields set, by leaf name or path, from text or values.  where: what an error says they are from."""
        return _changed(self, settings, where)

    def steps(self, examples: int) -> int:
        """Optimizer steps that a task of so many examples takes."""
        return self.training.epochs * -(-examples // self.training.window)


class RunConfig(Part):
    """One run: what config.yaml holds."""

    method: str  # a name, or "file.py:variable"
    settings: dict[str, float] = {}  # numbers of its parts that are not as in its definition, by "Part.field"
    selection: str | None = None  # SHA-256 of the selection.json that a setting comes from
    order: Order
    seed: int
    recipe: Recipe


def backbone_of(where: str, **settings: Any) -> LoadedModel:
    """A base model as a file or the command line names it.

    where: what an error says it is from. Raises ValueError in one line that repeats no password and no token.
    """
    try:
        return LoadedModel.model_validate(settings)
    except ValidationError as error:
        raise explained(error, where) from None


def on_model(settings: LoadedModel, model: str, *, where: str = "--model", **settings_too: Any) -> LoadedModel:
    """The settings for another model: no revision and no code of the one before.  Raises ValueError as `backbone_of` does."""
    other = {"model": model, "revision": None, "trust_remote_code": None}
    return backbone_of(where, **{**settings.model_dump(), **other, **settings_too})


def leaves(part: BaseModel, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every field with its dotted path; nested parts are opened, dictionaries are not."""
    for name in type(part).model_fields:
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def differences(ours: BaseModel, theirs: BaseModel) -> list[str]:
    """The fields in which two configurations differ, as "path: ours -> theirs"."""
    mine, other = dict(leaves(ours)), dict(leaves(theirs))
    return [f"{path}: {mine[path]!r} -> {other[path]!r}" for path in mine if mine[path] != other[path]]


def explained(error: ValidationError, where: str) -> InvalidValue:
    """One line with field, value and remedy from pydantic's report."""
    first = error.errors()[0]
    path = ".".join(str(step) for step in first["loc"])
    value = "" if first["type"] in ("missing", "value_error") else f" (found {without_secrets(str(first['input']))!r:.60})"
    said = first["msg"].removeprefix("Value error, ")  # what pydantic puts before words of ours
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
    """Text for a field that holds a list is split at commas."""
    return tuple(value.split(",")) if isinstance(value, str) and isinstance(old, tuple) else value
