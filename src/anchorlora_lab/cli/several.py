"""Several runs of a grid as one task of a scheduler:  python -m anchorlora_lab.cli.several ROOT FOLDER .. -- OPTION ..

One after the other, as processes that share their imports. The options are those of `anchorlora run`. Exit status 75: a signal, or
a run that was interrupted; the same call goes on. A run that fails is marked beside the folder and stops no other.
"""

from __future__ import annotations

import sys
from pathlib import Path

from anchorlora.cli.signals import INTERRUPTED, stopping_at_once


def main(words: list[str]) -> int:
    """Carry out runs."""
    from anchorlora.store.run_folder import RunFolder
    from anchorlora_lab.grid.folder import failure
    from anchorlora_lab.grid.scheduler import LocalEngine, Planned, command_line

    end = words.index("--")
    root, options = Path(words[0]), words[end + 1 :]
    planned = [Planned(root / name, RunFolder(root / name).read_config()) for name in words[1:end]]
    left = [run for run in planned if failure(run.folder, root) is None]  # a call that goes on does not try those again
    outcomes = LocalEngine(1).run(left, root=root, command=lambda folder, config: [*command_line(folder, config), *options])
    interrupted = any(o.status == "failed" and failure(o.planned.folder, root) is None for o in outcomes)
    return INTERRUPTED if interrupted else 0


if __name__ == "__main__":
    try:
        with stopping_at_once():
            sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
