"""SARI, the measure of simplified text that TRACE scores 20Minuten with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def sari(source: Sequence[str], answer: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return SARI: how well words are kept, deleted and added, over n-grams of 1 to 4 words (Xu et al. 2016).

    The mean of F1 of what is kept, precision of what is deleted and F1 of what is added, each a mean over n. Counts of kept and
    deleted n-grams are weighed by the share of references that have them; 0 / 0 is 1, as in the implementations that are in use.
    """
    parts = [_kept_deleted_added(source, answer, references, n) for n in range(1, 5)]
    return sum(map(sum, parts)) / (3 * len(parts))


def _kept_deleted_added(
    source: Sequence[str], answer: Sequence[str], references: Sequence[Sequence[str]], n: int
) -> tuple[float, float, float]:
    had, said = (_scaled(_grams(words, n), len(references)) for words in (source, answer))
    right = sum((_grams(words, n) for words in references), Counter[tuple[str, ...]]())
    kept, deleted = had & said, had - said
    kept_right, deleted_right = kept & right, deleted - right
    kept_precision = _ratio(sum(kept_right[g] / kept[g] for g in kept_right), len(kept))
    kept_recall = _ratio(kept_right.total(), (had & right).total())
    deleted_precision = _ratio(sum(deleted_right[g] / deleted[g] for g in deleted_right), len(deleted))
    added, wanted = set(said) - set(had), set(right) - set(had)
    added_f1 = _f1(_ratio(len(added & wanted), len(added)), _ratio(len(added & wanted), len(wanted)))
    return _f1(kept_precision, kept_recall), deleted_precision, added_f1


def _grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _scaled(counts: Counter[tuple[str, ...]], by: int) -> Counter[tuple[str, ...]]:
    return Counter({gram: by * count for gram, count in counts.items()})


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0
