"""A small folder in CL_Benchmark layout."""

import json

LABELS = {"TC/toys": ["ball", "doll"], "SC/views": ["good", "bad"], "COPA/COPA": ["A", "B"]}


def make(root, *, train=12, test=6, instructions=True):
    for path, labels in LABELS.items():
        folder = root / path
        folder.mkdir(parents=True)
        (folder / "labels.json").write_text(json.dumps(labels))
        for split, count in (("train", train), ("test", test)):
            rows = [{"label": labels[i % 2], "sentence": f"{split} passage {i} about a {labels[i % 2]}\n"} for i in range(count)]
            (folder / f"{split}.json").write_text(json.dumps(rows, indent=0))
    if instructions:
        texts = {"TC": "Which toy?\n", "SC": "Which view?\n"}
        config = {group: [{"instruction_type": "zero-shot", "instruction": text}] for group, text in texts.items()}
        (root / "instruction_config.json").write_text(json.dumps(config))
    return root
