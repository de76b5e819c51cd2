"""Hashes of what `anchorlora train` reads and writes: inputs stay as they are to the end, and later commands read what was written.

skill/inputs.json  SHA-256 of every file that the command reads and did not write, taken before anything is done
skill/*/SEAL.json  the same of what a stage has left, before/ or after/
skill/SEAL.json    SHA-256 of every file in skill/ and adapter/, written after the verdict
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from anchorlora import embedded
from anchorlora.config import differences
from anchorlora.data.sources import TextTaskList
from anchorlora.errors import InvalidValue
from anchorlora.models.load import TEMPLATES, commit_of, tokenizer_of
from anchorlora.models.tokenizer import reads_clock
from anchorlora.paths import expanded, files_in
from anchorlora.runs.record import now
from anchorlora.store.files import dump_yaml, new_folder, write_text
from anchorlora.store.run_folder import (
    ADAPTER,
    INPUTS,
    SKILL,
    TRACKERS,
    RunFolder,
    may_precede_config,
    refuse_altered,
    refuse_damaged_adapter,
    refuse_links,
)
from anchorlora.store.seal import SEAL, damage, read_sealed, seal, sha256, write_sealed
from anchorlora.train.kept import ROWS
from anchorlora.train.request import REQUEST, SELF, SkillRequest, changed_options, earlier_sources, request_in

OF_A_MODEL = (*("*.json", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.model", "*.txt", "*.tiktoken", "*.py"), *TEMPLATES)

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
TASKS = "tasks.yaml"
OWN = (TASKS, ROWS)  # in skill/, written at the beginning
STAGES = ("before", "after", "unprotected/skill/after")  # in skill/, each with a seal of its own


def settle(request: SkillRequest, out: Path) -> SkillRequest:
    """Return the request with a hub model's commit and, if a template writes it, the date fixed; a method keeps its numbers."""
    base, file, earlier = request.base_model, out / SKILL / REQUEST, Path(request.after or "") / SKILL / REQUEST
    past = request_in(earlier) if request.after is not None and earlier.is_file() else None  # its cores are of its weights
    known = request_in(file).base_model if file.exists() else None
    if base.revision is None and base.trust_remote_code is None:
        revision = known.revision if known else (past and past.base_model.revision) or commit_of(base)
        base = base.model_copy(update={"revision": revision})
    if base.date is None and known is not None:
        base = base.model_copy(update={"date": known.date})
    elif base.date is None and reads_clock(tokenizer_of(base, adapter=request.adapter)):
        base = base.model_copy(update={"date": now()[:10]})
    numbers = past.numbers if past and past.method == request.method else {}
    if past and past.same_size:  # the rank is of that skill's adapter
        numbers = {path: value for path, value in numbers.items() if not path.endswith("PerTask.rank")}
    return request.model_copy(update={"base_model": base, "numbers": numbers | request.numbers})


def refuse_others(request: SkillRequest, out: Path) -> None:
    """Check that this is the directory of the request, or empty but for what a killed process has left; write nothing."""
    file = out / SKILL / REQUEST
    if file.exists():
        changed = changed_options(request_in(file), request)
        if changed:
            raise InvalidValue(f"{out} belongs to another request ({'; '.join(changed[:3])}); choose another --out")
    elif out.exists() and not out.is_dir():
        raise InvalidValue(f"{out} is not a folder; choose another --out")
    elif (out / SKILL).exists() or (out.exists() and not all(may_precede_config(path) for path in out.iterdir())):
        raise InvalidValue(f"{out} is not empty and holds no skill; choose another --out")


def claim(request: SkillRequest, out: Path, count: Callable[[], list[dict[str, Any]]]) -> None:
    """Make this the directory of a request, or find that it is already, and that everything it reads is unchanged."""
    refuse_others(request, out)
    if (out / SKILL / REQUEST).exists():
        compare_inputs(request, out / SKILL)
        return
    refuse_damaged_past(request)
    with new_folder(out / SKILL) as temporary:
        tasks = TextTaskList(tasks={request.name: request.listed})
        write_text(temporary / TASKS, dump_yaml(tasks.model_dump(mode="json", exclude_none=True)))
        keep_inputs(request, temporary)
        _refuse_other_base(request, temporary)
        rows = count()  # what cannot be read is refused before anything is left behind
        compare_inputs(request, temporary)
        write_text(temporary / ROWS, json.dumps(rows, indent=1) + "\n")
        keep_inputs(request, temporary)
        write_text(temporary / REQUEST, dump_yaml(request.model_dump(mode="json")))


def forget(request: SkillRequest, out: Path) -> None:
    """Remove what a request that was refused has left, unless a state was saved."""
    file, run = out / SKILL / REQUEST, RunFolder(out)
    if file.exists() and not differences(request_in(file), request) and not any(run.states.glob("[0-9]*")):
        for path in (run.config_file, run.log_file, run.trace):
            path.unlink(missing_ok=True)
        for folder in (run.states, run.root / TRACKERS, run.skill):
            shutil.rmtree(folder, ignore_errors=True)


def keep_inputs(request: SkillRequest, skill: Path) -> None:
    """Write down the hashes of everything that the command reads, or add those of what it has written of it since."""
    known = read_sealed(skill / INPUTS, dict[str, str]) if (skill / INPUTS).exists() else _hashes(request)
    write_sealed(skill / INPUTS, known | _own(skill))


def compare_inputs(request: SkillRequest, skill: Path) -> None:
    """Check that everything the command reads, and has written so far, is unchanged."""
    refuse_links(skill)
    refuse_damaged_past(request)
    known, now = read_sealed(skill / INPUTS, dict[str, str]), _hashes(request) | _own(skill)
    for name in sorted(known.keys() | now.keys()):
        if known.get(name) != now.get(name):
            how = "is missing" if name not in now else "was not there" if name not in known else "was changed"
            where = skill / name if name in OWN else name
            raise InvalidValue(f"{where} {how} since this skill was begun; put back what was there, or choose another --out")
    for stage in STAGES:
        wrong = damage(skill / stage) if (skill / stage).is_dir() else None
        if wrong is not None:
            raise InvalidValue(f"{wrong}; put back what was there, or choose another --out")


def _refuse_other_base(request: SkillRequest, skill: Path) -> None:
    """Refuse an earlier skill of another base model: what it kept, and its adapter, are of those weights."""
    now = _weights(request, skill)
    for folder in (expanded(source) for source in earlier_sources(request) if source != SELF):
        if (folder / SKILL / INPUTS).is_file():
            earlier = request_in(folder / SKILL / REQUEST)
            then = _weights(earlier, folder / SKILL)
            if then and now and then != now:
                raise InvalidValue(
                    f"{folder} was trained on other weights ({earlier.base_model.model}) than those of {request.base_model.model}; "
                    "give that model"
                )


def _weights(request: SkillRequest, skill: Path) -> set[str]:
    """Hashes of the base model's weights, or its commit on the hub, as a skill wrote them down; whatever the folder's name is."""
    known, model = read_sealed(skill / INPUTS, dict[str, str]), request.base_model.model or ""
    folder = str(embedded.folder(model, "base_model") or expanded(model))
    files = {value for name, value in known.items() if Path(name).suffix in WEIGHTS and str(Path(name).parent) == folder}
    return files or {value for name, value in known.items() if name == model}


def _own(skill: Path) -> dict[str, str]:
    return {name: sha256(skill / name) for name in OWN if (skill / name).is_file()}


def seal_skill(request: SkillRequest, out: Path) -> None:
    """Seal skill/ and adapter/ of a finished skill."""
    run = RunFolder(out)
    made = run.task(1, request.name).adapter
    if not made.is_dir():
        raise InvalidValue(f"{made} is missing, which was trained; the same command trains it again")
    for file in files_in(made, "*"):
        published = run.adapter / file.name
        if not published.is_file() or sha256(published) != sha256(file):
            raise InvalidValue(f"{published} is not what was trained ({file}); copy that file to it")
    seal(run.skill, beside={f"{ADAPTER}/{file.name}": file for file in files_in(run.adapter, "*")})


def refuse_damaged_past(request: SkillRequest) -> None:
    """Refuse an earlier skill, or its adapter, that is not what was written."""
    for source in earlier_sources(request):
        if source != SELF and (expanded(source) / SKILL).is_dir():
            RunFolder(expanded(source)).refuse_damaged_skill()
    if request.old_adapter is not None:
        refuse_altered(expanded(request.old_adapter))
        refuse_damaged_adapter(expanded(request.old_adapter))


def _hashes(request: SkillRequest) -> dict[str, str]:
    base = request.base_model
    commit = commit_of(base)
    return {str(file): sha256(file) for file in _files(request)} | ({str(base.model): commit} if commit else {})


def changed_since(request: SkillRequest, out: Path) -> list[Path]:
    """Return the files of a finished skill's text that are there and are not what it was trained on."""
    known = read_sealed(out / SKILL / INPUTS, dict[str, str])
    return [file for file in _texts(request) if file.is_file() and known.get(str(file)) != sha256(file)]


def _texts(request: SkillRequest) -> Iterator[Path]:
    for source in (request.data, request.test, *request.keep, request.after):
        if source is None or source == SELF:
            continue
        path = expanded(source)
        if (path / SKILL).is_dir():
            yield path / SKILL / SEAL
        elif path.is_dir():
            yield from files_in(path)
        elif path.is_file():
            yield path


def _files(request: SkillRequest) -> Iterator[Path]:
    yield from _texts(request)
    if request.old_adapter is not None:
        yield from _of_a_model(expanded(request.old_adapter))
    base = request.base_model
    folder = embedded.folder(base.model or "", "base_model") or expanded(base.model or "")
    yield from _of_a_model(folder)
    if base.chat_template is not None and expanded(base.chat_template).is_file():
        yield expanded(base.chat_template)


def _of_a_model(folder: Path) -> list[Path]:
    files = {file for pattern in OF_A_MODEL for file in folder.glob(pattern)} if folder.is_dir() else set()
    return sorted(file for file in files if file.is_file())
