"""PPO's rewards, advantages and critic against their equations, on numbers worked by hand.

1. The KL in the reward, and where the score goes.      2. GAE: gaps, padding, two lambdas.
3. The clipped value loss and its gradient.     4. Explained variance.      5. The KL's coefficient.
"""

import math

import pytest
import torch

from reason_llm.train import advantages as values
from reason_llm.train.advantages import returns_to_go

NAN = math.nan


def tensor(numbers: object) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


MASK = torch.tensor(
    [[False, True, True, False, True, False], [True, False, False, False, False, False]]
)


def test_the_score_is_at_the_last_trained_token_and_the_kl_at_each() -> None:
    """Two rows, one with a tool gap and padding on both sides; garbage outside the mask."""
    logprobs = tensor([[NAN, -1.0, -2.0, NAN, -3.0, NAN], [-1.0, *[NAN] * 5]])
    ref = tensor([[NAN, -1.5, -1.0, NAN, -3.0, NAN], [-21.0, *[NAN] * 5]])
    rewards = values.kl_in_reward(logprobs, ref, MASK, tensor([4.0, -6.0]), 0.1)
    assert rewards[0].tolist() == pytest.approx([0, -0.05, 0.1, 0, 4.0, 0])
    assert rewards[1].tolist() == pytest.approx([-8.0, 0, 0, 0, 0, 0])
    squares = values.kl_in_reward(logprobs, ref, MASK, tensor([4.0, -6.0]), 0.1, "k2")
    assert squares[0].tolist() == pytest.approx([0, -0.0125, -0.05, 0, 4.0, 0])


def test_a_row_without_trained_tokens_gets_no_reward() -> None:
    some = tensor([[-1.0, -2.0]])
    mask = torch.zeros(1, 2, dtype=torch.bool)
    assert values.kl_in_reward(some, some - 1, mask, tensor([5.0]), 0.1).tolist() == [[0.0, 0.0]]


def test_gae_goes_over_gaps_and_garbage_to_the_next_trained_token() -> None:
    mask = torch.tensor([[True, False, True, False, True, False]])
    rewards = tensor([[0.0, NAN, 0.0, 7.0, 10.0, NAN]])
    estimates = tensor([[1.0, 50.0, 3.0, NAN, -2.0, math.inf]])
    advantages, returns = values.gae(rewards, estimates, mask, 0.5, 0.5)
    assert advantages.tolist() == [[0.25, 0.0, -1.0, 0.0, 12.0, 0.0]]
    assert returns.tolist() == [[2.5, 0.0, 5.0, 0.0, 10.0, 0.0]]  # whole


def test_gae_of_rows_that_end_at_different_places() -> None:
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    rewards, estimates = tensor([[1.0, 9, 9], [9, 9, 9], [0, 0, 1.0]]), tensor([[0.25] * 3] * 3)
    advantages, returns = values.gae(rewards, estimates, mask, 1.0, 1.0)
    assert advantages.tolist() == [[0.75, 0, 0], [0, 0, 0], [0.75, 0.75, 0.75]]
    assert returns.tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 1]]


def test_gae_with_lambda_1_is_the_return_minus_the_value_and_with_0_the_error_of_one_step() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(3, 8, dtype=torch.float64, generator=generator)
    estimates = torch.randn(3, 8, dtype=torch.float64, generator=generator)
    mask = torch.rand(3, 8, generator=generator) < 0.6
    advantages, returns = values.gae(rewards, estimates, mask, 0.9, 1.0)
    expected = returns_to_go(rewards, mask, 0.9)
    assert torch.allclose(returns, expected)
    assert torch.allclose(advantages, torch.where(mask, expected - estimates, 0.0))
    every = torch.ones(3, 2).bool()
    one_step, _ = values.gae(rewards[:, :2], estimates[:, :2], every, 0.9, 0.0)
    assert torch.allclose(one_step[:, 0], rewards[:, 0] + 0.9 * estimates[:, 1] - estimates[:, 0])


@pytest.mark.parametrize(
    ("value", "returned", "loss", "slope"),
    [
        (0.1, 2.0, 1.9**2 / 2, -1.9),  # within the clip
        (0.9, 2.0, 1.8**2 / 2, 0.0),  # went far towards the return: no more gradient
        (-0.9, 2.0, 2.9**2 / 2, -2.9),  # went far from it: the whole error counts
        (0.9, -2.0, 2.9**2 / 2, 2.9),
        (-0.9, -2.0, 1.8**2 / 2, 0.0),
    ],
)
def test_the_clip_stops_the_critic_only_on_its_way_to_the_return(
    value: float, returned: float, loss: float, slope: float
) -> None:
    old = tensor([[7.0]])
    estimates = (old + value).requires_grad_()
    got, clipped = values.value_loss(estimates, old, old + returned, 0.2)
    got.sum().backward()
    assert got.item() == pytest.approx(loss)
    assert estimates.grad.item() == pytest.approx(slope)
    assert clipped.item() == (slope == 0)


def test_value_loss_without_a_clip_is_half_the_square() -> None:
    loss, clipped = values.value_loss(tensor([[3.0]]), tensor([[0.0]]), tensor([[1.0]]), 0.0)
    assert (loss.item(), clipped.item()) == (2.0, False)


def test_explained_variance() -> None:
    returns = tensor([1.0, 5.0])
    assert values.explained_variance(returns, returns) == 1.0
    assert values.explained_variance(tensor([9.0, 9.0]), returns) == 0.0
    half = tensor([0.5, 2.5])  # leaves 0.5 and 2.5: a quarter of the variance
    assert values.explained_variance(half, returns) == pytest.approx(0.75)
    assert values.explained_variance(-returns, returns) == pytest.approx(-3.0)
    for count in (3, 1, 0):
        equal = tensor([0.1] * count)
        assert values.explained_variance(tensor([0.0, 1.0, 3.0])[:count], equal) == 0.0
