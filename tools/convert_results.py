"""Rewrite the files of finished runs from schema 1 in the words of schema 2: python tools/convert_results.py results

Only names change: `backbone` is `base_model`, `illegal` is `invalid`, `sites` is `layers`, `quantised` is `quantized`,
and general.json is eval.json. A number keeps the digits that it had. Records of whole run directories hold hashes and are left
alone; every command reads them.
"""

import json
import sys
from pathlib import Path

from anchorlora.schemas.record import FORMER, upgraded
from anchorlora.storage.files import dump_yaml, load_yaml, write_text


def renamed(content):
    """Keys of schema 1 at any depth, in the words of schema 2."""
    if isinstance(content, dict):
        return {FORMER.get(name, name): renamed(value) for name, value in content.items()}
    return [renamed(part) for part in content] if isinstance(content, list) else content


def convert(folder: Path) -> int:
    """Convert every file below a folder; how many were written."""
    count = 0
    for path in sorted(folder.rglob("*")):
        if path.name in ("record.json", "selection.json", "general.json"):
            old = path.read_text()
            content = json.loads(old)
            if content["schema"] == 1 and not content.get("files"):
                new = json.dumps(upgraded(content), indent=1, allow_nan=False, ensure_ascii=path.name == "record.json") + "\n"
                write_text(path.with_name(path.name.replace("general", "eval")), new)
                if path.name == "general.json":
                    path.unlink()
                count += 1
        elif path.name == "config.yaml":
            write_text(path, dump_yaml(renamed(load_yaml(path))))
            count += 1
    return count


if __name__ == "__main__":
    print(f"{convert(Path(sys.argv[1]))} files")
