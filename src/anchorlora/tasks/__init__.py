"""Tasks as text: prompts, files, answers.  Imports nothing else of this project."""

from anchorlora.tasks.answer import Answer, accuracy, illegal_share, normalise, read_answer
from anchorlora.tasks.benchmark import Benchmark
from anchorlora.tasks.holdout import fingerprint, held_apart
from anchorlora.tasks.rehearsal import Rehearsal, stratified
from anchorlora.tasks.text import Encoded, Encoder, Example, Task

__all__ = [
    "Answer",
    "Benchmark",
    "Encoded",
    "Encoder",
    "Example",
    "Rehearsal",
    "Task",
    "accuracy",
    "fingerprint",
    "held_apart",
    "illegal_share",
    "normalise",
    "read_answer",
    "stratified",
]
