"""Answers compared as mathematics."""

from reason_llm.score.math.boxed_math import equivalent, majority, matches
from reason_llm.score.math.extraction import extract_answer

__all__ = [
    "equivalent",
    "extract_answer",
    "majority",
    "matches",
]
