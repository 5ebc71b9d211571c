"""Interface of the samplers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from reason_llm.rollout import Group, Prompt


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, applied in this order: temperature, min-p, top-k, top-p."""

    num_completions: int
    max_new_tokens: int
    temperature: float = 1.0
    """0: greedy, always the likeliest token."""
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    """1: all tokens."""
    min_p: float = 0.0
    """0: all tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion as an end token does; they are part of it."""


Progress = Callable[[int, int], None]
"""Called after every decoding step: (tokens sampled in it, completions that ended in it)."""
Ended = Callable[[int, Group], None]
"""Called with the place of a prompt among the prompts, and its Group, when all of its completions
have ended. A sampler need not call it for every group."""


def ignore_ended(place: int, group: Group) -> None:
    """The ``Ended`` that does nothing."""


class Sampler(Protocol):
    """One engine over the resident base and its current adapter."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        seed: int,
        progress: Progress,
        ended: Ended = ignore_ended,
    ) -> list[Group]:
        """A Group of ``params.num_completions`` completions for each prompt, in the prompts' order.

        The same prompts, params, seed and weights give the same tokens on the same machine.
        """

    def prompts_at_once(self, prompts: Sequence[Prompt], params: SamplingParams) -> int:
        """Number of these prompts that fit into memory with all their completions; at least 1."""


class Episodes:
    """The form of a run's rollouts: one answer of the model, unless a player replies to it."""

    def over(self, sampler: Sampler) -> Sampler:
        """The sampler of whole rollouts, over a sampler of single answers."""
        return sampler

    def check(
        self, groups: Sequence[Group], earlier: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> None:
        """Raise TrainingError if it makes no sense to continue after the groups of a step.

        Args:
            earlier: reads the records of the steps before it.
        """

    def close(self) -> None:
        """Release everything held between waves; another wave creates it again."""
