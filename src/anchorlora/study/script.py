"""Runs as a file to submit elsewhere: a shell file, or a Kubernetes Indexed Job.

    FILE.sh      `bash FILE.sh` carries out all runs, one after the other; `bash FILE.sh 3` the one with the number 3, as a task of
                 an array of any scheduler would
    FILE.yaml    `kubectl apply -f FILE.yaml` carries out one run for each index; the volume holds the folder of all runs

Both end a run's process with its exit status, so that 75 means: the same command goes on.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorlora.errors import INTERRUPTED, InvalidValue
from anchorlora.storage.files import dump_yaml, write_text
from anchorlora.study.folder import HERE, submitting
from anchorlora.study.scheduler import Command, OnOutcome, Outcome, Planned, command_line, nobody_watches, to_begin
from anchorlora.study.shell import OURS, script

GRACE = 180  # seconds that Kubernetes gives a run to save
BODY = """
[ -d "$runs" ] || { echo "error: this machine does not see $runs; run this where it is mounted at the same place" >&2; exit 2; }
if [ $# -eq 0 ]; then
  if [ -n "$JOB_COMPLETION_INDEX" ]; then set -- "$JOB_COMPLETION_INDEX"; else set -- $(seq 0 @LAST@); fi
fi
worst=0
for number; do
  carry_out "$number"
  status=$?
  [ $status -ne 75 ] || exit 75
  [ $status -eq 0 ] || worst=$status
done
exit $worst
"""


@dataclass(frozen=True)
class ScriptEngine:
    """A file with everything that is missing, to submit elsewhere; nothing is started.

    Args:
        file: A file that ends in .sh, or in .yaml for a Kubernetes Indexed Job.
        image: Container image of the Job, with anchorlora in it.
        volume: "CLAIM:PATH": a persistent volume claim, and where it is mounted, here and in the containers.
        gpus: GPUs of each container.
        max_running: Containers at a time; all of them by default.
        retry_failed: Include runs that have failed.

    Example:
        >>> from anchorlora.config import RunConfig
        >>> from anchorlora.recipes import mini
        >>> from anchorlora.study.scheduler import Planned
        >>> from anchorlora.study.script import ScriptEngine
        >>> run = Planned(tmp / "grid/sfor", RunConfig(method="sfor", order=("reviews", "news"), seed=42, recipe=mini()))
        >>> [outcome] = ScriptEngine(tmp / "grid.sh").run([run], root=tmp / "grid")
        >>> outcome.status, (tmp / "grid.sh").read_text().splitlines()[0]
        ('submitted', '#!/bin/bash')
    """

    file: Path
    image: str | None = None
    volume: str | None = None
    gpus: int = 0
    max_running: int | None = None
    retry_failed: bool = False

    def check(self, root: Path) -> None:
        """Find what is wrong with the request before anything is written.

        Args:
            root: The folder of all runs.

        Raises:
            InvalidValue: The file cannot be written, or containers would not see the folder.
        """
        if self.file.suffix not in (".sh", ".yaml", ".yml"):
            raise InvalidValue(f"--script {self.file}: end it in .sh for a shell file, or in .yaml for a Kubernetes Job")
        if not self.file.absolute().parent.is_dir():
            raise InvalidValue(f"--script {self.file}: there is no folder {self.file.absolute().parent}; make it first")
        if self.file.exists() and OURS not in self.file.read_text(errors="replace")[:200]:
            raise InvalidValue(f"--script {self.file} exists and was not written by anchorlora; give another name")
        if self.file.suffix == ".sh":
            return
        if self.image is None or self.volume is None or not all(self.volume.partition(":")[::2]):
            raise InvalidValue("a Kubernetes Job needs --image IMAGE and --volume CLAIM:PATH, the volume that holds --out")
        mounted = Path(self.volume.partition(":")[2])
        if not root.absolute().is_relative_to(mounted):
            raise InvalidValue(
                f"{root.absolute()} is not below {mounted}, so the containers cannot see it; choose an --out on the volume"
            )

    def run(
        self, planned: Sequence[Planned], *, root: Path, watch: OnOutcome = nobody_watches, command: Command = command_line
    ) -> list[Outcome]:
        """Write the file for the runs that are missing; an older one of the same name is replaced.

        Args:
            planned: The runs, finished ones included.
            root: A folder that holds all of them.
            watch: Called with each outcome.
            command: Returns the command line that fills a claimed run directory.

        Returns:
            One outcome for each run that was missing.

        Raises:
            InvalidValue: Somebody else is submitting.
        """
        if all(each.done for each in planned):
            return []
        with submitting(root):
            fresh, outcomes = to_begin(planned, root, given={}, retry_failed=self.retry_failed)
            if fresh:
                how = self._write(fresh, root, command)
                note = f"{self.file}, to be started with `{how} {self.file}`"
                outcomes += [Outcome(each, "submitted", note=note) for each in fresh]
        for outcome in outcomes:
            watch(outcome)
        return outcomes

    def _write(self, planned: Sequence[Planned], root: Path, command: Command) -> str:
        """Returns the command that starts it."""
        text = script(planned, root, command, head="", body=BODY.replace("@LAST@", str(len(planned) - 1)))
        if self.file.suffix == ".sh":
            write_text(self.file, text)
            return "bash"
        name = f"anchorlora-{secrets.token_hex(4)}"
        shell = root.absolute() / HERE / f"{name}.sh"
        write_text(shell, text)
        write_text(
            self.file, f"{OURS}: {len(planned)} runs of {root.absolute()}\n{dump_yaml(self._job(name, shell, len(planned)))}"
        )
        return "kubectl apply -f"

    def _job(self, name: str, shell: Path, count: int) -> dict[str, Any]:
        claim, _, mounted = (self.volume or "").partition(":")
        container: dict[str, Any] = {
            "name": "run",
            "image": self.image,
            "command": ["bash", str(shell)],
            "volumeMounts": [{"name": "runs", "mountPath": mounted}],
        }
        if self.gpus:
            container["resources"] = {"limits": {"nvidia.com/gpu": self.gpus}}
        again: list[dict[str, Any]] = [
            {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [INTERRUPTED]}},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        ]
        spec = {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": min(count, self.max_running or count),
            "backoffLimitPerIndex": 0,
            "podFailurePolicy": {"rules": again},
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": GRACE,
                    "containers": [container],
                    "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": claim}}],
                }
            },
        }
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}
