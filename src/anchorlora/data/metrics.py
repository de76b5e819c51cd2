"""Score generated answers: the official normalized exact match, with invalid predictions counted, and metrics of one's own.

Both sides are lowercased, stripped of punctuation and of extra white space, and compared. Text after the label makes an answer
wrong, and an answer that is no label of the task is invalid. (The official script is `compute_metrics.py`; it strips ASCII
punctuation, and ASCII text is normalized as it does.)
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Protocol

from anchorlora.data.samples import Example
from anchorlora.errors import MissingExtra, UnknownName, nearest_names

TOKEN_ACCURACY = "token_accuracy"  # of a task without answers: share of the right text's tokens that the model would have chosen
LOSS = "loss"  # in every task's scores: mean cross-entropy per token of the right answer, in nats
FULL_WIDTH = 0xFEE0  # from an ASCII character to its full-width form
_PUNCTUATION = dict.fromkeys(
    [
        *map(ord, string.punctuation),
        *(ord(sign) + FULL_WIDTH for sign in string.punctuation),
        *(code for code in range(0x80, 0x1F000) if unicodedata.category(chr(code)).startswith("P")),
    ]
)
# Thai, Lao, Tibetan, Burmese, Khmer, kana, bopomofo, Han: scripts that put no spaces between words
_UNSPACED = re.compile(
    "([\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3021-\u312f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003ffff])"
)


def normalize(text: str) -> str:
    """Return text in lower case, without punctuation, with white space collapsed."""
    return " ".join(text.lower().translate(_PUNCTUATION).split())


def words_of(text: str) -> list[str]:
    """Return the words of a text once normalized; in scripts without spaces between words, its characters."""
    return _UNSPACED.sub(r" \1 ", normalize(text)).split()


@dataclass(frozen=True)
class Answer:
    """One generated answer.

    Args:
        text: What the model generated.
        label: Label that it means; None for an invalid prediction.
        gold: The right label.
        scores: Name of a metric -> its score, the task's primary metric first.

    Example:
        >>> Answer("Positive.", "positive", gold="positive").correct
        True
    """

    text: str
    label: str | None
    gold: str
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def correct(self) -> bool:
        """True if the label is the right one."""
        return self.label is not None and normalize(self.label) == normalize(self.gold)


def read_answer(text: str, *, gold: str, labels: Sequence[str]) -> Answer:
    """Return the answer that a generated text gives.

    Args:
        text: What the model generated.
        gold: The right label.
        labels: Labels of the task; those that are equal once normalized count as one, as they do officially.

    Example:
        >>> read_answer(" Positive. ", gold="positive", labels=["positive", "negative"]).correct
        True
        >>> read_answer("I think so", gold="positive", labels=["positive", "negative"]).label is None
        True
    """
    answer = normalize(text)
    alike = sorted((label for label in labels if normalize(label) == answer), key=text.strip().__ne__)  # 1, then -1
    return Answer(text, next(iter(alike), None), gold)


class Metric(Protocol):
    """A metric of a task: a name, and the score of one answer.

    Tasks list their metrics in `Task.metrics`; the first is the primary one, which a run calls accuracy and forgetting is measured
    in. A run records every metric of every task as a percentage (docs/extend.md).

    Args:
        name: Name in the record; one name means one metric.

    Example:
        >>> from dataclasses import dataclass
        >>> from anchorlora.data import Example
        >>> @dataclass(frozen=True)
        ... class FirstWord:
        ...     name: str = "first_word"
        ...     def score(self, answer, example):
        ...         return float(answer.text.split()[:1] == [example.label])
        >>> FirstWord().score(Answer("yes indeed", None, gold="yes"), Example(0, "Is it?", "yes"))
        1.0
    """

    @property
    def name(self) -> str:
        """Name in the record."""

    def score(self, answer: Answer, example: Example) -> float:
        """Return the score of one answer, a fraction in [0, 1].

        Args:
            answer: The generated answer.
            example: The example that it answers.
        """


@dataclass(frozen=True)
class ExactMatch:
    """The official metric: 1 if the normalized answer is the normalized label.

    Example:
        >>> from anchorlora.data import Example
        >>> ExactMatch().score(Answer("Yes.", "yes", gold="yes"), Example(0, "Is it?", "yes"))
        1.0
    """

    name: str = "exact_match"

    def score(self, answer: Answer, example: Example) -> float:
        """Return 1.0 for a correct answer, else 0.0.

        Args:
            answer: The generated answer.
            example: The example that it answers.
        """
        return float(answer.correct)


@dataclass(frozen=True)
class TokenF1:
    """F1 of the words that answer and reference share, both normalized, as in SQuAD's official script.

    Text in scripts without spaces between words, such as Chinese, Japanese and Thai, is counted by characters, as in DRCD and MLQA.
    """

    name: str = "token_f1"

    def score(self, answer: Answer, example: Example) -> float:
        """Return the F1 score; 1.0 for two empty texts."""
        predicted, gold = Counter(words_of(answer.text)), Counter(words_of(example.label))
        if not predicted or not gold:
            return float(predicted == gold)
        return 2 * (predicted & gold).total() / (predicted.total() + gold.total())


@dataclass(frozen=True)
class OfTexts:
    """A metric that a function computes of an answer and its example, with a library where it needs one."""

    name: str
    compute: Callable[..., float]
    library: tuple[str, str] | None = None  # module, and the package that has it

    def score(self, answer: Answer, example: Example) -> float:
        """Return what the function computes."""
        return float(self.compute(answer.text, example, *([] if self.library is None else [_library(self)])))


def rouge_l(answer: str, example: Example, scorer: Any) -> float:
    """Return the F1 score of the longest common subsequence, with stemming, by Google's rouge-score."""
    return scorer.RougeScorer(["rougeL"], use_stemmer=True).score(example.label, answer)["rougeL"].fmeasure


def sentence_bleu(answer: str, example: Example, sacrebleu: Any) -> float:
    """Return BLEU of a single answer as a fraction, smoothed; a mean of these is not corpus BLEU."""
    return min(1.0, sacrebleu.sentence_bleu(answer, [example.label]).score / 100)


def edit_similarity(answer: str, example: Example, fuzz: Any) -> float:
    """Return 1 - edit distance / sum of both lengths, over characters, insertions and deletions alone counting; by rapidfuzz."""
    return fuzz.ratio(answer, example.label) / 100


def code_similarity(answer: str, example: Example, fuzz: Any) -> float:
    """Return the same of code in which placeholders of literals are replaced by the literals, as TRACE scores Py150."""
    return fuzz.ratio(with_literals(answer), with_literals(example.label)) / 100


def with_literals(code: str) -> str:
    """Return code with placeholders such as <STR_LIT:text> replaced by what they stand for."""
    bare = code.replace("<NUM_LIT>", "0").replace("<STR_LIT>", "").replace("<CHAR_LIT>", "")
    return re.sub(r"<(?:STR|NUM|CHAR)_LIT:(.*?)>", r"\1", bare, flags=re.DOTALL)


def verbatim_match(answer: str, example: Example) -> float:
    """Return 1 for the right text, white space around it aside: 1.5 is neither 15 nor -1.5, as it is once normalized."""
    return answer.strip() == example.label.strip()


def choice_match(answer: str, example: Example) -> float:
    """Return 1 for the same first letter, as TRACE scores ScienceQA, where a choice comes before its reasons."""
    return bool(answer.strip()) and answer.strip()[:1] == example.label.strip()[:1]


Words = Sequence[str]


def sari(source: Words, answer: Words, references: Sequence[Words]) -> float:
    """Return SARI (Xu et al. 2016): the mean of F1 of kept, precision of deleted and F1 of added words, over n-grams of 1 to 4
    words.

    Counts of kept and deleted n-grams are weighted by the share of references that have them; 0 / 0 is 1, as in common
    implementations.
    """
    parts = [_kept_deleted_added(source, answer, references, n) for n in range(1, 5)]
    return sum(map(sum, parts)) / (3 * len(parts))


def _kept_deleted_added(source: Words, answer: Words, references: Sequence[Words], n: int) -> tuple[float, float, float]:
    had, predicted = (
        Counter({gram: len(references) * count for gram, count in _grams(words, n).items()}) for words in (source, answer)
    )
    right = sum((_grams(words, n) for words in references), Counter[tuple[str, ...]]())
    kept, deleted = had & predicted, had - predicted
    kept_right, deleted_right = kept & right, deleted - right
    kept_precision = _ratio(sum(kept_right[g] / kept[g] for g in kept_right), len(kept))
    kept_recall = _ratio(kept_right.total(), (had & right).total())
    deleted_precision = _ratio(sum(deleted_right[g] / deleted[g] for g in deleted_right), len(deleted))
    added, wanted = set(predicted) - set(had), set(right) - set(had)
    added_f1 = _f1(_ratio(len(added & wanted), len(added)), _ratio(len(added & wanted), len(wanted)))
    return _f1(kept_precision, kept_recall), deleted_precision, added_f1


def _grams(words: Words, n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def sari_of_prompt(answer: str, example: Example, tokenizer_13a: Any) -> float:
    """Return SARI of a single answer against one reference; the source is the prompt, as TRACE scores 20Minuten (see `sari`)."""
    tokenized = tokenizer_13a.Tokenizer13a()
    source, predicted, right = (tokenized(text.lower()).split() for text in (example.sentence, answer, example.label))
    return sari(source, predicted, [right])


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        ExactMatch(),
        TokenF1(),
        OfTexts("rouge_l", rouge_l, ("rouge_score.rouge_scorer", "rouge-score")),
        OfTexts("bleu", sentence_bleu, ("sacrebleu", "sacrebleu")),
        OfTexts("edit_similarity", edit_similarity, ("rapidfuzz.fuzz", "rapidfuzz")),
        OfTexts("code_similarity", code_similarity, ("rapidfuzz.fuzz", "rapidfuzz")),
        OfTexts("verbatim_match", verbatim_match),
        OfTexts("choice_match", choice_match),
        OfTexts("sari", sari_of_prompt, ("sacrebleu.tokenizers.tokenizer_13a", "sacrebleu")),
    )
}


def metric_named(name: str) -> Metric:
    """Return a metric by its name."""
    if name not in METRICS:
        raise UnknownName(f"no metric called {name!r:.60}; {nearest_names(name, METRICS)}")
    return METRICS[name]


def refuse_uninstalled(metrics: Sequence[Metric]) -> None:
    """Refuse metrics whose library is not installed, before anything is trained."""
    for metric in metrics:
        if getattr(metric, "library", None):
            _library(metric)


def _library(metric: Any) -> Any:
    module, package = metric.library
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise MissingExtra(
            f"{metric.name} is computed by {package}, which is not installed: pip install 'anchorlora[metrics]'"
        ) from None


def score_answer(answer: Answer, example: Example, metrics: Sequence[Metric]) -> Answer:
    """Return an answer with its score by every metric."""
    return replace(answer, scores={metric.name: metric.score(answer, example) for metric in metrics})


def percents(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the mean of every metric over answers, in percent; of the loss, in nats per token.

    Args:
        answers: At least one answer; all have scores by the same metrics.

    Example:
        >>> percents([Answer("yes", "yes", "yes", {"exact_match": 1.0}), Answer("no", "no", "yes", {"exact_match": 0.0})])
        {'exact_match': 50.0}
    """
    means = {name: sum(answer.scores[name] for answer in answers) / len(answers) for name in answers[0].scores}
    return {name: mean if name == LOSS else 100 * mean for name, mean in means.items()}


def invalid_share(answers: Sequence[Answer], labels: Sequence[str] = ("any",)) -> float | None:
    """Return the percentage of invalid predictions: answers that are no label of the task."""
    return 100 * sum(a.label is None for a in answers) / len(answers) if labels else None
