"""Answers compared as mathematics."""

from reason_llm.score.math.boxed_math import majority
from reason_llm.score.math.extraction import extract_answer

__all__ = [
    "extract_answer",
    "majority",
]
