"""Sampling in shards: the prompts are dealt in a number of parts that the config fixes, each with a
seed of its own and sampled by itself. What is drawn does not depend on who draws which part."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from reason_llm.rollout import Group, Prompt
from reason_llm.sample.protocol import Progress, Sampler, SamplingParams


@dataclass(frozen=True, slots=True)
class Part:
    """What one shard has of the prompts."""

    shard: int
    prompts: tuple[Prompt, ...]
    seed: int


Draw = Callable[[Part], list[Group]]


class Dealer(Protocol):
    """Who samples which part."""

    def sample(
        self, parts: Sequence[Part], params: SamplingParams, own: Draw, progress: Progress
    ) -> list[list[Group]]:
        """The groups of each part.

        Args:
            own: samples a part in this process, and tells the progress by itself.
        """
        ...


class ShardedSampler:
    """The Sampler that deals the prompts: prompt i is in shard i mod ``count``.

    Args:
        sampler: of this process.
    """

    def __init__(self, sampler: Sampler, count: int, dealer: Dealer) -> None:
        self._sampler = sampler
        self._count = count
        self._dealer = dealer

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, seed: int, progress: Progress
    ) -> list[Group]:
        """See ``Sampler.sample``."""
        parts = [
            Part(
                shard,
                tuple(prompts[shard :: self._count]),
                seed if self._count == 1 else _seed(seed, shard),
            )
            for shard in range(min(self._count, len(prompts)))
        ]

        def own(part: Part) -> list[Group]:
            return self._sampler.sample(part.prompts, params, part.seed, progress)

        sampled = self._dealer.sample(parts, params, own, progress)
        return [sampled[i % self._count][i // self._count] for i in range(len(prompts))]

    def prompts_at_once(self, prompts: Sequence[Prompt], params: SamplingParams) -> int:
        """What one process takes at once, of each shard."""
        return self._count * self._sampler.prompts_at_once(prompts, params)


def _seed(seed: int, shard: int) -> int:
    return random.Random(f"{seed}/shard/{shard}").getrandbits(63)
