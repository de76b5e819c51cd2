"""Small folders in the layouts of TRACE, SAPT and LLaMA-Factory, written as their own code writes and reads them."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer

from anchorlora.embedded import folder

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def write_json(path: Path, content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False))


def trace(root: Path, *, tasks=("20Minuten", "C-STANCE"), train: int = 16, test: int = 4) -> Path:
    for task in tasks:
        for split, count in (("train", train), ("eval", 1), ("test", test)):
            answers = ["A", "B"] if task != "20Minuten" else [f"kurz {i}" for i in range(count)]
            rows = [{"prompt": f"{split} of {task}: {i}\nAnswer:", "answer": answers[i % len(answers)]} for i in range(count)]
            write_json(root / task / f"{split}.json", rows)
    return root


def sapt(root: Path, *, train: int = 16, test: int = 4) -> Path:
    for group, task in (("SuperNI", "task002_quoref"), ("Long_Sequence", "boolq")):
        for split, count in (("train", train), ("dev", 1), ("test", test)):
            rows = [{"id": f"{i}", "input": f"{split} {i} {{0}}", "output": f"{i % 2}"} for i in range(count)]
            content = {"Definition": [f"  What is {{it}} in {task}?\n"], "Positive Examples": [], "Instances": rows}
            write_json(root / group / task / f"{split}.json", content)
        if group == "Long_Sequence":
            write_json(root / group / task / "labels.json", ["0", "1"])
    return root


def llama_factory(root: Path, *, rows: int = 16) -> Path:
    write_json(root / "alpaca.json", [{"instruction": f"Say {i}", "input": "", "output": f"{i}"} for i in range(rows)])
    turns = [[{"from": "human", "value": f"Say {i}"}, {"from": "gpt", "value": f"so {i}"}] for i in range(rows)]
    lines = [json.dumps({"conversations": turn, "about": "Be brief."}) for turn in turns]
    (root / "chats.jsonl").write_text("\n".join(lines))
    info = {
        "alpaca": {"file_name": "alpaca.json"},
        "chats": {
            "file_name": "chats.jsonl",
            "formatting": "sharegpt",
            "columns": {"messages": "conversations", "system": "about"},
        },
    }
    write_json(root / "dataset_info.json", info)
    return root


def chat_model(root: Path) -> Path:
    """The embedded model with a chat template."""
    source = folder("embedded:mini", "base_model")
    assert source is not None
    root.mkdir()
    for path in source.iterdir():
        (root / path.name).write_bytes(path.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(root)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(root)
    return root
