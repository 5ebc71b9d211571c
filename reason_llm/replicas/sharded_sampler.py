"""Sampling in shards: the prompts are split into a number of parts that the config fixes, each with
its own seed. Samples do not depend on which process draws a part: if vLLM draws several parts in
one batch, each request has its own seed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from reason_llm.rollout import Group, Prompt
from reason_llm.sample import Ended, Progress, Sampler, SamplingParams, VllmSampler, ignore_ended


@dataclass(frozen=True, slots=True)
class Part:
    """The prompts of one shard."""

    shard: int
    prompts: tuple[Prompt, ...]
    seed: int


Lot = tuple[Part, ...]
"""The parts that one process samples together."""
Draw = Callable[[Lot], list[list[Group]]]


class Dealer(Protocol):
    """Decides which process samples which part."""

    def sample(
        self, parts: Sequence[Part], params: SamplingParams, own: Draw, progress: Progress
    ) -> list[list[Group]]:
        """The groups of each part; ``own`` samples a lot here, and tells the progress."""


@dataclass(frozen=True, slots=True)
class ShardedSampler:
    """The Sampler that deals the prompts, from this process's: prompt i is in shard i mod count."""

    sampler: Sampler
    count: int
    dealer: Dealer

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        seed: int,
        progress: Progress,
        ended: Ended = ignore_ended,
    ) -> list[Group]:
        """See ``Sampler.sample``; ``ended`` is called for what this process samples."""
        parts = []
        for shard in range(min(self.count, len(prompts))):
            own_seed = random.Random(f"{seed}/shard/{shard}").getrandbits(63)
            own_seed = seed if self.count == 1 else own_seed
            parts.append(Part(shard, tuple(prompts[shard :: self.count]), own_seed))

        def own(lot: Lot) -> list[list[Group]]:
            own = [p for part in lot for p in range(part.shard, len(prompts), self.count)]
            return sample_lot(
                self.sampler, lot, params, progress, lambda n, group: ended(own[n], group)
            )

        sampled = self.dealer.sample(parts, params, own, progress)
        return [sampled[i % self.count][i // self.count] for i in range(len(prompts))]

    def prompts_at_once(self, prompts: Sequence[Prompt], params: SamplingParams) -> int:
        """Number of prompts that one process takes at once, times the number of shards."""
        return self.count * self.sampler.prompts_at_once(prompts, params)


def sample_lot(
    sampler: Sampler,
    lot: Lot,
    params: SamplingParams,
    progress: Progress,
    ended: Ended = ignore_ended,
) -> list[list[Group]]:
    """The groups of each part: under vLLM in one batch, else of one part after the other. The
    places that ``ended`` gets are those among the prompts of all parts."""
    if isinstance(sampler, VllmSampler):
        waves = [(part.prompts, part.seed) for part in lot]
        return sampler.sample_in_one_batch(waves, params, progress, ended)
    sampled: list[list[Group]] = []
    for part in lot:
        before = sum(map(len, sampled))

        def of_part(place: int, group: Group, before: int = before) -> None:
            ended(before + place, group)

        sampled.append(sampler.sample(part.prompts, params, part.seed, progress, of_part))
    return sampled


def lots(parts: Sequence[Part], takers: int, in_batches: bool) -> list[Lot]:
    """The parts, grouped for handing out: one lot for each taker if a process samples all its parts
    in one batch, else part by part, so that faster processes take more."""
    count = min(takers, len(parts)) if in_batches else len(parts)
    return [tuple(parts[number::count]) for number in range(count)]
