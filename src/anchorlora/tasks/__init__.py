"""Tasks as text: benchmark folders, prompts, answers, rehearsal."""

from anchorlora.tasks.benchmark import Benchmark
from anchorlora.tasks.metrics import Answer, accuracy, invalid_share, normalize, read_answer
from anchorlora.tasks.prompts import Encoded, Encoder, Example, Task
from anchorlora.tasks.rehearsal import Rehearsal, fingerprint, held_apart, stratified
from anchorlora.tasks.sample_files import read_samples
from anchorlora.tasks.samples import Sample, samples_of, token_ids

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
    "invalid_share",
    "normalize",
    "read_answer",
    "read_samples",
    "samples_of",
    "stratified",
    "token_ids",
]
