"""Tasks as text: benchmark folders, prompts, answers, rehearsal."""

from anchorlora.data.benchmark import Benchmark, TaskSource
from anchorlora.data.metrics import (
    LOSS,
    TOKEN_ACCURACY,
    Answer,
    ExactMatch,
    Metric,
    TokenF1,
    invalid_share,
    normalize,
    percents,
    read_answer,
)
from anchorlora.data.prompts import Encoder, Task
from anchorlora.data.rehearsal import Rehearsal, fingerprint, held_apart, read_examples, stratify
from anchorlora.data.rendering import chat_ids
from anchorlora.data.rows import samples_of
from anchorlora.data.sample_files import read_samples
from anchorlora.data.samples import Example, Sample, examples_of
from anchorlora.data.spool import Encoded, EncodedExamples
from anchorlora.data.text import AnyTask, TextTask, token_ids
from anchorlora.data.text_files import TextFiles, TextSource

__all__ = [
    "LOSS",
    "TOKEN_ACCURACY",
    "Answer",
    "AnyTask",
    "Benchmark",
    "Encoded",
    "EncodedExamples",
    "Encoder",
    "ExactMatch",
    "Example",
    "Metric",
    "Rehearsal",
    "Sample",
    "Task",
    "TaskSource",
    "TextFiles",
    "TextSource",
    "TextTask",
    "TokenF1",
    "chat_ids",
    "examples_of",
    "fingerprint",
    "held_apart",
    "invalid_share",
    "normalize",
    "percents",
    "read_answer",
    "read_examples",
    "read_samples",
    "samples_of",
    "stratify",
    "token_ids",
]
