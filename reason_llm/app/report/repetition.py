"""Repetition within completions and between them: pure functions of token ids."""

from collections.abc import Sequence
from itertools import combinations

NGRAM = 4
SHINGLE = 3


def repeated_fraction(token_ids: Sequence[int], ngram: int = NGRAM) -> float:
    """Fraction of n-grams that occurred before in the same completion; 0 without n-grams."""
    total = len(token_ids) - ngram + 1
    if total < 1:
        return 0.0
    return 1 - len(_ngrams(token_ids, ngram)) / total


def similarity(completions: Sequence[Sequence[int]], shingle: int = SHINGLE) -> float:
    """Similarity of a group's completions, 0 to 1: the mean Jaccard index of their n-grams over all
    pairs; 1 for the same text, 0 for a single completion."""
    sets = [_ngrams(ids, min(shingle, len(ids))) for ids in completions]
    pairs = list(combinations(sets, 2))
    if not pairs:
        return 0.0
    return sum(len(a & b) / len(a | b) for a, b in pairs) / len(pairs)


def _ngrams(token_ids: Sequence[int], size: int) -> set[tuple[int, ...]]:
    return set(zip(*(token_ids[start:] for start in range(size)), strict=False))
