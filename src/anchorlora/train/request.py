"""The request to `anchorlora train`, and the recipe that follows from it."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import Field

from anchorlora.adapters import read_adapter
from anchorlora.config import BaseModelSettings, Count, Place, Positive, Recipe, Settings, Targets, TaskName, differences
from anchorlora.constraints import AnswerSensitivity, Freeze, GradientStart, KroneckerBrake
from anchorlora.data.sample_files import HUB
from anchorlora.data.sources import TextTaskSettings
from anchorlora.errors import InvalidValue
from anchorlora.geometry import Factors, one_scale
from anchorlora.methods import METHODS, Method
from anchorlora.methods.folded import FoldedPerTask
from anchorlora.methods.gated import GatedPerTask
from anchorlora.methods.merged import MergedPerTask
from anchorlora.models.hub import is_path
from anchorlora.paths import expanded, is_name
from anchorlora.recipes.standard import default_recipe
from anchorlora.store.artifact import artifact_in
from anchorlora.store.files import load_yaml
from anchorlora.store.run_folder import SKILL, RunFolder
from anchorlora.text import shown

SELF = "self"  # to keep what the model writes itself
FRESH = METHODS.default("new block").name
SAME_SIZE = METHODS.default("same size").name
EXACT = METHODS.default("beside").name
CONFIG, REQUEST = "adapter_config.json", "request.yaml"
CORES, MEMORY = "cores.safetensors", "memory.safetensors"  # what is kept, in before/ and after/
UNREAD = "unread.jsonl"  # rows of a skill, of which a later one reads what answers depend on
OLD_TEXT = "old_text.jsonl"  # rows of what is kept that are trained on again, in the same folders
STARTS_FROM = 16  # examples of the new skill whose gradient a block starts from
FROM_TEXT = ("sensitivity/",)  # what can be remembered of text
# fields of a recipe that have a place of their own on the command line
OPTIONS = ("data", "targets", "name", "seed", "test", "columns", "keep", "after", "adapter", "method", "compare", "budget")
SETTING_OPTIONS = {"epochs": "--epochs", "learning_rate": "--learning-rate", "rank": "--rank", "max_tokens": "--max-length"}
INSTEAD = {
    **{name: f"--{name}" for name in OPTIONS},
    **dict.fromkeys(("old_cores", "old_memory", "old_text"), "--keep or --after"),
    "model": "the MODEL argument",
    "orders": "--data and --name",
    "old_adapter": "--adapter or --after",
    "keep_columns": "--keep-columns",
    "metrics": "--metric",
    "own": "--self-texts",
    "same_size": "--same-size",
    "title": "--name",
}


def changed_options(was: SkillRequest, now: SkillRequest) -> list[str]:
    """Return the differences of two requests, each by the option that asks for it."""
    options, named = [], INSTEAD | {"old_adapter": "--adapter"}
    for difference in differences(was, now):
        field, colon, values = difference.partition(": ")
        section, _, name = field.partition(".")
        if section not in ("settings", "numbers"):
            loaded = section == "base_model"
            options.append(named.get(name if loaded else section, f"--set {name}" if loaded else field) + colon + values)
            continue
        then, other = getattr(was, section), getattr(now, section)
        changed = [name for name in sorted({*then, *other}) if then.get(name) != other.get(name)]
        options += [
            f"{SETTING_OPTIONS.get(name, f'--set {name}')}: {then.get(name, 'not given')} -> {other.get(name, 'not given')}"
            for name in changed
        ]
    return options


class SkillRequest(Settings):
    """A skill to teach, and what to keep."""

    base_model: BaseModelSettings  # the model, and how it is loaded
    data: Place  # examples of the new skill: a file, a folder written by `datasets`, or ORG/NAME:SPLIT of the hub
    test: Place | None = None  # the same for testing; None holds out a tenth of `data`
    columns: str | None = None  # which columns of both to read (see `anchorlora.data.samples`)
    keep_columns: str | None = None  # which columns of the files in `keep` to read
    metrics: tuple[str, ...] | None = None  # names of metrics, the primary one first; None decides by the answers
    name: TaskName  # name of the skill, which a folder may have
    title: str | None = None  # what it is called, where that is another
    old_adapter: Place | None = None  # folder of a PEFT LoRA adapter that the model is used with so far
    after: Place | None = None  # directory of an earlier skill to go on from, with all that it keeps
    keep: tuple[Place, ...] = ()  # what to keep: files like `data`, directories of earlier skills, or "self"
    own: Count = 72  # number of texts that the model writes for "self"
    method: str
    targets: Targets | None = None  # modules to adapt; None takes those of the old adapter, or all linear layers
    seed: int = 42
    compare: bool = False  # train an unprotected twin as well
    same_size: bool = False  # keep the rank of the adapter that it goes on from
    budget: Positive | None = None  # how much the loss of what is kept may rise, per token; the change is scaled until it fits
    settings: dict[str, str] = Field(default_factory=dict)  # fields of the recipe to change, as text
    numbers: dict[str, float] = Field(default_factory=dict)  # of the method's parts to change, by "Part.field"

    def method_in(self, methods: Mapping[str, Method]) -> Method:
        """Return the request's method with all its numbers."""
        return methods[self.method].changed(self.numbers_in(methods))

    def numbers_in(self, methods: Mapping[str, Method]) -> dict[str, float]:
        """Return all numbers of the request's method: kept things have equal weight. A method of the catalog starts from fewer
        examples than there, and, except in a chain, with a weaker penalty.
        """
        numbers: dict[str, float] = {}
        for part in methods[self.method].constraints:
            if isinstance(part, AnswerSensitivity):
                numbers["AnswerSensitivity.alike"] = 1
            if isinstance(part, GradientStart) and not part.principal and self.method in METHODS:
                numbers["GradientStart.examples"] = STARTS_FROM
            if isinstance(part, KroneckerBrake) and self.method in METHODS and self.after is None:
                numbers["KroneckerBrake.strength"] = KroneckerBrake.strength
        return numbers | self.numbers

    @property
    def adapter(self) -> Path | None:
        """Folder of the adapter that the model is used with so far, if there is one."""
        if self.after is not None:
            return RunFolder(Path(self.after)).adapter
        return Path(self.old_adapter) if self.old_adapter is not None else None

    @property
    def old_factors(self) -> dict[str, Factors]:
        """Factors of that adapter, by layer; none without one."""
        return {} if self.adapter is None else read_adapter(self.adapter, beside={})

    @property
    def asked(self) -> Recipe:
        """The recipe before the model is known: the settings of `anchorlora train`, as the request changes them."""
        return default_recipe().model_copy(update={"base_model": self.base_model}).changed(self.settings)

    @property
    def listed(self) -> TextTaskSettings:
        """The examples of the new skill, as a list of files has them."""
        return TextTaskSettings(train=self.data, test=self.test, columns=self.columns, metrics=self.metrics)

    def recipe(self, folder: Path, method: Method, facts: Mapping[str, Any]) -> Recipe:
        """Return the recipe of the run, for the modules that `facts` of `before/` name, of the old adapter's rank if it trains."""
        folder, rank = Path(os.path.abspath(folder)), None
        fields: dict[str, Any] = {
            "data": str(folder / "tasks.yaml"),
            "orders": {self.name: (self.name,)},
            "gradient_checkpointing": facts["checkpointing"],
            "targets": facts["targets"],
            "old_adapter": None if self.adapter is None else str(self.adapter),
            "old_cores": str(folder / "before" / CORES) if reads_cores(method) and (self.keep or self.after) else None,
            "old_memory": str(folder / "before" / MEMORY) if method.reads_past else None,
            "old_text": str(folder / "before" / OLD_TEXT) if method.rehearsal else None,
        }
        if method.plan.family == "shared" and (factors := self.old_factors):
            rank = max(f.rank for f in factors.values())
            fields |= {"rank": rank, "alpha": one_scale(factors) * rank}
        made = default_recipe().model_copy(update={"base_model": self.base_model}).changed(fields).changed(self.settings)
        if rank is not None and made.adapter.rank != rank:
            raise InvalidValue(
                f"rank {made.adapter.rank}: the method trains the old adapter further, which has rank {rank}; leave the rank out"
            )
        return made


def skill_request(given: Mapping[str, Any], *, same_size: bool, method: str | None, methods: Mapping[str, Method]) -> SkillRequest:
    """Return a request with locations made absolute, a name and a method."""
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name in ("data", "test", "old_adapter", "after"):
        if name in fields:
            fields[name] = absolute(fields[name])
    files = {name: fields["base_model"].get(name) for name in ("model", "chat_template")}
    local = {name: absolute(file) for name, file in files.items() if file is not None and expanded(file).exists()}
    fields["base_model"] = fields["base_model"] | local
    if "old_adapter" in fields and not (Path(fields["old_adapter"]) / CONFIG).is_file():  # a run, or one of its tasks
        run = RunFolder(Path(fields["old_adapter"]))
        within = artifact_in(run.root).adapter if run.has_begun and not run.skill.is_dir() else run.adapter
        fields["old_adapter"] = str(within) if (within / CONFIG).is_file() else fields["old_adapter"]
    _refuse_repeated_fields(fields.get("settings", {}))
    fields["keep"] = tuple(_source_to_keep(source) for source in fields.get("keep", ()))
    if "after" in fields and "old_adapter" in fields:
        raise InvalidValue("--after continues from that run's adapter, so --adapter does not fit; leave one of them out")
    if same_size and not ({"after", "old_adapter"} & set(fields)):
        raise InvalidValue(
            "--same-size trains an old adapter further, and there is none: give --adapter or --after, or leave it out"
        )
    how = methods[method or (SAME_SIZE if same_size and not _has_memory(fields.get("after")) else _fresh(fields))]
    if same_size and how.plan.family != "shared" and getattr(how.plan, "grows", True):
        raise InvalidValue(f"--same-size needs a method whose adapter does not grow, and {how.name} adds a block per task")
    if same_size and hasattr(how.plan, "rank"):
        adapter = RunFolder(Path(fields["after"])).adapter if "after" in fields else Path(fields["old_adapter"])
        fields["numbers"] = _as_large(how, adapter) | fields.get("numbers", {})
    how.changed(fields.get("numbers", {}))
    how.refuse_without_memory("text", FROM_TEXT)
    _refuse_without_examples(how)
    needs = reads_cores(how) and not (_merges(how) and "old_adapter" in fields)
    if (needs or how.reads_past or how.rehearsal) and not fields["keep"] and "after" not in fields:
        who = f"--method {how.name}" if method else "train"
        raise InvalidValue(
            f"{who} keeps something, and nothing is named: add --keep self for what the model writes itself, --keep FILE, "
            "or --after RUN; to train without protection, --method inc-lora"
        )
    if "targets" in fields and ({"after", "old_adapter"} & set(fields)):
        raise InvalidValue("--targets is for a new adapter, and an old one has its layers already; leave it out")
    if "budget" in fields and not fields["keep"] and "after" not in fields:
        raise InvalidValue("--budget is for what is kept, and nothing is named: add --keep FILE, --keep self, or --after RUN")
    title = shown(str(fields.get("name", "")) or stem_of(str(fields["data"])))
    fields["name"] = title if is_name(title) else named(title)
    fields["title"] = None if title == fields["name"] else f"{title:.100}"
    return SkillRequest.read(fields | {"method": how.name, "same_size": same_size}, "train")


def request_in(file: Path) -> SkillRequest:
    """Return the request that a skill was begun with."""
    return SkillRequest.read(load_yaml(file), str(file))


def refuse_early(request: SkillRequest, method: Method) -> None:
    """Refuse, before the model is loaded, what would otherwise fail only afterwards."""
    if request.budget is not None:
        _refuse_nonlinear(request, method)
    rank, plan = request.asked.adapter.rank, method.plan
    named = {"rank", "adapter.rank"} & set(request.settings) and not request.same_size
    if named and isinstance(plan, FoldedPerTask) and plan.cuts(rank):
        raise InvalidValue(
            f"--rank {rank}: {method.name} folds what it learns into an adapter of rank {plan.rank} and would cut the rest; "
            f"add --set {type(plan).__name__}.rank={rank}, or ask for at most {plan.rank}"
        )
    skills = earlier_skills(request)
    for asked, left, needs, lacks in (
        (reads_cores(method), CORES, "protects directions that layers read", "leaves none"),
        (method.reads_past, MEMORY, "needs what answers depend on", "does not remember it"),
        (method.rehearsal is not None, OLD_TEXT, "trains on old text again", "keeps none"),
    ):
        without = next((skill for skill in skills if asked and not (skill / left).is_file()), None)
        if without is not None:
            there = ((CORES, EXACT), (MEMORY, FRESH))
            instead = next((name for file, name in there if (without / file).is_file()), METHODS.baseline("cumulative").name)
            raise InvalidValue(
                f"{method.name} {needs}, and {without.parents[1]} was trained by a method that {lacks}; give its text with --keep "
                f"FILE instead, or continue with --method {instead}"
            )
    trains_A = method.plan.family == "shared" and any(c.factor == "B" for c in method.constraints if isinstance(c, Freeze))
    if trains_A and not any(factors.B.any() for factors in request.old_factors.values()):
        instead = "give --adapter, --after, or" if request.adapter is None else "leave --same-size out, or"
        raise InvalidValue(
            f"{method.name} trains A alone, and B of {request.adapter or 'a new adapter'} is zero, so nothing would be "
            f"learned; {instead} take --method inc-lora-hard"
        )
    if request.adapter is not None and isinstance(method.plan, GatedPerTask):
        raise InvalidValue(
            f"{method.name} weighs earlier blocks by gates, which no adapter holds; take --method {EXACT}, or keep text with "
            "--keep FILE and leave the adapter out"
        )
    if method.reads_past and len(skills) > 1:
        one, other = (skill.parents[1] for skill in skills[:2])
        raise InvalidValue(
            f"{one} and {other} each remember what their answers depend on, and {method.name} continues from one memory; "
            "keep one of them by its text, with --keep FILE"
        )
    if request.after is None:
        return
    earlier = Path(request.after) / SKILL / REQUEST
    if not earlier.is_file():
        raise InvalidValue(f"{request.after} is not the --out of an earlier anchorlora train; give one, or --adapter and --keep")
    was, now = request_in(earlier).base_model.model, request.base_model.model
    if was != now and not (was and now and is_path(was) and is_path(now)):
        raise InvalidValue(f"{request.after} was trained on {was}, and this is {now}; continue with the same model")


def _refuse_nonlinear(request: SkillRequest, method: Method) -> None:
    """Refuse a budget for a method whose change is not linear in one factor, or is merged after it was scaled."""
    frozen = any(isinstance(part, Freeze) for part in method.constraints)
    both = method.plan.family == "shared" and request.adapter is not None and not frozen
    if both or isinstance(method.plan, (GatedPerTask, MergedPerTask)):
        why = "trains both factors of the old adapter" if both else "weighs or merges its blocks itself"
        raise InvalidValue(f"--budget scales what is learned, and {method.name} {why}; use --method {FRESH}, or no --budget")


def _has_memory(run: Any) -> bool:
    """True if an earlier run left what answers depend on, so that its adapter is folded and does not grow."""
    return bool(run) and (Path(run) / SKILL / "after" / MEMORY).is_file()


def _as_large(how: Method, adapter: Path) -> dict[str, float]:
    """The number with which a fold keeps the size of an adapter; none where there is no adapter, which is refused later."""
    if not (adapter / CONFIG).is_file():
        return {}
    return {f"{type(how.plan).__name__}.rank": float(max(factors.rank for factors in read_adapter(adapter, beside={}).values()))}


def _source_to_keep(source: str) -> str:
    """A source of `--keep`, made absolute; a misspelled "self" is no file."""
    if source != SELF and get_close_matches(source.lower(), [SELF], cutoff=0.7) and not expanded(source).exists():
        raise InvalidValue(f"--keep {source}: there is no such file; what the model writes itself is kept with --keep self")
    if (expanded(source) / CONFIG).is_file():
        raise InvalidValue(
            f"--keep {source}: this is a PEFT adapter, and what is kept is shown by text; give the adapter with --adapter, and "
            "--keep FILE or --keep self beside it"
        )
    return source if source == SELF else absolute(source)


def _fresh(fields: Mapping[str, Any]) -> str:
    """The method of a new block: the exact one beside an old adapter, which a fold would cut, or a run that left cores alone."""
    runs = [source for source in (fields.get("after"), *fields["keep"]) if source and (Path(source) / SKILL / "after").is_dir()]
    return EXACT if fields.get("old_adapter") or not all(map(_has_memory, runs)) else FRESH


def _refuse_repeated_fields(settings: Mapping[str, str]) -> None:
    """Refuse fields of the recipe that the request has already: the recipe would say one thing, and the verdict another."""
    for name in settings:
        instead = INSTEAD.get(name.rsplit(".", 1)[-1])
        if instead is not None:
            raise InvalidValue(f"--set {name}: train takes this in its own place: {instead}")


def _refuse_without_examples(method: Method) -> None:
    """Refuse a method that needs a task before the first: here it would be plain LoRA."""
    part = next((c for c in method.constraints if "start" in c.requires), None)
    if part is not None and method.rehearsal is None:
        raise InvalidValue(
            f"{method.name}: {type(part).__name__} needs an earlier task of the same run, and train has none, so it would be plain "
            f"LoRA; keep text with --keep FILE and --method {FRESH}, or leave --method out"
        )


def reads_cores(method: Method) -> bool:
    """Return whether a method protects cores that are made of feature rows, or merges with what they stand for."""
    return ("core" in method.requires or _merges(method)) and method.provided_cores is None


def earlier_sources(request: SkillRequest) -> list[str]:
    """Return everything that is kept: files, "self", and directories of earlier skills."""
    return [*([request.after] if request.after is not None else []), *request.keep]


def earlier_skills(request: SkillRequest) -> list[Path]:
    """Return what the earlier skills that are kept have left, each a folder."""
    left = (Path(source) / SKILL / "after" for source in earlier_sources(request))
    return [folder for folder in left if folder.is_dir()]


def leaves_cores(request: SkillRequest, method: Method) -> bool:
    """Return whether a skill leaves cores, which a later one may protect: of all that is kept, or none."""
    known = not method.reads_past and all((folder / CORES).is_file() for folder in earlier_skills(request))
    return reads_cores(method) or known


def leaves_rows(request: SkillRequest, method: Method, rank: int) -> bool:
    """Return whether what a skill's answers depend on is left to a later skill: unless blocks of its rank in all are cut by it."""
    old = max((factors.rank for factors in request.old_factors.values()), default=0)
    rewrites, whole = getattr(method.plan, "rewrites", False), rank + old
    return method.reads_past and not getattr(method.plan, "cuts", lambda rank: rewrites)(whole)


def _merges(method: Method) -> bool:
    """True if a method protects no core, but merges its block with the past at the end."""
    return "core" not in method.requires and getattr(method.plan, "rewrites", False)


def absolute(location: str) -> str:
    """Return a location so that it means the same from every folder; an id of the hub is returned as it is."""
    path = expanded(location)
    elsewhere = "://" in location or (HUB.fullmatch(location) and not path.exists())
    return location if elsewhere else os.path.abspath(path)


def name_of_data(data: str) -> str:
    """Return a name for a skill: the stem of its file, in characters that a folder may have."""
    return named(stem_of(data))


def named(text: str) -> str:
    """Return a name that a folder may have on every system, which is near to a text."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in plain)
    kept = re.sub(r"\.{2,}", ".", kept).strip("-._")[:40].rstrip("-._")
    if any(c.isalnum() and not c.isascii() for c in plain):  # letters are lost: two such names stay two
        kept = f"{kept or 'skill'}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:8]}"
    return kept if is_name(kept) else f"skill-{kept}".rstrip("-")


def stem_of(data: str) -> str:
    """Return what a file of data or a dataset of the hub is called."""
    return re.split(r"[:.]", Path(data).name)[0]
