"""Greedy accuracy of the policy on a held-out set.

And, before any of that counts: is what the sampler samples from the policy at all?
"""

from collections.abc import Sequence

from reason_llm.rollout import Prompt
from reason_llm.sample import Progress, Sampler, SamplingParams
from reason_llm.score import Scorer


def evaluate(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    max_new_tokens: int,
    progress: Progress,
) -> dict[str, float]:
    """Accuracy from one greedy completion of each prompt, judged by the first reward.

    Returns:
        ``eval/accuracy``, the mean reward; ``eval/completion_tokens``, the mean length;
        ``eval/truncated_fraction``.
    """
    params = SamplingParams(num_completions=1, max_new_tokens=max_new_tokens, temperature=0.0)
    groups = scorer.score(
        sampler.sample(prompts, params, seed=0, progress=progress), only_first=True
    )
    completions = [group.completions[0] for group in groups]
    count, name = len(completions), scorer.rewards[0].name
    return {
        "eval/accuracy": sum(completion.rewards[name] for completion in completions) / count,
        "eval/completion_tokens": sum(len(completion.token_ids) for completion in completions)
        / count,
        "eval/truncated_fraction": sum(
            completion.finish_reason == "length" for completion in completions
        )
        / count,
    }
