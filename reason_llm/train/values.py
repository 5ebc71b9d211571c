"""PPO with a critic: rewards of tokens, advantages, the critic's loss and the KL's coefficient.
Pure functions of tensors and numbers.

Shapes: B rows, T tokens, N rollouts. ``mask_BT`` is True where a token is trained; entry t of every
(B, T) tensor belongs to token t. The token after t is the next trained one: prompts, tool outputs
and padding are skipped, whatever their entries hold.
"""

import math

import torch
from torch import Tensor

from reason_llm.config import KLEstimator
from reason_llm.train.losses import kl_penalty


@torch.no_grad()
def kl_in_reward(
    logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    mask_BT: Tensor,
    scores_B: Tensor,
    coefficient: float,
    estimator: KLEstimator = "k1",
) -> Tensor:
    """Reward of each token: ``-coefficient KL_t``, and the score at the last trained token.

    Args:
        logprobs_BT: of the policy before the step.
        scores_B: of the whole completions, no NaN. A row without a trained token has no place for
            its score.

    Returns:
        (B, T), 0 outside the mask.

    Source: arXiv:1909.08593 eq. 2; arXiv:2203.02155 eq. 2.
    """
    kl_BT = torch.where(mask_BT, kl_penalty(logprobs_BT, ref_logprobs_BT, estimator), 0.0)
    is_last_BT = mask_BT & (mask_BT.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(is_last_BT, scores_B[:, None], 0.0) - coefficient * kl_BT


@torch.no_grad()
def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    gamma: float,
    lam: float,
    critic_lam: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, (B, T), 0 outside the mask.

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lam A_{t+1}``, ``R_t = A_t +
    V_t``. After the last trained token V is 0.

    Args:
        lam: of the advantages.
        critic_lam: of the returns.

    Source: arXiv:1506.02438 eq. 16; a lambda of its own for the critic, VC-PPO, arXiv:2503.01491.
    """
    advantages_BT = _gae(rewards_BT, values_BT, mask_BT, gamma, lam)
    critic_BT = advantages_BT
    if critic_lam != lam:
        critic_BT = _gae(rewards_BT, values_BT, mask_BT, gamma, critic_lam)
    return advantages_BT, torch.where(mask_BT, critic_BT + values_BT, 0.0)


def _gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float
) -> Tensor:
    advantages_BT = torch.zeros_like(values_BT)
    advantage_B = value_B = torch.zeros_like(values_BT[:, 0])
    for t in reversed(range(values_BT.shape[1])):
        here_B = mask_BT[:, t]
        delta_B = rewards_BT[:, t] + gamma * value_B - values_BT[:, t]
        advantage_B = torch.where(here_B, delta_B + gamma * lam * advantage_B, advantage_B)
        value_B = torch.where(here_B, values_BT[:, t], value_B)
        advantages_BT[:, t] = torch.where(here_B, advantage_B, 0.0)
    return advantages_BT


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
