"""Advantages: from rewards alone, and with a critic's values (PPO), its loss and the KL's
coefficient. Pure functions of tensors and numbers.

Shapes: P groups of G completions, N = P * G; completion i belongs to group i // G; R rewards; B
rows, T tokens. ``mask_BT`` is True where a token is trained; entry t of every (B, T) tensor belongs
to token t. The token after t is the next trained one, whatever the entries between hold.
"""

import torch
from torch import Tensor

from reason_llm.config import Baseline, KLEstimator, Scale
from reason_llm.train.losses import kl_penalty


def group_advantages(
    rewards_N: Tensor,
    group_size: int,
    scale: Scale,
    baseline: Baseline = "group_mean",
    epsilon: float = 1e-4,
    counted_N: Tensor | None = None,
    earned_KN: Tensor | None = None,
) -> Tensor:
    """Advantages: each reward minus its baseline, divided by a sample's standard deviation +
    epsilon; (N,), or (K, N) with ``earned_KN``.

    Args:
        rewards_N: total rewards. NaN counts in no mean and no deviation, and its advantage is 0.
        scale: ``group`` takes the group's standard deviation, ``batch`` that of all N rewards;
            ``whiten`` subtracts the mean of all N advantages and takes their standard deviation.
        baseline: ``group_mean``; ``leave_one_out``, the mean of the group's others; ``none``.
        epsilon: of equal rewards the advantages are 0 whatever it is.
        counted_N: for ``whiten``, the completions over which it is; the others' advantages are 0.
        earned_KN: part of each reward that was earned before each of K turns or tokens. The reward
            less it takes the reward's place; baseline and deviation stay those of whole
            completions: each turn's own would bias the gradient (arXiv:1506.02438 section 2).

    Source: arXiv:2402.03300 section 4.1.2 (group); arXiv:2503.20783 section 3.2 (none);
    arXiv:2402.14740 (leave_one_out); arXiv:2501.03262 (v9) eq. 5 (whiten).
    Differs: the papers give neither the kind of deviation nor epsilon; both are TRL's.
    """
    centred_PG = rewards_PG = rewards_N.view(-1, group_size)
    known_PG = ~rewards_PG.isnan()
    if baseline != "none":
        centred_PG = rewards_PG - rewards_PG.nanmean(dim=1, keepdim=True)
        # A mean of equal numbers can be off by a rounding; such a group must teach nothing.
        centred_PG = centred_PG.masked_fill(_are_equal(rewards_PG), 0.0)
    if baseline == "leave_one_out":
        count_P1 = known_PG.sum(dim=1, keepdim=True, dtype=rewards_N.dtype)
        centred_PG = centred_PG * (count_P1 / (count_P1 - 1).clamp(min=1))
    whole_PG, shape = centred_PG, rewards_N.shape
    if earned_KN is not None:
        centred_PG, shape = centred_PG - earned_KN.view(-1, *known_PG.shape), earned_KN.shape
    if scale == "whiten":
        counted_PG = known_PG if counted_N is None else known_PG & counted_N.view_as(known_PG)
        return whiten(centred_PG, counted_PG, epsilon, whole_PG).reshape(shape)
    if scale != "none":
        over = {"group": rewards_PG, "batch": rewards_N.view(1, -1)}[scale]
        counts_P1 = (~over.isnan()).sum(dim=1, keepdim=True)
        squares_PG = (over - over.nanmean(dim=1, keepdim=True)).square()
        variance_P1 = squares_PG.nansum(dim=1, keepdim=True) / (counts_P1 - 1).clamp(min=1)
        centred_PG = centred_PG / (variance_P1.sqrt() + epsilon)
        centred_PG = centred_PG.masked_fill(_are_equal(over), 0.0)
    return torch.where(known_PG, centred_PG, 0.0).reshape(shape)


def _are_equal(values_PG: Tensor) -> Tensor:
    """(P, 1) bool: all known values of the group are equal."""
    least_P1, most_P1 = values_PG.nan_to_num(torch.inf), values_PG.nan_to_num(-torch.inf)
    return least_P1.amin(dim=1, keepdim=True) >= most_P1.amax(dim=1, keepdim=True)


def per_reward_advantages(
    rewards_RN: Tensor,
    weights_R: Tensor,
    group_size: int,
    scale: Scale,
    epsilon: float = 1e-4,
    counted_N: Tensor | None = None,
) -> Tensor:
    """Each reward (NaN: none) normalised in its group, then the weighted sum, (N,); with
    ``scale: whiten`` whitened over the batch, as in ``group_advantages``.

    Source: arXiv:2601.05242 eq. 4 to 7.
    """
    normalized = [
        group_advantages(rewards_N, group_size, "group", epsilon=epsilon)
        for rewards_N in rewards_RN
    ]
    total_N = (weights_R[:, None] * torch.stack(normalized)).sum(dim=0)
    if scale != "whiten":
        return total_N
    known_N = ~rewards_RN.isnan().all(dim=0)
    return whiten(total_N, known_N if counted_N is None else known_N & counted_N, epsilon)


def returns_to_go(rewards_BT: Tensor, mask_BT: Tensor, gamma: float = 1.0) -> Tensor:
    """Return at each token: ``G_t = r_t + gamma G_{t+1}``, 0 outside the mask.

    Source: arXiv:2501.03262 (v9) eq. 4 (gamma = 1).
    """
    return _gae(rewards_BT, torch.zeros_like(rewards_BT), mask_BT, gamma, 1.0)


def whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8, of: Tensor | None = None) -> Tensor:
    """Values of mean 0 and deviation 1 over the mask, 0 elsewhere; 0 if all are equal. With ``of``
    both are of these numbers, one for each entry of the mask."""
    chosen = (values if of is None else of)[mask]
    if len(chosen) < 2 or bool((chosen == chosen[0]).all()):
        return torch.zeros_like(values)
    whitened = (values - chosen.mean()) / (chosen.std() + epsilon)
    return torch.where(mask, whitened, 0.0)


@torch.no_grad()
def kl_in_reward(
    logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor,
    mask_BT: Tensor,
    scores_B: Tensor,
    coefficient: float,
    estimator: KLEstimator = "k1",
) -> Tensor:
    """Reward of each token, (B, T): ``-coefficient KL_t``, and the score at the last trained token;
    0 outside the mask.

    Source: arXiv:1909.08593 eq. 2; arXiv:2203.02155 eq. 2.
    """
    kl_BT = torch.where(mask_BT, kl_penalty(logprobs_BT, ref_logprobs_BT, estimator), 0.0)
    is_last_BT = mask_BT & (mask_BT.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(is_last_BT, scores_B[:, None], 0.0) - coefficient * kl_BT


@torch.no_grad()
def gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages, by ``lam``, and whole returns, those with a lambda of 1; (B, T), 0 outside the
    mask.

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lam A_{t+1}``, ``R_t = A_t +
    V_t``. After the last trained token V is 0.

    Source: arXiv:1506.02438 eq. 16; whole returns for the critic, VC-PPO, arXiv:2503.01491, and
    VAPO, arXiv:2504.05118.
    """
    advantages_BT = _gae(rewards_BT, values_BT, mask_BT, gamma, lam)
    whole_BT = _gae(rewards_BT, values_BT, mask_BT, gamma, 1.0) if lam != 1 else advantages_BT
    return advantages_BT, torch.where(mask_BT, whole_BT + values_BT, 0.0)


def _gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float
) -> Tensor:
    advantages_BT = torch.zeros_like(values_BT)
    advantage_B = value_B = torch.zeros_like(values_BT[:, 0])
    for t in reversed(range(values_BT.shape[1])):
        is_trained_B = mask_BT[:, t]
        delta_B = rewards_BT[:, t] + gamma * value_B - values_BT[:, t]
        advantage_B = torch.where(is_trained_B, delta_B + gamma * lam * advantage_B, advantage_B)
        value_B = torch.where(is_trained_B, values_BT[:, t], value_B)
        advantages_BT[:, t] = torch.where(is_trained_B, advantage_B, 0.0)
    return advantages_BT


def value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """``max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2`` of each token, and
    where the clip took the gradient away. A clip of 0 is none.

    Source: arXiv:2005.12729 on the clip of OpenAI's baselines.
    """
    loss_BT = (values_BT - returns_BT).square() / 2
    if not clip:
        return loss_BT, torch.zeros_like(loss_BT, dtype=torch.bool)
    near_BT = old_values_BT + (values_BT - old_values_BT).clamp(-clip, clip)
    near_loss_BT = (near_BT - returns_BT).square() / 2
    return torch.maximum(loss_BT, near_loss_BT), near_loss_BT > loss_BT


@torch.no_grad()
def explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """``1 - Var(R - V) / Var(R)``: 1 for a perfect critic, 0 for a constant one, and where all
    returns are equal.

    Source: ``explained_variance`` of OpenAI's baselines, which has NaN there.
    """
    returns_N = returns_N.double()
    if not len(returns_N) or bool((returns_N == returns_N[0]).all()):
        return 0.0
    left_N = returns_N - values_N.double()
    return float(1 - left_N.var(correction=0) / returns_N.var(correction=0))
