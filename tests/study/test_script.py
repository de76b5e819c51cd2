"""The file to submit elsewhere: a shell file that carries out what it names, and a Kubernetes Job that a cluster would accept."""

import os
import shlex
import subprocess
import sys

import pytest
from test_scheduler import RECORD, missing_runs, stand_in

from anchorlora.cli.app import main
from anchorlora.storage.files import load_yaml
from anchorlora.study.script import ScriptEngine

GRID = ["grid", "mini", "--methods", "sfor", "--orders", "order1", "--seeds", "1,2", "--engine", "script"]


def write(file, root, script=RECORD, **how):
    outcomes = ScriptEngine(file, **how).run(missing_runs(root, 3), root=root, command=stand_in(script))
    return {o.planned.folder.name: o.status for o in outcomes}


def bash(file, *words, **environment):
    return subprocess.run(["bash", str(file), *words], env={**os.environ, **environment}, check=False).returncode


def done(root):
    return [place.parent.name for place in sorted(root.glob("*/record.json"))]


def test_a_shell_file_carries_out_everything_or_one_run_by_its_number(tmp_path):
    root, file = tmp_path / "grid", tmp_path / "grid.sh"
    assert set(write(file, root).values()) == {"submitted"}
    assert done(root) == [], "nothing is started"
    assert bash(file, "1") == 0
    assert done(root) == ["run-1"]
    assert bash(file, JOB_COMPLETION_INDEX="2") == 0
    assert done(root) == ["run-1", "run-2"]
    assert bash(file) == 0
    assert done(root) == ["run-0", "run-1", "run-2"]
    assert bash(file, "7") == 1
    assert write(file, root) == {}


def test_a_failure_stops_no_other_run_and_is_written_again_on_request_alone(tmp_path):
    root, file = tmp_path / "grid", tmp_path / "grid.sh"
    write(file, root, f"if name == 'run-1':\n    sys.exit('no room')\n{RECORD}")
    assert bash(file) == 1
    assert done(root) == ["run-0", "run-2"]
    assert write(file, root) == {"run-1": "failed"}
    assert write(file, root, retry_failed=True) == {"run-1": "submitted"}
    assert bash(file) == 0
    assert done(root) == ["run-0", "run-1", "run-2"]


def test_an_interruption_ends_the_file_with_75(tmp_path):
    write(tmp_path / "grid.sh", tmp_path / "grid", "sys.exit(75)")
    assert bash(tmp_path / "grid.sh") == 75
    assert not list((tmp_path / "grid/.runs").glob("*.failed"))


def test_a_machine_that_does_not_see_the_folder_says_so(tmp_path, capfd):
    write(tmp_path / "grid.sh", tmp_path / "grid")
    (tmp_path / "grid").rename(tmp_path / "away")
    assert bash(tmp_path / "grid.sh") == 2
    assert f"error: this machine does not see {tmp_path / 'grid/.runs'}" in capfd.readouterr().err


def test_a_kubernetes_job_has_an_index_for_each_run(tmp_path):
    root, file = tmp_path / "grid", tmp_path / "grid.yaml"
    engine = {"image": "lab/anchorlora", "volume": f"data:{tmp_path}", "gpus": 1, "max_running": 2}
    assert set(write(file, root, **engine).values()) == {"submitted"}
    job = load_yaml(file)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 2)
    assert spec["podFailurePolicy"]["rules"][0] == {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]}}
    assert pod["restartPolicy"] == "Never", "a pod failure policy needs it"
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert container["volumeMounts"][0]["name"] == pod["volumes"][0]["name"]
    assert subprocess.run(container["command"], env={**os.environ, "JOB_COMPLETION_INDEX": "1"}, check=False).returncode == 0
    assert done(root) == ["run-1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--script", "{}/x.txt"], "x.txt: end it in .sh for a shell file, or in .yaml for a Kubernetes Job"),
        (["--script", "{}/no/x.sh"], "there is no folder"),
        (["--script", "{}/thesis.sh"], "exists and was not written by anchorlora; give another name"),
        (["--script", "{}/x.yaml"], "a Kubernetes Job needs --image IMAGE and --volume CLAIM:PATH"),
        (
            ["--script", "{}/x.yaml", "--image", "i", "--volume", "data:/elsewhere"],
            "is not below /elsewhere, so the containers cannot see it; choose an --out on the volume",
        ),
        (["--script", "{}/x.yaml", "--gres", "gpu"], "--gres gpu: for a Kubernetes Job, give gpu:N"),
    ],
)
def test_a_wrong_request_is_one_line_and_nothing_is_written(words, message, tmp_path, capsys):
    (tmp_path / "thesis.sh").write_text("echo years of work")
    assert main([*GRID, "--out", str(tmp_path / "g"), *[word.format(tmp_path) for word in words]]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert [place.name for place in tmp_path.iterdir()] == ["thesis.sh"]


def test_the_command_says_how_to_start_the_file(tmp_path, capsys):
    file = tmp_path / "jobs.sh"
    assert main([*GRID, "--out", str(tmp_path / "g"), "--script", str(file)]) == 0
    assert f"2 submitted: {file}, to be started with `bash {file}`" in capsys.readouterr().out
    words = shlex.join([sys.executable, "-m", "anchorlora", "run", f"{tmp_path}/g/sfor/order1-2/config.yaml"])
    assert words in file.read_text()
