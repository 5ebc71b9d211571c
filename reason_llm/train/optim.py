"""The optimizer and its schedule; its state as plain tensors, so that no pickle is ever written or
read."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from reason_llm.config import TrainSection


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: TrainSection
) -> torch.optim.Optimizer:
    """AdamW, fused. Source: arXiv:1711.05101."""
    return torch.optim.AdamW(
        parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
    )


def learning_rate(config: TrainSection, optimizer_step: int, total_steps: int) -> float:
    """The rate of optimizer step ``optimizer_step`` (from 0) of ``total_steps``: warm-up, then the
    schedule.

    linear and cosine reach 0 just after the last step.
    """
    if optimizer_step < config.warmup_steps:
        return config.learning_rate * (optimizer_step + 1) / config.warmup_steps
    progress = (optimizer_step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": (1.0 + math.cos(math.pi * progress)) / 2,
    }[config.schedule]
    return config.learning_rate * max(0.0, factor)


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """``{"3.exp_avg": tensor, ...}``: every tensor of the state by parameter number and name."""
    states = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": value for index, state in states.items() for name, value in state.items()
    }


def load_state_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Take back what ``state_tensors`` gave."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )
