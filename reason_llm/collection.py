"""The scored groups of a step: prompts drawn, sampled and scored wave by wave. A wave is scored and
saved while the next one is sampled.

With ``algorithm.dynamic_sampling`` a group whose rewards do not vary is dropped, and further
prompts are drawn until the step is full or the bound is reached. Source: arXiv:2503.14476 eq. 11.
"""

import random
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from reason_llm.buffer import RolloutBuffer
from reason_llm.config import Config
from reason_llm.console import Console
from reason_llm.job import Job
from reason_llm.metrics import Record, timed
from reason_llm.prompts import order
from reason_llm.rollout import Group
from reason_llm.sample import Sampler, SamplingParams
from reason_llm.stopping import StopSignal
from reason_llm.train.algorithms import Algorithm


def collect(
    job: Job,
    sampler: Sampler,
    buffer: RolloutBuffer,
    step: int,
    start: int,
    record: Record,
    console: Console,
    stop: StopSignal,
) -> tuple[list[Group], int]:
    """The groups to train on, and how many prompts were sampled for them.

    Args:
        start: how many prompts were taken from the order before this step.

    Raises:
        Stopped: a signal asked for the end; the waves so far are in the buffer.

    Where no group has a signal, or too few have within the bound, the step is taken with what
    there is; with none at all, with the last wave as it was sampled, which teaches nothing.
    """
    config, sample = job.config, job.config.sample
    algorithm = config.algorithm.row()
    wanted, most = sample.prompts_per_step, sample.prompts_per_step * algorithm.dynamic_sampling
    all_prompts = job.data.prompts
    indices = order(job.data.sizes, job.data.weights, config.run.seed, start, most)
    prompts = [all_prompts[index] for index in indices]
    params = sampling_params(config)
    wave = sample.prompts_per_wave or sampler.prompts_at_once(prompts, params)
    state = _Collected(buffer.groups(step), buffer.drawn(step))
    fresh_tokens = 0  # without those of an interrupted run

    def finish(sampled: list[Group]) -> None:
        """Score a wave and save it; in a thread, while the next one is sampled."""
        with timed(record, "scoring"):
            state.last = job.scorer.score(sampled)
        first = job.scorer.rewards[0].name
        kept = [group for group in state.last if is_kept(group, algorithm, first)]
        state.groups, state.drawn = state.groups + kept, state.drawn + len(sampled)
        if len(state.groups) < wanted and state.drawn < most:
            with timed(record, "buffer"):
                buffer.add_wave(step, kept, len(sampled))

    with (
        console.phase("sampling", wanted * sample.completions_per_prompt) as progress,
        ThreadPoolExecutor(1) as scoring,
    ):
        progress(0, len(state.groups) * sample.completions_per_prompt)
        under_way: Future[None] | None = None
        asked = len(state.groups), state.drawn
        while asked[0] < wanted and asked[1] < most:
            size, first = min(wave, wanted - asked[0], most - asked[1]), asked[1]
            seed = random.Random(f"{config.run.seed}/sample/{step}/{first}").getrandbits(63)
            with timed(record, "sampling"):
                sampled = sampler.sample(
                    prompts[first : first + size], params, seed=seed, progress=progress
                )
            fresh_tokens += sum(len(c.token_ids) for group in sampled for c in group.completions)
            if under_way is not None:
                under_way.result()
            under_way = scoring.submit(finish, sampled)
            asked = asked[0] + size, asked[1] + size
            if stop.requested:
                under_way.result()
                if asked[0] < wanted and asked[1] < most:
                    stop.check()  # the last wave is written by the caller
            if algorithm.dynamic_sampling > 1:  # how many more are wanted, its scores say
                under_way.result()
                asked = len(state.groups), state.drawn
        if under_way is not None:
            under_way.result()
    if seconds := record.get("time/sampling_seconds"):
        record["sample/tokens_per_second"] = fresh_tokens / seconds
    return state.groups or state.last, state.drawn


@dataclass(slots=True)
class _Collected:
    groups: list[Group]
    drawn: int
    last: list[Group] = field(default_factory=list)
    """The last wave as it was scored."""


def sampling_params(config: Config) -> SamplingParams:
    """How completions to train on are drawn."""
    sample = config.sample
    return SamplingParams(
        sample.completions_per_prompt,
        sample.max_new_tokens,
        sample.temperature,
        sample.top_k,
        sample.top_p,
        sample.min_p,
    )


def is_kept(group: Group, algorithm: Algorithm, first_reward: str) -> bool:
    """Whether dynamic sampling leaves the group in: its rewards vary, and its success rate is in
    range.

    Args:
        first_reward: the reward whose positive values are successes.
    """
    if algorithm.dynamic_sampling == 1:
        return True
    rewards = [completion.reward for completion in group.completions]
    if all(reward == rewards[0] for reward in rewards):
        return False
    if algorithm.success_range is None:
        return True
    low, high = algorithm.success_range
    successes = sum(completion.rewards[first_reward] > 0 for completion in group.completions)
    return low <= successes / len(group.completions) <= high
