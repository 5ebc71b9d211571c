"""The loss of reward models, a number for each of P pairs, and their preference for length."""

import math
from collections.abc import Sequence
from statistics import StatisticsError, correlation

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(
    chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | None = None, centering: float = 0.0
) -> Tensor:
    """``-log sigmoid(chosen - rejected - margin) + centering (chosen + rejected)^2``; the last term
    pulls the rewards' mean to 0, which pairs alone leave open.

    Source: arXiv:2203.02155 eq. 1 with K = 2; the margin, arXiv:2307.09288 eq. 2; centering,
    arXiv:2312.09244 eq. 2 (0.01 there).
    """
    difference_P = chosen_P - rejected_P
    if margin_P is not None:
        difference_P = difference_P - margin_P
    return -logsigmoid(difference_P) + centering * (chosen_P + rejected_P).square()


def in_order(ahead_P: Tensor) -> Tensor:
    """(P,) accuracy of each pair, from chosen minus rejected: 1 where it is above 0, 1/2 at 0."""
    return (ahead_P > 0).float() + 0.5 * (ahead_P == 0).float()


def length_bias(
    chosen_rewards: Sequence[float],
    rejected_rewards: Sequence[float],
    chosen_lengths: Sequence[int],
    rejected_lengths: Sequence[int],
) -> dict[str, float]:
    """Dependence of a reward model on length in tokens, on held-out pairs: the correlation of both
    over all completions; the accuracy where the chosen completion is the longer one, and where it
    is not (below 1/2 the model goes by length), with the number of these pairs; that of always
    choosing the longer one. A tie counts one half. NaN where there are no pairs, or no variance.

    Source: length correlations of RLHF's rewards, arXiv:2310.03716.
    """
    rewards = zip(chosen_rewards, rejected_rewards, strict=True)
    are_right = [0.5 if chosen == other else float(chosen > other) for chosen, other in rewards]
    lengths = zip(chosen_lengths, rejected_lengths, strict=True)
    are_longer = [chosen > other for chosen, other in lengths]
    both = list(zip(are_right, are_longer, strict=True))
    not_longer = [right for right, longer in both if not longer]
    try:
        pearson = correlation(
            [*chosen_rewards, *rejected_rewards], [*chosen_lengths, *rejected_lengths]
        )
    except StatisticsError:  # fewer than two numbers, or one of the two is constant
        pearson = math.nan

    def mean(of: Sequence[float]) -> float:
        return sum(of) / len(of) if of else math.nan

    return {
        "length_correlation": pearson,
        "accuracy_chosen_longer": mean([right for right, longer in both if longer]),
        "accuracy_chosen_not_longer": mean(not_longer),
        "pairs_chosen_not_longer": float(len(not_longer)),
        "accuracy_prefer_longer": mean(are_longer),
    }
