"""Completions become rewards.

``score.math`` and ``score.code`` stand below the other folders and are imported without this one's
``Scorer``, which is loaded when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reason_llm.score.scorer import Scorer

__all__ = ["Scorer"]


def __getattr__(name: str) -> Any:
    """The scorer, on its first use."""
    if name != "Scorer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from reason_llm.score.scorer import Scorer

    return Scorer
