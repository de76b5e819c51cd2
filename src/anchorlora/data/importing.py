"""Import and verify a CL_Benchmark folder: copy the files, hash them, and write a manifest last.

The source may be such a folder, a clone of the O-LoRA repository, or a git URL. `dev.json` is left out: officially it is the
same blob as `test.json`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from anchorlora.data.benchmark import INSTRUCTIONS_FILE, Benchmark
from anchorlora.data.manifest import ALTERED, LARGEST, MANIFEST_FILE, Manifest, facts_of, kind_of, refuse_odd
from anchorlora.errors import InvalidValue
from anchorlora.store.json import Unreadable, load
from anchorlora.text import visible, without_secrets

PARTS = ("labels.json", "train.json", "test.json")


def import_benchmark(source: str, to: Path) -> dict[str, Any]:
    """Copy a benchmark into a new folder, once every split is read and its labels are checked; a failure leaves nothing."""
    _refuse_existing(to)
    with _fetch(source) as root, _made_for(to), tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=to.parent) as workshop:
        groups, instructions, origin = _locate(root)
        declared = Manifest.beside(groups)
        made = Path(workshop) / to.name
        files = dict(sorted(_present(groups).items()))
        if not files:
            raise InvalidValue(
                f"{without_secrets(source)} holds no <group>/<task>/labels.json; give a CL_Benchmark folder or a clone of O-LoRA"
            )
        if instructions is not None:
            files[INSTRUCTIONS_FILE] = instructions
        for relative, path in files.items():
            _copy(path, made / relative)
        entries: dict[str, dict[str, Any]] = {}
        for relative in files:
            facts = facts_of(made / relative)
            kind = kind_of(relative, facts)
            if relative in declared.files:
                kind = declared.judge(relative, replace(facts, path=groups / relative)).kind
            entries[relative] = {"sha256": facts.sha256, "instances": _instances(made / relative), "kind": kind}
        manifest = {
            "schema": 1,
            "note": "made by anchorlora data import",
            "source": origin or {"folder": visible(Path(source).name)},
            "files": entries,
        }
        (made / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", newline="\n")
        benchmark = Benchmark(made)
        for name in benchmark.names:
            _readable(benchmark, name, shown=without_secrets(source))
        try:
            made.rename(to)
        except OSError:
            _refuse_existing(to)  # another process has made it meanwhile
            raise
    return manifest


def _refuse_existing(to: Path) -> None:
    if to.exists():
        raise InvalidValue(f"{to} exists already; import into a new folder")


def verify_benchmark(root: Path) -> dict[str, str]:
    """Return the kind of every file of a benchmark folder: the manifest's where the bytes agree, else the official list's."""
    manifest = Manifest.beside(root)
    present = set(_present(root))
    if (root / INSTRUCTIONS_FILE).is_file() and INSTRUCTIONS_FILE in manifest.files:
        present.add(INSTRUCTIONS_FILE)
    if not present:
        raise InvalidValue(f"{root} holds no <group>/<task>/labels.json; give a CL_Benchmark folder")
    paths = sorted(present | set(manifest.files))
    return {path: manifest.verify(path, facts_of(root / path)) if path in present else "missing" for path in paths}


def agrees(kind: str) -> bool:
    """Return True if a verified file is what it is declared to be."""
    return not kind.startswith((ALTERED + ":", "missing"))


@contextmanager
def _made_for(to: Path) -> Iterator[None]:
    """Make the folders above a new one, and remove those again that stay empty."""
    made = [folder for folder in to.parents if not folder.exists()]
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # it is not empty
            for folder in made:
                folder.rmdir()


@contextmanager
def _fetch(source: str) -> Iterator[Path]:
    if Path(source).is_dir():
        yield Path(source)
        return
    if "://" not in source and not source.startswith("git@"):
        raise InvalidValue(f"{without_secrets(source)} is neither a folder nor a git URL")
    if not source.isprintable():
        raise InvalidValue(f"{without_secrets(source)!r} holds characters that a URL cannot have; remove them")
    with tempfile.TemporaryDirectory(prefix="anchorlora-import-") as folder:
        allowed = {**os.environ, "GIT_ALLOW_PROTOCOL": "https:ssh:git:file", "GIT_TERMINAL_PROMPT": "0"}
        clone = ["git", "-c", "core.autocrlf=input", "clone", "--quiet", "--depth", "1", "--", source, folder]
        try:
            subprocess.run(clone, check=True, env=allowed, capture_output=True, text=True, errors="replace")
        except FileNotFoundError:
            raise InvalidValue(
                "git is not installed, so a URL cannot be imported; clone it elsewhere and give the folder"
            ) from None
        except subprocess.CalledProcessError as error:
            last = error.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise InvalidValue(without_secrets(f"git could not clone {source}: {last[0]}")) from None
        yield Path(folder)


def _locate(root: Path) -> tuple[Path, Path | None, dict[str, str] | None]:
    """Folder of groups, instruction file if any, and git origin if the source is a repository."""
    groups = root / "CL_Benchmark" if (root / "CL_Benchmark").is_dir() else root
    if groups != root and groups.is_symlink():
        raise InvalidValue(f"{groups} is a link, which is not followed; import what it points to")
    paths = [groups / INSTRUCTIONS_FILE, root / "configs" / INSTRUCTIONS_FILE, groups.parent / "configs" / INSTRUCTIONS_FILE]
    origin = None
    if (root / ".git").exists():
        asked = [("url", ["config", "--get", "remote.origin.url"]), ("commit", ["rev-parse", "HEAD"])]
        answers = {name: subprocess.run(["git", "-C", str(root), *args], capture_output=True) for name, args in asked}
        lines = {name: answer.stdout.decode(errors="replace") for name, answer in answers.items() if answer.returncode == 0}
        origin = {name: without_secrets(line.strip()) for name, line in lines.items()}
    return groups, next((path for path in paths if path.is_file()), None), origin


def _present(root: Path) -> dict[str, Path]:
    """Files of a folder's tasks by relative path; raises InvalidValue for a name with line breaks or controls."""
    paths = {p.relative_to(root).as_posix(): p for part in PARTS for p in root.glob(f"*/*/{part}")}
    for relative in paths:
        if not relative.isprintable():
            raise InvalidValue(f"{root} holds {relative!r:.80}, a name with line breaks or controls; rename it")
    return paths


def _copy(path: Path, to: Path) -> None:
    if any(part.is_symlink() for part in (path, path.parent, path.parent.parent)):
        raise InvalidValue(f"{path} is a link, or in a folder that is one; import what it points to")
    refuse_odd(path)
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)


def _instances(path: Path) -> int | None:
    try:
        content = load(path, largest=LARGEST)
    except Unreadable as error:
        raise InvalidValue(f"{path.parent.name}/{path.name}: {error}; fetch it again") from None
    return len(content) if isinstance(content, list) else None


def _readable(benchmark: Benchmark, name: str, *, shown: str) -> None:
    try:
        group = benchmark.root / benchmark.task(name).group
        for split in ("train", "test"):
            if (group / name / f"{split}.json").is_file():
                deque(benchmark.examples(name, split), maxlen=0)
    except ValueError as error:
        raise InvalidValue(str(error).replace(str(benchmark.root), shown)) from None
