"""The Slurm engine on slurmctld and slurmd: kills of workers, daemons and submitters, a folder out of sight, a cancelled array.

ANCHORLORA_SLURM names a script that starts and stops both daemons: `SCRIPT FOLDER start|stop`. It leaves their process ids in
FOLDER/*.mypid and slurm.conf in FOLDER/etc; the fixture `slurm` says where it leaves programs and libraries.
"""

import os
import random
import shlex
import signal
import socket
import subprocess
import time
from collections import Counter
from itertools import cycle
from pathlib import Path

import pytest

from engines.grids import SEEDS, assert_every_record_once, came, finished, kill, steps, undisturbed, until, words

FEW = 4  # steps between two kills
SCRIPT = os.environ.get("ANCHORLORA_SLURM")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(SCRIPT is None, reason="ANCHORLORA_SLURM names no script that starts slurmctld and slurmd"),
]


class Slurm:
    def __init__(self, folder):
        self.folder = folder

    def start(self):
        """Both daemons. The script waits for an idle node, which a killed one is only once somebody resumes it."""
        starting = shlex.join(["bash", SCRIPT, str(self.folder), "start"])
        subprocess.run(["bash", "-c", f"{starting} > /dev/null 2>&1 &"], check=True)
        until(lambda: said("sinfo", "-h", "-o", "%T"), 60)
        until(self.resumed, 60)

    def resumed(self):
        state = said("sinfo", "-h", "-o", "%T").strip()
        if state in ("idle", "mixed", "allocated"):
            return True
        subprocess.run(["scontrol", "update", f"NodeName={socket.gethostname()}", "State=RESUME"], check=False, capture_output=True)
        return False

    def stop(self):
        subprocess.run(["bash", SCRIPT, str(self.folder), "stop"], check=True)

    def kill(self):
        """Both daemons, and start them again; returns how many."""
        files = list(self.folder.glob("*.mypid"))
        for file in files:
            os.kill(int(file.read_text()), signal.SIGKILL)
        time.sleep(1.0)
        self.start()
        return len(files)

    def hurry(self):
        """Requeued tasks wait two minutes otherwise."""
        for task in said("squeue", "-h", "-r", "-t", "PENDING", "-o", "%i").split():
            subprocess.run(["scontrol", "update", f"JobId={task}", "StartTime=now"], check=False, capture_output=True)

    @property
    def queue(self):
        return said("squeue", "-h", "-r", "-o", "%i %T").splitlines()


def said(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    daemons = Slurm(Path(os.environ.get("ANCHORLORA_SLURM_FOLDER") or tmp_path_factory.mktemp("slurm")))
    libraries = daemons.folder / "lib"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(daemons.folder / "etc/slurm.conf"))
        patch.setenv("PATH", f"{daemons.folder / 'root/usr/bin'}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("LD_LIBRARY_PATH", f"{libraries}{os.pathsep}{libraries / 'slurm-wlm'}")
        daemons.start()
        yield daemons
    daemons.stop()


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "grid")


def submit(root, *options):
    return subprocess.run(words(root, "--engine", "slurm", *options), capture_output=True, text=True, check=False)


def test_twelve_kills_of_worker_daemon_and_submitter_leave_every_record_once(slurm, twin, tmp_path):
    killed, grids = Counter(), 0
    while killed.total() < 12:
        grids += 1
        root = tmp_path / f"grid-{grids}"
        a_grid_with_kills(slurm, root, killed)
        assert_every_record_once(root, twin)
    print(f"{dict(killed)} in {grids} grids")
    assert min(killed[what] for what in ("submitter", "worker", "script", "daemons")) >= 1


def a_grid_with_kills(slurm, root, killed):
    """Kill the submitter first, and then one thing after the other, until every run has a record."""
    submitter = subprocess.Popen(words(root, "--engine", "slurm"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(random.uniform(1.0, 10.0))  # while it imports, plans and submits
    submitter.kill()
    submitter.wait()
    killed["submitter"] += 1
    turns = cycle(["worker", "script", "worker", "daemons"])
    while finished(root) < len(SEEDS):
        submit(root, "--retry-failed")
        queued = [line.split()[0] for line in slurm.queue]
        assert len(queued) <= len(SEEDS), "no run is in the queue twice"
        more = steps(root) + FEW
        came(lambda more=more: slurm.hurry() or steps(root) >= more or finished(root) == len(SEEDS), 60)
        what = next(turns) if killed.total() < 12 else "nothing"
        if what == "daemons":
            killed["daemons"] += slurm.kill()
        elif what != "nothing":
            killed[what] += kill(f"anchorlora run {root}" if what == "worker" else "slurm_script")


def test_a_time_limit_saves_requeues_and_goes_on_bitwise(slurm, twin, tmp_path):
    root = tmp_path / "grid"
    assert submit(root).returncode == 0
    until(lambda: steps(root) > 0)
    for task in said("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%i").split():
        subprocess.run(["scancel", "--batch", "--signal=USR1", task], check=True)  # what Slurm sends before the limit
    until(lambda: any("PENDING" in line for line in slurm.queue) or finished(root))
    until(lambda: slurm.hurry() or finished(root) == len(SEEDS))
    assert_every_record_once(root, twin)


def test_a_signal_in_the_first_seconds_loses_no_run(slurm, twin, tmp_path):
    root = tmp_path / "grid"
    assert submit(root).returncode == 0
    for _ in range(8):
        for task in said("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%i").split():
            subprocess.run(["scancel", "--batch", "--signal=USR1", task], check=False)
        slurm.hurry()
        time.sleep(0.4)
    until(lambda: slurm.hurry() or finished(root) == len(SEEDS))
    assert_every_record_once(root, twin)


def test_a_cancelled_array_does_not_come_back(slurm, tmp_path):
    root = tmp_path / "grid"
    job = submit(root).stdout.partition("Slurm job ")[2].split()[0]
    until(lambda: steps(root) > 0)
    subprocess.run(["scancel", job], check=True)
    until(lambda: not slurm.queue)
    time.sleep(5.0)
    assert not slurm.queue
    assert finished(root) < len(SEEDS)


def test_a_folder_that_nodes_do_not_see_is_one_clear_line(slurm, tmp_path):
    root = tmp_path / "grid"
    assert submit(root, "--sbatch=--begin=now+8").returncode == 0
    root.rename(tmp_path / "away")
    until(lambda: any("SPECIAL_EXIT" in line for line in slurm.queue), 120)
    (tmp_path / "away").rename(root)
    refused = submit(root)
    assert refused.returncode == 2
    assert f"a node does not see {root}" in refused.stderr
    assert "choose an --out on storage that all nodes share" in refused.stderr
    assert refused.stderr.count("\n") == 1
    until(lambda: not slurm.queue, 60)


@pytest.mark.parametrize(
    ("option", "message"),
    [("--partition=nowhere", "invalid partition specified: nowhere"), ("--gres=gpu:9", "Invalid generic resource")],
)
def test_what_slurm_does_not_have_is_one_line_and_nothing_is_written(option, message, slurm, tmp_path):
    refused = submit(tmp_path / "grid", option)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "grid").exists()
