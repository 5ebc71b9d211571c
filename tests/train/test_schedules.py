"""Learning-rate schedules by their names in Transformers."""

import pytest

from reason_llm.config import TrainSection
from reason_llm.train import optim


def rates(total: int, **options: object) -> list[float]:
    config = TrainSection(learning_rate=2.0, **options)
    return [optim.learning_rate(config, step, total) for step in range(total)]


def test_each_name_by_hand() -> None:
    assert rates(2, schedule="cosine_with_min_lr") == pytest.approx([2.0, 1.1])
    stable = rates(20, schedule="warmup_stable_decay")
    assert stable[:18] == [2.0] * 18
    assert 2.0 >= stable[18] > stable[19] > 0
    assert rates(9, schedule="inverse_sqrt", warmup_steps=4)[3:] == pytest.approx(
        [2.0, *(2.0 * (4 / step) ** 0.5 for step in range(4, 9))]
    )


def test_a_rate_of_0_has_any_schedule() -> None:
    config = TrainSection(learning_rate=0.0, schedule="cosine_with_min_lr")
    assert optim.learning_rate(config, 1, 4) == 0.0


@pytest.mark.parametrize("name", ["linear", "cosine", "inverse_sqrt", "warmup_stable_decay"])
def test_the_warm_up_rises_to_the_rate_from_its_first_step(name: str) -> None:
    assert rates(8, schedule=name, warmup_steps=4)[:4] == [0.5, 1.0, 1.5, 2.0]
