"""Tasks as text: benchmark folders, prompts, answers, rehearsal."""

from anchorlora.tasks.benchmark import Benchmark, TaskSource
from anchorlora.tasks.metrics import (
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
from anchorlora.tasks.prompts import AnyTask, Encoded, Encoder, Example, Task
from anchorlora.tasks.rehearsal import Rehearsal, fingerprint, held_apart, read_examples, stratified
from anchorlora.tasks.rendering import chat_ids
from anchorlora.tasks.sample_files import read_questions, read_samples
from anchorlora.tasks.samples import Question, Sample, questions_of, samples_of
from anchorlora.tasks.spool import EncodedExamples
from anchorlora.tasks.text import TextFiles, TextSource, TextTask, examples_of, token_ids

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
    "Question",
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
    "questions_of",
    "read_answer",
    "read_examples",
    "read_questions",
    "read_samples",
    "samples_of",
    "stratified",
    "token_ids",
]
