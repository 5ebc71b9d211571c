"""The gradient of every row of the algorithm table, against numbers that were stored once.

Float64, off policy, with a sampler that is not quite the policy, and in any split of the rollouts
into micro-batches. A change of the learner's shape
must not change them; a change of its mathematics must, and then stores them anew:
``python tests/equivalence/test_stored_gradients.py``. Inputs are made by arithmetic alone, so
that no library's random numbers are in them.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import TINY
from marks import most_are_long
from reason_llm.config import AdapterSection, ModelSection, TrainSection
from reason_llm.config.algorithms import ALGORITHMS, Algorithm, resolve
from reason_llm.model.base import Model, load_tokenizer
from reason_llm.model.datum import to_data
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.train.learner import Learner, Learners, LearningSettings, learning
from reason_llm.train.objectives import PolicyGradient
from reason_llm.train.scored import with_advantages

STORED = Path(__file__).with_name("stored_gradients.json")
OPTIONS: list[dict[str, Any]] = [
    {"entropy_coefficient": 0.1},
    {"top_entropy_fraction": 0.3},
    {"off_policy_threshold": 0.05},
    {"correction": "token_truncate", "correction_cap": 1.05},
    {"correction": "sequence_mask", "correction_cap": 1.2},
    {"keep": "positive"},
    {"keep": 3},
    {"truncated": "leave_out"},
    {"scale": "batch"},
    {"delta": 1.5},
    {"kl": "k3", "kl_coefficient": 0.1},
    {"kl": "k1", "kl_coefficient": 0.1, "kl_place": "reward"},
]
NUM_PROJECTIONS = 8
MEANS = ("loss", "entropy", "kl", "grad_norm")
"""Metrics that no split may change."""


def rows() -> dict[str, Algorithm]:
    """Every row, dapo with each option, and the row that takes the correction into its ratio."""
    return {
        **{name: row for name, row in ALGORITHMS.items() if not (row.critic or row.teacher)},
        **{f"dapo {json.dumps(options)}": resolve("dapo", options) for options in OPTIONS},
        "vespo corrected": resolve("vespo", {"correction": "token_truncate"}),
    }


def wave(count: int, seed: int, scale: float) -> Tensor:
    """Float64 numbers (count,) between -scale and scale that look random: the fractional parts of
    multiples of an irrational number."""
    places = torch.arange(1, count + 1, dtype=torch.float64) * (math.sqrt(2) + seed * math.pi)
    return scale * (2 * (places - places.floor()) - 1)


def groups() -> list[Group]:
    """Four groups of four completions of 1 to 29 tokens, with two rewards each."""
    made = []
    for p in range(4):
        completions = []
        for i in range(4):
            length = 1 + (p * 11 + i * 17) % 29
            ids = tuple(3 + (p * 101 + i * 37 + t * 53) % 240 for t in range(length))
            rewards = {"a": float((p * 3 + i * 5) % 4), "b": float(i % 2)}
            logprobs = tuple((-5.0 + wave(length, p * 4 + i, 0.6)).tolist())
            reason = "length" if (p + i) % 3 == 2 else "stop"
            total = rewards["a"] + rewards["b"]
            completions.append(Completion(ids, "", logprobs, reason, rewards, total))
        prompt = Prompt(f"p{p}", "", tuple(5 + 7 * p + t for t in range(4 + 2 * p)), "")
        made.append(Group(prompt, tuple(completions)))
    return made


@pytest.fixture(scope="module")
def double_model(tokenizer: Any) -> Iterator[Model]:
    with made_model(tokenizer) as model:
        yield model


def made_model(tokenizer: Any) -> Model:
    section = ModelSection(path=str(TINY), dtype="float32", adapter=AdapterSection(rank=4))
    model = Model(section, tokenizer, seed=0)
    model.policy.double()
    return model


def gradient(model: Model, row: Algorithm, budget: int = 100) -> tuple[Tensor, dict[str, float]]:
    """Of the second of two updates, before clipping, and the metrics; between them the policy moves
    by a fixed amount, and the optimizer's own step is 0."""
    settings = LearningSettings(
        objective=PolicyGradient(row, 32),
        train=TrainSection(
            learning_rate=0.0, epochs=2, max_grad_norm=1e9, gradient_checkpointing=False
        ),
        temperature=0.9,
        micro_batch_tokens=budget,
        seed=0,
        total_optimizer_steps=10,
    )
    parameters = [p for p in model.policy.parameters() if p.requires_grad]
    for seed, parameter in enumerate(parameters):
        parameter.data.copy_(wave(parameter.numel(), seed, 0.1).view_as(parameter))
        parameter.grad = None
    learner = Learner(model, settings)
    seen: list[Tensor] = []

    def move(*_: Any) -> None:
        seen.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
        for seed, parameter in enumerate(parameters):
            parameter.data += wave(parameter.numel(), 1000 + seed, 0.01).view_as(parameter)

    learner.optimizer.register_step_pre_hook(move)
    with learning(learner):
        data = to_data(with_advantages(groups(), row))
        metrics = Learners(learner).learn(0, data, lambda items: None)
    assert len(seen) == 2
    return seen[-1], metrics


def projections(gradient_D: Tensor) -> list[float]:
    """The gradient's norm, then its products with fixed directions."""
    directions = [wave(len(gradient_D), 2000 + k, 1.0) for k in range(NUM_PROJECTIONS)]
    return [float(gradient_D.norm()), *(float(gradient_D @ each) for each in directions)]


@pytest.mark.parametrize("name", rows())
def test_the_gradient_is_the_stored_one(double_model: Model, name: str) -> None:
    assert told(double_model, name, 10**6)


@pytest.mark.parametrize("name", most_are_long(rows(), ["dapo", "gspo"]))
def test_no_split_changes_it(double_model: Model, name: str) -> None:
    whole = told(double_model, name, 10**6)
    for budget in (100, 1):
        assert told(double_model, name, budget) == pytest.approx(whole, rel=1e-6)


def told(model: Model, name: str, budget: int) -> list[float]:
    """The metrics of a row, once its gradient was compared with the stored one."""
    gradient_D, metrics = gradient(model, rows()[name], budget)
    found = projections(gradient_D)
    assert found[0] > 1e-3
    scale = found[0] * math.sqrt(len(gradient_D))
    assert found == pytest.approx(json.loads(STORED.read_text())[name], rel=0, abs=1e-12 * scale)
    return [metrics.get(f"train/{key}", 0.0) for key in MEANS]


def test_the_stored_gradients_differ() -> None:
    """One number for all rows would hold nothing."""
    stored = json.loads(STORED.read_text())
    assert set(stored) == set(rows())
    assert len({tuple(values) for values in stored.values()}) >= len(stored) - 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    with made_model(load_tokenizer(str(TINY))) as made:
        found = {name: projections(gradient(made, row)[0]) for name, row in rows().items()}
    STORED.write_text(json.dumps(found, indent=1) + "\n")
