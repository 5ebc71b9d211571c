"""Shards under vLLM: what a process has of a wave is one batch, and who has what changes nothing.

1. Parts that are sampled together have the tokens that each has by itself.
2. Each process is handed what it samples at once; with Transformers part by part.
3. A shard's prompts are dealt in turn, with a seed of their own, and come back in order.
4. A batch behind a barrier has room for the longest turn, and a seed of its own.
"""

from typing import Any

import pytest

from conftest import TINY
from families import SIZES, prompts_of, quiet
from reason_llm.config import AdapterSection, ModelSection
from reason_llm.model.base import Model, load_tokenizer
from reason_llm.rollout import Group
from reason_llm.sample import Part, SamplingParams, lots, sample_lot, sampling
from reason_llm.sample.batches import Barrier
from reason_llm.sample.shards import ShardedSampler


@pytest.mark.filterwarnings("default")  # vLLM warns of its own
def test_together_and_alone_are_the_same_tokens() -> None:
    pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")
    tokenizer = load_tokenizer(str(TINY))
    prompts = prompts_of(tokenizer, *(f"What is {n} + 68?" for n in (3, 57, 41, 9)))
    parts = tuple(Part(i, tuple(prompts[i::2]), seed) for i, seed in enumerate((7, 2**62)))
    params = SamplingParams(3, 12)
    section = ModelSection(path=str(TINY), adapter=AdapterSection(rank=8, alpha=16))
    with (
        Model(section, tokenizer, 0, SIZES) as model,
        sampling(model, 0) as sampler,
    ):
        steps = []
        together = sample_lot(sampler, parts, params, lambda tokens, items: steps.append(items))
        (first,), (second,) = (sample_lot(sampler, (part,), params, quiet) for part in parts)
    assert [group.prompt for group in together[1]] == list(parts[1].prompts)
    assert together == [first, second]
    drawn = [c.token_ids for groups in together for group in groups for c in group.completions]
    assert len(set(drawn)) > 4 and len(drawn) == 12 == sum(steps)


def test_lots() -> None:
    parts = [Part(number, (), number) for number in range(8)]
    one_by_one = lots(parts, 3, in_batches=False)
    assert one_by_one == [(part,) for part in parts]
    batches = lots(parts, 3, in_batches=True)
    assert [[part.shard for part in lot] for lot in batches] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert lots(parts[:2], 3, in_batches=True) == [(parts[0],), (parts[1],)]


class Recorder:
    """A sampler, and a dealer of one process, that give empty groups and keep what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def sample(self, *asked: Any) -> Any:
        self.asked.append(asked)
        first = asked[0]
        if isinstance(first[0], Part):
            return [[Group(prompt, ()) for prompt in part.prompts] for part in first]
        return [Group(prompt, ()) for prompt in first]


PROMPTS = prompts_of(load_tokenizer(str(TINY)), *(f"What is {n} + 8?" for n in range(5)))


def test_prompts_are_dealt_in_turn_with_seeds_of_their_own() -> None:
    dealer: Any = Recorder()
    for count, seed in ((1, 7), (2, 7), (2, 8), (9, 7)):
        groups = ShardedSampler(dealer, count, dealer).sample(
            PROMPTS, SamplingParams(1, 4), seed, quiet
        )
        assert [group.prompt for group in groups] == PROMPTS
    (alone,), *dealt = (parts for parts, *_ in dealer.asked)
    assert (list(alone.prompts), alone.seed) == (PROMPTS, 7)  # as a run without shards
    assert [list(part.prompts) for part in dealt[0]] == [PROMPTS[::2], PROMPTS[1::2]]
    assert [len(parts) for parts in dealt] == [2, 2, 5]
    assert dealt[2][1].seed == dealt[0][1].seed  # of the shard, whatever their number
    assert len({part.seed for parts in dealt[:2] for part in parts}) == 4


def test_a_batch_behind_a_barrier_has_room_for_its_longest_turn() -> None:
    sampler: Any = Recorder()
    barrier = Barrier(sampler, 3)
    assert barrier.step(quiet) == []
    for limits in ((9, 5), (5, 9, 7), (4,)):
        for key, limit in enumerate(limits):
            barrier.add(key, PROMPTS[key], SamplingParams(1, limit), seed=key)
        assert [key for key, _ in barrier.step(quiet)] == list(range(len(limits)))
    asked = [(prompts, own.max_new_tokens) for prompts, own, *_ in sampler.asked]
    assert asked == [(PROMPTS[:2], 9), (PROMPTS[:3], 9), (PROMPTS[:1], 4)]
    assert len({seed for _, _, seed, _ in sampler.asked}) == 3
