"""A wave of rollouts, and the batches in which their turns are sampled. With vLLM a request joins
the one under way. With other samplers, and with ``model.deterministic``, there is a barrier: the
next batch begins when all live rollouts ask. Equal batches have equal bits in any order of arrival.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from reason_llm.errors import DataError
from reason_llm.model import decode
from reason_llm.rollout import Completion, Prompt
from reason_llm.sample import Ended, Progress, Sampler, SamplingParams, VllmBatch, VllmSampler


class Wave(NamedTuple):
    """Arguments of ``Sampler.sample``, and the sampler of the single turns."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    seed: int
    progress: Progress
    sampler: Sampler
    ended: Ended


def turn_seed(seed: int, rollout: int, turn: int | str) -> int:
    """Seed of a turn, from its wave's, the rollout's number there and its own number or name."""
    return random.Random(f"{seed}/{rollout}/turn/{turn}").getrandbits(62)


def common_prompt(
    prompt: Prompt, ids: Sequence[tuple[int, ...]], tokenizer: Any, fix: str
) -> Prompt:
    """The prompt with the tokens with which all of these begin; DataError if there are none."""
    same = takewhile(lambda column: len(set(column)) == 1, zip(*ids, strict=False))
    common = tuple(column[0] for column in same)
    if not common:
        raise DataError(
            f"{prompt.id}: two rollouts of it begin with different tokens, and cannot be compared "
            f"with each other; {fix}"
        )
    if common == prompt.token_ids:
        return prompt
    (text,) = decode(tokenizer, [list(common)])
    return replace(prompt, token_ids=common, text=text)


class Barrier:
    """Batches of any sampler, one after the other; as ``VllmBatch`` else."""

    joins = False

    def __init__(self, sampler: Sampler, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._number = 0
        self.keys: dict[Any, tuple[Prompt, SamplingParams, int | None]] = {}

    def add(
        self, key: Any, prompt: Prompt, params: SamplingParams, seed: int, fixed: bool = False
    ) -> None:
        """Add a request to the next batch. All share the batch's seed but those of a fixed seed,
        which are sampled one by one."""
        self.keys[key] = prompt, params, seed if fixed else None

    def keep(self, is_wanted: Callable[[Any], bool]) -> None:
        """Nothing is under way between the batches."""

    def step(self, progress: Progress) -> list[tuple[Any, tuple[Completion, ...]]]:
        """Sample the batch."""
        requests, self.keys = self.keys, {}
        shared = {key: (p, params) for key, (p, params, seed) in requests.items() if seed is None}
        completions: dict[Any, tuple[Completion, ...]] = {}
        if shared:
            number = f"{self._seed}/turn/{self._number}"
            self._number += 1
            groups = self._sampler.sample(
                [prompt for prompt, _ in shared.values()],
                max((own for _, own in shared.values()), key=lambda own: own.max_new_tokens),
                random.Random(number).getrandbits(63),
                progress,
            )
            completions |= {
                key: group.completions for key, group in zip(shared, groups, strict=True)
            }
        for key, (prompt, params, seed) in requests.items():
            if seed is not None:
                (group,) = self._sampler.sample([prompt], params, seed, progress)
                completions[key] = group.completions
        return [(key, completions[key]) for key in requests]


@contextmanager
def batch_of(sampler: Sampler, seed: int) -> Iterator[VllmBatch | Barrier]:
    """Context of the batches of a wave."""
    if isinstance(sampler, VllmSampler) and not sampler.model.deterministic:
        with sampler.batch() as batch:
            yield batch
    else:
        yield Barrier(sampler, seed)
