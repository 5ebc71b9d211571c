"""The loss of reward models against its equation, and what is told about their scores.

1. Bradley-Terry with centering.     2. Dependence on length.
"""

import math

import pytest
import torch

from reason_llm.train import rewards


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def softplus(x: float) -> float:
    """``-log sigmoid(-x)``."""
    return math.log1p(math.exp(x))


def test_centering_pulls_the_sum_to_0_and_leaves_the_difference() -> None:
    chosen, rejected = tensor([3.0]).requires_grad_(), tensor([2.0]).requires_grad_()
    loss = rewards.bradley_terry(chosen, rejected, centering=0.01)
    loss.sum().backward()
    push = 1 / (1 + math.e)
    assert loss.item() == pytest.approx(softplus(-1.0) + 0.25)
    assert chosen.grad.item() == pytest.approx(-push + 0.1)
    assert rejected.grad.item() == pytest.approx(push + 0.1)
    assert rewards.in_order(tensor([0.5, 0.0, -0.5])).tolist() == [1.0, 0.5, 0.0]


def test_length_bias_of_four_pairs() -> None:
    bias = rewards.length_bias(
        [2.0, 1.0, 0.0, 3.0], [1.0, 1.0, 2.0, 0.0], [9, 8, 7, 5], [3, 7, 6, 5]
    )
    assert bias.accuracy == rewards.PairAccuracy(2.5, 4)  # equal rewards count one half
    # (9, 3): right; (8, 7): a tie; (7, 6): wrong.
    assert bias.chosen_longer == rewards.PairAccuracy(1.5, 3)
    assert bias.chosen_not_longer == rewards.PairAccuracy(1, 1)  # equal lengths are here
    assert bias.prefer_longer == rewards.PairAccuracy(3, 4)  # and wrong here
    assert bias.accuracy.fraction == 0.625
    assert math.isnan(rewards.PairAccuracy(0, 0).fraction)


def test_pearson_is_over_all_completions() -> None:
    rising = rewards.length_bias([3.0, 1.0], [2.0, 4.0], [30, 10], [20, 40])
    falling = rewards.length_bias([-3.0, -1.0], [-2.0, -4.0], [30, 10], [20, 40])
    assert (rising.pearson, falling.pearson) == pytest.approx((1.0, -1.0))
    # Deviations of rewards (-1, 0, 0, 1) and lengths (-1, 1, -1, 1): 2 / sqrt(2 * 4).
    mixed = rewards.length_bias([0.0, 1.0], [1.0, 2.0], [1, 3], [1, 3])
    assert mixed.pearson == pytest.approx(1 / math.sqrt(2))


@pytest.mark.parametrize("scores", [([], []), ([1.0], [1.0])])
def test_pearson_of_too_little_is_nan(scores: tuple) -> None:
    bias = rewards.length_bias(*scores, [1][: len(scores[0])], [2][: len(scores[0])])
    assert math.isnan(bias.pearson)


def test_preferring_the_longer_may_be_all_that_a_model_does() -> None:
    bias = rewards.length_bias([9.0, 2.0], [1.0, 5.0], [9, 2], [1, 5])
    assert bias.chosen_longer.fraction == 1.0
    assert bias.chosen_not_longer.fraction == 0.0
    assert bias.pearson == pytest.approx(1.0)
