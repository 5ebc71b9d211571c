"""Rewards for length, repetition and form: pure functions of numbers and text."""

import math
import re
from collections.abc import Sequence

_STEP = re.compile(
    r"(?:step\s{1,9}+\d{1,9}+\b|\d{1,9}+[.)]\s|[-*]\s|first(?:ly)?\b|second(?:ly)?\b|third(?:ly)?\b"
    r"|next\b|then\b|finally\b)",
    re.IGNORECASE,
)
"""How a line of a step begins."""


def soft_overlong(length: int, max_tokens: int, cache_tokens: int) -> float:
    """0 up to ``max_tokens - cache_tokens``, from there down to -1 at ``max_tokens``.

    Source: DAPO, arXiv:2503.14476 eq. 13.
    """
    over = length - (max_tokens - cache_tokens)
    return -min(1.0, max(0.0, over / cache_tokens))


def cosine(
    length: int,
    is_correct: bool,
    max_tokens: int,
    correct: tuple[float, float],
    wrong: tuple[float, float],
) -> float:
    """From the first value at length 0 to the second at ``max_tokens``, along half a cosine.

    Args:
        correct: values of a right answer, short and long: short ones earn more.
        wrong: of a wrong one: long ones lose less.

    Source: arXiv:2502.03373 appendix C.1.
    """  # fmt: skip
    short, long = correct if is_correct else wrong
    place = min(length / max_tokens, 1.0)
    return long + (short - long) * (1 + math.cos(math.pi * place)) / 2


def length_in_group(lengths: Sequence[int], are_correct: Sequence[bool]) -> list[float]:
    """0.5 for the group's shortest to -0.5 for its longest; a wrong answer never gains by it.

    Source: Kimi k1.5, arXiv:2501.12599 section 2.3.3.
    """
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    values = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [v if right else min(0.0, v) for v, right in zip(values, are_correct, strict=True)]


def repetition_penalty(token_ids: Sequence[int], ngram: int, penalty: float) -> float:
    """``penalty`` times the part of n-grams that stood there before.

    Source: arXiv:2502.03373 appendix C.2, over token ids.
    """
    total = len(token_ids) - ngram + 1
    if total < 1:
        return 0.0
    unique = {tuple(token_ids[i : i + ngram]) for i in range(total)}
    return (1 - len(unique) / total) * penalty


def reasoning_steps(text: str, wanted: int) -> float:
    """The part of ``wanted`` marked steps (numbered, listed, "First", "Next") that are there."""
    steps = sum(_STEP.match(f"{line.lstrip()}\n") is not None for line in text.split("\n"))
    return min(1.0, steps / wanted)
