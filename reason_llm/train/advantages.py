"""Advantages from rewards. Pure functions of numbers.

Shapes: P groups of G completions, N = P * G, grouped: completion i belongs to group i // G; R
rewards; T tokens.
"""

import torch
from torch import Tensor

from reason_llm.config import Baseline, Scale


def group_advantages(
    rewards_N: Tensor,
    group_size: int,
    scale: Scale,
    baseline: Baseline = "group_mean",
    ddof: int = 1,
    epsilon: float = 1e-4,
    counted_N: Tensor | None = None,
) -> Tensor:
    """Advantages: each reward minus its baseline, divided by a standard deviation + epsilon.

    Args:
        rewards_N: total rewards; NaN where there is none, which counts in no mean and no deviation.
        group_size: G.
        scale: ``group`` takes the group's standard deviation, ``batch`` that of all N rewards;
            ``whiten`` subtracts the mean of all N advantages and takes their standard deviation;
            ``none`` divides by nothing.
        baseline: ``group_mean``; ``leave_one_out``, the mean of the group's others; ``none``.
        ddof: 1 for the sample's standard deviation, 0 for the population's.
        epsilon: keeps nearly equal rewards finite. Where those that a deviation is taken of are all
            equal, the advantages are 0.
        counted_N: for ``whiten``, the completions over which it is; the others' advantages are 0.
            None: all.

    Returns:
        (N,) in the rewards' dtype, 0 where there is no reward.

    Source: arXiv:2402.03300 section 4.1.2 (group); arXiv:2503.20783 section 3.2 (none);
    arXiv:2402.14740 (leave_one_out); arXiv:2501.03262 (v9) eq. 5 (whiten).
    Differs: the papers give neither ddof nor epsilon; both are TRL's.
    """
    rewards_PG = rewards_N.view(-1, group_size)
    known_PG = ~rewards_PG.isnan()
    centred_PG = rewards_PG
    if baseline != "none":
        centred_PG = rewards_PG - rewards_PG.nanmean(dim=1, keepdim=True)
        # A mean of equal numbers can be off by a rounding; such a group must teach nothing.
        centred_PG = centred_PG.masked_fill(_are_equal(rewards_PG), 0.0)
    if baseline == "leave_one_out":
        count_P1 = known_PG.sum(dim=1, keepdim=True, dtype=rewards_N.dtype)
        centred_PG = centred_PG * (count_P1 / (count_P1 - 1).clamp(min=1))
    if scale == "whiten":
        counted_PG = known_PG if counted_N is None else known_PG & counted_N.view_as(known_PG)
        return whiten(centred_PG, counted_PG, ddof, epsilon).reshape(-1)
    if scale != "none":
        over = {"group": rewards_PG, "batch": rewards_N.view(1, -1)}[scale]
        centred_PG = centred_PG / (_deviation(over, ddof) + epsilon)
        centred_PG = centred_PG.masked_fill(_are_equal(over), 0.0)
    return torch.where(known_PG, centred_PG, 0.0).reshape(-1)


def _are_equal(values_PG: Tensor) -> Tensor:
    """(P, 1) bool: all known values of the group are equal."""
    known_PG = ~values_PG.isnan()
    least_P1 = values_PG.masked_fill(~known_PG, torch.inf).amin(dim=1, keepdim=True)
    most_P1 = values_PG.masked_fill(~known_PG, -torch.inf).amax(dim=1, keepdim=True)
    return least_P1 >= most_P1


def _deviation(values_PG: Tensor, ddof: int) -> Tensor:
    """(P, 1): standard deviation of the group's known values."""
    counts_P1 = (~values_PG.isnan()).sum(dim=1, keepdim=True)
    squares_PG = (values_PG - values_PG.nanmean(dim=1, keepdim=True)).square()
    return (squares_PG.nansum(dim=1, keepdim=True) / (counts_P1 - ddof).clamp(min=1)).sqrt()


def per_reward_advantages(
    rewards_RN: Tensor,
    weights_R: Tensor,
    group_size: int,
    scale: Scale,
    epsilon: float = 1e-4,
    counted_N: Tensor | None = None,
) -> Tensor:
    """Each reward normalised in its group by itself, then the weighted sum, (N,); NaN where a
    completion has none of that reward.

    With ``scale: whiten`` that sum is whitened over the batch, as in ``group_advantages``. Source:
    arXiv:2601.05242 eq. 4 to 7.
    """
    normalized_RN = torch.stack(
        [
            group_advantages(rewards_N, group_size, "group", epsilon=epsilon)
            for rewards_N in rewards_RN
        ]
    )
    total_N = (weights_R[:, None] * normalized_RN).sum(dim=0)
    if scale != "whiten":
        return total_N
    known_N = ~rewards_RN.isnan().all(dim=0)
    return whiten(total_N, known_N if counted_N is None else known_N & counted_N, epsilon=epsilon)


def returns_to_go(rewards_BT: Tensor, mask_BT: Tensor, gamma: float = 1.0) -> Tensor:
    """Return at each token: ``G_t = r_t + gamma G_{t+1}``, 0 outside the mask.

    Source: arXiv:2501.03262 (v9) eq. 4 (gamma = 1).
    """
    returns_BT = torch.zeros_like(rewards_BT)
    coming_B = torch.zeros_like(rewards_BT[:, 0])
    for t in reversed(range(rewards_BT.shape[1])):
        here_B = mask_BT[:, t]
        coming_B = torch.where(here_B, rewards_BT[:, t] + gamma * coming_B, coming_B)
        returns_BT[:, t] = torch.where(here_B, coming_B, 0.0)
    return returns_BT


def whiten(values: Tensor, mask: Tensor, ddof: int = 1, epsilon: float = 1e-8) -> Tensor:
    """Values of mean 0 and deviation 1 over the mask, 0 elsewhere; 0 if all are equal."""
    chosen = values[mask]
    if len(chosen) < 2 or bool((chosen == chosen[0]).all()):
        return torch.zeros_like(values)
    whitened = (values - chosen.mean()) / (chosen.std(correction=ddof) + epsilon)
    return torch.where(mask, whitened, 0.0)
