"""A saved state with one item less, or with one as a task begins with it; sealed again, so that only a resumed run can tell."""

import json
import random
import shutil

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import small
from anchorlora.store.seal import seal

TENSORS = "tensors.safetensors"


def edited(folder, tmp_path, change, *, at):
    """A copy of a run in which `change` got one of its sealed folders, which is sealed again."""
    out = tmp_path / "edited"
    shutil.copytree(folder, out)
    change(out / at)
    (out / at / "SEAL.json").unlink()
    number = at.removeprefix("state/")
    beside = out / "tasks" / f"{number}-{small.ORDER[int(number) - 1]}" if number.isdigit() else None
    files = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors", "cores.safetensors")
    seal(out / at, beside={name: beside / name for name in files} if beside else None)
    return out


def tensors_of(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def moved(folder):
    """The tensors that are no longer as they began: the first step moves no A while B is zero."""
    return sorted(name for name, t in tensors_of(folder / TENSORS)[0].items() if t.any())


def without(file, prefix):
    """Leave out the tensors whose names begin so."""

    def change(folder):
        tensors, metadata = tensors_of(folder / file)
        left = {name: t for name, t in tensors.items() if not name.startswith(prefix)}
        assert len(left) < len(tensors), f"{file} holds no {prefix}"
        save_file(left, folder / file, metadata=metadata)

    return change


def at_the_beginning(file, prefix):
    """Put zeros, with which an optimizer, a fisher and a sum begin, in place of the tensors whose names begin so."""

    def change(folder):
        tensors, metadata = tensors_of(folder / file)
        named = [name for name in tensors if name.startswith(prefix)]
        assert named, f"{file} holds no {prefix}"
        generator = torch.Generator().manual_seed(42).get_state()
        first = {n: generator if n.startswith("dropout") else torch.zeros_like(tensors[n]) for n in named}
        save_file({**tensors, **first}, folder / file, metadata=metadata)

    return change


def refitted(fit):
    """Of tensors whose names begin so, what `fit` makes of each."""

    def make(file, prefix):
        def change(folder):
            tensors, metadata = tensors_of(folder / file)
            named = [name for name in tensors if name.startswith(prefix)]
            assert named, f"{file} holds no {prefix}"
            save_file({**tensors, **{n: fit(tensors[n]) for n in named}}, folder / file, metadata=metadata)

        return change

    return make


HOW = {"left out": without, "as at the beginning": at_the_beginning}
MISFITS = {
    "of another shape": refitted(lambda t: torch.cat([t, t], dim=-1) if t.ndim else t[None].clone()),
    "of another type": refitted(lambda t: t.to(torch.float32 if t.dtype == torch.int32 else torch.int32)),
}


def one_of(kind, how):
    """One drawn tensor of a kind; kind: the beginning of its name, * for anything, and the end."""
    first, _, last = kind.partition("*")

    def change(folder):
        named = [name for name in moved(folder) if name.startswith(first) and name.endswith(last)]
        assert named, f"the state holds no {kind}"
        how(TENSORS, random.Random(kind).choice(named))(folder)

    return change


def put(file, content):
    def change(folder):
        assert (folder / file).read_text() != content
        (folder / file).write_text(content)

    return change


def fact(name, value, file="facts.json"):
    """Another value of a fact; value: may be a function of what it was."""

    def change(folder):
        facts = json.loads((folder / file).read_text())
        new = value(facts[name]) if callable(value) else value
        assert facts[name] != new
        (folder / file).write_text(json.dumps(facts | {name: new}))

    return change
