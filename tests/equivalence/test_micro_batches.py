"""The gradient of groups: what is left out, where it points to, and what stops it.

Rollouts without signal may be left out, several optimizer steps partition the rollouts, and a loss
that is not finite stops before it reaches the weights.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from learners import learned, learner
from reason_llm.config.algorithms import ALGORITHMS, Algorithm
from reason_llm.errors import TrainingError
from reason_llm.model.base import Model
from reason_llm.model.datum import to_data
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.train.learner import Learners, learning
from reason_llm.train.scored import with_advantages


def groups(seed: int = 0, flat: bool = False) -> list[Group]:
    """Four groups of four completions of 1 to 30 random tokens, with random rewards."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, count: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high, (count,), generator=generator).tolist())

    made = []
    for p in range(4):
        completions = []
        for i in range(4):
            ids = integers(3, 250, integers(1, 31, 1)[0])
            reward = 1.0 if flat and p > 0 else float(integers(0, 4, 1)[0]) + i
            rewards = {"a": reward - i, "b": float(i)}
            completions.append(Completion(ids, "", (-1.0,) * len(ids), "stop", rewards, reward))
        made.append(Group(Prompt(f"p{p}", "", integers(3, 250, 5 + 3 * p), ""), tuple(completions)))
    return made


def gradient(model: Model, row: Algorithm, budget: int, data: list[Group], **train: Any) -> Any:
    """The gradient that one optimizer step saw, before clipping, and the metrics."""
    options = {"temperature": 0.9, "budget": budget, "max_grad_norm": 1e9, "learning_rate": 0.0}
    metrics, found = learned(model, row, with_advantages(data, row), **options, **train)
    return found, metrics


def test_checkpointing_gives_the_same_gradient(model: Model) -> None:
    row = ALGORITHMS["grpo"]
    plain, _ = gradient(model, row, 200, groups())
    recomputed, _ = gradient(model, row, 200, groups(), gradient_checkpointing=True)
    model.policy.gradient_checkpointing_disable()
    assert (plain - recomputed).norm() / plain.norm() < 1e-6
    offloaded, _ = gradient(model, row, 200, groups(), gradient_checkpointing="offload")
    model.policy.gradient_checkpointing_disable()
    model.policy.disable_input_require_grads()
    assert (plain - offloaded).norm() / plain.norm() < 1e-6


def test_groups_without_signal_are_left_out_and_still_count(model: Model) -> None:
    """Their passes are saved; the mean is over all rollouts as if they had been computed."""
    row = replace(ALGORITHMS["grpo"], kl="none", kl_coefficient=0.0)
    short, metrics = gradient(model, row, 10**6, groups(flat=True))
    assert metrics["train/trained_fraction"] == 0.25
    # A KL weight too small to matter makes every rollout take part.
    full_row = replace(row, kl="k3", kl_coefficient=1e-12)
    full, full_metrics = gradient(model, full_row, 10**6, groups(flat=True))
    assert full_metrics["train/trained_fraction"] == 1.0
    assert (short - full).norm() / full.norm() < 1e-5


def test_gradient_points_to_the_better_answer(model: Model) -> None:
    """After a few steps the rewarded completion is likelier and the other one less likely."""
    row = replace(ALGORITHMS["grpo"], kl="none", kl_coefficient=0.0)
    prompt = Prompt("p", "", (5, 6, 7), "")
    good = Completion((20, 21, 22), "", (-1.0,) * 3, "stop", {}, 1.0)
    bad = Completion((30, 31, 32, 33), "", (-1.0,) * 4, "stop", {}, 0.0)
    data = with_advantages([Group(prompt, (good, bad))], row)
    made = learner(model, row)

    def likelihoods() -> list[float]:
        return [float(t.sum()) for t in made.measure(to_data(data), "policy")[0]]

    before = likelihoods()
    with learning(made):
        for step in range(3):
            Learners(made).learn(step, to_data(data), lambda items: None)
    after = likelihoods()
    assert after[0] > before[0] + 0.1
    assert after[1] < before[1] - 0.1


def test_kl_holds_the_policy_to_the_base(model: Model) -> None:
    """With no reward signal, the KL term alone moves the policy back towards the reference."""
    row = replace(ALGORITHMS["grpo"], kl="k3", kl_coefficient=1.0)
    data = [
        replace(g, completions=tuple(replace(c, reward=1.0) for c in g.completions))
        for g in groups()
    ]
    made = learner(model, row)
    with learning(made):
        first = Learners(made).learn(0, to_data(with_advantages(data, row)), lambda items: None)
        for step in range(1, 6):
            last = Learners(made).learn(
                step, to_data(with_advantages(data, row)), lambda items: None
            )
    assert 0 < last["train/kl"] < 0.7 * first["train/kl"]


def test_several_optimizer_steps_use_each_rollout_once_an_epoch(model: Model) -> None:
    made = learner(model, ALGORITHMS["dapo"], optimizer_steps=3, epochs=2)
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1

    made.optimizer.register_step_pre_hook(count)
    told: list[int] = []
    with learning(made):
        Learners(made).learn(0, to_data(with_advantages(groups(), ALGORITHMS["dapo"])), told.append)
    assert steps == 6
    assert sum(told) == 2 * 16


def test_a_loss_that_is_not_finite_stops_before_the_weights(model: Model) -> None:
    row = ALGORITHMS["dapo"]
    data = with_advantages(groups(), row)
    broken = replace(data[2].completions[1], advantage=float("nan"))
    completions = (data[2].completions[0], broken, *data[2].completions[2:])
    data[2] = replace(data[2], completions=completions)
    made = learner(model, row, budget=60)
    before = [p.detach().clone() for p in made.parameters]
    with pytest.raises(TrainingError, match=r"step 4: the loss is nan on .*p2#1"), learning(made):
        Learners(made).learn(4, to_data(data), lambda items: None)
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters, strict=True))
    assert not model.policy.training
