"""The schedule, and an optimizer state that goes to tensors and back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reason_llm.config import TrainSection
from reason_llm.model.plan import memory
from reason_llm.train import optim


def rates(total: int, **options: object) -> list[float]:
    config = TrainSection(learning_rate=1.0, **options)
    return [optim.learning_rate(config, step, total) for step in range(total)]


def test_schedules_by_hand() -> None:
    assert rates(4) == [1.0] * 4
    assert rates(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(4, schedule="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.5]
    assert rates(4, schedule="cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)


BYTES = {"adamw": 80_000, "adamw_8bit": 20_000, "paged_adamw_8bit": 20_000, "adafactor": 800}
"""Of the moments of 100 x 100 parameters."""


@pytest.mark.filterwarnings("default")  # bitsandbytes warns of its own
@pytest.mark.parametrize("name", BYTES)
def test_state_survives_the_round_trip(name: str, tmp_path: Path) -> None:
    def step(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        for parameter in parameters:
            parameter.grad = parameter.detach() ** 3
        optimizer.step()

    config = TrainSection(learning_rate=0.1, weight_decay=0.25, optimizer=name)
    torch.manual_seed(0)
    first = [torch.nn.Parameter(torch.randn(*shape)) for shape in ((100, 100), (100, 100), (7,))]
    start = first[1].detach().clone()
    before = optim.make_optimizer(first, config)
    assert {(each["lr"], each["weight_decay"]) for each in before.param_groups} == {(0.1, 0.25)}
    step(first, before)
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    after = optim.make_optimizer(second, config)
    save_file(optim.state_tensors(before), str(tmp_path / "state.safetensors"))
    optim.load_state_tensors(after, load_file(str(tmp_path / "state.safetensors")))
    for made, parameters in ((before, first), (after, second)):
        count = made.state[parameters[0]]["step"]
        assert (float(count), isinstance(count, int)) == (1, "8bit" in name)
    step(first, before)
    step(second, after)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[1], start)
    moments = [t.nbytes for t in optim.state_tensors(before).values() if t.shape[:1] == (100,)]
    moments += [t.nbytes for key, t in optim.state_tensors(before).items() if "col_var" in key]
    assert sum(moments) == 2 * BYTES[name]
    planned = 10_000 * memory.OPTIMIZER_BYTES[name]
    assert BYTES[name] <= planned <= 1.03 * BYTES[name] + 200
    fresh = optim.make_optimizer(first, config)
    optim.allocate_state(fresh)
    shapes = {key: (t.shape, t.dtype) for key, t in optim.state_tensors(fresh).items()}
    assert shapes == {k: (t.shape, t.dtype) for k, t in optim.state_tensors(before).items()}
    optim.load_state_tensors(fresh, held := optim.state_tensors(before))
    assert all(torch.equal(held[key], t) for key, t in optim.state_tensors(fresh).items())


@pytest.mark.parametrize("key", ["2.exp_avg", "x.exp_avg", "1.row_var", "0.exp_avg"])
def test_a_state_of_other_parameters_is_refused(key: str) -> None:
    """There are the numbers 0 and 1, of other shapes than this."""
    optimizer = optim.make_optimizer(
        [torch.nn.Parameter(torch.zeros(n)) for n in (2, 3)], TrainSection()
    )
    said = "belongs to none of 2 parameters" if key[0] in "2x" else r"of shape \[4\] is not a state"
    with pytest.raises(ValueError, match=said):
        optim.load_state_tensors(optimizer, {key: torch.zeros(4)})


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", BYTES)
def test_bfloat16_is_stepped_in_float32_and_rounded_right_in_the_mean(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, where the step of an element depends on no other."""
    monkeypatch.setattr(optim, "STEPPED_AT_ONCE", 4_100)
    config = TrainSection(learning_rate=1e-3, optimizer=name)
    start = torch.linspace(-1, 1, 20_000).view(100, 200).bfloat16()

    def stepped(dtype: torch.dtype, seed: str) -> torch.Tensor:
        parameter = torch.nn.Parameter(start.to(dtype, copy=True))
        carried = optim.carriers([parameter], name)
        is_split = dtype == torch.bfloat16 and name != "adafactor"
        assert [len(each.moved) for each in carried] == ([20] * 5 if is_split else [100])
        optimizer = optim.make_optimizer([each.moved for each in carried], config)
        optim.allocate_state(optimizer)
        place = parameter.data_ptr()
        for number in range(3):
            parameter.grad = torch.cos(torch.arange(20_000.0)).view(100, 200).to(dtype)
            optim.step(optimizer, carried, f"{seed}/{number}")
        assert parameter.data_ptr() == place
        assert dtype == torch.float32 or carried[0].moved.untyped_storage().nbytes() == 4
        return parameter.detach().clone()

    rounded, exact = stepped(torch.bfloat16, "a"), stepped(torch.float32, "a")
    assert torch.equal(rounded, stepped(torch.bfloat16, "a"))
    assert not torch.equal(rounded, stepped(torch.bfloat16, "b"))
    assert (rounded.float() - exact).abs().max() < 3 * 2**-7
    way = exact - start.float()  # less than half of a weight's last bit
    along = float(((rounded.float() - start.float()) * way).sum() / way.square().sum())
    assert along == pytest.approx(1, abs=0.15)


def test_each_value_is_rounded_up_as_often_as_it_lies_above() -> None:
    value = torch.full((40_000,), -(1 + 2**-7 * 0.25))  # a quarter of the way to the next number
    found = torch.empty(40_000, dtype=torch.bfloat16)
    optim.round_into(found, value, seed=1)
    assert set(found.tolist()) == {-1.0, -(1 + 2**-7)}
    assert float((found != -1).float().mean()) == pytest.approx(0.25, abs=0.01)


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
