"""Advantages against numbers worked by hand and known vectors."""

import pytest
import torch

from reason_llm.train.advantages import group_advantages


def advantages(rewards: list[float], size: int, scale: str, **options: float) -> list[float]:
    tensor = torch.tensor(rewards, dtype=torch.float64)
    return group_advantages(tensor, size, scale, **options).tolist()  # type: ignore[arg-type]


def test_group_scale_by_hand() -> None:
    # mean 0.25, sample variance (3 * 0.0625 + 0.5625) / 3 = 0.25, std 0.5
    by_hand = [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]
    assert advantages([1, 0, 0, 0], 4, "group") == pytest.approx(by_hand, abs=1e-12)


def test_population_deviation_is_an_option() -> None:
    # population variance (0.5625 + 3 * 0.0625) / 4 = 0.1875
    std = 0.1875**0.5
    found = advantages([1, 0, 0, 0], 4, "group", ddof=0, epsilon=0.0)
    assert found == pytest.approx([0.75 / std] + [-0.25 / std] * 3, abs=1e-12)


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


def test_groups_do_not_mix() -> None:
    alone = advantages([1, 0, 3, 5], 4, "group")
    beside = advantages([9, 7, 9, 8, 1, 0, 3, 5], 4, "group")
    assert beside[4:] == alone


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_equal_rewards_teach_exactly_nothing(scale: str, value: float) -> None:
    assert advantages([value] * 6, 6, scale) == [0.0] * 6
