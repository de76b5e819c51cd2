"""Provenance of a run: hashes of every file that it reads and did not write, so that it never goes on with other files.

config.yaml, model/<file>, data/<file>   SHA-256; null where there was no file
model                                    commit of a model from the hub
software/<package>, device, processes    versions, device and number of processes, which may round differently when they change
inexact/<n>                              what was changed while the run stood still
start/<field>                            SHA-256 of an adapter, of cores or of a memory that the run goes on from
threads                                  taken over, since another number of them rounds differently
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from anchorlora import embedded
from anchorlora.config import Recipe, Start
from anchorlora.data import Benchmark, TaskSource
from anchorlora.data.sample_files import HUB, facts_of_data
from anchorlora.devices import device_name
from anchorlora.errors import InvalidValue
from anchorlora.models.load import LoadedModel, device_of
from anchorlora.models.tokenizer import reads_clock
from anchorlora.paths import expanded, start_of
from anchorlora.processes import launched, sharding
from anchorlora.store.adapter_config import WEIGHTS_FILE
from anchorlora.store.record import Record
from anchorlora.store.seal import read_sealed, sha256, write_sealed

CONFIG, MODEL, DATA, SOFTWARE, INEXACT = "config.yaml", "model", "data", "software", "inexact"
THREADS, START, DATE = "threads", "start", "date"
READ_IF_THERE = ("instruction_config.json", "MANIFEST.json")
MOST_THREADS = 4096
Hashes = dict[str, str | None]


@dataclass(frozen=True)
class Provenance:
    """Record of what a run began with."""

    path: Path  # state/provenance.json of the run directory
    config: Path

    def compare(self, recipe: Recipe, *, allow_inexact: bool = False) -> None:
        """Check, before anything is read, that files, versions and device are what they were when the run began."""
        self.compare_config()
        self._compare_software(device_of(recipe.base_model), allow_inexact)
        self.take_threads()
        known = self._known()
        places = {MODEL: _place(recipe.base_model.model, "base_model"), DATA: _place(recipe.tasks.data, "data")}
        for name, was in known.items():
            part, _, rest = name.partition("/")
            path = _file(places[part], rest, of_data=part == DATA) if rest and part in places else None
            if path is not None:
                self._refuse(path, was, _hash(path))

    def take_threads(self) -> None:
        """Compute with as many threads as when the run began, if it has."""
        threads = self._known().get(THREADS) or ""
        if threads.isdecimal() and 0 < int(threads[:6]) <= MOST_THREADS:
            torch.set_num_threads(int(threads[:6]))

    def _compare_software(self, device: torch.device, allow_inexact: bool) -> None:
        known, now = self._known(), computing(device)
        if before := _below(SOFTWARE, known):  # of a run that was begun by one process, nothing says so
            before, now = {PROCESSES: "1", **before}, {PROCESSES: "1", **now}
        other = [f"{name} {was} then and {now.get(name)} now" for name, was in before.items() if was != now.get(name)]
        if other and not allow_inexact:
            raise InvalidValue(
                f"{self.config.parent} was begun under other conditions ({', '.join(other)}), so its end would not be that of "
                "a run in one go; restore them, or continue with --allow-inexact, which the record will say"
            )
        if other:
            done = _below(INEXACT, known)
            self._write(known | _under(SOFTWARE, now) | _under(INEXACT, {str(len(done)): ", ".join(other)}))

    def inexact(self) -> list[str]:
        """Return what was changed while the run stood still, each time that it was."""
        return [change for change in _below(INEXACT, self._known()).values() if change]

    @property
    def commit(self) -> str | None:
        """Commit of a model from the hub that the run began with; its branch may have moved since."""
        return self._known().get(MODEL)

    @property
    def date(self) -> str | None:
        """Day that chat templates see which write the date: the one on which the run began."""
        return self._known().get(DATE)

    def compare_config(self) -> None:
        """Check that config.yaml is what the run began with."""
        known = self._known()
        if CONFIG in known:
            self._refuse(self.config, known[CONFIG], _hash(self.config))

    def keep(self, base_model: LoadedModel, source: TaskSource, start: Start, *, date: str | None = None) -> None:
        """Write down what was read, or check that it is what was written down. A run that took over its first task reads the data
        of later tasks for the first time, so data may be added.
        """
        known = self._known()
        hashes: Hashes = {CONFIG: sha256(self.config), THREADS: str(torch.get_num_threads())}
        hashes |= _under(SOFTWARE, computing(base_model.device))
        if reads_clock(base_model.tokenizer):
            hashes[DATE] = date
        hashes |= {f"{MODEL}/{name}": value for name, value in base_model.files.items()}
        hashes |= {} if base_model.files else {MODEL: base_model.sha256}
        if isinstance(source, Benchmark):
            hashes |= {f"{DATA}/{name}": _hash(source.root / name) for name in READ_IF_THERE}
        hashes |= {f"{DATA}/{name}": facts.sha256 for name, facts in source.opened.items()}
        hashes |= {f"{START}/{name}": sha256(path) for name, path in start_files(start).items()}
        for name, value in hashes.items():
            if name in known or (known and name.startswith(MODEL)):
                what = f"{base_model.name}{name.removeprefix(MODEL)}" if name.startswith(MODEL) else name
                self._refuse(what, known.get(name), value)
        if hashes != known:
            self._write(known | hashes)

    def take_over(self, other: Provenance) -> None:
        """Begin with what another run began with; the configuration is this run's own."""
        self._write({name: value for name, value in other._known().items() if name != CONFIG})

    def _known(self) -> Hashes:
        if not self.path.exists() and not any(self.path.parent.glob("[0-9]*")):
            return {}  # nothing is saved yet that it could belong to
        try:
            return read_sealed(self.path, dict[str, str | None])
        except ValueError as error:
            raise InvalidValue(f"{error}; what this run began with is not known, so begin again with another --out") from None

    def _refuse(self, path: Path | str, was: str | None, now: str | None) -> None:
        if was == now:
            return
        how, remedy, begins = f"its hash differs from that in {self.path}", "put it back", ""
        if now is None:
            how, begins = "it is missing", start_of(path)
        elif was is None:
            how, remedy = f"{self.path} has no hash of it", "take it away if it was added"
        raise InvalidValue(f"{path} is not what this run began with: {how}; {remedy}, or begin again with another --out{begins}")

    def _write(self, hashes: Mapping[str, str | None]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(self.path, dict(sorted(hashes.items())))


def _place(name: str | None, part: str) -> Path:
    return embedded.folder(name or "", part) or Path(name or "").expanduser()


def _file(folder: Path, name: str, *, of_data: bool) -> Path | None:
    """A file of a model or of data; None for data that is no file, whose rows are compared when they are read."""
    path = _data_at(folder, name) if of_data else folder / name
    return None if of_data and (path.is_dir() or HUB.fullmatch(str(path))) else path


def _data_at(folder: Path, name: str) -> Path:
    path = folder / name
    listed = not path.exists() and (HUB.fullmatch(name) or expanded(name).exists())  # which has a place of its own
    return expanded(name) if listed else path


def changed_data(record: Record, recipe: Recipe) -> list[Path]:
    """Return the data files and saved data sets of a finished run that are there and are not what it read."""
    folder = _place(recipe.tasks.data, "data")
    data = {_data_at(folder, name): facts.sha256 for name, facts in record.data.items()}
    return [path for path, was in data.items() if path.exists() and facts_of_data(str(path)).sha256 != was]


def _below(part: str, hashes: Hashes) -> Hashes:
    return {name.removeprefix(f"{part}/"): value for name, value in hashes.items() if name.startswith(f"{part}/")}


def _under(part: str, values: Mapping[str, str]) -> Hashes:
    return {f"{part}/{name}": value for name, value in values.items()}


def _hash(path: Path) -> str | None:
    return sha256(path) if path.is_file() else None


def start_files(start: Start) -> dict[str, Path]:
    """Return the files that a run goes on from."""
    files = {name: Path(path).expanduser() for name, path in start if path is not None}
    return files | ({"old_adapter": files["old_adapter"] / WEIGHTS_FILE} if "old_adapter" in files else {})


PROCESSES = "processes"
COMPUTING = ("anchorlora", "torch", "transformers", "peft", "accelerate", "tokenizers")


def versions() -> dict[str, str]:
    """Return the versions that a record names, by package."""
    packages = {name: metadata.version(name) for name in (*COMPUTING, "safetensors")}
    return packages | {"python": platform.python_version()}


def computing(device: torch.device) -> dict[str, str]:
    """Return what a run that goes on must have in common with its beginning to compute the same."""
    packages = {name: metadata.version(name) for name in COMPUTING}
    if launched() > 1:
        packages[PROCESSES] = f"{launched()}, split" if sharding() else str(launched())
    if device.type != "cpu":
        return packages | {"device": device_name(device)}
    return packages | {"device": "cpu", "instructions": torch.backends.cpu.get_cpu_capability()}
