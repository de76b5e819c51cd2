"""The Ray engine on two raylets of one machine: kills of workers, of a raylet, and of the command itself."""

import os
import subprocess
from collections import Counter
from itertools import cycle

import pytest

from engines.grids import SEEDS, assert_every_record_once, finished, kill, steps, undisturbed, until, words

FEW = 4  # steps between two kills
pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install 'anchorlora[ray]'")


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 10**8})
    made.add_node(num_cpus=1, object_store_memory=10**8)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "grid")


def start(root, tmp_path):
    said = (tmp_path / "said").open("a")
    return subprocess.Popen(words(root, "--engine", "ray"), stdout=said, stderr=said)


def test_twelve_kills_of_worker_raylet_and_command_leave_every_record_once(cluster, twin, tmp_path):
    killed, grids = Counter(), 0
    while killed.total() < 12:
        grids += 1
        root = tmp_path / f"grid-{grids}"
        a_grid_with_kills(cluster, root, tmp_path, killed)
        assert_every_record_once(root, twin)
    print(f"{dict(killed)} in {grids} grids")
    assert min(killed[what] for what in ("run", "worker", "raylet", "command")) >= 1


def a_grid_with_kills(cluster, root, tmp_path, killed):
    """One thing after the other, until every run has a record."""
    turns, process = cycle(["run", "worker", "raylet", "command"]), start(root, tmp_path)
    while finished(root) < len(SEEDS) and killed.total() < 12:
        more = steps(root) + FEW
        until(lambda ended=process.poll, more=more: steps(root) >= more or finished(root) == len(SEEDS) or ended() is not None)
        what = next(turns)
        if process.poll() is not None:
            process = start(root, tmp_path)
        elif what == "command":
            process.kill()
            process.wait()
            killed[what] += 1
        elif what == "raylet":
            before = list(cluster.worker_nodes)
            cluster.add_node(num_cpus=1, object_store_memory=10**8)
            cluster.remove_node(before[0], allow_graceful=False)
            killed[what] += 1
        else:
            killed[what] += kill(f"anchorlora run {root}" if what == "run" else "ray::carried_out")
    while finished(root) < len(SEEDS):
        process.wait()
        process = start(root, tmp_path)
    process.wait()


def test_two_commands_on_one_grid_are_one_line(cluster, tmp_path):
    root = tmp_path / "grid"
    first = start(root, tmp_path)
    until((root / ".runs/submit.lease").exists)
    second = subprocess.run(words(root, "--engine", "ray"), capture_output=True, text=True, check=False)
    first.terminate()
    first.wait()
    assert second.returncode == 2
    assert f"{root}: process {first.pid} on" in second.stderr
    assert second.stderr.count("\n") == 1


def test_a_cluster_that_does_not_answer_is_one_line(tmp_path):
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    refused = subprocess.run(words(tmp_path / "g", "--engine", "ray"), capture_output=True, text=True, env=environment, check=False)
    assert refused.returncode == 2
    assert "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1" in refused.stderr
    assert not (tmp_path / "g").exists()
