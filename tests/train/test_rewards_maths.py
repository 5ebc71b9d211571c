"""The loss of reward models against its equation, and what is told about their scores."""

import math

import pytest
import torch

from reason_llm.train import rewards


def test_centering_pulls_the_sum_to_0_and_leaves_the_difference() -> None:
    chosen, rejected = (torch.tensor([n], requires_grad=True) for n in (3.0, 2.0))
    loss = rewards.bradley_terry(chosen, rejected, centering=0.01)
    loss.sum().backward()
    push = 1 / (1 + math.e)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-1.0)) + 0.25)
    assert chosen.grad.item() == pytest.approx(-push + 0.1)
    assert rejected.grad.item() == pytest.approx(push + 0.1)


def test_length_bias_of_four_pairs() -> None:
    """(9, 3): right; (8, 7): a tie; (7, 6): wrong; (5, 5), which is not longer: right."""
    bias = rewards.length_bias(
        [2.0, 1.0, 0.0, 3.0], [1.0, 1.0, 2.0, 0.0], [9, 8, 7, 5], [3, 7, 6, 5]
    )
    assert bias == {
        "accuracy_chosen_longer": 0.5, "accuracy_chosen_not_longer": 1.0,
        "pairs_chosen_not_longer": 1.0, "accuracy_prefer_longer": 0.75,
        "length_correlation": bias["length_correlation"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("pairs", "pearson"),
    [
        (([3.0, 1.0], [2.0, 4.0], [30, 10], [20, 40]), 1.0),
        (([-3.0, -1.0], [-2.0, -4.0], [30, 10], [20, 40]), -1.0),
        # Deviations of rewards (-1, 0, 0, 1) and lengths (-1, 1, -1, 1): 2 / sqrt(2 * 4).
        (([0.0, 1.0], [1.0, 2.0], [1, 3], [1, 3]), 0.5**0.5),
        (([], [], [], []), math.nan),
        (([1.0], [1.0], [1], [2]), math.nan),
    ],
)
def test_pearson_is_over_all_completions(pairs: tuple, pearson: float) -> None:
    found = rewards.length_bias(*pairs)["length_correlation"]
    assert found == pytest.approx(pearson, nan_ok=True)
