"""Losses of reward models, their scores' scale and their preference for length: pure functions.

The losses return one number a pair or a ranking, with gradient; the caller sums them and divides
once by their number over the whole optimizer batch.

Shapes: P pairs, K completions of a ranking, R rewards, N completions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation, fmean
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

StepAggregation = Literal["min", "product", "last", "mean"]
"""How the probabilities of a process reward model's steps become one score."""


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


def ranking_loss(rewards_K: Tensor) -> Tensor:
    """Mean of ``-log sigmoid(r_i - r_j)`` over all pairs of one ranking, i before j. A scalar: one
    ranking is one element of the batch, so that its completions are not fitted K - 1 times.

    Args:
        rewards_K: of the completions from the best to the worst, K at least 2.

    Raises:
        ValueError: fewer than 2 completions.

    Source: arXiv:2203.02155 eq. 1.
    """
    if len(rewards_K) < 2:
        raise ValueError(f"a ranking of {len(rewards_K)} completions has no pair; it needs 2")
    better, worse = torch.triu_indices(len(rewards_K), len(rewards_K), 1, device=rewards_K.device)
    return -logsigmoid(rewards_K[better] - rewards_K[worse]).mean()


def normalized(rewards_N: Tensor, mean: float, std: float) -> Tensor:
    """``(r - mean) / std``, by the fixed mean and deviation of a held-out set; 0 where that set's
    rewards were all equal. NaN, which stands for no reward, stays NaN.
    """
    if std > 0:
        return (rewards_N - mean) / std
    return torch.where(rewards_N.isnan(), rewards_N, 0.0)


def weighted_total(
    rewards_RN: Tensor, weights_R: Tensor, clip: tuple[float, float] | None = None
) -> Tensor:
    """``sum_r w_r r``, (N,), cut off at ``clip``; NaN where a completion lacks one of the rewards.

    Source: OpenRLHF's sum of several reward models, without weights there; the limits are its
    ``reward.clip_range``, (-10, 10) there.
    """
    total_N = (weights_R[:, None] * rewards_RN).sum(dim=0)
    return total_N if clip is None else total_N.clamp(*clip)


_AGGREGATIONS: dict[StepAggregation, Callable[[Sequence[float]], float]] = {
    "min": min,
    "product": math.prod,
    "last": lambda probabilities: probabilities[-1],
    "mean": fmean,
}


def prm_aggregate(step_probabilities: Sequence[float], aggregation: StepAggregation) -> float:
    """Score of a completion from the probabilities that each of its steps is right.

    Raises:
        ValueError: no steps.

    Source: product, arXiv:2305.20050; min, arXiv:2312.08935.
    """
    if not step_probabilities:
        raise ValueError("a completion without steps has no process reward; split it into steps")
    return float(_AGGREGATIONS[aggregation](step_probabilities))


@dataclass(frozen=True, slots=True)
class PairAccuracy:
    """Pairs and those that are ordered rightly: what a Wilson interval is made of."""

    num_right: int
    num_pairs: int

    @property
    def fraction(self) -> float:
        """NaN if there are no pairs."""
        return self.num_right / self.num_pairs if self.num_pairs else math.nan


@dataclass(frozen=True, slots=True)
class LengthBias:
    """How far a reward model goes by length."""

    pearson: float
    """Correlation of reward and length over all completions; NaN if either is constant."""
    accuracy: PairAccuracy
    """Pairs whose chosen completion has the higher reward; equal rewards are wrong."""
    chosen_longer: PairAccuracy
    """Likewise, where the chosen completion is the longer one."""
    chosen_not_longer: PairAccuracy
    """Likewise, where it is shorter or as long: below 1/2, the model goes by length."""
    prefer_longer: PairAccuracy
    """Of choosing the longer one, without a model; equal lengths are wrong."""


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
    are_right = [chosen > rejected for chosen, rejected in rewards]
    lengths = zip(chosen_lengths, rejected_lengths, strict=True)
    are_longer = [chosen > rejected for chosen, rejected in lengths]
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


def _accuracy(are_right: Sequence[bool]) -> PairAccuracy:
    return PairAccuracy(sum(are_right), len(are_right))
