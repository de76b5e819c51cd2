"""Files of strangers: every reader returns a value or refuses in one line that names the file, within a bounded time."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

import records
import small
from anchorlora.adapters import attach, read_adapter
from anchorlora.adapters.files import write_adapter
from anchorlora.cli.parsing import recipe_named
from anchorlora.config import RunConfig
from anchorlora.data import Benchmark, read_samples
from anchorlora.data.importing import verify_benchmark
from anchorlora.errors import AnchorloraError
from anchorlora.features.files import read_cores, read_origin, write_cores
from anchorlora.geometry import Factors, Subspace
from anchorlora.recipes import mini
from anchorlora.runs.checkpoint import Checkpoint
from anchorlora.runs.directory import RunDirectory
from anchorlora.store import tensors
from anchorlora.store.export import Export
from anchorlora.store.files import dump_yaml, load_yaml
from anchorlora.store.json import read_file
from anchorlora.store.log import read_events
from anchorlora.store.record import read_record
from anchorlora.store.run_folder import RunFolder
from anchorlora.store.seal import damage, sha256
from anchorlora.store.selection import Candidate, Selection, read_selection
from anchorlora.store.tensors import open_weights
from anchorlora_lab.report import writers
from anchorlora_lab.report.chapters import chapters_of
from anchorlora_lab.report.comparability import studies_of
from anchorlora_lab.report.records import find_runs, read_trace
from anchorlora_lab.suites.evaluation import read_evaluation
from faults.mutations import mutated
from reports import made

SECONDS = 5.0  # of a processor; a reader that takes longer hangs


def _record(root):
    (root / "record.json").write_text(records.record().as_json())
    return root / "record.json", read_record, "json"


def _report(root):
    """Not only read: made into tables."""
    (root / "record.json").write_text(records.record().as_json())
    (root / "eval.json").write_text(made.evaluation(after=1.0))
    return (
        root / "record.json",
        lambda path: [writers.text(t) for c in chapters_of(studies_of(find_runs([path.parent]))) for t in c.tables],
        "json",
    )


def _general(root):
    (root / "eval.json").write_text(made.evaluation(after=1.0))
    return root / "eval.json", read_evaluation, "json"


def _general_2(root):
    (root / "eval.json").write_text(made.evaluation_2(after=1.0))
    return root / "eval.json", read_evaluation, "json"


def _export(root):
    layer = {"module": "q", "rank": 1, "error": 0.0}
    source = {"kind": "run", "number": 1, "task": "a", "tasks": 2, "finished": True, "adapter_sha256": "0", "dtype": "F32"}
    base = {"name": "m", "hub": None, "revision": None}
    content = {"schema": 1, "form": "cat", "dtype": "float32", "rank": 1, "asked_rank": None, "error": 0.0, "layers": [layer]}
    content |= {"protection": None, "logits": None, "source": source, "base": base, "versions": {"anchorlora": "1"}}
    (root / "export.json").write_text(json.dumps(content))
    return root / "export.json", partial(read_file, kind=Export, remedy="export again"), "json"


def _selection(root):
    candidate = Candidate(value=1.0, AA=50.0, accuracy=[50.0])
    content = {"method": "ewc", "parameter": "FisherAnchor.strength", "declared": [1.0], "scale": None, "candidates": [candidate]}
    content |= {"selected": 1.0, "recipe": "r", "base_model": {}, "order": ["a"], "seed": 1, "protocol": {}, "holdout_sha256": "0"}
    (root / "selection.json").write_text(Selection(**content, data={}).as_json())
    return root / "selection.json", read_selection, "json"


def _cell(root):
    cell = RunConfig(method="sfor", order=("a", "b"), seed=1, recipe=mini())
    (root / "config.yaml").write_text(dump_yaml(cell.model_dump(mode="json")))
    return root / "config.yaml", lambda path: RunFolder(path.parent).read_config(), "bytes"


def _cell_as_json(root):
    """JSON is YAML: the parts of a configuration altered one by one."""
    cell = RunConfig(method="sfor", order=("a", "b"), seed=1, recipe=mini())
    (root / "config.yaml").write_text(json.dumps(cell.model_dump(mode="json")))
    return root / "config.yaml", lambda path: recipe_named(str(path)), "json"


def _recipe(root):
    content = {
        "extends": "standard-cl",
        "name": "own",
        "training": {"window": 4, "betas": [0.9, 0.99]},
        "tasks": {"orders": {"o": ["a"]}},
    }
    (root / "own.yaml").write_text(json.dumps(content))
    return root / "own.yaml", lambda path: recipe_named(str(path)), "json"


def _samples(root):
    rows = [{"text": "a b"}, {"text": "c"}]
    (root / "old.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root / "old.jsonl", read_samples, "jsonl"


def _chats(root):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 2
    (root / "old.json").write_text(json.dumps(rows))
    return root / "old.json", read_samples, "json"


def _table(root):
    (root / "old.csv").write_text('prompt,completion\n"a ""b""",c\nd,e\n')
    return root / "old.csv", read_samples, "bytes"


def _trace(root):
    points = made.points("sfor", seed=42)
    made.write_points(root / "trace.jsonl", points)
    return root / "trace.jsonl", lambda path: read_trace(path, steps=None), "jsonl"


def _log(root):
    (root / "log.jsonl").write_text('{"event": "task", "task": 1}\n{"event": "step", "task": 1, "step": 2, "loss": 0.5}\n')

    def trim(path):
        RunDirectory(path.parent).log.trim(1, 1)
        return read_events(path)

    return root / "log.jsonl", trim, "jsonl"


def _benchmark(name):
    def make(root):
        path = small.write_folders(root / "data", train=3, test=2) / name

        def read(_):
            benchmark = Benchmark(root / "data")
            benchmark.task("toys")
            list(benchmark.examples("toys", "train"))
            verify_benchmark(root / "data")

        if path.name == "MANIFEST.json":
            path.write_text(
                json.dumps(
                    {
                        "schema": 1,
                        "files": {"TC/toys/labels.json": {"sha256": sha256(root / "data/TC/toys/labels.json"), "kind": "own"}},
                    }
                )
            )
        return path, read, "json"

    return make


def _factors():
    draw = torch.Generator().manual_seed(1)
    return {name: Factors(torch.randn(2, 6, generator=draw), torch.randn(4, 2, generator=draw), 2.0) for name in ("a.q", "a.v")}


def _adapter(name, form):
    def make(root):
        write_adapter(root / "adapter", _factors(), base="m")
        return root / "adapter" / name, lambda path: read_adapter(path.parent), form

    return make


def _attached(root):
    write_adapter(root / "adapter", _factors(), base="m")
    model = torch.nn.Module()
    model.a = torch.nn.Module()
    model.a.q, model.a.v = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)

    def read(path):
        from anchorlora.adapters.attach import _refuse_what_is_followed

        read_adapter(path.parent)
        _refuse_what_is_followed(path.parent)

    return root / "adapter/adapter_config.json", read, "json"


def _cores(root):
    core = Subspace(torch.linalg.qr(torch.randn(6, 2, generator=torch.Generator().manual_seed(1))).Q)
    write_cores(root / "cores.safetensors", {"q": core, "v": core}, origin={})
    return root / "cores.safetensors", lambda path: (read_cores(path), read_origin(path)), "bytes"


def _weights(root):
    save_file({"q.weight": torch.zeros(2, 3)}, root / "model-1.safetensors")
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"q.weight": "model-1.safetensors"}}))
    return root / "model.safetensors.index.json", lambda path: open_weights(path.parent).read("q.weight"), "json"


def _tensors(root):
    save_file({"q.weight": torch.zeros(2, 3)}, root / "model.safetensors")
    return root / "model.safetensors", lambda path: open_weights(path).weight_of("q"), "bytes"


def _answers(root):
    checkpoint = _trained(root)
    checkpoint.write_answers({"a": {1: "yes"}}, 2.0)
    return root / "answers.json", lambda path: checkpoint._read_answers(lambda said: None), "json"


def _trained(root):
    """The folder of a task that is being answered."""
    (root / "trained").mkdir()
    (root / "trained/facts.json").write_text("{}")
    return Checkpoint(root, root / "trace.jsonl")


def _unsealed_answers(root):
    """Answers with a right hash around whatever they hold."""
    checkpoint = _trained(root)
    of = hashlib.sha256(b"{}").hexdigest()
    (root / "content").write_text(json.dumps({"of": of, "seconds": 2.0, "texts": {"a": {"1": "yes"}}}))

    def read(path):
        text = path.read_bytes().decode("utf-8", "replace")
        sealed = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text}
        (root / "answers.json").write_text(json.dumps(sealed))
        return checkpoint._read_answers(lambda said: None)

    return root / "content", read, "json"


def _seal(root):
    (root / "SEAL.json").write_text(json.dumps({"files": {"a.json": "0" * 64}, "beside": {"b": "0" * 64}}))
    return root / "SEAL.json", lambda path: damage(path.parent), "json"


READERS = {
    "record": _record,
    "report": _report,
    "general": _general,
    "general of schema 2": _general_2,
    "export": _export,
    "selection": _selection,
    "config.yaml": _cell,
    "config.yaml, by parts": _cell_as_json,
    "recipe": _recipe,
    "text samples": _samples,
    "chats": _chats,
    "csv": _table,
    "trace": _trace,
    "log": _log,
    "labels": _benchmark("TC/toys/labels.json"),
    "train": _benchmark("TC/toys/train.json"),
    "instructions": _benchmark("instruction_config.json"),
    "manifest": _benchmark("MANIFEST.json"),
    "adapter config": _adapter("adapter_config.json", "json"),
    "adapter config, attached": _attached,
    "adapter weights": _adapter("adapter_model.safetensors", "bytes"),
    "cores": _cores,
    "index of shards": _weights,
    "full weights": _tensors,
    "answers": _answers,
    "answers with a right hash": _unsealed_answers,
    "seal": _seal,
}


def unwanted(error, name, place):
    """What is wrong with how a reader refused; empty when it did so on purpose, in words, naming the file."""
    if isinstance(error, OSError) and error.filename:
        return ""
    if not isinstance(error, AnchorloraError):
        return "".join(traceback.format_exception(error)[-6:])
    said = str(error.args[0])
    return "" if name in said or place in said else f"names no file: {said}"


def try_out(reader, root, *, cases, seed):
    """Damage the reader's file in many ways: what came of it, in numbers, and what should not have, in words."""
    root.mkdir()
    path, read, form = READERS[reader](root)
    read(path)
    whole, draw = path.read_bytes(), random.Random(f"{reader} {seed}")
    around = {p for p in root.parent.rglob("*")}
    found, wrongs = Counter(files=cases, most_seconds=0.0), []
    for case in range(cases):
        content = mutated(whole, draw, form=form)
        path.write_bytes(content)
        began = time.process_time()
        try:
            read(path)
            found["read"] += 1
        except Exception as error:
            wrong = unwanted(error, path.name, str(path.parent))
            found["tracebacks" if wrong else "refused"] += 1
            wrongs += [f"{reader}, case {case}, {content[:300]!r}\n{wrong}"] if wrong else []
        found["most_seconds"] = max(found["most_seconds"], time.process_time() - began)
    path.write_bytes(whole)
    extra = {p for p in root.parent.rglob("*")} - around - {root / "answers.json"}
    wrongs += [f"{reader} wrote {place}" for place in extra]
    return {**dict.fromkeys(("read", "refused", "tracebacks"), 0), **found, "outside": len(extra)}, wrongs


def assert_read_or_refused(found, wrongs):
    assert not wrongs, "\n".join(wrongs[:3])
    assert found["read"] + found["refused"] == found["files"]
    assert found["most_seconds"] < SECONDS


@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_is_read_or_refused_in_words(reader, tmp_path):
    found, wrongs = try_out(reader, tmp_path / "place", cases=25, seed=1)
    assert_read_or_refused(found, wrongs)
    assert found["refused"] or reader in ("log", "answers", "answers with a right hash", "seal")


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_eight_hundred_damaged_files_of_each_kind_are_read_or_refused(reader, figure, tmp_path):
    """With 26 kinds, 20,800 cases."""
    found, wrongs = try_out(reader, tmp_path / "place", cases=800, seed=2)
    figure("readers", readers=1, **found)
    assert_read_or_refused(found, wrongs)


BOMB = "a: &a [x, x, x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9))
YAML = {
    "an alias": ("a: &a [x]\nb: *a\n", "one part in two places"),
    "aliases": (BOMB, "one part in two places"),
    "an alias within itself": ("a: &a [*a]\n", "not readable YAML"),
    "depth": ("a: " + "[" * 3000, "nested too deeply"),
    "depth that is closed": ("a: " + "[" * 60 + "]" * 60, "nested too deeply"),
    "a tag": ("a: !!python/object/apply:os.system [echo]\n", "not readable YAML"),
    "a key twice": ("a: 1\na: 2\n", "duplicate key"),
    "a date": ("a: 2026-01-01\n", "holds a date"),
    "no date": ("a: 2026-99-99\n", "not readable YAML"),
    "NaN": ("a: .nan\n", "which is not a number"),
    "infinity": ("a: .inf\n", "which is not a number"),
    "a long number": ("a: " + "9" * 5000, "not readable YAML"),
    "a long hexadecimal number": ("a: 0x" + "f" * 5000, "number that is too long"),
    "a NUL": ("a: \0\n", "not readable YAML"),
    "a key that is a number": ("1: a\n", "which is not text"),
    "size": ("a: " + "x" * 2**18, "larger than"),
    "no text": (b"a: \xff\n", "not UTF-8"),
}


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@contextmanager
def refused_at_once(message):
    began = time.process_time()
    with pytest.raises(ValueError, match=message):
        yield
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize("name", YAML)
def test_yaml_that_is_a_trap_is_refused_at_once(name, tmp_path):
    content, message = YAML[name]
    with refused_at_once(rf"own.yaml.*{message}"):
        recipe_named(str(written(tmp_path / "own.yaml", content)))


def test_yaml_means_what_its_present_version_says(tmp_path):
    """In version 1.1, which other readers follow, the first is text and the others are truth values."""
    (tmp_path / "own.yaml").write_text("rate: 1e-4\nswitch: on\nanswer: no\ninner: {parts: [1]}\n")
    content = {"rate": 1e-4, "switch": "on", "answer": "no", "inner": {"parts": [1]}}
    for _ in range(2):  # what a reader changes is not there for the next one, although the file is parsed once
        found = load_yaml(tmp_path / "own.yaml")
        assert found == content
        found["inner"]["parts"].append(2)


JSON = {
    "depth": ("[" * 3000, "nested too deeply"),
    "depth that is closed": ("[" * 60 + "]" * 60, "nested too deeply"),
    "a key twice": ('{"a": 1, "a": 2}', "holds 'a' twice"),
    "NaN": ("[NaN]", "which is not a number"),
    "infinity": ("[-Infinity]", "which is not a number"),
    "what rounds to infinity": ("[1e999]", "which is not a number"),
    "a long number": ("9" * 60, "number that is too long"),
    "a very long number": ("9" * 5000, "number that is too long"),
    "half a character": (r'["\ud800"]', "not Unicode text"),
    "half a character as a key": (r'{"\ud800": 1}', "not Unicode text"),
    "no text": (b"[\xff]", "not UTF-8"),
    "half of it": ('{"a": ', "not complete JSON"),
    "nothing": ("", "not complete JSON"),
}


@pytest.mark.parametrize("name", JSON)
def test_json_that_is_a_trap_is_refused_at_once(name, tmp_path):
    content, message = JSON[name]
    with refused_at_once(rf"own.json: .*{message}.*; fetch it again"):
        read_file(written(tmp_path / "own.json", content), object, remedy="fetch it again")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "own.json").mkdir()
    with pytest.raises(ValueError, match="own.json: not a regular file; fetch it again"):
        read_file(tmp_path / "own.json", object, remedy="fetch it again")


@pytest.mark.parametrize("name", ["../outside", "within/../../outside", "/etc/hostname"])
def test_a_seal_that_names_files_elsewhere_is_refused(name, tmp_path):
    """Even where the hash fits."""
    (tmp_path / "outside").write_text("{}")
    place = tmp_path / "state"
    (place / "within").mkdir(parents=True)
    known = sha256(place / name) if (place / name).is_file() else "0" * 64
    (place / "SEAL.json").write_text(json.dumps({"files": {name: known}, "beside": {}}))
    assert damage(place) == f"{place / 'SEAL.json'} names {name!r}, which is not in its folder"


def test_a_recipe_that_extends_itself_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text(f"extends: {tmp_path}/a.yaml\n")
    with pytest.raises(LookupError, match=r"a.yaml extends '.*', which is no recipe of the package; there is: mini, "):
        recipe_named(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize(
    ("header", "size"),
    [(b"{}", 2**62), (b"{}", 2**30), (b"[" * 4000, 4000), (b'{"q":{"dtype":"F32","shape":[1e99],"data_offsets":[0,4]}}', None)]
    + [
        (json.dumps({"q": {"dtype": kind, "shape": [1], "data_offsets": [0, 4]}}).encode(), None)
        for kind in ("X9", "F4", "C64", "")
    ]
    + [(b'{"q":{"dtype":"F32","shape":[9223372036854775807,9223372036854775807],"data_offsets":[0,4]}}', None)],
)
def test_headers_of_tensors_that_lie_are_refused(header, size, tmp_path):
    path = tmp_path / "cores.safetensors"
    path.write_bytes(struct.pack("<Q", len(header) if size is None else size) + header + bytes(8))
    with pytest.raises(ValueError, match="cores.safetensors is not a readable safetensors file"):
        read_cores(path)


@pytest.mark.parametrize("raised", [AttributeError, KeyError, MemoryError, OverflowError, RuntimeError])
def test_what_other_versions_of_the_library_of_tensors_raise_is_a_refusal_too(raised, tmp_path, monkeypatch):
    def open_(path, framework):
        raise raised("F4")

    (tmp_path / "cores.safetensors").write_bytes(b"")
    monkeypatch.setattr(tensors, "safe_open", open_)
    with pytest.raises(ValueError, match="cores.safetensors is not a readable safetensors file: .*F4"):
        read_cores(tmp_path / "cores.safetensors")


def test_a_regular_expression_or_a_foreign_library_in_an_adapter_is_refused_at_once(tmp_path, small_model):
    write_adapter(tmp_path / "adapter", _factors(), base="m")
    config = tmp_path / "adapter/adapter_config.json"
    fields = json.loads(config.read_text())
    hostile = {
        "exclude_modules": "(a|a)*$",
        "layers_pattern": "(a+)+",
        "modules_to_save": ["(a+)+"],
        "rank_pattern": {"(a+)+$": 1},
        "auto_mapping": {"base_model_class": "x", "parent_library": "antigravity"},
        "megatron_config": {"a": 1},
    }
    model = torch.nn.Module()
    model.a = torch.nn.Module()
    model.a.q, model.a.v = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)
    for name, value in hostile.items():
        config.write_text(json.dumps(fields | {name: value}))
        began = time.process_time()
        with pytest.raises(ValueError, match=rf"adapter_config.json.*{name}"):
            attach(model, tmp_path / "adapter")
        assert time.process_time() - began < 1, name
    import sys

    assert "antigravity" not in sys.modules
