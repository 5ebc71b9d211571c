"""Models with weights of their own in the memory plan, such as a separate reward model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reason_llm.config import Config

if TYPE_CHECKING:
    from reason_llm.model.plan.bound import Phase, Sizes


@dataclass(frozen=True, slots=True)
class OutsideModel:
    """A model that reads the rollouts in a phase of its own: on a GPU one at a time, and else in
    host memory."""

    name: str
    weight_bytes: int
    passing_bytes: Callable[[int, int], int]
    """Bytes of a pass over so many tokens, with so many tokens' logits at once."""
    phase: "Callable[[Config, Sizes], Phase] | None" = None
    """Its time in a step; None: it is not counted."""
