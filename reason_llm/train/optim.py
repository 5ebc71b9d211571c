"""Optimizer and schedule. The state is plain tensors, so no pickle is written or read.

The step of weights in bfloat16 is made on a float32 copy, one parameter at a time, large ones in
parts, and rounded up or down with the probability that makes it right in the mean.
Source: arXiv:2010.06192.
"""

import random
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import get_scheduler

from reason_llm.config import TrainSection
from reason_llm.model.plan import STEPPED_AT_ONCE, UPDATE_BYTES


def make_optimizer(
    parameters: Sequence[torch.nn.Parameter], config: TrainSection
) -> torch.optim.Optimizer:
    """AdamW with two moments in float32, or in blocks of 8 bits (bitsandbytes; tensors below 4,096
    elements keep float32), optionally paged to host memory; or Adafactor.

    Source: arXiv:1711.05101; 8 bits, arXiv:2110.02861; paged, arXiv:2305.14314 section 3;
    Adafactor, arXiv:1804.04235.
    """
    options: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, fused=True, **options)
    if config.optimizer == "adafactor":  # foreach would hold temporaries of all parameters at once
        return torch.optim.Adafactor(parameters, foreach=False, **options)
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    kind: Any = {"adamw_8bit": AdamW8bit, "paged_adamw_8bit": PagedAdamW8bit}[config.optimizer]
    return cast(torch.optim.Optimizer, kind(parameters, **options))


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the moments before sampling begins, so that too little memory is noticed then; names
    and types are those of torch 2.13 and bitsandbytes 0.50."""
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if (theirs := getattr(optimizer, "init_state", None)) is not None:
                theirs(group, parameter, number, index)
            else:
                optimizer.state[parameter] = _zeros_for(parameter, group)


def _zeros_for(parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """The state of a parameter before its first step, by torch's optimizer whose group this is."""
    shape, counts_on = parameter.shape, parameter.device
    shapes: dict[str, tuple[int, ...]] = {"exp_avg": shape, "exp_avg_sq": shape}  # AdamW
    if "beta2_decay" in group:  # Adafactor
        counts_on = torch.device("cpu")
        shapes = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
        if len(shape) < 2:
            shapes = {"variance": shape}
    zeros = {name: parameter.new_zeros(size) for name, size in shapes.items()}
    return {"step": torch.zeros((), dtype=torch.float32, device=counts_on)} | zeros


class Carrier(NamedTuple):
    """The tensor that the optimizer steps instead of some rows of a parameter."""

    moved: torch.nn.Parameter
    """The parameter itself, if it has 32 bits; else one in float32 of the rows' shape, which has
    separate storage within ``step`` alone."""
    parameter: torch.nn.Parameter
    rows: slice


def carriers(parameters: Sequence[torch.nn.Parameter], optimizer: str) -> list[Carrier]:
    """A carrier for each parameter; for 16-bit parameters one for about ``STEPPED_AT_ONCE``
    elements, if the optimizer steps each element independently."""
    carried = list[Carrier]()
    for parameter in parameters:
        if parameter.dtype.itemsize >= 4:
            carried.append(Carrier(parameter, parameter, slice(None)))
            continue
        rows = len(parameter)
        if optimizer not in UPDATE_BYTES:
            rows = max(1, STEPPED_AT_ONCE // parameter[0].numel())
        for start in range(0, len(parameter), rows):
            part = slice(start, start + rows)
            moved = torch.zeros(1, device=parameter.device).expand(parameter[part].shape)
            carried.append(Carrier(torch.nn.Parameter(moved), parameter, part))
    return carried


@torch.no_grad()
def step(optimizer: torch.optim.Optimizer, carried: Sequence[Carrier], seed: str) -> None:
    """The optimizer's step on parameters with gradients, whose ``carriers`` it has."""
    optimizer.step()  # of those of 32 bits: no other carrier has a gradient
    for number, (moved, parameter, rows) in enumerate(carried):
        if moved is parameter:
            continue
        assert parameter.grad is not None
        empty, moved.data = moved.data, parameter[rows].float()
        moved.grad = parameter.grad[rows].float()
        optimizer.step()
        moved.grad = None
        into = parameter[rows]
        round_into(into, moved.data, random.Random(f"{seed}/{number}").getrandbits(63))
        moved.data = empty


def round_into(parameter: Tensor, value: Tensor, seed: int) -> None:
    """Write a float32 value, which is overwritten, into a bfloat16 parameter: up or down, right in
    the mean, by adding noise below its last bit."""
    generator = torch.Generator(value.device).manual_seed(seed)
    bits = value.view(torch.int32)
    noise = torch.randint(
        0, 1 << 16, bits.shape, dtype=torch.int32, device=value.device, generator=generator
    )
    parameter.copy_(bits.add_(noise).bitwise_and_(-1 << 16).view(torch.float32))


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the moments, and the blocks' scales of the 8-bit ones, to another device; paged ones
    stay, as the driver moves their pages."""
    for parameter in _parameters(optimizer):
        state = optimizer.state[parameter]
        for name, value in state.items():
            if isinstance(value, Tensor) and not _is_paged(value):
                state[name] = value.to(device)


LAST_PART = 0.1
"""Part of the steps in which warmup_stable_decay falls, and part of the peak rate at which
cosine_with_min_lr ends."""


def learning_rate(config: TrainSection, optimizer_step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``optimizer_step`` (from 0) of ``total_steps``: warm-up, then
    the schedule of that name in Transformers; linear and cosine reach 0 just after the last step.
    Differs: in the warm-up, whose first step would have a rate of 0 there."""
    if optimizer_step < config.warmup_steps:
        return config.learning_rate * (optimizer_step + 1) / config.warmup_steps
    rate = config.learning_rate
    factor = _schedule(config.schedule, rate, config.warmup_steps, total_steps)
    return rate * max(0.0, float(factor(optimizer_step)))


@cache
def _schedule(
    name: str, rate: float, warmup_steps: int, total_steps: int
) -> Callable[[int], float]:
    """Factor of the learning rate by optimizer step, as Transformers has it."""
    if name == "constant":
        return lambda step: 1.0
    options: dict[str, Any] = {}
    if name == "cosine_with_min_lr":
        options = {"min_lr_rate": LAST_PART}
    if name == "warmup_stable_decay":
        options = {"num_decay_steps": max(1, round(LAST_PART * total_steps))}
    # A rate of 0, which trains nothing, has no schedule.
    carrier = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate or 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has taken no step
        schedule: Any = get_scheduler(
            name, carrier, warmup_steps, total_steps, scheduler_specific_kwargs=options
        )
    return cast(Callable[[int], float], schedule.lr_lambdas[0])


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """``{"3.exp_avg": tensor, ...}``: every value of the state by parameter number and name; of
    bitsandbytes' shared tables (qmap) each has a copy, as safetensors wants it."""
    return {
        f"{index}.{name}": torch.as_tensor(value.clone() if name.startswith("qmap") else value)
        for index, parameter in enumerate(_parameters(optimizer))
        for name, value in optimizer.state[parameter].items()
    }


def load_state_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load what ``state_tensors`` returned; a ValueError if they are another optimizer's or another
    adapter's."""
    if not optimizer.state:
        allocate_state(optimizer)
    parameters = _parameters(optimizer)
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        if not index.isdecimal() or int(index) >= len(parameters):
            raise ValueError(f"{key!r} belongs to none of {len(parameters)} parameters")
        state = optimizer.state[parameters[int(index)]]
        held = state.get(name)
        if held is None or torch.as_tensor(held).shape != value.shape:
            kind = type(optimizer).__name__
            raise ValueError(f"{key!r} of shape {list(value.shape)} is not a state of {kind}")
        if _is_paged(held):  # an ordinary tensor in its place would not be paged
            held.copy_(value)
        else:
            state[name] = value.to(held.device) if isinstance(held, Tensor) else int(value)


def _is_paged(value: Any) -> bool:
    """Whether this is memory that bitsandbytes has from the driver, on host and card by turns."""
    return getattr(value, "is_paged", False)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
