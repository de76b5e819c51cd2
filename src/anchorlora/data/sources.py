"""The source of a run's tasks, by what lies in the place that its recipe names: a folder in the layout of CL_Benchmark, TRACE, SAPT
or LLaMA-Factory, or a YAML file that lists files of free text.

tasks:
  sql: {train: new.jsonl, test: test.jsonl, columns: "prompt=question,completion=query", metrics: [exact_match], max_new_tokens: 64}
  chat: {train: org/name:train}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from anchorlora import embedded
from anchorlora.config import Count, Place, Settings, TaskName, TaskSettings
from anchorlora.data.benchmark import Benchmark, TaskSource
from anchorlora.data.layouts import sources_in
from anchorlora.data.metrics import metric_named
from anchorlora.data.text_files import TextFiles, TextSource
from anchorlora.errors import InvalidValue
from anchorlora.paths import expanded
from anchorlora.store.files import load_yaml

LISTS = (".yaml", ".yml")
LAYOUTS = (
    "CL_Benchmark (<group>/<task>/{train,test,labels}.json), TRACE (<task>/{train,test}.json), "
    "SAPT ({SuperNI,Long_Sequence}/<task>/{train,test}.json), LLaMA-Factory (dataset_info.json), or a YAML file that lists files"
)


class TextTaskSettings(Settings):
    """A task in a list of files."""

    train: Place  # its training examples (see `anchorlora.data.TextSource`)
    test: Place | None = None  # its test examples; None holds out a tenth of `train`
    columns: str | None = None
    metrics: tuple[str, ...] | None = None  # names of metrics, the primary one first; None decides by the answers
    max_new_tokens: Count | None = None  # most tokens of an answer; None for what the recipe says

    def source(self, folder: Path) -> TextSource:
        """Return the same as a source."""
        metrics = None if self.metrics is None else tuple(metric_named(name) for name in self.metrics)
        test = None if self.test is None else _from(folder, self.test)
        return TextSource(_from(folder, self.train), test, self.columns, metrics, self.max_new_tokens)


class TextTaskList(Settings):
    """A YAML file that lists tasks of free text."""

    tasks: Annotated[dict[TaskName, TextTaskSettings], Field(min_length=1)]  # name of a task -> its files


def _from(folder: Path, file: str) -> str:
    """A place as its list means it: from the list's own folder, unless it is of the hub."""
    if Path(file).expanduser().is_absolute() or not (folder / file).exists():
        return file
    return str(folder / file)


def source_of(tasks: TaskSettings) -> TaskSource:
    """Return the source of a run's tasks."""
    if tasks.data is None:
        raise InvalidValue("this recipe names no data; give a CL_Benchmark folder or a YAML list of files with --data")
    source = _find_source(tasks.data)
    return source.training_only() if tasks.tested_on == "holdout" else source


def _find_source(data: str) -> Benchmark | TextFiles:
    path = embedded.folder(data, "data") or expanded(data)
    if path.is_file() and path.suffix in LISTS:
        listed = TextTaskList.read(load_yaml(path), str(path))
        return TextFiles({name: task.source(path.parent) for name, task in listed.tasks.items()})
    read = sources_in(path)
    if read is not None:
        return TextFiles(read)
    if path.is_file() or (path.is_dir() and not any(path.glob("*/*/labels.json"))):
        raise InvalidValue(f"{path} holds no tasks in a layout that is read: {LAYOUTS}")
    return Benchmark(path)
