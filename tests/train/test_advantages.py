"""Advantages against numbers worked by hand and known vectors."""

from typing import Any

import pytest
import torch

from reason_llm.train.advantages import (
    group_advantages,
    per_reward_advantages,
    returns_to_go,
    whiten,
)


def advantages(rewards: list[float], size: int, scale: str, **options: Any) -> list[float]:
    tensor = torch.tensor(rewards, dtype=torch.float64)
    return group_advantages(tensor, size, scale, **options).tolist()  # type: ignore[arg-type]


def test_group_scale_by_hand() -> None:
    # mean 0.25, sample variance (3 * 0.0625 + 0.5625) / 3 = 0.25, std 0.5
    by_hand = [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]
    assert advantages([1, 0, 0, 0], 4, "group") == pytest.approx(by_hand, abs=1e-12)


def test_no_scale_is_dr_grpo() -> None:
    rewards = [0.0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 0]
    expected = [-0.25] * 5 + [0.75, 0.75, -0.25]
    expected += [-0.375] * 3 + [0.625, 0.625, -0.375, 0.625, -0.375]
    assert advantages(rewards, 8, "none") == pytest.approx(expected, abs=1e-12)


def test_batch_scale_divides_by_the_deviation_of_all() -> None:
    # rewards 0 2 4 4: group means 1 and 4; over all, mean 2.5, sample variance 11 / 3
    std = (11 / 3) ** 0.5 + 1e-4
    expected = [-1 / std, 1 / std, 0, 0]
    assert advantages([0, 2, 4, 4], 2, "batch") == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_equal_rewards_teach_exactly_nothing(scale: str, value: float) -> None:
    assert advantages([value] * 6, 6, scale) == [0.0] * 6


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    by_hand = [3 - 1.5, 1 - 2.5, 2 - 2.0]
    found = advantages([3, 1, 2], 3, "none", baseline="leave_one_out")
    assert found == pytest.approx(by_hand, abs=1e-12)
    found = advantages([8, 5, 1, 1], 4, "none", baseline="leave_one_out")
    assert found == pytest.approx([8 - 7 / 3, 5 - 10 / 3, 1 - 14 / 3, 1 - 14 / 3], abs=1e-12)


def test_without_a_baseline_the_reward_is_the_advantage() -> None:
    assert advantages([3, 0, 0, 0], 4, "none", baseline="none") == [3, 0, 0, 0]
    assert advantages([1, 1, 1, 1], 4, "none", baseline="none") == [1, 1, 1, 1]


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_equal_rewards_without_a_baseline_are_not_blown_up(scale: str) -> None:
    """1 over a deviation of 0 would weigh 10,000 times what 1 over another one does."""
    assert advantages([1, 1, 1, 1], 4, scale, baseline="none") == [0, 0, 0, 0]
    found = advantages([1, 1, 3, 5], 2, "group", baseline="none")
    std = 2**0.5 + 1e-4
    assert found == pytest.approx([0, 0, 3 / std, 5 / std], abs=1e-12)


def test_a_completion_without_a_reward_counts_nowhere() -> None:
    """The known vector of TRL: None is left out of mean and deviation, and its advantage is 0."""
    nan = float("nan")
    expected = [0.5772502865071344, -1.1545005730142686, 0.0, 0.5772502865071344]
    expected += [-0.4999000199960008] * 3 + [1.4997000599880024]
    found = advantages([1, 0, nan, 1, 0, 0, 0, 1], 4, "group")
    assert found == pytest.approx(expected, abs=1e-12)
    found = advantages([3, 1, nan, 2, nan, nan], 3, "none", baseline="leave_one_out")
    assert found == pytest.approx([2, -2, 0, 0, 0, 0], abs=1e-12)
    assert advantages([1, 1, nan, 1], 4, "group") == [0, 0, 0, 0]
    found = advantages([1, nan, 2, 3], 2, "whiten", baseline="none", epsilon=0.0)
    assert found == pytest.approx([-1, 0, 0, 1], abs=1e-12)
    rewards = torch.tensor([[1.0, 0.0, nan, nan], [nan, 2.0, 4.0, nan]], dtype=torch.float64)
    found = per_reward_advantages(rewards, torch.ones(2, dtype=torch.float64), 4, "whiten").tolist()
    half = 0.5**0.5  # of two values their distance from the mean over their deviation
    alone = torch.tensor([half, -half - half, half], dtype=torch.float64)
    assert found[3] == 0
    assert found[:3] == pytest.approx((alone / alone.std()).tolist(), abs=1e-3)


def test_whitening_takes_mean_and_deviation_over_the_batch() -> None:
    found = advantages([5, 3, 1, 1], 2, "whiten", baseline="none", epsilon=0.0)
    std = (11 / 3) ** 0.5  # deviations 2.5 0.5 -1.5 -1.5
    assert found == pytest.approx([2.5 / std, 0.5 / std, -1.5 / std, -1.5 / std], abs=1e-12)


def test_each_reward_is_normalised_by_itself() -> None:
    """Two rewards whose sums tie: only GDPO tells the completions apart."""
    rewards = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    rewards[1] *= 3  # of another size
    weights = torch.tensor([1.0, 1 / 3], dtype=torch.float64)
    total = (weights[:, None] * rewards).sum(0)
    assert total[0] == total[1]
    unit = 0.5 / (1 / 3) ** 0.5  # half over the sample deviation of 1 0 1 0
    found = per_reward_advantages(rewards, weights, 4, "none", epsilon=0.0)
    by_hand = [unit - unit / 3, -unit + unit / 3, unit + unit / 3, -unit - unit / 3]
    assert found.tolist() == pytest.approx(by_hand, abs=1e-12)
    whitened = per_reward_advantages(rewards, weights, 4, "whiten", epsilon=0.0)
    assert whitened.mean().item() == pytest.approx(0, abs=1e-12)
    assert whitened.std().item() == pytest.approx(1, abs=1e-12)


def test_returns_add_up_what_is_to_come() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0, 9.0], [0.0, 1.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    found = returns_to_go(rewards, mask, gamma=0.5)
    assert found.tolist() == [[3.0, 4.0, 4.0, 0.0], [0.5, 1.0, 0.0, 0.0]]


def test_whitening_of_equal_values_is_zero_and_masked_ones_count_nothing() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    assert whiten(torch.tensor([[2.0, 2.0], [2.0, 7.0]]), mask).tolist() == [[0, 0], [0, 0]]
    found = whiten(torch.tensor([[1.0, 2.0], [3.0, 99.0]]), mask, epsilon=0.0)
    assert found.tolist() == [[-1.0, 0.0], [1.0, 0.0]]
