"""Scored groups with their advantages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch

from reason_llm.config import Algorithm
from reason_llm.rollout import Completion, Group
from reason_llm.train import advantages


def with_advantages(
    groups: Sequence[Group],
    algorithm: Algorithm,
    weights: Mapping[str, float] | None = None,
    turn_weight: float = 0.0,
) -> list[Group]:
    """The scored groups with an advantage on every completion, from the rewards alone; 0 for a
    completion without any reward, which counts in no baseline.

    Args:
        weights: of each reward by name, for ``normalization: per_reward``; None: 1 each.
        turn_weight: of the turns' rewards in the total; 0: each completion has one advantage.
    """
    size = len(groups[0].completions)
    completions = [c for group in groups for c in group.completions]
    # A truncated completion that is left out counts in no baseline, either.
    leaves_out = algorithm.truncated == "leave_out"
    counted = [not (leaves_out and c.finish_reason == "length") for c in completions]
    counted_N = torch.tensor(counted)
    if algorithm.normalization == "per_reward":
        names = list(completions[0].rewards)
        by_name = [[c.rewards[name] for c in completions] for name in names]
        rewards_RN = torch.tensor(by_name, dtype=torch.float64)
        own = [weights[name] if weights else 1.0 for name in names]
        weights_R = torch.tensor(own, dtype=torch.float64)
        values_KN = advantages.per_reward_advantages(
            rewards_RN, weights_R, size, algorithm.scale, counted_N=counted_N
        )
    else:
        earned = zip_longest(*(c.earned for c in completions), fillvalue=0.0)
        earned_KN = torch.tensor(list(earned), dtype=torch.float64)
        rewards = [c.reward if c.has_reward else math.nan for c in completions]
        rewards_N = torch.tensor(rewards, dtype=torch.float64)
        values_KN = advantages.group_advantages(
            rewards_N,
            size,
            algorithm.scale,
            algorithm.baseline,
            counted_N=counted_N,
            earned_KN=turn_weight * earned_KN,
        )
    values = iter(values_KN.view(-1, len(completions)).T.tolist())

    def with_own(completion: Completion) -> Completion:
        own = next(values)
        turns = tuple(own[: len(completion.turn_rewards)]) if turn_weight else ()
        return replace(completion, advantage=own[0], turn_advantages=turns)

    return [replace(group, completions=tuple(map(with_own, group.completions))) for group in groups]
