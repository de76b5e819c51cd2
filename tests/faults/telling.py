"""The program, telling in a file where it is when it is asked to stop:  python tests/faults/telling.py PLACES WORDS...

began          tasks begin
asked <place>  a signal has come; place: accumulating (some micro-batches of a step have given their gradient and others
               have not), answering, or elsewhere
"""

import sys
from pathlib import Path

from accelerate import Accelerator

from anchorlora.__main__ import entry
from anchorlora.continual import learn as learning
from anchorlora.continual.sequence import TaskSequence
from anchorlora.runs.autosave import Stop

WINDOW = 4  # micro-batches of a step


def telling(places):
    gone, answering = 0, False

    def around(owner, name, before=lambda *args: None, after=lambda: None):
        call = getattr(owner, name)

        def wrapped(*args, **kwargs):
            before(*args)
            try:
                return call(*args, **kwargs)
            finally:
                after()

        setattr(owner, name, wrapped)

    def tell(line):
        with places.open("a") as file:
            file.write(f"{line}\n")

    def asked(stop, why):
        tell(f"asked {'accumulating' if 0 < gone < WINDOW else 'answering' if answering else 'elsewhere'}")

    def one_more():
        nonlocal gone
        gone += 1

    def none():
        nonlocal gone
        gone = 0

    def answers(now):
        def change(*args):
            nonlocal answering
            answering = now

        return change

    around(TaskSequence, "run", before=lambda *args: tell("began"))
    around(Stop, "ask", before=asked)
    around(Accelerator, "backward", after=one_more)
    around(learning, "finite_numbers", after=none)
    around(TaskSequence, "_evaluate", before=answers(True), after=answers(False))


if __name__ == "__main__":
    telling(Path(sys.argv.pop(1)))
    entry()
