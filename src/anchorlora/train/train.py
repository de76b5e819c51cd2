"""Teach a skill: what is kept and how well it goes, the run, the same again, and the verdict. Each part is done once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from anchorlora.adapters import read_adapter
from anchorlora.config import Recipe, differences, explained
from anchorlora.continual.callback import RunCallback, Tell, telling
from anchorlora.continual.data import counting
from anchorlora.data import Encoder, TextFiles
from anchorlora.data.sources import TextTaskList, TextTaskSettings
from anchorlora.data.templates import refuse_deaf
from anchorlora.data.text import counted
from anchorlora.errors import AnchorloraError, Interrupted, InvalidValue
from anchorlora.methods import METHODS, Method
from anchorlora.models.hub import is_path
from anchorlora.models.load import commit_of, tokenizer_of
from anchorlora.models.own_text import most_tokens, refuse_too_large
from anchorlora.models.session import Session
from anchorlora.models.tokenizer import reads_clock
from anchorlora.runs.autosave import Stop
from anchorlora.runs.directory import RunDirectory
from anchorlora.runs.record import now
from anchorlora.runs.run import run_sequence
from anchorlora.store.files import dump_yaml, load_yaml, new_folder, write_text
from anchorlora.store.json import read_file
from anchorlora.store.lock import Lease
from anchorlora.store.predictions import read_predictions
from anchorlora.store.record import read_record
from anchorlora.store.run_folder import SKILL, RunFolder, may_precede_config
from anchorlora.store.seal import sealed_folder
from anchorlora.train import price
from anchorlora.train.budget import WithinBudget, budget_in, refuse_few, refuse_nonlinear
from anchorlora.train.judge import DEFAULT_MARGIN, Margin
from anchorlora.train.kept import OWN_SHARE, PROBES, ROWS, counted_at, earlier_places, refuse_repeated
from anchorlora.train.request import (
    CORES,
    EXACT,
    FRESH,
    MEMORY,
    OLD_TEXT,
    SELF,
    SkillRequest,
    asked_by,
    default_recipe,
    leaves_rows,
    reads_cores,
)
from anchorlora.train.sealed import compare_inputs, keep_inputs, refuse_damaged_past, seal_skill
from anchorlora.train.stages import (
    ALL_LINEAR,
    SCORES,
    Say,
    after,
    before,
    checkpoints,
    facts_in,
    probes_in,
    rows_in,
    scored,
    scores_in,
    skill_files,
    targets_of,
)
from anchorlora.train.verdict import Verdict, verdict_of

REQUEST, UNPROTECTED = "request.yaml", "unprotected"


def train_skill(
    request: SkillRequest,
    out: Path,
    *,
    methods: Mapping[str, Method],
    callbacks: Sequence[RunCallback] = (),
    stop: Stop | None = None,
    say: Say = lambda sentence: None,
    conduct: Mapping[str, Any] | None = None,
    margin: Margin = DEFAULT_MARGIN,
) -> Verdict:
    """Teach a model a skill, keep what it could do, and return how that went.

    The directory is a run directory, with `adapter/` (one ordinary PEFT adapter) and `skill/` (what a later skill goes on from). A
    directory of the same request goes on where it stopped.
    """
    if not (out / SKILL / REQUEST).exists():
        _refuse_others(request, out)
        _refuse_early(request, request.method_in(methods))
    request = _settled(request, out)
    _refuse_others(request, out)
    if RunFolder(out).is_taught:
        return _finished(request, out, margin)
    _refuse_early(request, request.method_in(methods))
    with _alone(out) as lease, lease.lent():
        if RunFolder(out).is_taught:  # another process has finished it meanwhile
            _refuse_others(request, out)
            return _finished(request, out, margin)
        _taught(request, out, methods, lease, say, callbacks=callbacks, stop=stop, conduct=conduct or {})
        lease.check()
        verdict = _judged(request, out, margin)
        write_text(RunFolder(out).verdict, json.dumps(verdict.as_dict(), indent=1) + "\n")
        seal_skill(request, out)
        return verdict


def priced(request: SkillRequest, out: Path, *, methods: Mapping[str, Method]) -> price.Price:
    """Return what teaching a skill will take, or refuse what `train_skill` would refuse; nothing is written."""
    _refuse_early(request, request.method_in(methods))
    request = _settled(request, out)
    _refuse_others(request, out)
    method = request.method_in(methods)  # with the numbers of the skill before
    refuse_damaged_past(request)
    listed = TextTaskSettings(train=request.data, test=request.test, columns=request.columns, metrics=request.metrics)
    files = TextFiles({request.name: listed.source(Path())})
    rows = _counted(request, files)
    asked = default_recipe().model_copy(update={"base_model": request.base_model}).changed(request.settings)
    session = Session(asked.base_model, adapter=request.adapter)
    began = price.clock()
    session.adapted(request.adapter, targets=request.targets or ALL_LINEAR)
    loading = price.clock() - began
    facts = {"targets": targets_of(request, session), "checkpointing": checkpoints(request, session)}
    recipe = _recipe(request, out / SKILL, method, facts)
    left = _leaves_rows(request, method, recipe)
    return price.price_of(request, method, recipe, session, files, rows, loading=loading, left=left)


def _finished(request: SkillRequest, out: Path, margin: Margin) -> Verdict:
    """The verdict of a skill that was taught to its end, whose files are what was written; by another margin if one is given."""
    run = RunDirectory(out)
    run.refuse_damaged_skill()
    run.finished()
    verdict = read_file(run.verdict, Verdict, remedy="train the skill again, with another --out")
    return verdict if verdict.margin == margin else _judged(request, out, margin)


def _judged(request: SkillRequest, out: Path, margin: Margin) -> Verdict:
    """The verdict on a skill that was taught, from the files of its directory."""
    folder = out / SKILL
    then, now = scores_in(folder, "before"), scores_in(folder, "after") | {request.name: _predictions(out, request.name)}
    twins = _twins_scores(folder, request) if request.compare else None
    for later in (now, twins or {}):
        _refuse_other_examples(out, then, later)
    return verdict_of(
        request,
        read_record(RunFolder(out).record_file),
        facts=facts_in(folder),
        before=then,
        after=now,
        unprotected=twins,
        adapter=RunFolder(out).adapter,
        margin=margin,
        rows=rows_in(folder),
        budget=budget_in(folder),
    )


@contextmanager
def _alone(out: Path) -> Iterator[Lease]:
    """The directory is this process's alone in the block; what was made for it and stays empty is removed, parents included."""
    made = [place for place in (out, *out.parents) if not place.exists()]
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
            for place in made:
                place.rmdir()


def _taught(
    request: SkillRequest,
    out: Path,
    methods: Mapping[str, Method],
    lease: Lease,
    say: Say,
    *,
    callbacks: Sequence[RunCallback],
    stop: Stop | None,
    conduct: Mapping[str, Any],
) -> None:
    """Do what is left of teaching a skill: what is kept, the run, the same again."""
    folder, method = out / SKILL, request.method_in(methods)
    asked = default_recipe().model_copy(update={"base_model": request.base_model}).changed(request.settings)
    session = Session(asked.base_model, adapter=request.adapter)
    try:
        _claim(request, out, telling(callbacks))
        if not (folder / "before").is_dir():
            before(session, request, folder, say, method, callbacks=callbacks)
            compare_inputs(request, folder)
    except AnchorloraError as error:
        if not (folder / "before").is_dir() and not isinstance(error, Interrupted):  # own text that is written stays
            _forget(request, out)
        raise

    def checked() -> None:
        """The directory is still ours, and what the command reads is what it was."""
        lease.check()
        compare_inputs(request, folder)

    recipe = _recipe(request, folder, method, facts_in(folder))
    left = _leaves_rows(request, method, recipe)

    def run(how: Method, recipe: Recipe, place: Path, *more: RunCallback) -> None:
        """Train the skill with a method, in a directory of its own."""
        run_sequence(
            recipe,
            how,
            order=[request.name],
            seed=request.seed,
            out=place,
            session=session,
            callbacks=[*callbacks, *more],
            stop=stop,
            leave_last=left,
            **conduct,
        )

    budget = []
    if request.budget is not None:
        refuse_few({part["name"]: part["probes"] for part in facts_in(folder)["kept"]})
        budget = [WithinBudget(session, request, folder, say, telling(callbacks))]
    say("training")
    run(method, recipe, out, *budget)
    checked()
    _publish(out, request)
    if not (folder / "after").is_dir():
        after(session, request, folder, RunFolder(out).adapter, recipe, say, method, left=left, callbacks=callbacks)
        checked()
    if request.compare:
        say("training without protection")
        start = recipe.start.model_copy(update={"old_cores": None, "old_memory": None, "old_text": None})
        twin = folder / UNPROTECTED
        run(METHODS.baseline(method.plan.family), recipe.model_copy(update={"start": start}), twin)
        if not (twin / SKILL / "after").is_dir():
            adapter = RunFolder(twin).task(1, request.name).adapter
            _score_the_twin(session, folder, adapter, recipe, say, telling(callbacks))
        checked()


def _settled(request: SkillRequest, out: Path) -> SkillRequest:
    """The request with what may be another tomorrow: the commit of a model on the hub, and the day where a template writes it;
    with the numbers of the skill before, where the method is the same.
    """
    base, file, past = request.base_model, out / SKILL / REQUEST, _past(request)
    known = _read(file).base_model if file.exists() else None
    date, revision = base.date, base.revision
    if revision is None and base.trust_remote_code is None:
        revision = known.revision if known else (past and past.base_model.revision) or commit_of(base)
    base = base.model_copy(update={"revision": revision})
    if date is None and known is not None:
        date = known.date
    elif date is None and reads_clock(tokenizer_of(base, adapter=request.adapter)):
        date = now()[:10]
    numbers = past.numbers if past and past.method == request.method else {}
    base = base.model_copy(update={"date": date})
    return request.model_copy(update={"base_model": base, "numbers": numbers | request.numbers})


def _past(request: SkillRequest) -> SkillRequest | None:
    """What was asked of the skill before: its cores are of those weights."""
    earlier = None if request.after is None else Path(request.after) / SKILL / REQUEST
    return _read(earlier) if earlier is not None and earlier.is_file() else None


def _refuse_other_examples(out: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """An interval over the same examples needs the same examples."""
    for name in then.keys() & now.keys():
        if [row["prompt_sha256"] for row in then[name]] != [row["prompt_sha256"] for row in now[name]]:
            raise InvalidValue(f"{out}: {name} was tested on other examples before than after; begin again with another --out")


def _refuse_others(request: SkillRequest, out: Path) -> None:
    """Check that this is the directory of the request, or empty but for what a killed process has left; write nothing."""
    file = out / SKILL / REQUEST
    if file.exists():
        changed = [asked_by(each) for each in differences(_read(file), request)]
        if changed:
            raise InvalidValue(f"{out} belongs to another request ({'; '.join(changed[:3])}); choose another --out")
    elif out.exists() and not out.is_dir():
        raise InvalidValue(f"{out} is not a folder; choose another --out")
    elif (out / SKILL).exists() or (out.exists() and not all(may_precede_config(place) for place in out.iterdir())):
        raise InvalidValue(f"{out} is not empty and holds no skill; choose another --out")


def _claim(request: SkillRequest, out: Path, tell: Tell) -> None:
    """Make this the directory of a request, or find that it is already, and that all it reads is what it was."""
    _refuse_others(request, out)
    if (out / SKILL / REQUEST).exists():
        compare_inputs(request, out / SKILL)
        return
    refuse_damaged_past(request)
    listed = TextTaskSettings(train=request.data, test=request.test, columns=request.columns, metrics=request.metrics)
    with new_folder(out / SKILL) as temporary:
        TextTaskList(tasks={request.name: listed}).write(temporary / "tasks.yaml")
        keep_inputs(request, temporary)
        rows = _counted(request, skill_files(temporary), tell)  # what cannot be read is refused before anything is left behind
        compare_inputs(request, temporary)
        write_text(temporary / ROWS, json.dumps(rows, indent=1) + "\n")
        keep_inputs(request, temporary)
        write_text(temporary / REQUEST, dump_yaml(request.model_dump(mode="json")))


def _counted(request: SkillRequest, files: TextFiles, tell: Tell = lambda what, done, total: None) -> list[dict[str, Any]]:
    """Count the rows of each source of text; refuse rows and own texts that the tokenizer alone shows to be impossible."""
    base, room = request.base_model, default_recipe().changed(request.settings).training.max_tokens
    tokenizer = tokenizer_of(base, adapter=request.adapter)
    name, encoder = request.name, Encoder(tokenizer, max_tokens=room)
    for split in ("test", "train"):
        next(iter(files.examples(name, split)))
    if tokenizer.chat_template:
        refuse_deaf(tokenizer)
    if SELF in request.keep:
        tokens = most_tokens(tokenizer, chat=bool(tokenizer.chat_template) and base.chat_template is None, room=room)
        refuse_too_large(base, tokens=tokens)
    source, held = files.sources[name], files.held_out(name)
    rows = []
    for place, use in ((source.train, "learned"), (source.test, "tested")):
        if place is not None:
            total = sum(1 for _ in source.samples(place))  # takes a thirtieth of their encoding
            samples = counting(source.samples(place), partial(tell, f"reading rows of {name}: {use}"), total)
            found, _ = counted(name, samples, encoder)
            rows.append(
                {"name": name, "source": place, "use": use, **found, "held_out": held if use == "learned" else found["read"]}
            )
    kept = [each for place in earlier_places(request) for each in counted_at(place, request.keep_columns, encoder)]
    held_out = [(each["name"], each["held_out"]) for each in kept]
    held_out += [(SELF, max(1, request.own // OWN_SHARE)) for place in request.keep if place == SELF]
    refuse_repeated([kept_name for kept_name, _ in held_out], name)
    if request.budget is not None:
        refuse_few(dict(held_out))
    return rows + kept


def _read(file: Path) -> SkillRequest:
    from pydantic import ValidationError

    try:
        return SkillRequest.model_validate(load_yaml(file))
    except ValidationError as error:
        raise explained(error, str(file)) from None


def _forget(request: SkillRequest, out: Path) -> None:
    """Remove what a request that was refused has left."""
    file = out / SKILL / REQUEST
    if file.exists() and not differences(_read(file), request):
        shutil.rmtree(out / SKILL)


def _refuse_early(request: SkillRequest, method: Method) -> None:
    """Refuse what would show only after the model is loaded."""
    if request.budget is not None:
        refuse_nonlinear(request, method)
    skills = [place for place in earlier_places(request) if (Path(place) / SKILL / "after").is_dir()]
    for place in skills if reads_cores(method) else ():
        if not (Path(place) / SKILL / "after" / CORES).is_file():
            raise InvalidValue(
                f"{method.name} protects directions that layers read, and {place} was trained by a method that leaves none; "
                f"give its text with --keep FILE instead, or continue with --method {FRESH}"
            )
    if method.reads_past:
        for place in skills:
            if not (Path(place) / SKILL / "after" / MEMORY).is_file():
                raise InvalidValue(
                    f"{method.name} needs what answers depend on, and {place} was trained by a method that does not remember it; "
                    f"give its text with --keep FILE instead, or continue with --method {EXACT}"
                )
        if len(skills) > 1:
            raise InvalidValue(
                f"{skills[0]} and {skills[1]} each remember what their answers depend on, and {method.name} continues from one "
                "memory; keep one of them by its text, with --keep FILE"
            )
    if method.rehearsal is not None:
        for place in skills:
            if not (Path(place) / SKILL / "after" / OLD_TEXT).is_file():
                raise InvalidValue(
                    f"{method.name} trains on old text again, and {place} was trained by a method that keeps none; give its text "
                    f"with --keep FILE instead, or continue with --method {EXACT}"
                )
    if request.after is None:
        return
    earlier = Path(request.after) / SKILL / REQUEST
    if not earlier.is_file():
        raise InvalidValue(f"{request.after} is not the --out of an earlier anchorlora train; give one, or --adapter and --keep")
    was, now = _read(earlier).base_model.model, request.base_model.model
    if was != now and not (was and now and is_path(was) and is_path(now)):
        raise InvalidValue(f"{request.after} was trained on {was}, and this is {now}; continue with the same model")


def _recipe(request: SkillRequest, folder: Path, method: Method, facts: Mapping[str, Any]) -> Recipe:
    rank = alpha = None
    if method.plan.family == "shared" and request.adapter is not None:
        factors = read_adapter(request.adapter, beside={})
        rank = max(f.rank for f in factors.values())
        alpha = next(iter(factors.values())).scale * rank
    targets = facts["targets"]
    return request.recipe(
        folder,
        targets=targets if isinstance(targets, str) else tuple(targets),
        rank=rank,
        alpha=alpha,
        method=method,
        checkpointing=facts["checkpointing"],
    )


def _leaves_rows(request: SkillRequest, method: Method, recipe: Recipe) -> bool:
    """Whether a later skill reads what the answers of this one depend on."""
    old = {} if request.adapter is None else read_adapter(request.adapter, beside={})
    return leaves_rows(method, recipe.adapter.rank + max((factors.rank for factors in old.values()), default=0))


def _publish(out: Path, request: SkillRequest) -> None:
    """Put the adapter and the tokenizer where people look for them."""
    if (RunFolder(out).adapter).is_dir():
        return
    made = RunFolder(out).task(1, request.name).adapter
    with new_folder(RunFolder(out).adapter) as temporary:
        for file in made.iterdir():
            (temporary / file.name).write_bytes(file.read_bytes())
        tokenizer_of(request.base_model, adapter=request.adapter).save_pretrained(temporary)


def _predictions(run: Path, name: str) -> list[dict[str, Any]]:
    return [row.model_dump() for row in read_predictions(RunFolder(run).task(1, name).predictions)]


def _score_the_twin(session: Session, folder: Path, adapter: Path, recipe: Recipe, say: Say, tell: Tell) -> None:
    names = [file.stem for file in sorted((folder / "before" / PROBES).glob("*.jsonl"))]
    tasks = {name: probes_in(folder / "before", name) for name in names}
    scores = scored(session, session.adapted(adapter), tasks, recipe, say, tell)
    with sealed_folder(folder / UNPROTECTED / SKILL / "after") as temporary:
        write_text(temporary / SCORES, json.dumps(scores))


def _twins_scores(folder: Path, request: SkillRequest) -> dict[str, list[dict[str, Any]]]:
    twin = folder / UNPROTECTED
    return scores_in(twin / SKILL, "after") | {request.name: _predictions(twin, request.name)}
