"""What can happen to a file, and the files that a run reads."""

import shutil


def truncate(path, other):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path, other):
    path.write_bytes(b"")


def flip(path, other, *, at=0.5, bit=0):
    """One bit, by default in the middle."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 1 << bit
    path.write_bytes(bytes(content))


def delete(path, other):
    path.unlink()


def swap(path, other):
    """The same file of another run."""
    shutil.copyfile(other, path)


DAMAGES = {damage.__name__: damage for damage in (truncate, empty, flip, delete, swap)}
SPLITS = [f"{task}/{split}.json" for task in ("TC/fruit", "SC/mood", "TC/metal") for split in ("train", "test", "labels")]
MODEL = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
STATE = (
    "SEAL.json",
    "facts.json",
    "remembered.safetensors",
    "rows.safetensors",
    "stack.safetensors",
    "stores.json",
    "wide.safetensors",
)
ADAPTER = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors")
TASK = (*ADAPTER, "cores.safetensors", "predictions.jsonl")
TASKS = ("1-fruit", "2-mood")

# of a run stopped after step 2 of task 3, saved after each step
BEGUN = [
    *(f"state/{number}/{name}" for number in (1, 2) for name in STATE),
    *(f"tasks/{task}/{name}" for task in TASKS for name in TASK),
    *(f"state/3-begun/step-00000002/{name}" for name in ("SEAL.json", "facts.json", "tensors.safetensors")),
    "trace.jsonl",
]
# of a run stopped while task 2 was answered
ANSWERED = [
    *(f"state/2-begun/trained/{name}" for name in (*STATE, "cores.safetensors", *ADAPTER)),
    "state/2-begun/answers.json",
]
STOPS = ["config.yaml", "state/provenance.json"]  # nothing older stands in for these
INPUTS = [f"model/{name}" for name in MODEL] + [f"data/{name}" for name in (*SPLITS, "instruction_config.json")]
