"""Stored results, one compressed file a study: python tools/results.py (pack | unpack) [STUDY ..]

results/STUDY.jsonl.gz is what git has; a line is {"path": .., "text": ..}. results/STUDY/ is made of it, for tests, tables and
pages, whenever the archive is another than the one that it was made of. `pack` writes the archive of a folder that
`tools/collect.py` or a benchmark has changed; the same files make the same bytes.
"""

import gzip
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
ENDING, MADE_OF = ".jsonl.gz", ".made-of"  # the latter, in a study's folder, holds the hash of its archive


def pack(folder: Path) -> Path:
    """Write the archive of a study's folder, beside it."""
    archive = folder.with_name(folder.name + ENDING)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MADE_OF)
    lines = [json.dumps({"path": path.relative_to(folder).as_posix(), "text": path.read_bytes().decode()}) for path in files]
    archive.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
    (folder / MADE_OF).write_text(hash_of(archive))
    return archive


def unpack(archive: Path) -> Path:
    """Make a study's folder of its archive, unless it is made of it already."""
    folder = archive.with_name(archive.name.removesuffix(ENDING))
    made_of = folder / MADE_OF
    if made_of.is_file() and made_of.read_text() == hash_of(archive):
        return folder
    with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".unpacking-") as place:
        for line in gzip.decompress(archive.read_bytes()).decode().splitlines():
            content = json.loads(line)
            path = Path(place) / folder.name / content["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content["text"].encode())
        (Path(place) / folder.name / MADE_OF).write_text(hash_of(archive))
        shutil.rmtree(folder, ignore_errors=True)
        (Path(place) / folder.name).rename(folder)
    return folder


def hash_of(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def unpack_all(results: Path = RESULTS) -> None:
    """Make the folders of all archives."""
    for archive in sorted(results.glob(f"*{ENDING}")):
        unpack(archive)


if __name__ == "__main__":
    command, *studies = sys.argv[1:] or [""]
    if command == "pack":
        for name in studies or sorted(path.name for path in RESULTS.iterdir() if path.is_dir()):
            print(pack(RESULTS / name))
    elif command == "unpack":
        unpack_all()
    else:
        raise SystemExit(__doc__)
