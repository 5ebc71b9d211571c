"""The schedule, and an optimizer state that goes to tensors and back."""

import pytest
import torch

from reason_llm.config import TrainSection
from reason_llm.train import optim


def rates(total: int, **options: object) -> list[float]:
    config = TrainSection(learning_rate=1.0, **options)
    return [optim.learning_rate(config, step, total) for step in range(total)]


def test_schedules_by_hand() -> None:
    assert rates(4) == [1.0] * 4
    assert rates(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(4, schedule="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.5]
    assert rates(4, schedule="cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)


@pytest.mark.filterwarnings("default")  # bitsandbytes warns of its own
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "paged_adamw_8bit"])
def test_state_survives_the_round_trip(name: str) -> None:
    def step(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        parameter.grad = parameter.detach() ** 3
        optimizer.step()

    config = TrainSection(learning_rate=0.1, optimizer=name)
    torch.manual_seed(0)
    first = torch.nn.Parameter(torch.randn(100, 100))
    start = first.detach().clone()
    before = optim.make_optimizer([first], config)
    step(first, before)
    second = torch.nn.Parameter(first.detach().clone())
    after = optim.make_optimizer([second], config)
    optim.load_state_tensors(after, {k: v.clone() for k, v in optim.state_tensors(before).items()})
    step(first, before)
    step(second, after)
    assert torch.equal(first, second)
    assert not torch.equal(first, start)
    large = [t for t in optim.state_tensors(before).values() if t.numel() == 10_000]
    assert {t.dtype for t in large} == {torch.float32 if name == "adamw" else torch.uint8}
    assert len(large) == 2
