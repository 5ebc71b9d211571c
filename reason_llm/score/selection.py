"""Scored completions become data for offline stages: the best ones, pairs, and prompts that hold
their completion's score.

Completions are named by their places in the group; among equal rewards the earlier one counts as
the better for a choice and as the worse for a rejection. A completion without a reward is never
chosen and never rejected.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from statistics import fmean, stdev

from reason_llm.errors import ConfigError
from reason_llm.rollout import Group

Pair = tuple[int, int]
"""Places of the chosen and of the rejected completion."""
CONDITIONAL_TEMPLATE = "{input} <rm_score>: {reward} "
"""Prompt of conditional SFT; the space at its end belongs to it."""


def rewards_of(group: Group, name: str | None = None) -> dict[int, float]:
    """Rewards of those completions that have one, by place.

    Args:
        name: of one reward; None: the weighted sum of all.

    Raises:
        ConfigError: no completion has a reward of that name.
    """
    if name is not None and not any(name in c.rewards for c in group.completions):
        names = ", ".join(sorted({each for c in group.completions for each in c.rewards}))
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
    """Whether a reward is ``minimum`` or more, but for the rounding of a weighted sum: 0.6 + 0.3 +
    0.1 is below 1."""
    return reward >= minimum or math.isclose(reward, minimum, rel_tol=1e-9)


def at_least(
    group: Group, minimum: float, limit: int | None = None, reward: str | None = None
) -> list[int]:
    """Completions whose reward is ``minimum`` or more, in the order of sampling; of those with the
    same tokens only the first.

    Args:
        limit: the best so many of them; None: all.

    Source: ReST, arXiv:2308.08998 eq. 4; STaR, arXiv:2203.14465.
    """
    rewards = rewards_of(group, reward)
    first = {
        group.completions[i].token_ids: i
        for i in reversed(rewards)
        if reaches(rewards[i], minimum)
    }  # fmt: skip
    distinct = {i: rewards[i] for i in sorted(first.values())}
    return sorted(_best_first(distinct)[:limit])


def best_worst_pair(
    group: Group, min_margin: float = 0.0, reward: str | None = None
) -> Pair | None:
    """The first of the highest and the first of the lowest reward; None where they are equal, are
    less than ``min_margin`` apart, or have the same tokens.

    Source: iterative DPO, arXiv:2405.07863; arXiv:2401.10020.
    """
    rewards = rewards_of(group, reward)
    if not rewards:
        return None
    pair = (max(rewards, key=rewards.__getitem__), min(rewards, key=rewards.__getitem__))
    return pair if _teaches(group, rewards, pair, min_margin) else None


def right_wrong_pairs(
    group: Group, minimum: float, min_margin: float = 0.0, reward: str | None = None
) -> list[Pair]:
    """Each right completion with each wrong one, but for pairs whose rewards are less than
    ``min_margin`` apart and pairs of the same tokens.

    Args:
        minimum: the reward from which on a completion is right.
    """
    rewards = rewards_of(group, reward)
    right = [i for i, value in rewards.items() if reaches(value, minimum)]
    wrong = [i for i in rewards if i not in right]
    pairs = [(i, j) for i in right for j in wrong]
    return [pair for pair in pairs if _teaches(group, rewards, pair, min_margin)]


def _best_first(rewards: dict[int, float]) -> list[int]:
    return sorted(rewards, key=lambda i: (-rewards[i], i))


def _teaches(group: Group, rewards: dict[int, float], pair: Pair, min_margin: float) -> bool:
    chosen, rejected = pair
    margin = rewards[chosen] - rewards[rejected]
    tokens = group.completions[chosen].token_ids, group.completions[rejected].token_ids
    return margin >= min_margin and tokens[0] != tokens[1]


def best_of_n_kl(n: int) -> float:
    """``log n - (n - 1) / n``, an upper bound in nats of how far best-of-n is from the sampler.

    Raises:
        ValueError: n is below 1.

    Source: arXiv:2009.01325; that it is a bound, arXiv:2401.01879.
    """
    if n < 1:
        raise ValueError(f"best of {n}: there must be 1 completion or more")
    return math.log(n) - (n - 1) / n


def z_scores(rewards: Sequence[float]) -> list[float]:
    """``(r - mean) / std`` over the whole set, with the unbiased deviation; 0 for equal rewards.

    Source: OpenRLHF's ``--normalize_reward``.
    Differs: it divides by 0 where the rewards are equal.
    """
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean, deviation = fmean(rewards), stdev(rewards)
    return [(reward - mean) / deviation for reward in rewards]


def conditional_prompt(text: str, reward: float, template: str = CONDITIONAL_TEMPLATE) -> str:
    """The prompt of conditional SFT: ``reward`` with two decimals after the prompt's text.

    Args:
        reward: in training the completion's own, as ``z_scores`` gives it; in sampling the one
            that is asked for.

    Raises:
        ConfigError: the template lacks a field.

    Source: arXiv:2308.12050; OpenRLHF of February 2024, ``conditional_sft_processor``.
    """
    if missing := [field for field in ("{input}", "{reward}") if field not in template]:
        raise ConfigError(f"template {template!r} lacks {' and '.join(missing)}; add it")
    # The text last: a field's name in it is not replaced.
    return template.replace("{reward}", f"{reward:.2f}").replace("{input}", text)


def quantile_edges(rewards: Sequence[float], num_bins: int) -> list[float]:
    """The num_bins - 1 quantiles of the training rewards between their bins, linearly interpolated.

    Raises:
        ValueError: no rewards, or fewer than 2 bins.

    Source: quantile tokens, Quark, arXiv:2205.13636 (5 bins).
    """
    if not rewards or num_bins < 2:
        raise ValueError(
            f"{num_bins} bins of {len(rewards)} rewards; there must be 2 bins and 1 reward or more"
        )
    ordered = sorted(rewards)
    edges = []
    for k in range(1, num_bins):
        # In whole numbers: where an edge is a reward, it is that very number.
        below, part = divmod(k * (len(ordered) - 1), num_bins)
        above = min(below + 1, len(ordered) - 1)
        edges.append(ordered[below] + (ordered[above] - ordered[below]) * part / num_bins)
    return edges


def quantile_bin(reward: float, edges: Sequence[float]) -> int:
    """Number of edges that the reward reaches: 0 is the worst bin, a reward on an edge is above it.

    Source: arXiv:2205.13636.
    """
    return bisect_right(edges, reward)


def bin_text(index: int) -> str:
    """Text that stands for a bin in the prompt: plain text, no token of its own, as the embedding
    is frozen."""
    return f"<|reward_{index}|>"
