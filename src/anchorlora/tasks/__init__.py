"""Tasks as text: prompts, files, answers.  Imports nothing else of this project."""

from anchorlora.tasks.answer import Answer, accuracy, illegal_share, normalise, read_answer
from anchorlora.tasks.benchmark import Benchmark
from anchorlora.tasks.holdout import fingerprint, held_apart
from anchorlora.tasks.rehearsal import Rehearsal, stratified
from anchorlora.tasks.sample_files import read_samples
from anchorlora.tasks.samples import Sample, samples_of, token_ids
from anchorlora.tasks.text import Encoded, Encoder, Example, Task

__all__ = [
    "Answer",
    "Benchmark",
    "Encoded",
    "Encoder",
    "Example",
    "Rehearsal",
    "Sample",
    "Task",
    "accuracy",
    "fingerprint",
    "held_apart",
    "illegal_share",
    "normalise",
    "read_answer",
    "read_samples",
    "samples_of",
    "stratified",
    "token_ids",
]
