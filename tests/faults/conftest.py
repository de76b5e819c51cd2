"""What tests of faults share: runs that were stopped, and `figure`.

`figure` writes down what a test counted when ANCHORLORA_FAULTS names a file; `make faults` builds a table from it. The last line
says how the session ended and on what, so that a table is made of a whole run or not at all.
"""

import json
import os
import platform
from collections import Counter
from datetime import date
from pathlib import Path

import pytest
import torch

import small
from anchorlora.errors import Interrupted
from faults.runs import run


@pytest.fixture(scope="module")
def recipe(small_benchmark, small_model):
    """Rows for more than one step, so that a task can be stopped before its store is full."""
    return small.recipe(small_benchmark, small_model, rows=300, trace_points=4)


@pytest.fixture(scope="module")
def kept(recipe, tmp_path_factory):
    """(method, point) -> the folder of a run that was stopped there, and the folder of one that was not; both to be copied."""
    made = {}

    def of(method, point):
        key = (method, tuple(point.items()))
        if (method, None) not in made:
            made[method, None] = tmp_path_factory.mktemp("whole") / method
            run(recipe, made[method, None], method)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("stopped") / method
            with pytest.raises(Interrupted):
                run(recipe, made[key], method, point=point)
        return made[key], made[method, None]

    return of


def write(**line):
    path = os.environ.get("ANCHORLORA_FAULTS")
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.fixture
def figure():
    def count(name, **counts):
        """name: a row of tools/fill_reliability.py.  Counts are added up over all tests; of most_... the largest counts."""
        write(figure=name, counts=counts)

    return count


def pytest_deselected(items):
    write(left_out=[item.nodeid for item in items])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    if hasattr(session.config, "workerinput"):  # one session ends for all workers
        return
    stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
    ended = {how: Counter(Path(r.nodeid.split("::")[0]).stem for r in stats.get(how, [])) for how in ("passed", "skipped")}
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    write(status=int(exitstatus), asked_for=session.config.args, **ended, versions=versions, cpu=cpu(), date=str(date.today()))


def cpu():
    """The processor's name, and how many cores of it there are."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
