"""Data in the layouts of other projects, as tasks of free text; what lies in a place decides which one it is.

    TRACE            <task>/{train,test}.json: a list of {"prompt", "answer"} (arXiv 2310.06762)
    SAPT             {SuperNI,Long_Sequence}/<task>/{train,test}.json: {"Definition", "Instances": [{"input", "output"}]}
                     (arXiv 2401.08295)
    LLaMA-Factory    dataset_info.json: name -> file or data set of the hub, and which column is which

Prompts are those of the projects' own code. Their development files (eval.json, dev.json) are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from anchorlora.data.forms.base import MARKS
from anchorlora.data.manifest import LARGEST
from anchorlora.data.metrics import METRICS, ExactMatch, Metric
from anchorlora.data.rows import iterate_samples
from anchorlora.data.sample_files import rows_in
from anchorlora.data.samples import Sample
from anchorlora.data.text_files import TextSource
from anchorlora.errors import InvalidValue
from anchorlora.store.json import read_file

Sources = dict[str, TextSource]
DATASET_INFO = "dataset_info.json"
TRACE_TOKENS, SAPT_TOKENS = 512, 50  # most tokens of an answer in the projects' scripts
# SuperNI's zero-shot prompt, and that of the Long Sequence benchmark
INSTRUCTED = "Definition: {definition}\n\nNow complete the following example -\nInput: {input}\nOutput: "
CLASSIFIED = "{definition}\n{input}\nOutput: "
TRACE: Mapping[str, tuple[Metric, ...]] = {  # in the paper's order, each with its primary metric first
    "C-STANCE": (METRICS["verbatim_match"],),
    "FOMC": (METRICS["verbatim_match"],),
    "MeetingBank": (METRICS["rouge_l"],),
    "Py150": (METRICS["code_similarity"],),
    "ScienceQA": (METRICS["choice_match"], METRICS["rouge_l"]),
    "NumGLUE-cm": (METRICS["verbatim_match"],),
    "NumGLUE-ds": (METRICS["verbatim_match"],),
    "20Minuten": (METRICS["sari"], METRICS["rouge_l"]),
}
ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
PARTS = {**ALPACA, "history": "history", "system": "system", "tools": "tools"}  # column of the file -> of our form
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
OTHER_COLUMNS = ("images", "videos", "audios", "kto_tag")


def sources_in(data_path: Path) -> Sources | None:
    """Return the tasks of a folder in TRACE's, SAPT's or LLaMA-Factory's layout; None for a place that is none of these."""
    info = data_path / DATASET_INFO if data_path.is_dir() else data_path
    if info.name == DATASET_INFO and info.is_file() and not (info.parent / "state.json").exists():  # that is one of `datasets`
        return _llama_factory(info)
    folders = [path.parent for path in sorted(data_path.glob("*/train.json"))] or [
        path.parent for path in sorted(data_path.glob("*/*/train.json"))
    ]
    kinds = {_begins_with(folder / "train.json") for folder in folders}
    if kinds == {"["} and not any(folder.parent != data_path or (folder / "labels.json").exists() for folder in folders):
        return {folder.name: _trace(folder) for folder in sorted(folders, key=_of_paper)}
    if kinds != {"{"}:
        return None
    sources = {folder.name: _sapt(folder) for folder in folders}
    if len(sources) < len(folders):
        twice = next(folder.name for i, folder in enumerate(folders) if folder.name in {f.name for f in folders[:i]})
        raise InvalidValue(f"{data_path} has two tasks called {twice}; give one of its folders")
    return sources


def _begins_with(path: Path) -> str:
    """The first letter of a JSON file: an object or a list."""
    with path.open("rb") as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1].decode(errors="replace")


def _of_paper(folder: Path) -> tuple[int, str]:
    return (list(TRACE).index(folder.name) if folder.name in TRACE else len(TRACE), folder.name)


def _splits(folder: Path) -> tuple[str, str]:
    if not (folder / "test.json").is_file():
        raise InvalidValue(f"{folder} has a train.json and no test.json; fetch it again")
    return str(folder / "train.json"), str(folder / "test.json")


def _trace(folder: Path) -> TextSource:
    return TextSource(*_splits(folder), metrics=TRACE.get(folder.name), max_new_tokens=TRACE_TOKENS)


def _sapt(folder: Path) -> TextSource:
    short = folder.parent.name == "Long_Sequence"
    metrics: tuple[Metric, ...] = (ExactMatch(),) if short else (METRICS["rouge_l"], ExactMatch())
    reader = partial(_instances, form=CLASSIFIED if short else INSTRUCTED)
    return TextSource(*_splits(folder), metrics=metrics, max_new_tokens=SAPT_TOKENS, reader=reader)


def _instances(file: str, form: str) -> Iterator[Sample]:
    content = _load(Path(file))
    if not isinstance(content, dict) or not isinstance(content.get("Instances"), list):
        raise InvalidValue(f'{file} is not a SAPT task: {{"Definition": .., "Instances": [{{"input", "output"}}, ..]}}')
    definition = _first(content.get("Definition"))
    rows = ((f"{file}, instance {number}", row) for number, row in enumerate(content["Instances"], 1))
    yield from iterate_samples((_instance(where, row, definition, form) for where, row in rows), source=file)


def _instance(where: str, row: Any, definition: Any, form: str) -> tuple[str, Any]:
    output = _first(row.get("output")) if isinstance(row, dict) else None
    if not isinstance(output, str) or not isinstance(row.get("input"), str) or not isinstance(definition, str):
        raise InvalidValue(f'{where}: a definition and {{"input": text, "output": text}} are needed, not {row!r:.80}')
    # by replacing alone: texts may hold braces
    before, after = form.replace("{definition}", "\0").split("{input}")
    return where, {"prompt": before.replace("\0", definition.strip()) + row["input"] + after, "completion": output}


def _first(value: Any) -> Any:
    """A text, or the first of a list: of several right answers, SAPT draws one."""
    return next(iter(value), "") if isinstance(value, list) else value


def _load(path: Path) -> Any:
    return read_file(path, object, remedy="fetch it again", largest=LARGEST)


def _llama_factory(info: Path) -> Sources:
    content = _load(info)
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()) or not content:
        raise InvalidValue(f'{info} describes no data set: {{name: {{"file_name": .., "formatting": .., "columns": {{..}}}}, ..}}')
    return {name: _read_entry(info, name, entry) for name, entry in content.items()}


def _read_entry(info: Path, name: str, entry: Mapping[str, Any]) -> TextSource:
    """One data set of the file; what cannot be read is refused when the task is asked for."""
    where = f"{info}: {name}"
    columns, tags = ({**entry.get(part, {})} for part in ("columns", "tags"))
    reason = _unread(entry, columns)
    if reason:
        return TextSource(where, reader=partial(_refused, where, reason))
    if "hf_hub_url" in entry:
        train = f"{entry['hf_hub_url']}:{entry.get('split') or 'train'}"
    else:
        train = str(info.parent / entry["file_name"])
    if entry.get("formatting", "alpaca") == "alpaca":
        known = columns if "columns" in entry else ALPACA
        row: Callable[[str, Mapping[str, Any]], Any] = partial(_alpaca, {part: known.get(part) for part in PARTS})
    else:
        row = partial(_sharegpt, {"messages": "conversations", **columns}, TAGS | tags)
    return TextSource(train, reader=partial(_convert, row=row, limit=entry.get("num_samples")))


def _unread(entry: Mapping[str, Any], columns: Mapping[str, Any]) -> str:
    """Why a data set cannot be read; "" if it can."""
    if entry.get("ranking"):
        return "it holds preferences (ranking), and a run learns answers"
    other = next((name for name in OTHER_COLUMNS if columns.get(name)), None)
    if other:
        return f"it has a column of {other.removesuffix('_tag')}, and only text is read"
    if entry.get("formatting", "alpaca") not in ("alpaca", "sharegpt", "openai"):
        return f"the formatting {entry['formatting']!r:.40} is none of alpaca, sharegpt, openai"
    if "hf_hub_url" in entry:
        part = next((name for name in ("subset", "folder") if entry.get(name)), None)
        return f"a {part} of a data set of the hub is not read; save it as a file, and name that as file_name" if part else ""
    return "" if isinstance(entry.get("file_name"), str) else "it names neither file_name nor hf_hub_url"


def _refused(where: str, reason: str, file: str) -> Iterator[Sample]:
    raise InvalidValue(f"{where} cannot be learned: {reason}; name other tasks with --order")


def _convert(source: str, *, row: Callable[[str, Any], Any], limit: int | None) -> Iterator[Sample]:
    rows = ((where, _as_ours(row, where, content)) for where, content in rows_in(source))
    return iterate_samples(islice(rows, limit), source=source)


def _as_ours(row: Callable[[str, Any], Any], where: str, content: Any) -> Any:
    """A row in one of our forms, with the columns by which it says how it is learned."""
    if not isinstance(content, Mapping):
        return content
    return row(where, content) | {mark: content[mark] for mark in MARKS if mark in content}


def _alpaca(known: Mapping[str, str | None], where: str, row: Mapping[Any, Any]) -> dict[str, Any]:
    """A row of the alpaca formatting; plain text if nothing answers it."""
    part = {name: None if column is None else row.get(column) for name, column in known.items()}
    if part["prompt"] is None:
        raise InvalidValue(f"{where}: no column {known['prompt']!r}; it has: {', '.join(map(str, row))}")
    if part["response"] is None:
        return {"text": part["prompt"]}
    return {column: part[name] for name, column in PARTS.items()}


def _sharegpt(columns: Mapping[str, str | None], tags: Mapping[str, str], where: str, row: Mapping[Any, Any]) -> dict[str, Any]:
    """A row of the sharegpt formatting, as a chat."""
    messages = columns["messages"]
    turns = row.get(messages)
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise InvalidValue(f"{where}: {messages} must be a list of messages; the row has: {', '.join(map(str, row))}")
    speaks, says = tags["role_tag"], tags["content_tag"]
    called = {tags[f"{role}_tag"]: TAGS[f"{role}_tag"] for role in ("user", "assistant", "observation", "function", "system")}
    chat = []
    for turn in turns:
        if turn.get(speaks) not in called:
            raise InvalidValue(f"{where}: {speaks} {turn.get(speaks)!r:.40} is none of {', '.join(called)}")
        further = {key: value for key, value in turn.items() if key not in (speaks, says)}
        chat.append({"from": called[turn[speaks]], "value": turn.get(says), **further})
    others = {part: row.get(column) for part in ("system", "tools") if (column := columns.get(part))}
    return {"conversations": chat, **others}
