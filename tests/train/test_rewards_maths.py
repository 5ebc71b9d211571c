"""Losses of reward models against their equations, and what is told about their scores.

1. Bradley-Terry with margin and centering.     2. Rankings.       3. The scale of several rewards.
4. Process rewards.     5. Dependence on length.
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


def test_bradley_terry_of_two_pairs() -> None:
    chosen, rejected = tensor([1.0, 0.5]).requires_grad_(), tensor([0.0, 2.5]).requires_grad_()
    loss = rewards.bradley_terry(chosen, rejected)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([softplus(-1.0), softplus(2.0)])
    push = [1 / (1 + math.e), 1 / (1 + math.exp(-2.0))]  # 1 - sigmoid(difference)
    assert chosen.grad.tolist() == pytest.approx([-each for each in push])
    assert rejected.grad.tolist() == pytest.approx(push)


def test_equal_rewards_cost_log_2() -> None:
    zeros = tensor([0.0, 0.0])
    assert rewards.bradley_terry(zeros, zeros).tolist() == pytest.approx([math.log(2)] * 2)


def test_the_margin_must_be_exceeded() -> None:
    loss = rewards.bradley_terry(tensor([1.0, 1.0]), tensor([0.0, 0.0]), tensor([3.0, 0.0]))
    assert loss.tolist() == pytest.approx([softplus(2.0), softplus(-1.0)])


def test_centering_pulls_the_sum_to_0_and_leaves_the_difference() -> None:
    chosen, rejected = tensor([3.0]).requires_grad_(), tensor([2.0]).requires_grad_()
    loss = rewards.bradley_terry(chosen, rejected, centering=0.01)
    loss.sum().backward()
    push = 1 / (1 + math.e)
    assert loss.item() == pytest.approx(softplus(-1.0) + 0.25)
    assert chosen.grad.item() == pytest.approx(-push + 0.1)
    assert rejected.grad.item() == pytest.approx(push + 0.1)


def test_a_ranking_is_the_mean_of_its_pairs() -> None:
    scores = tensor([2.0, 0.0, 1.0]).requires_grad_()
    loss = rewards.ranking_loss(scores)
    loss.backward()
    pairs = [softplus(-2.0), softplus(-1.0), softplus(1.0)]  # 0 over 1, 0 over 2, 1 over 2
    assert loss.item() == pytest.approx(sum(pairs) / 3)
    assert scores.grad[0] < 0 < scores.grad[2]
    pair = rewards.ranking_loss(tensor([1.0, 0.0]))
    assert pair.item() == pytest.approx(rewards.bradley_terry(tensor([1.0]), tensor([0.0])).item())
    with pytest.raises(ValueError, match="ranking of 1 completions"):
        rewards.ranking_loss(tensor([1.0]))


def test_rewards_are_normalized_by_the_given_statistics() -> None:
    values = rewards.normalized(tensor([1.0, 5.0, math.nan]), mean=3.0, std=0.5)
    assert values[:2].tolist() == [-4.0, 4.0]
    assert values[2].isnan()
    constant = rewards.normalized(tensor([3.0, math.nan]), mean=3.0, std=0.0)
    assert constant[0] == 0
    assert constant[1].isnan()


def test_the_total_is_weighted_and_cut_off() -> None:
    table = tensor([[1.0, -2.0, math.nan], [3.0, 30.0, 1.0]])
    total = rewards.weighted_total(table, tensor([2.0, 0.5]))
    assert total[:2].tolist() == [3.5, 11.0]
    assert total[2].isnan()
    cut = rewards.weighted_total(table, tensor([2.0, 0.5]), clip=(-1.0, 10.0))
    assert cut[:2].tolist() == [3.5, 10.0]
    low = rewards.weighted_total(table[:, :1], tensor([-2.0, 0.0]), clip=(-1.0, 10.0))
    assert low.tolist() == [-1.0]


def test_process_rewards() -> None:
    steps = [0.5, 0.25, 0.8]
    by_name = {n: rewards.prm_aggregate(steps, n) for n in ("min", "product", "last", "mean")}
    assert by_name == pytest.approx({"min": 0.25, "product": 0.1, "last": 0.8, "mean": 1.55 / 3})
    assert rewards.prm_aggregate([0.7], "product") == 0.7
    with pytest.raises(ValueError, match="without steps"):
        rewards.prm_aggregate([], "min")


def test_length_bias_of_four_pairs() -> None:
    bias = rewards.length_bias(
        [2.0, 1.0, 0.0, 3.0], [1.0, 1.0, 2.0, 0.0], [9, 8, 7, 5], [3, 7, 6, 5]
    )
    assert bias.accuracy == rewards.PairAccuracy(2, 4)  # equal rewards are wrong
    assert bias.chosen_longer == rewards.PairAccuracy(1, 3)
    assert bias.chosen_not_longer == rewards.PairAccuracy(1, 1)  # equal lengths are here
    assert bias.prefer_longer == rewards.PairAccuracy(3, 4)  # and wrong here
    assert bias.accuracy.fraction == 0.5
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
