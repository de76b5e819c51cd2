"""The runs of a study in results/, and what the regions of docs/lab/results*.md share.

A study is a folder of results/ ("real/grid"), several folders whose runs belong together ("real/grid+real/order1"), or those of
their runs that have one order of the recipe ("real/grid+real/order1@order1").
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

from anchorlora_lab.report.chapters import chapters_of
from anchorlora_lab.report.comparability import studies_of
from anchorlora_lab.report.records import find_runs
from anchorlora_lab.report.tables.pairs import comparisons

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


@cache
def report(study: str):
    """(chapters, runs, references) of the records of a study and of the references beside it."""
    folders, _, order = study.partition("@")
    places = [RESULTS / folder for folder in folders.split("+")]
    runs = [run for run in find_runs(places) if run.folder.name.startswith(f"{order}-" if order else "")]
    beside = places[0].parent / "references"
    others = tuple(find_runs([beside])) if beside.is_dir() else ()
    return chapters_of([replace(each, others=others) for each in studies_of(runs)]), runs, others


def row_of(study: str, one: str, other: str, score: str) -> str:
    """What a link to a row of a study's comparisons names."""
    return f"{study.removesuffix('/grid').replace('/', '-')}--{one}--{other}--{score.lower()}"


@cache
def all_comparisons(study: str):
    """The declared comparisons of a study."""
    return comparisons(report(study)[1])
