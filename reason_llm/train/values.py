"""PPO with a critic: rewards of tokens, advantages, the critic's loss and the KL's coefficient.
Pure functions of tensors and numbers.

Shapes: B rows, T tokens, N rollouts. ``mask_BT`` is True where a token is trained; entry t of every
(B, T) tensor belongs to token t. The token after t is the next trained one: prompts, tool outputs
and padding are skipped, whatever their entries hold.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from reason_llm.config import KLEstimator
from reason_llm.train.losses import kl_penalty

Resampling = Literal["pow", "max_min", "max_random"]
"""Which rollouts PF-PPO draws again more often."""


@torch.no_grad()
def kl_in_reward(
    logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    mask_BT: Tensor,
    scores_B: Tensor,
    coefficient: float,
    estimator: KLEstimator = "k1",
    kl_clip: float | None = None,
    score_clip: tuple[float, float] | None = None,
    ended_B: Tensor | None = None,
    missing_eos_penalty: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Reward of each token: ``-coefficient KL_t``, and the score at the last trained token.

    Args:
        logprobs_BT: of the policy before the step.
        scores_B: of the whole completions, no NaN.
        kl_clip: each token's KL is kept within -kl_clip to kl_clip; None: it is not. 10 in
            OpenRLHF.
        score_clip: lowest and highest score; None: none.
        ended_B: bool, the end token was sampled; None: in all rows.
        missing_eos_penalty: is subtracted from the clipped score where it was not.

    Returns:
        rewards_BT, 0 outside the mask; kl_B, each row's sum over its tokens, for
        ``next_kl_coefficient``; scores_B as they were added. A row without a trained token has no
        place for its score.

    Source: arXiv:1909.08593 eq. 2; arXiv:2203.02155 eq. 2; missing_eos_penalty is of TRL's PPO.
    """
    kl_BT = kl_penalty(logprobs_BT, ref_logprobs_BT, estimator)
    if kl_clip is not None:
        kl_BT = kl_BT.clamp(-kl_clip, kl_clip)
    kl_BT = torch.where(mask_BT, kl_BT, 0.0)
    if score_clip is not None:
        scores_B = scores_B.clamp(*score_clip)
    if ended_B is not None:
        scores_B = torch.where(ended_B, scores_B, scores_B - missing_eos_penalty)
    is_last_BT = mask_BT & (mask_BT.flip(1).cumsum(1).flip(1) == 1)
    rewards_BT = torch.where(is_last_BT, scores_B[:, None], 0.0) - coefficient * kl_BT
    return rewards_BT, kl_BT.sum(dim=1), scores_B


@torch.no_grad()
def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    critic_lam: float | Tensor | None = None,
    bootstrap_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, (B, T), 0 outside the mask.

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lam A_{t+1}``, ``R_t = A_t +
    V_t``. After the last trained token V is 0.

    Args:
        lam: of the advantages; (B,) where it depends on the row.
        critic_lam: of the returns, likewise; None: the same.
        bootstrap_B: V after the last trained token, for rows that were cut off; None: 0 for all.

    Source: arXiv:1506.02438 eq. 16; a lambda of its own for the critic, VC-PPO, arXiv:2503.01491.
    """
    advantages_BT = _gae(rewards_BT, values_BT, mask_BT, gamma, lam, bootstrap_B)
    critic_BT = advantages_BT
    if critic_lam is not None:
        critic_BT = _gae(rewards_BT, values_BT, mask_BT, gamma, critic_lam, bootstrap_B)
    return advantages_BT, torch.where(mask_BT, critic_BT + values_BT, 0.0)


def _gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    gamma: float,
    lam: float | Tensor,
    bootstrap_B: Tensor | None,
) -> Tensor:
    advantages_BT = torch.zeros_like(values_BT)
    advantage_B = torch.zeros_like(values_BT[:, 0])
    value_B = advantage_B if bootstrap_B is None else bootstrap_B.to(values_BT.dtype)
    decay = gamma * (lam.to(values_BT.dtype) if isinstance(lam, Tensor) else lam)
    for t in reversed(range(values_BT.shape[1])):
        here_B = mask_BT[:, t]
        delta_B = rewards_BT[:, t] + gamma * value_B - values_BT[:, t]
        advantage_B = torch.where(here_B, delta_B + decay * advantage_B, advantage_B)
        value_B = torch.where(here_B, values_BT[:, t], value_B)
        advantages_BT[:, t] = torch.where(here_B, advantage_B, 0.0)
    return advantages_BT


def length_adaptive_lambda(lengths_B: Tensor, alpha: float = 0.05) -> Tensor:
    """``1 - 1 / (alpha length)``, at least 0: the longer a completion, the further its last reward
    reaches.

    Args:
        lengths_B: trained tokens of each row.

    Source: VAPO, arXiv:2504.05118 (alpha 0.05).
    """
    return (1 - 1 / (alpha * lengths_B)).clamp(min=0)


def value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """``max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2``, token by token.

    Args:
        values_BT: of the critic as it is now, with gradient.
        old_values_BT: of the critic before the step.
        clip: 0: no clip, ``(V - R)^2 / 2``.

    Returns:
        loss_BT, and clipped_BT: True where the clip took the token's gradient away.

    Source: arXiv:2005.12729 on the clip of OpenAI's baselines.
    """
    loss_BT = (values_BT - returns_BT).square() / 2
    if not clip:
        return loss_BT, torch.zeros_like(loss_BT, dtype=torch.bool)
    near_BT = old_values_BT + (values_BT - old_values_BT).clamp(-clip, clip)
    near_loss_BT = (near_BT - returns_BT).square() / 2
    return torch.maximum(loss_BT, near_loss_BT), near_loss_BT > loss_BT


@torch.no_grad()
def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> float:
    """``1 - Var(R - V) / Var(R)`` over the masked tokens: 1 for a perfect critic, 0 for a constant
    one; NaN where all returns are equal.

    Source: ``explained_variance`` of OpenAI's baselines.
    """
    returns_N = returns_BT[mask_BT].double()
    if not len(returns_N) or bool((returns_N == returns_N[0]).all()):
        return math.nan
    left_N = returns_N - values_BT[mask_BT].double()
    return float(1 - left_N.var(correction=0) / returns_N.var(correction=0))


def next_kl_coefficient(
    coefficient: float, kl: float, num_rollouts: int, target: float, horizon: float = 10_000
) -> float:
    """``coefficient (1 + clamp(kl / target - 1, -0.2, 0.2) num_rollouts / horizon)``: up where the
    KL is above its target.

    Args:
        kl: mean over the step's rollouts of the sum over their tokens, in nats.
        target: likewise, above 0.
        horizon: rollouts after which the coefficient has changed by at most about a fifth.

    Source: arXiv:1909.08593 section 2.2; num_rollouts / horizon is of its code and of all peers.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * num_rollouts / horizon)


_RESAMPLING: dict[Resampling, Callable[[Tensor, float], Tensor]] = {
    "pow": lambda scores_N, power: scores_N.abs() ** power,
    "max_min": lambda scores_N, _: ((scores_N == scores_N.max()) | (scores_N == scores_N.min()))
    .to(scores_N.dtype),
    "max_random": lambda scores_N, _: torch.where(scores_N == scores_N.max(), 0.4, 0.1)
    .to(scores_N.dtype),
}  # fmt: skip


def pf_ppo_weights(scores_N: Tensor, method: Resampling, power: float = 2.0) -> Tensor:
    """Probabilities, (N,), with which rollouts are drawn again with replacement: those whose score
    is farther from 0 (pow), the best and worst ones (max_min), the best ones (max_random) most.

    Source: PF-PPO, arXiv:2409.06957; the weights, with their 1e-8, are those of verl's
    ``compute_pf_ppo_reweight_data``.
    """
    weights_N = _RESAMPLING[method](scores_N, power) + 1e-8
    return weights_N / weights_N.sum()
