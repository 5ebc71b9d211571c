"""Scored completions become data for offline stages: the best ones, and pairs.

Completions are named by their places in the group; among equal rewards the earliest completion is
chosen first, and is rejected first. A completion without a reward is never chosen and never
rejected.
"""

import math

from reason_llm.errors import ConfigError
from reason_llm.rollout import Group

Pair = tuple[int, int]
"""Places of the chosen and of the rejected completion."""


def rewards_of(group: Group, name: str | None = None) -> dict[int, float]:
    """Rewards of those completions that have one, by place.

    Args:
        name: of one reward; None: the weighted sum of all.

    Raises:
        ConfigError: no completion has a reward of that name.
    """
    if name is not None and not any(name in c.rewards for c in group.completions):
        names = ", ".join(sorted({reward for c in group.completions for reward in c.rewards}))
        raise ConfigError(
            f"prompt {group.prompt.id!r} has no reward {name!r}; it has {names or 'none'}"
        )
    totals = [c.reward if c.has_reward else None for c in group.completions]
    values = [c.rewards.get(name) for c in group.completions] if name is not None else totals
    return {i: v for i, v in enumerate(values) if v is not None and not math.isnan(v)}


def best_of_n(group: Group, count: int = 1, reward: str | None = None) -> list[int]:
    """The ``count`` highest rewards' completions, best first; fewer where fewer have a reward.

    Source: arXiv:2307.09288 section 3.2.3; RAFT, arXiv:2304.06767 algorithm 1.
    """
    return _best_first(rewards_of(group, reward))[:count]


def reaches(reward: float, minimum: float) -> bool:
    """Whether a reward is ``minimum`` or more up to rounding: 0.6 + 0.3 + 0.1 is below 1."""
    return reward >= minimum or math.isclose(reward, minimum, rel_tol=1e-9)


def at_least(group: Group, minimum: float, reward: str | None = None) -> list[int]:
    """Completions whose reward is ``minimum`` or more, best first; of those with the same tokens
    only the first.

    Source: ReST, arXiv:2308.08998 eq. 4; STaR, arXiv:2203.14465.
    """
    rewards = rewards_of(group, reward)
    first = {
        group.completions[i].token_ids: i for i in reversed(rewards) if reaches(rewards[i], minimum)
    }
    return _best_first({i: rewards[i] for i in first.values()})


def best_worst_pair(group: Group, reward: str | None = None) -> Pair | None:
    """The first of the highest and the first of the lowest reward; None where they are equal or
    have the same tokens.

    Source: iterative DPO, arXiv:2405.07863; arXiv:2401.10020.
    """
    rewards = rewards_of(group, reward)
    if not rewards:
        return None
    pair = (max(rewards, key=rewards.__getitem__), min(rewards, key=rewards.__getitem__))
    return pair if _differs(group, pair) else None


def right_wrong_pairs(group: Group, minimum: float, reward: str | None = None) -> list[Pair]:
    """Each right completion with each wrong one, but for pairs of the same tokens.

    Args:
        minimum: the reward from which on a completion is right.
    """
    rewards = rewards_of(group, reward)
    right = [i for i, value in rewards.items() if reaches(value, minimum)]
    wrong = [i for i in rewards if i not in right]
    pairs = [(i, j) for i in right for j in wrong]
    return [pair for pair in pairs if _differs(group, pair)]


def _best_first(rewards: dict[int, float]) -> list[int]:
    return sorted(rewards, key=lambda i: (-rewards[i], i))


def _differs(group: Group, pair: Pair) -> bool:
    chosen, rejected = (group.completions[i].token_ids for i in pair)
    return chosen != rejected
