"""Completions become rewards."""

from reason_llm.score.scorer import Scorer

__all__ = ["Scorer"]
