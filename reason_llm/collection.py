"""The scored groups of a step: prompts drawn, sampled and scored wave by wave, each wave on disk
before the next begins.

With ``algorithm.dynamic_sampling`` a group whose rewards do not vary is dropped, and further
prompts are drawn until the step is full or the bound is reached. Source: arXiv:2503.14476 eq. 11.
"""

import random

from reason_llm.buffer import RolloutBuffer
from reason_llm.config import Config
from reason_llm.console import Console
from reason_llm.job import Job
from reason_llm.metrics import Record, timed
from reason_llm.prompts import order
from reason_llm.rollout import Group
from reason_llm.sample import Sampler, SamplingParams
from reason_llm.score import score
from reason_llm.train.algorithms import Algorithm


def collect(
    job: Job, sampler: Sampler, buffer: RolloutBuffer, step: int, record: Record, console: Console
) -> tuple[list[Group], int]:
    """The groups to train on, and how many prompts were sampled for them.

    Where no group has a signal, or too few have within the bound, the step is taken with what
    there is; with none at all, with the last wave as it was sampled, which teaches nothing.
    """
    config, sample = job.config, job.config.sample
    algorithm = config.algorithm.row()
    wanted, most = sample.prompts_per_step, sample.prompts_per_step * algorithm.dynamic_sampling
    all_prompts = job.data.prompts
    indices = order(job.data.sizes, job.data.weights, config.run.seed, step * most, most)
    prompts = [all_prompts[index] for index in indices]
    params = sampling_params(config)
    wave = sample.prompts_per_wave or sampler.prompts_at_once(prompts, params)
    groups, drawn = buffer.groups(step), buffer.drawn(step)
    scored: list[Group] = []
    fresh_tokens = 0  # without those of an interrupted run
    with console.phase("sampling", wanted * sample.completions_per_prompt) as progress:
        progress(0, len(groups) * sample.completions_per_prompt)
        while len(groups) < wanted and drawn < most:
            size = min(wave, wanted - len(groups), most - drawn)
            seed = random.Random(f"{config.run.seed}/sample/{step}/{drawn}").getrandbits(63)
            with timed(record, "sampling"):
                sampled = sampler.sample(
                    prompts[drawn : drawn + size], params, seed=seed, progress=progress
                )
            fresh_tokens += sum(len(c.token_ids) for group in sampled for c in group.completions)
            with timed(record, "scoring"):
                scored = score(sampled, job.rewards)
            kept = [g for g in scored if is_kept(g, algorithm, job.rewards[0].name)]
            groups, drawn = groups + kept, drawn + size
            if len(groups) < wanted and drawn < most:
                with timed(record, "buffer"):
                    buffer.add_wave(step, kept, size)
    if seconds := record.get("time/sampling_seconds"):
        record["sample/tokens_per_second"] = fresh_tokens / seconds
    return groups or scored, drawn


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
