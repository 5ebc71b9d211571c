"""The schedule, and an optimizer state that goes to tensors and back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

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
def test_state_survives_the_round_trip(name: str, tmp_path: Path) -> None:
    def step(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        for parameter in parameters:
            parameter.grad = parameter.detach() ** 3
        optimizer.step()

    config = TrainSection(learning_rate=0.1, optimizer=name)
    torch.manual_seed(0)
    first = [torch.nn.Parameter(torch.randn(100, 100)) for _ in range(2)]
    start = first[1].detach().clone()
    before = optim.make_optimizer(first, config)
    step(first, before)
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    after = optim.make_optimizer(second, config)
    save_file(optim.state_tensors(before), str(tmp_path / "state.safetensors"))
    optim.load_state_tensors(after, load_file(str(tmp_path / "state.safetensors")))
    for made, parameters in ((before, first), (after, second)):
        count = made.state[parameters[0]]["step"]
        assert (float(count), isinstance(count, int)) == (1, name != "adamw")
    step(first, before)
    step(second, after)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[1], start)
    large = [t for t in optim.state_tensors(before).values() if t.numel() == 10_000]
    assert {t.dtype for t in large} == {torch.float32 if name == "adamw" else torch.uint8}
    assert len(large) == 4


def test_paged_moments_stay_the_driver_s() -> None:
    """Marked as bitsandbytes marks them: another tensor in their place would not be paged."""
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    config = TrainSection(learning_rate=0.1, optimizer="paged_adamw_8bit")
    optimizer = optim.make_optimizer([parameter], config)
    state = optimizer.state[parameter]
    paged, ordinary = torch.zeros(4, 4), torch.zeros(4, 4)
    paged.is_paged = True  # type: ignore[attr-defined]
    state.update(state1=paged, state2=ordinary, step=0)
    optim.load_state_tensors(
        optimizer,
        {"0.state1": torch.ones(4, 4), "0.state2": torch.ones(4, 4), "0.step": torch.tensor(3)},
    )
    assert state["state1"] is paged and paged.sum() == 16 == state["state2"].sum()
    assert state["step"] == 3
    optim.move_state(optimizer, torch.device("meta"))
    assert state["state1"] is paged and state["state2"].device.type == "meta"
