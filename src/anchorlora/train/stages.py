"""Stages around the training of a skill: the text and the cores of what is kept, and scores of everything before and after.

    skill/rows.json    how many rows of each source are learned, kept, cut and left out
    skill/before/  cores.safetensors  what the skill must keep          probes/<name>.jsonl  held-out text of what is kept
                   scores.json        of the skill's test and of all probes, with the model as it was
                   facts.json         how the cores came about
                   memory.safetensors what a method that remembers what answers depend on knows of what is kept, in place of cores
                   old_text.jsonl     rows of everything that is kept, where a method trains on them again
    skill/after/   cores.safetensors  the same and the new skill's own  probes/<skill>.jsonl held-out examples of the skill
                   scores.json        of all probes, with the new adapter
                   energies.safetensors  how much of each thing lies on their directions (in before/, too)
                   capacity.json      how many directions are protected, and for how many more skills there is room
                   memory.safetensors what such a method remembers now; old_text.jsonl with the new skill's own rows
                   unread.jsonl       rows of the skill, where that does not hold what its answers depend on: a later skill reads it

A later skill goes on from these folders alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Tensor

from anchorlora import embedded
from anchorlora.adapters import lora_layers
from anchorlora.adapters.kinds import without_empty
from anchorlora.adapters.targets import names_of
from anchorlora.config import ALL_LINEAR, Recipe
from anchorlora.constraints import AnswerSensitivity
from anchorlora.constraints.sensitivity import INPUTS
from anchorlora.continual.callback import RunCallback, Tell, notify
from anchorlora.continual.data import longest_first
from anchorlora.continual.evaluate import Scorer
from anchorlora.continual.losses import memory_of_text, spread
from anchorlora.continual.seeds import number
from anchorlora.data import Encoder, Sample, TextFiles, TextSource, read_samples
from anchorlora.data.rows import row_of
from anchorlora.data.templates import stop_ids
from anchorlora.data.text import count_rows, token_ids
from anchorlora.errors import InvalidValue
from anchorlora.geometry import JoinedCore, joined_within
from anchorlora.methods import Method
from anchorlora.models.cores_from_text import CoreRule, MadeCores, Watch, cores_of_samples, refuse_alike
from anchorlora.models.load import ends_of, template_note
from anchorlora.models.own_text import OWN_TOKENS, defects, own_text
from anchorlora.models.packing import unpackable
from anchorlora.models.session import Session
from anchorlora.recipes.standard import default_recipe
from anchorlora.runs.directory import RunDirectory
from anchorlora.runs.sizes import needs_checkpointing
from anchorlora.scores import MOST_PROBES
from anchorlora.store.files import link, write_lines, write_text
from anchorlora.store.run_folder import SKILL, RunFolder
from anchorlora.store.seal import sealed_folder
from anchorlora.store.tensors import write_tensors
from anchorlora.text import amount
from anchorlora.train import kept
from anchorlora.train.folder import FACTS, SCORES, add_first, facts_in, probes_in, rows_in
from anchorlora.train.judge import Comparison
from anchorlora.train.request import CORES, MEMORY, OLD_TEXT, SELF, UNREAD, SkillRequest, earlier_sources, leaves_cores, reads_cores

OWN_TEXT = "self.jsonl"  # what the model has written so far, a batch a line
Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Teaching:
    """A skill as it is taught: what was asked for, in which directory, by which method, with which model, and whom to tell."""

    request: SkillRequest
    out: Path
    method: Method
    session: Session
    files: TextFiles  # of the skill
    say: Say = lambda sentence: None
    callbacks: Sequence[RunCallback] = ()

    @property
    def folder(self) -> Path:
        """The folder for what is kept, measured and judged."""
        return self.out / SKILL

    def tell(self, what: str, done: int, total: int) -> None:
        """Tell callbacks how far something is."""
        notify(self.callbacks, RunCallback.on_progress, what, done, total)

    def begin(self, what: str) -> Watch:
        """Announce a phase, and return the function that reports its progress."""
        self.say(what)
        return partial(self.tell, what)

    def adapted(self) -> Any:
        """Return the model with the adapter that it is used with so far, or with empty ones."""
        return self.session.adapted(self.request.adapter, targets=self.request.targets or ALL_LINEAR)

    def scores(self, adapted: Any, tasks: Mapping[str, TextFiles]) -> dict[str, list[dict[str, Any]]]:
        """Return the scores of a model on every test example of some tasks."""
        return score_tasks(self.session, adapted, tasks, self.request.asked, self.say, self.tell)

    def kept_scores(self, adapted: Any) -> dict[str, list[dict[str, Any]]]:
        """Return the scores of a model on the probes of everything that is kept."""
        parts = facts_in(self.folder)["kept"]
        return self.scores(adapted, {p["name"]: probes_in(self.folder / "before", p["name"]) for p in parts if p["probes"]})


def before(teaching: Teaching) -> None:
    """Write `before/`: the cores of what is kept, what the method remembers of it, and scores of the model as it was."""
    request, method, folder, session = teaching.request, teaching.method, teaching.folder, teaching.session
    recipe = request.asked
    teaching.say(f"loading {request.base_model.model}")
    adapted, tokenizer = teaching.adapted(), session.tokenizer
    parts = parts_of(teaching, rows_in(folder), adapted)
    if note := template_note(request.base_model, tokenizer, request.adapter):
        teaching.say(note)
    room = session.room(recipe.training.max_tokens)
    of_run = facts_of_run(teaching)
    request.recipe(folder, method, of_run)  # what does not go together is refused before text is written and read
    if leaves_cores(request, method):
        _refuse_short(teaching, recipe.features.at_least, room)
    for part in parts:
        if part.source == SELF:
            _write_own_text(teaching, part, adapted, room)
    union: dict[str, JoinedCore] = {}
    memory: Mapping[str, Tensor] = next((part.memory for part in parts if part.memory is not None), {})
    for part in parts:
        if method.reads_past and (part.unread or part.memory is None):
            watch = teaching.begin(f"reading what answers depend on in {part.name}")
            elsewhere = bool(part.unread) and part.source != request.after  # learned by an adapter that is not trained further
            reader = session.adapted(RunFolder(Path(part.source)).adapter) if elsewhere else adapted
            reading = partial(memory_of_text, method, reader, tokenizer, device=session.loaded.device, max_tokens=room)
            memory = reading(part.unread or part.samples, name=part.name, past=memory, watch=watch)
            if elsewhere:
                adapted = teaching.adapted()
        if not leaves_cores(request, method):
            continue
        if part.cores is None:
            made = _cores(teaching, adapted, part.samples, f"finding what to protect of {part.name}")
            refuse_alike(made.layers, recipe.features.at_least)  # fewer of the skill itself, once it is trained, are enough
            part.facts, cores = {**part.facts, **made.origin}, kept.new_cores(part.name, made.layers)
        elif any(part.name in core.energy for core in union.values()):
            continue  # one run's cores stand for all that it kept
        else:
            cores = kept.cores_of_layers(part, adapted)
        union = joined_within(union, cores, asked=recipe.features.energy)
    for layer, core in union.items() if reads_cores(method) else ():
        core.refuse_full(layer)
    with sealed_folder(folder / "before") as temporary:
        (temporary / kept.PROBES).mkdir()
        for part in parts:
            if part.probes:
                write_lines(temporary / kept.PROBES / f"{part.name}.jsonl", part.probes)
        if union:
            kept.write_joined_cores(temporary, union, origin={"kept": [part.name for part in parts]})
        of_parts = [{"name": p.name, "source": p.source, "probes": len(p.probes)} | kept.facts_of_joined(p, union) for p in parts]
        facts: dict[str, Any] = {"kept": of_parts, **of_run}
        if method.rehearsal:
            write_lines(temporary / OLD_TEXT, [row for part in parts for row in part.old_text or map(row_of, part.samples)])
        if method.reads_past:
            write_tensors(temporary / MEMORY, memory)
        if method.provided_cores is not None:
            protected = method.provided_cores(memory).values()
            directions = mean(layer_core.core.k for layer_core in protected)
            energy = mean(layer_core.retained_energy for layer_core in protected)
            facts["memory"] = {"directions": directions, "energy": energy}
        facts["penalty"] = next(
            (c.strength for c in method.constraints if getattr(c, "reads", ()) and hasattr(c, "strength")), None
        )
        write_text(temporary / FACTS, json.dumps(facts, indent=1))
        tasks = {request.name: teaching.files, **{p.name: probes_in(temporary, p.name) for p in parts if p.probes}}
        scores = teaching.scores(adapted, tasks)
        add_first(request.after, scores)
        write_text(temporary / SCORES, json.dumps(scores))


def parts_of(teaching: Teaching, rows: Sequence[Mapping[str, Any]], adapted: Any) -> list[kept.Kept]:
    """Return everything that is kept; a memory of other layers than those that are adapted is refused."""
    request, unfit = teaching.request, {row["name"]: row.get("unfit", ()) for row in rows}
    parts = [part for source in earlier_sources(request) for part in kept.read_kept(source, request.keep_columns, unfit)]
    for part in parts if teaching.method.reads_past else ():
        if part.memory is not None and not all(f"{INPUTS}/{layer}" in part.memory for layer in lora_layers(adapted)):
            raise InvalidValue(
                f"{part.source} remembers what its answers depend on at fewer layers than are adapted now; give its --targets, or "
                "keep its text with --keep FILE"
            )
    return parts


def _refuse_short(teaching: Teaching, at_least: int, room: int) -> None:
    name, kinds = teaching.request.name, set[int]()
    samples = islice(teaching.files.rows_of(name, "train"), kept.MOST_ROWS)
    for ids in token_ids(samples, teaching.session.tokenizer, max_tokens=room):
        kinds.update(ids)
        if len(kinds) >= at_least:
            return
    raise InvalidValue(
        f"{name} has {amount(len(kinds), 'different token')}, but a core needs at least {amount(at_least, 'feature row')}; give "
        "more text"
    )


def _write_own_text(teaching: Teaching, part: kept.Kept, adapted: Any, room: int) -> None:
    """Let the model write texts of its own, as what is kept."""
    request, tokenizer = teaching.request, teaching.session.tokenizer
    teaching.say(f"writing {request.own} texts of its own")
    rows = own_text(
        adapted,
        tokenizer,
        count=request.own,
        seed=number(request.seed, "own text"),
        max_tokens=OWN_TOKENS,
        room=room,
        chat=bool(tokenizer.chat_template) and request.base_model.chat_template is None,
        written=teaching.folder / OWN_TEXT,
        watch=lambda texts: teaching.tell("writing texts of its own", texts, request.own),
    )
    samples, ends = read_samples(rows), ends_of(adapted)
    part.samples, part.probes = kept.hold_out(part.name, samples, share=kept.OWN_SHARE)
    counts, _ = count_rows(part.name, samples, Encoder(tokenizer, max_tokens=room, ends=ends), measured=True)
    counts = {"name": part.name, "source": SELF, "use": "kept", **counts, "held_out": len(part.probes)}
    part.facts |= {"rows": counts, "own": defects(rows, stops=stop_ids(tokenizer, ends))}


def after(teaching: Teaching, *, left: bool) -> None:
    """Write `after/`: scores with the new adapter, and the cores, memory, and rows that a later skill goes on from."""
    request, method, folder = teaching.request, teaching.method, teaching.folder
    adapted = teaching.session.adapted(RunFolder(teaching.out).adapter)
    with sealed_folder(folder / "after") as temporary:
        write_text(temporary / SCORES, json.dumps(teaching.kept_scores(adapted)))
        source, earlier = teaching.files, folder / "before"
        if leaves_cores(request, method):
            samples = islice(source.rows_of(request.name, "train"), kept.MOST_ROWS)  # what is held out measures a later skill
            made = _cores(teaching, adapted, samples, f"finding what a later skill must protect of {request.name}")
            union = kept.joined_cores_in(earlier) if (earlier / CORES).exists() else {}
            union = joined_within(union, kept.new_cores(request.name, made.layers), asked=request.asked.features.energy)
            kept.write_joined_cores(temporary, union, origin=dict(made.origin))
            if reads_cores(method):
                write_text(temporary / kept.CAPACITY, json.dumps(kept.capacity(union), indent=1))
        if method.reads_past:
            link(temporary / MEMORY, RunDirectory(teaching.out).remembered(1))
        if left:
            learned = list(islice(source.rows_of(request.name, "train"), kept.MOST_ROWS))
            examples = sum(c.examples for c in method.constraints if isinstance(c, AnswerSensitivity))
            write_lines(temporary / UNREAD, [row_of(learned[i]) for i in spread(len(learned), examples)])
        if method.rehearsal:
            own = islice(source.rows_of(request.name, "train"), method.rehearsal.memory)
            write_lines(temporary / OLD_TEXT, [*kept.rows_of_file(earlier / OLD_TEXT), *map(row_of, own)])
        (temporary / kept.PROBES).mkdir()
        tests = islice(source.rows_of(request.name, "test"), MOST_PROBES)
        write_lines(temporary / kept.PROBES / f"{request.name}.jsonl", map(row_of, tests))


def score_tasks(
    session: Session,
    adapted: Any,
    tasks: Mapping[str, TextFiles],
    recipe: Recipe,
    say: Say,
    tell: Tell = lambda what, done, total: None,
) -> dict[str, list[dict[str, Any]]]:
    """Return the scores of every test example of some tasks."""
    encoder = Encoder(session.tokenizer, max_tokens=recipe.training.max_tokens, ends=ends_of(adapted))
    evaluation, scores = recipe.evaluation, {}
    for name, files in tasks.items():
        say(what := f"testing {name}")
        task = files.task(name, encoder)
        examples = files.encoded(name, "test", encoder, limit=recipe.tasks.test_limit)
        longest = max(examples.lengths) + (task.max_new_tokens or evaluation.max_new_tokens)
        unpacked = unpackable(adapted, longest_first(examples), longest=longest)
        if unpacked is not None:
            say(f"this model reads no packed rows ({unpacked}), so {name} is padded instead")
        counting = Counting(partial(tell, what), len(examples) * (2 if task.answered else 1))
        scorer = Scorer.of(adapted, session.tokenizer, evaluation, device=session.loaded.device, packed=unpacked is None)
        with without_empty(adapted):
            answers = scorer.score(task, examples, count=counting.read, watch=counting.answered)
        of_row = Counter(e.example.place for e in examples)
        scores[name] = [
            {"text": a.text, "gold": a.gold, "metrics": dict(a.scores), "prompt_sha256": e.prompt_sha256}
            | (
                {"row": e.example.place} if e.example.place and of_row[e.example.place] > 1 else {}
            )  # one of several turns of a chat
            for a, e in zip(answers, examples, strict=True)
        ]
    return scores


class Counting:
    """Counts examples whose loss is known and those that are answered, together."""

    def __init__(self, tell: Callable[[int, int], None], total: int) -> None:
        self.tell, self.total, self.done = tell, total, 0

    def read(self, examples: int) -> None:
        """Note that so many losses are known."""
        self.done = examples
        self.tell(self.done, self.total)

    def answered(self, texts: Mapping[int, str]) -> None:
        """Note that some more examples are answered."""
        self.read(self.done + len(texts))


def files_of(request: SkillRequest) -> TextFiles:
    """Return the files of the new skill."""
    return TextFiles({request.name: request.listed.source(Path())})


def _cores(teaching: Teaching, adapted: Any, samples: Iterable[Sample], what: str) -> MadeCores:
    watch, session, recipe = teaching.begin(what), teaching.session, teaching.request.asked
    f = recipe.features
    rule = CoreRule(f.rows, f.energy, f.at_least, f.at_most, max_tokens=session.room(recipe.training.max_tokens), spread=True)
    return cores_of_samples(adapted, session.tokenizer, list(samples), rule, device=session.loaded.device, watch=watch)


def facts_of_run(teaching: Teaching) -> dict[str, Any]:
    """Return the modules to adapt (the old adapter's, those asked for, or all linear ones), and whether to checkpoint."""
    request = teaching.request
    targets = names_of(request.old_factors) or request.targets or ALL_LINEAR
    recipe = request.asked.changed({"targets": targets})
    return {"targets": targets, "checkpointing": needs_checkpointing(recipe, teaching.session.loaded.device)}


def change_on(data: str | Path, before: Path, after: Path, *, model: str | None = None) -> dict[str, Any]:
    """Return loss and primary metric on data, with one adapter and with another of the same base model."""
    from anchorlora.store.artifact import artifact_in

    then, now = artifact_in(embedded.folder(str(before), "base_model") or before), artifact_in(after)
    settings = now.base_model(model)
    if settings.model is None:
        raise InvalidValue(f"{after} names no base model; give it with --model")
    source = str(data)
    files = TextFiles({"data": TextSource(source, test=source)})
    files.task("data")  # what cannot be read is refused before the model is loaded
    session, scores = Session(settings, adapter=now.adapter), []  # prompts of both are rendered by its template
    for adapter in (None if then.kind == "model" else then.adapter, now.adapter):
        answers = score_tasks(session, session.adapted(adapter), {"data": files}, default_recipe(), lambda sentence: None)
        scores.append(answers["data"])
    return asdict(Comparison.of(*scores))
