"""Rewards become advantages. Pure functions of numbers.

Shapes: P groups of G completions, N = P * G, grouped: completion i belongs to group i // G.
"""

import torch
from torch import Tensor

from reason_llm.train.algorithms import Scale


def group_advantages(
    rewards_N: Tensor, group_size: int, scale: Scale, ddof: int = 1, epsilon: float = 1e-4
) -> Tensor:
    """How much better each completion is than its group: ``(r - group mean) / (std + epsilon)``.

    Args:
        rewards_N: total rewards.
        group_size: G.
        scale: ``group`` takes the group's standard deviation, ``batch`` that of all N rewards;
            ``none`` divides by nothing.
        ddof: 1 for the sample's standard deviation, 0 for the population's.
        epsilon: keeps a group of equal rewards finite; its advantages are 0.

    Returns:
        (N,) in the rewards' dtype.

    Source: arXiv:2402.03300 section 4.1.2 (group); arXiv:2503.20783 section 3.2 (none).
    Differs: the paper gives neither ddof nor epsilon; both are TRL's.
    """
    rewards_PG = rewards_N.view(-1, group_size)
    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    # A mean of equal numbers can be off by a rounding; such a group must teach nothing at all.
    centred_PG = centred_PG.masked_fill(
        (rewards_PG == rewards_PG[:, :1]).all(dim=1, keepdim=True), 0.0
    )
    if scale == "none":
        return centred_PG.view(-1)
    over = {"group": rewards_PG, "batch": rewards_N.view(1, -1)}[scale]
    std = torch.std(over, dim=1, correction=ddof, keepdim=True)
    return (centred_PG / (std + epsilon)).view(-1)
