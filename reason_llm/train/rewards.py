"""The loss of reward models and their preference for length: pure functions.

The loss is one number a pair, with gradient; the caller sums them and divides once by their number
over the whole optimizer batch.

Shapes: P pairs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(
    chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | None = None, centering: float = 0.0
) -> Tensor:
    """``-log sigmoid(chosen - rejected - margin) + centering (chosen + rejected)^2``.

    Args:
        chosen_P, rejected_P: rewards.
        margin_P: by how much the chosen one is better; None: 0.
        centering: pulls the rewards' mean to 0, which pairs alone leave open.

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


@dataclass(frozen=True, slots=True)
class PairAccuracy:
    """Pairs and those that are ordered rightly: what a Wilson interval is made of."""

    num_right: float
    """A tie counts one half."""
    num_pairs: int

    @property
    def fraction(self) -> float:
        """NaN if there are no pairs."""
        return self.num_right / self.num_pairs if self.num_pairs else math.nan


@dataclass(frozen=True, slots=True)
class LengthBias:
    """Dependence of a reward model on length: its accuracy over all pairs, and over those whose
    chosen completion is the longer one, or is not (below 1/2 there, the model goes by length)."""

    pearson: float
    """Correlation of reward and length over all completions; NaN if either is constant."""
    accuracy: PairAccuracy
    chosen_longer: PairAccuracy
    chosen_not_longer: PairAccuracy
    prefer_longer: PairAccuracy
    """Accuracy of always choosing the longer one; equal lengths count as wrong."""


def length_bias(
    chosen_rewards: Sequence[float],
    rejected_rewards: Sequence[float],
    chosen_lengths: Sequence[int],
    rejected_lengths: Sequence[int],
) -> LengthBias:
    """Accuracy of a reward model on held-out pairs and its dependence on length in tokens.

    Source: length correlations of RLHF's rewards, arXiv:2310.03716.
    """
    rewards = zip(chosen_rewards, rejected_rewards, strict=True)
    are_right = [0.5 if chosen == other else float(chosen > other) for chosen, other in rewards]
    lengths = zip(chosen_lengths, rejected_lengths, strict=True)
    are_longer = [chosen > other for chosen, other in lengths]
    both = list(zip(are_right, are_longer, strict=True))
    try:
        pearson = correlation(
            [*chosen_rewards, *rejected_rewards], [*chosen_lengths, *rejected_lengths]
        )
    except StatisticsError:  # fewer than two numbers, or one of the two is constant
        pearson = math.nan
    return LengthBias(
        pearson=pearson,
        accuracy=_accuracy(are_right),
        chosen_longer=_accuracy([right for right, longer in both if longer]),
        chosen_not_longer=_accuracy([right for right, longer in both if not longer]),
        prefer_longer=_accuracy(are_longer),
    )


def _accuracy(are_right: Sequence[float]) -> PairAccuracy:
    return PairAccuracy(sum(are_right), len(are_right))
