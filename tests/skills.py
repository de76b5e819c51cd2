"""What `anchorlora train` is given in tests: rows of the embedded benchmark, and settings that make a skill small."""

import json

from anchorlora import embedded
from anchorlora.data import Benchmark

FEW = ["--set", "rows=128", "--set", "max_new_tokens=4", "--set", "threads=1", "--set", "learning_rate=2e-3", "--self-texts", "10"]
NARROW = ["--targets", "q_proj,v_proj"]  # two layers of seven in each block, where it does not matter which
EXACT = ["--method", "inc-lora-hard", *NARROW]  # what is protected is exact, and adds up along a chain


def rows(name, split, count):
    source = Benchmark(embedded.folder("embedded:mini", "data"))
    task = source.task(name)
    return [{"prompt": task.prompt(e.sentence), "completion": e.label} for e in source.examples(name, split, limit=count)]


def written(path, content):
    path.write_text("\n".join(map(json.dumps, content)))
    return str(path)
