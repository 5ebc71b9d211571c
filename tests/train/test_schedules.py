"""Learning-rate schedules by their names in Transformers."""

import pytest

from reason_llm.config import TrainSection
from reason_llm.errors import ConfigError
from reason_llm.train import check_schedule, optim


def rates(total: int, **options: object) -> list[float]:
    config = TrainSection(learning_rate=2.0, **options)
    check_schedule(config, total)
    return [optim.learning_rate(config, step, total) for step in range(total)]


def test_each_name_by_hand() -> None:
    floor = {"schedule": "cosine_with_min_lr", "schedule_options": {"min_lr_rate": 0.5}}
    assert rates(2, **floor) == pytest.approx([2.0, 1.5])
    twice = {"schedule": "cosine_with_restarts", "schedule_options": {"num_cycles": 2}}
    assert rates(4, **twice) == pytest.approx([2.0, 1.0, 2.0, 1.0])
    square = {"schedule": "polynomial", "schedule_options": {"power": 2, "lr_end": 0.0}}
    assert rates(2, **square) == pytest.approx([2.0, 0.5])
    stable = {"schedule": "warmup_stable_decay", "schedule_options": {"num_decay_steps": 2}}
    assert rates(4, **stable)[:2] == pytest.approx([2.0, 2.0])
    assert rates(4, **stable)[2] > rates(4, **stable)[3] > 0
    assert rates(9, schedule="inverse_sqrt", warmup_steps=4)[3:] == pytest.approx(
        [2.0, *(2.0 * (4 / step) ** 0.5 for step in range(4, 9))]
    )


def test_a_rate_of_0_has_any_schedule() -> None:
    config = TrainSection(learning_rate=0.0, schedule="polynomial")
    assert optim.learning_rate(config, 1, 4) == 0.0


@pytest.mark.parametrize("name", ["linear", "cosine", "inverse_sqrt", "polynomial"])
def test_the_warm_up_rises_to_the_rate_from_its_first_step(name: str) -> None:
    assert rates(8, schedule=name, warmup_steps=4)[:4] == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("warmup_stable_decay", {}),
        ("cosine_with_min_lr", {}),
        ("cosine", {"cycles": 2}),
        ("constant", {"power": 2}),
    ],
)
def test_what_a_schedule_cannot_take_is_one_line(schedule: str, options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"train.schedule={schedule} .*cannot be used"):
        rates(4, schedule=schedule, schedule_options=options)
