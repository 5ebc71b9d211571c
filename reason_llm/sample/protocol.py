"""Interface of the samplers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


def unheard(place: int, group: Group) -> None:
    """The ``Ended`` that does nothing."""


class Sampler(Protocol):
    """One engine over the resident base and its current adapter."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        seed: int,
        progress: Progress,
        ended: Ended = unheard,
    ) -> list[Group]:
        """A Group of ``params.num_completions`` completions for each prompt, in the prompts' order.

        The same prompts, params, seed and weights give the same tokens on the same machine.
        """

    def prompts_at_once(self, prompts: Sequence[Prompt], params: SamplingParams) -> int:
        """Number of these prompts that fit into memory with all their completions; at least 1."""


class Wave(NamedTuple):
    """Rollouts that are asked for, and the sampler of their turns; else as ``Sampler.sample``."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    seed: int
    progress: Progress
    sampler: Sampler
    ended: Ended


class Episodes(Protocol):
    """Rollouts of several turns in environments."""

    def play(self, wave: Wave) -> list[Group]:
        """Play a wave; the same seed gives the same tokens where the environments do the same."""

    def close(self) -> None:
        """Close what is held between waves; another wave makes it anew."""
