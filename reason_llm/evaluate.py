"""How good is the policy on problems it does not train on: greedy accuracy on a held-out set.

And, before any of that counts: is what the sampler samples from the policy at all?
"""

from collections.abc import Sequence

import torch

from reason_llm.errors import TrainingError
from reason_llm.model.base import Model
from reason_llm.rollout import Prompt
from reason_llm.sample import Progress, Sampler, SamplingParams
from reason_llm.score import WeightedReward, score
from reason_llm.train import packing
from reason_llm.train.phase import policy_logprobs, to_rollouts

CANARY_PROMPTS, CANARY_COMPLETIONS, CANARY_TOKENS = 4, 2, 16
CANARY_TOLERANCE = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (0.05, 1.0)}
"""Mean and largest difference of a log-prob, in nats, that rounding explains. In bfloat16 a single
unlikely token differs by more than a tenth now and then; the mean of 128 tells."""


def evaluate(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    reward: WeightedReward,
    max_new_tokens: int,
    progress: Progress,
) -> dict[str, float]:
    """One greedy completion of each prompt, judged by ``reward``.

    Returns:
        ``eval/accuracy``, the mean reward; ``eval/completion_tokens``, the mean length;
        ``eval/truncated_fraction``.
    """
    params = SamplingParams(num_completions=1, max_new_tokens=max_new_tokens, temperature=0.0)
    groups = score(sampler.sample(prompts, params, seed=0, progress=progress), [reward])
    completions = [group.completions[0] for group in groups]
    count = len(completions)
    return {
        "eval/accuracy": sum(completion.rewards[reward.name] for completion in completions) / count,
        "eval/completion_tokens": sum(len(completion.token_ids) for completion in completions)
        / count,
        "eval/truncated_fraction": sum(
            completion.finish_reason == "length" for completion in completions
        )
        / count,
    }


def prove_sampler_is_policy(
    sampler: Sampler, model: Model, prompts: Sequence[Prompt]
) -> dict[str, float]:
    """Sample a few tokens and compare their log-probs with the learner's.

    Returns:
        ``sample/canary_difference`` and ``sample/canary_difference_max``, in nats.

    Raises:
        TrainingError: one is beyond ``CANARY_TOLERANCE``: the sampler has other weights.
    """
    params = SamplingParams(CANARY_COMPLETIONS, CANARY_TOKENS)
    few = prompts[:CANARY_PROMPTS]
    rollouts = to_rollouts(sampler.sample(few, params, seed=0, progress=lambda tokens, items: None))
    ids_BT, mask_BT = packing.collate(rollouts, model.device)
    with torch.no_grad():
        logprobs_BT, _ = policy_logprobs(model, ids_BT, mask_BT, temperature=1.0)
    reported = torch.tensor([p for r in rollouts for p in r.sampler_logprobs])
    difference_N = (logprobs_BT[mask_BT].cpu() - reported).abs()
    worst, mean = int(difference_N.argmax()), float(difference_N.mean())
    most_mean, most = CANARY_TOLERANCE[model.head.weight.dtype]
    if not (mean <= most_mean and difference_N[worst] <= most):
        raise TrainingError(
            f"the sampler is not the policy: it reports a log-prob of {float(reported[worst]):.5f} "
            f"where the learner computes {float(logprobs_BT[mask_BT][worst]):.5f}, and they differ "
            f"by {mean:.2g} in the mean (at most {most:g} and {most_mean:g} is rounding); set "
            "sample.engine to transformers and report this"
        )
    return {
        "sample/canary_difference": mean,
        "sample/canary_difference_max": float(difference_N[worst]),
    }
