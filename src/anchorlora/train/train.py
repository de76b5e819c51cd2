"""Teach a skill: what is kept and how well it goes, the run, the same again, and the verdict. Each part is done once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from anchorlora.continual.callback import RunCallback, Tell
from anchorlora.data import Encoder, TextFiles
from anchorlora.data.holdout import RowHashes
from anchorlora.data.templates import refuse_deaf
from anchorlora.errors import AnchorloraError, Interrupted, InvalidType, InvalidValue, MissingExtra, Stopped, UnknownName
from anchorlora.methods import METHODS, Method
from anchorlora.models.load import configured_ends, empty_model, limits_in, tokenizer_of
from anchorlora.models.own_text import most_tokens, refuse_too_large
from anchorlora.models.session import Session
from anchorlora.paths import files_in
from anchorlora.runs.autosave import Stop
from anchorlora.runs.directory import RunDirectory
from anchorlora.runs.run import run_sequence
from anchorlora.store.files import new_folder, write_text
from anchorlora.store.json import read_file
from anchorlora.store.lock import Lease
from anchorlora.store.run_folder import SKILL, RunFolder
from anchorlora.store.seal import sealed_folder
from anchorlora.train import price, sealed, stages
from anchorlora.train.budget import WithinBudget, refuse_few
from anchorlora.train.folder import SCORES, facts_in
from anchorlora.train.judge import DEFAULT_MARGIN, Margin
from anchorlora.train.kept import OWN_SHARE, count_kept, refuse_repeated
from anchorlora.train.request import REQUEST, SELF, SkillRequest, earlier_sources, leaves_rows, refuse_early
from anchorlora.train.sentences import with_sentences
from anchorlora.train.verdict import UNPROTECTED, Verdict, serving, verdict_of


def train_skill(
    request: SkillRequest,
    out: Path,
    *,
    methods: Mapping[str, Method],
    callbacks: Sequence[RunCallback] = (),
    stop: Stop | None = None,
    say: stages.Say = lambda sentence: None,
    execution: Mapping[str, Any] | None = None,
    margin: Margin = DEFAULT_MARGIN,
) -> Verdict:
    """Teach a model a skill, keep what it could do, and return how that went; a folder of the same request goes on."""
    if not (out / SKILL / REQUEST).exists():
        sealed.refuse_others(request, out)
        refuse_early(request, request.method_in(methods))
    request = sealed.settle(request, out)
    sealed.refuse_others(request, out)
    if RunFolder(out).is_taught:
        return _read_verdict(request, out, margin)
    refuse_early(request, request.method_in(methods))
    with _alone(out) as lease, lease.lent():
        if RunFolder(out).is_taught:  # another process has finished it meanwhile
            sealed.refuse_others(request, out)
            return _read_verdict(request, out, margin)
        RunDirectory(out).provenance.take_threads()
        teaching = _teaching(request, out, methods, say, callbacks)
        _teach(teaching, lease, stop=stop, execution=execution or {})
        lease.check()
        verdict = with_sentences(verdict_of(request, out, margin))
        write_text(RunFolder(out).verdict, json.dumps(verdict.as_dict(), indent=1) + "\n")
        sealed.seal_skill(request, out)
        return verdict


def price_skill(request: SkillRequest, out: Path, *, methods: Mapping[str, Method]) -> price.Price:
    """Return what teaching a skill will take, or refuse what `train_skill` would refuse; nothing is written."""
    refuse_early(request, request.method_in(methods))
    request = sealed.settle(request, out)
    sealed.refuse_others(request, out)
    sealed.refuse_damaged_past(request)
    teaching = _teaching(request, out, methods)
    return price.price_of(teaching, _count_rows(request, teaching.files))


def _read_verdict(request: SkillRequest, out: Path, margin: Margin) -> Verdict:
    """The verdict of a skill that was taught to its end, whose files are what was written; by another margin if one is given."""
    run = RunDirectory(out)
    run.refuse_damaged_skill()
    record = run.finished()
    verdict = read_file(run.verdict, Verdict, remedy="train the skill again, with another --out")
    if verdict.margin != margin:
        return with_sentences(verdict_of(request, out, margin))
    if verdict.adapter != str(run.adapter):  # it was moved, or is called otherwise, from another folder
        return replace(verdict, adapter=str(run.adapter), serve=serving(run.adapter, request, record.base_model.dtype))
    return verdict


@contextmanager
def _alone(out: Path) -> Iterator[Lease]:
    """The directory is this process's alone in the block; what was made for it and stays empty is removed, parents included."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    lease = Lease(RunFolder(out).lease)
    try:
        for attempt in range(3):
            try:
                out.mkdir(parents=True, exist_ok=True)
                lease.take()
                break
            except FileNotFoundError:  # another process that was refused has removed its directory
                if attempt == 2:
                    raise
        yield lease
    finally:
        lease.release()
        with suppress(OSError):  # it is not empty
            for folder in made:
                folder.rmdir()


def _teaching(request: SkillRequest, out: Path, methods: Mapping[str, Method], *telling: Any) -> stages.Teaching:
    session = Session(request.asked.base_model, adapter=request.adapter)
    return stages.Teaching(request, out, request.method_in(methods), session, stages.files_of(request), *telling)


def _teach(teaching: stages.Teaching, lease: Lease, *, stop: Stop | None, execution: Mapping[str, Any]) -> None:
    """Do what is left of teaching a skill: measure what is kept, run, and measure again."""
    request, out, folder, method = teaching.request, teaching.out, teaching.folder, teaching.method
    begins = not (folder / "before").is_dir()
    try:
        sealed.claim(request, out, partial(_count_rows, request, teaching.files, teaching.tell))
        if begins:
            stages.before(teaching)
            sealed.compare_inputs(request, folder)
    except AnchorloraError as error:
        if not (folder / "before").is_dir() and not isinstance(error, Interrupted):  # own text that is written stays
            sealed.forget(request, out)
        raise

    def checked() -> None:
        """Check that the directory is still ours, and that what the command reads is unchanged."""
        lease.check()
        sealed.compare_inputs(request, folder)

    recipe = request.recipe(folder, method, facts_in(folder))
    left = leaves_rows(request, method, recipe.adapter.rank)

    skill: dict[str, Any] = {"order": [request.name], "seed": request.seed, "source": teaching.files, "session": teaching.session}
    skill |= {"stop": stop, "leave_last": left, **execution}
    teaching.say("training")
    try:
        callbacks = [*teaching.callbacks, *([] if request.budget is None else [WithinBudget(teaching)])]
        numbers = request.numbers_in({request.method: method})
        run_sequence(recipe, method, out=out, settings=numbers, callbacks=callbacks, **skill)
    except (InvalidValue, InvalidType, UnknownName, MissingExtra) as error:
        if begins and not isinstance(error, Stopped):  # so that what is mended can be asked for in the same place
            sealed.forget(request, out)
        raise
    checked()
    _publish(out, request)
    if not (folder / "after").is_dir():
        stages.after(teaching, left=left)
        checked()
    if request.compare:
        teaching.say("training without protection")
        start = recipe.start.model_copy(update={"old_cores": None, "old_memory": None, "old_text": None})
        twin, plain = folder / UNPROTECTED, METHODS.baseline(method.plan.family)
        run_sequence(recipe.model_copy(update={"start": start}), plain, out=twin, callbacks=teaching.callbacks, **skill)
        if not (twin / SKILL / "after").is_dir():
            scores = teaching.kept_scores(teaching.session.adapted(RunFolder(twin).task(1, request.name).adapter))
            with sealed_folder(twin / SKILL / "after") as temporary:
                write_text(temporary / SCORES, json.dumps(scores))
        checked()


def _count_rows(request: SkillRequest, files: TextFiles, tell: Tell = lambda what, done, total: None) -> list[dict[str, Any]]:
    """Count the rows of each source of text; refuse rows and own texts that the tokenizer alone shows to be impossible."""
    base, recipe = request.base_model, request.asked
    tokenizer, room = tokenizer_of(base, adapter=request.adapter), recipe.training.max_tokens
    name, encoder = request.name, Encoder(tokenizer, max_tokens=room, ends=configured_ends(base), **limits_in(empty_model(base)))
    files.look_through(name, partial(tell, f"looking through rows of {name}"))
    for split in ("test", "train"):
        next(iter(files.examples(name, split)))
    if tokenizer.chat_template:
        refuse_deaf(tokenizer)
    if SELF in request.keep:
        tokens = most_tokens(tokenizer, chat=bool(tokenizer.chat_template) and base.chat_template is None, room=room)
        refuse_too_large(base, tokens=tokens)
    text_source, rows = files.sources[name], []
    for data, split, use in ((text_source.train, "train", "learned"), (text_source.test, "test", "tested")):
        if data is not None:
            watch = partial(tell, f"reading rows of {name}: {use}")
            totals = files.counted(name, split, encoder, test_limit=recipe.tasks.test_limit, tell=watch)
            held = files.held_out(name) if use == "learned" else totals["read"]
            rows.append({"name": name, "source": data, "use": use, **totals, "held_out": held})
    sources = earlier_sources(request)
    learned = RowHashes(name, () if {*sources} <= {SELF} else files.rows_of(name, "train"))
    kept = [part for source in sources for part in count_kept(source, request.keep_columns, encoder, learned)]
    held_out = [(part["name"], part["held_out"]) for part in kept]
    held_out += [(SELF, max(1, request.own // OWN_SHARE)) for source in request.keep if source == SELF]
    refuse_repeated([kept_name for kept_name, _ in held_out], name)
    if request.budget is not None:
        limit = recipe.tasks.test_limit
        refuse_few({kept_name: min(rows_of, limit or rows_of) for kept_name, rows_of in held_out})
    most = recipe.evaluation.max_new_tokens  # of an answer that is scored, beside its end
    return [counts | ({"generated": most} if counts["longest"] > most + 1 else {}) for counts in rows + kept]


def _publish(out: Path, request: SkillRequest) -> None:
    """Put the adapter and the tokenizer where people look for them."""
    if (RunFolder(out).adapter).is_dir():
        return
    made = RunFolder(out).task(1, request.name).adapter
    with new_folder(RunFolder(out).adapter) as temporary:
        for file in files_in(made, "*"):
            (temporary / file.name).write_bytes(file.read_bytes())
        tokenizer_of(request.base_model, adapter=request.adapter).save_pretrained(temporary)
