"""What `anchorlora train` reads is the same from beginning to end, and what it has written is what later commands read.

skill/inputs.json  SHA-256 of every file that the command reads and did not write, taken before anything is done
skill/*/SEAL.json  the same of what a stage has left, before/ or after/
skill/SEAL.json    SHA-256 of every file in skill/ and adapter/, written after the verdict
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from anchorlora import embedded
from anchorlora.errors import InvalidValue
from anchorlora.models.load import commit_of
from anchorlora.paths import expanded
from anchorlora.store.run_folder import ADAPTER, INPUTS, SKILL, RunFolder, refuse_altered, refuse_damaged_adapter, refuse_links
from anchorlora.store.seal import SEAL, damage, read_sealed, seal, sha256, write_sealed
from anchorlora.train.request import SELF, SkillRequest

OF_A_MODEL = (
    *("*.json", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"),
    "additional_chat_templates/*.jinja",
)

OWN = ("tasks.yaml", "rows.json")  # in skill/, written at the beginning
STAGES = ("before", "after", "unprotected/skill/after")  # in skill/, each with a seal of its own


def keep_inputs(request: SkillRequest, skill: Path) -> None:
    """Write down the hashes of everything that the command reads, or add those of what it has written of it since."""
    known = read_sealed(skill / INPUTS, dict[str, str]) if (skill / INPUTS).exists() else _hashes(request)
    write_sealed(skill / INPUTS, known | _own(skill))


def compare_inputs(request: SkillRequest, skill: Path) -> None:
    """Check that everything the command reads, and has written so far, is what it was."""
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


def _own(skill: Path) -> dict[str, str]:
    return {name: sha256(skill / name) for name in OWN if (skill / name).is_file()}


def seal_skill(request: SkillRequest, out: Path) -> None:
    """Seal skill/ and adapter/ of a finished skill."""
    run = RunFolder(out)
    made = run.task(1, request.name).adapter
    if not made.is_dir():
        raise InvalidValue(f"{made} is missing, which was trained; the same command trains it again")
    for file in sorted(made.iterdir()):
        published = run.adapter / file.name
        if not published.is_file() or sha256(published) != sha256(file):
            raise InvalidValue(f"{published} is not what was trained ({file}); copy that file to it")
    seal(run.skill, beside={f"{ADAPTER}/{file.name}": file for file in sorted(run.adapter.iterdir()) if file.is_file()})


def refuse_damaged_past(request: SkillRequest) -> None:
    """Refuse an earlier skill, or its adapter, that is not what was written."""
    for place in (request.after, *request.keep):
        if place is not None and place != SELF and (expanded(place) / SKILL).is_dir():
            RunFolder(expanded(place)).refuse_damaged_skill()
    if request.old_adapter is not None:
        refuse_altered(expanded(request.old_adapter))
        refuse_damaged_adapter(expanded(request.old_adapter))


def _hashes(request: SkillRequest) -> dict[str, str]:
    found = {}
    for file in _files(request):
        try:
            found[str(file)] = sha256(file)
        except FileNotFoundError:
            raise InvalidValue(f"{file} went away while it was read; put it back, and give the same command") from None
    base = request.base_model
    commit = commit_of(base)
    return found | ({str(base.model): commit} if commit else {})


def _files(request: SkillRequest) -> Iterator[Path]:
    for place in (request.data, request.test, *request.keep, request.after):
        if place is None or place == SELF:
            continue
        path = expanded(place)
        if (path / SKILL).is_dir():
            yield path / SKILL / SEAL
        elif path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.is_file())
        elif path.is_file():
            yield path
    if request.old_adapter is not None:
        yield from _of_a_model(expanded(request.old_adapter))
    base = request.base_model
    folder = embedded.folder(base.model or "", "base_model") or expanded(base.model or "")
    yield from _of_a_model(folder)
    if base.chat_template is not None and expanded(base.chat_template).is_file():
        yield expanded(base.chat_template)


def _of_a_model(folder: Path) -> list[Path]:
    found = {file for pattern in OF_A_MODEL for file in folder.glob(pattern)} if folder.is_dir() else set()
    return sorted(file for file in found if file.is_file())
