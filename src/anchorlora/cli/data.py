"""`anchorlora data import` and `anchorlora data verify`: copy a benchmark, and check its files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from anchorlora.cli.console import example, out, path_option, print_json
from anchorlora.cli.signals import stopping_at_once
from anchorlora.data.importing import agrees, import_benchmark, verify_benchmark
from anchorlora.errors import Failed, InvalidValue
from anchorlora.text import amount


@click.group()
def data() -> None:
    """Import and verify benchmark data."""


@data.command("import", epilog=example("anchorlora data import CL_Benchmark --out data/benchmark"))
@click.argument("source")
@path_option("--out", "to", required=True, help="The folder to write.")
def import_(source: str, to: Path) -> None:
    """Copy a benchmark, check its files and labels, and write MANIFEST.json.

    SOURCE is a CL_Benchmark folder, a clone of the O-LoRA repository, or a git URL.
    """
    with stopping_at_once():
        manifest = import_benchmark(source, to)
    kinds = Counter(entry["kind"] for entry in manifest["files"].values())
    out.print(f"{amount(len(manifest['files']), 'file')} in {to}: " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))


@data.command(epilog=example("anchorlora data verify data/benchmark"))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(folder: Path, as_json: bool) -> None:
    """Check every file of a benchmark against its manifest.

    The manifest is MANIFEST.json in FOLDER, or the official list if there is none. Exits with status 1 if a file differs.
    """
    if not folder.is_dir():
        raise InvalidValue(f"{folder} is not a folder; give a CL_Benchmark folder")
    kinds = verify_benchmark(folder)
    if as_json:
        print_json({"folder": str(folder), "files": kinds, "ok": all(map(agrees, kinds.values()))})
    else:
        width = max(map(len, kinds))
        for path, kind in kinds.items():
            out.print(f"{path.ljust(width)}  {kind}")
    wrong = [path for path, kind in kinds.items() if not agrees(kind)]
    if wrong:
        raise Failed(f"{len(wrong)} of {len(kinds)} files differ from the expected ones, first {wrong[0]}; fetch them again")
