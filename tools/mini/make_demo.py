"""Write the files of `make demo`: a chat JSONL of the embedded news task, and exercises of the kinds that the base model knows.

python tools/mini/make_demo.py DIR       # chat.jsonl, chat-test.jsonl, abilities.jsonl
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import exercises

from anchorlora.data import Benchmark
from anchorlora.embedded import folder

SEED, ABILITIES, TASK = "anchorlora demo", 900, "news"


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    data = folder("embedded:mini", "data")
    assert data is not None
    source = Benchmark(data)
    task = source.task(TASK)
    for split, name in (("train", "chat"), ("test", "chat-test")):
        chats = [
            [{"role": "user", "content": task.prompt(e.sentence)}, {"role": "assistant", "content": e.label}]
            for e in source.examples(TASK, split)
        ]
        write(out / f"{name}.jsonl", [{"messages": chat} for chat in chats])
    asked = (piece for piece in exercises.pieces(SEED) if piece[0])
    write(out / "abilities.jsonl", [{"prompt": prompt, "completion": answer} for prompt, answer in islice(asked, ABILITIES)])


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
