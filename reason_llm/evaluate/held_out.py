"""How good is the policy on problems it does not train on: greedy accuracy on a held-out set.

And, before any of that counts: is what the sampler samples from the policy at all?
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from reason_llm.errors import TrainingError
from reason_llm.model import adapters, layout as packing
from reason_llm.model.base import Model
from reason_llm.rollout import Prompt
from reason_llm.sample import Progress, Sampler, SamplingParams
from reason_llm.score import Scorer
from reason_llm.train.policy import policy_logprobs
from reason_llm.train.preparation import to_rollouts

CANARY_PROMPTS, CANARY_COMPLETIONS, CANARY_TOKENS = 4, 2, 16
CANARY_TOLERANCE = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (0.1, 2.0)}
"""Mean and largest difference of a log-prob, in nats, that rounding explains. In bfloat16 a single
unlikely token differs by more than a tenth now and then, and a random model of 12 layers by 0.027
in the mean of 128."""


def evaluate(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    max_new_tokens: int,
    progress: Progress,
) -> dict[str, float]:
    """One greedy completion of each prompt, judged by the first reward.

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


def prove_sampler_is_policy(
    sampler: Sampler, model: Model, prompts: Sequence[Prompt]
) -> dict[str, float]:
    """Sample a few tokens and compare their log-probs with the learner's.

    A sampler that leaves the adapter out is told by its direction, long before the adapter changes
    more than rounding does: of the way from the policy's log-probs to the base's, what it reports
    lies nearer to the base's end.

    Returns:
        ``sample/canary_difference`` and ``sample/canary_difference_max``, in nats.

    Raises:
        TrainingError: one is beyond ``CANARY_TOLERANCE``, or the sampler samples from the base.
    """
    params = SamplingParams(CANARY_COMPLETIONS, CANARY_TOKENS)
    short = sorted(prompts, key=lambda prompt: len(prompt.token_ids))[:CANARY_PROMPTS]
    sampled = sampler.sample(short, params, seed=0, progress=lambda tokens, items: None)
    rollouts = to_rollouts(sampled)
    ids_BT, mask_BT = packing.collate(rollouts, model.device)
    with torch.no_grad():
        policy_N = policy_logprobs(model, ids_BT, mask_BT, temperature=1.0)[0][mask_BT].cpu()
        with adapters.reference(model.policy):
            base_N = policy_logprobs(model, ids_BT, mask_BT, temperature=1.0)[0][mask_BT].cpu()
    reported_N = torch.tensor([p for r in rollouts for p in r.sampler_logprobs])
    difference_N = (policy_N - reported_N).abs()
    worst, mean = int(difference_N.argmax()), float(difference_N.mean())
    most_mean, most = CANARY_TOLERANCE[model.head.weight.dtype]
    if not (mean <= most_mean and difference_N[worst] <= most):
        raise TrainingError(
            f"the sampler is not the policy: it reports a log-prob of {reported_N[worst]:.5f} "
            f"where the learner computes {policy_N[worst]:.5f}, and they differ by {mean:.2g} in "
            f"the mean (at most {most:g} and {most_mean:g} is rounding); set sample.engine to "
            "transformers and report this"
        )
    share, error = share_of_base(policy_N, base_N, reported_N)
    if share - 4 * error > 0.5:
        raise TrainingError(
            "the sampler is not the policy: its log-probs are those of the base without the "
            f"adapter ({share:.2f} +- {error:.2f} of the way from the policy's to the base's); "
            "set sample.engine to transformers and report this"
        )
    return {
        "sample/canary_difference": mean,
        "sample/canary_difference_max": float(difference_N[worst]),
    }


def share_of_base(policy_N: Tensor, base_N: Tensor, reported_N: Tensor) -> tuple[float, float]:
    """How far along the way from the policy's log-probs to the base's the reported ones lie, 0 to
    1, by least squares, and its standard error; (0, inf) while the two are the same."""
    way_N, moved_N = base_N - policy_N, reported_N - policy_N
    length = float(way_N.norm())
    if length == 0 or len(way_N) < 2:
        return 0.0, math.inf
    share = float(moved_N @ way_N) / length**2
    residual_N = moved_N - share * way_N
    return share, float(residual_N.norm()) / math.sqrt(len(way_N) - 1) / length
