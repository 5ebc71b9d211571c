"""Accuracy with intervals on problems that are not trained on. What needs torch is loaded on its
first use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reason_llm.evaluate.evaluation import run_evaluation
    from reason_llm.evaluate.request import make_request

__all__ = [
    "make_request",
    "run_evaluation",
]


def __getattr__(name: str) -> Any:
    """A public name, on its first use."""
    if name == "run_evaluation":
        from reason_llm.evaluate.evaluation import run_evaluation

        return run_evaluation
    if name == "make_request":
        from reason_llm.evaluate.request import make_request

        return make_request
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
