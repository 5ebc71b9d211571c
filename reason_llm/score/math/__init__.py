"""Answers compared as mathematics."""

from reason_llm.score.math.boxed_math import majority

__all__ = [
    "majority",
]
