"""What an optimizer step does with its rollouts, watched from outside.

1. Rates by position, clipping, weight decay.    2. A batch's own denominator, old log-probs.
3. The temperature of the policy.                4. Non-finite gradients.
"""

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from learners import ROW, SHAPED, groups, learned, learner, use, watch
from reason_llm.config.algorithms import Algorithm
from reason_llm.errors import TrainingError
from reason_llm.model.base import Model
from reason_llm.model.datum import to_data
from reason_llm.rollout import Group
from reason_llm.train import optim
from reason_llm.train.learner import Learners, learning, split
from reason_llm.train.objectives import mean_advantage
from reason_llm.train.scored import with_advantages


@pytest.mark.parametrize("passes", [{"optimizer_steps": 2}, {"epochs": 2}], ids=str)
def test_the_rate_follows_the_schedule_over_all_steps(
    model: Model, passes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = learner(model, schedule="linear", learning_rate=0.8, **passes)
    rates, seeds = [], []
    monkeypatch.setattr(optim, "step", lambda *given: seeds.append(given[2]))  # nothing diverges
    original = made._update

    def update(*args: Any) -> tuple[float, float]:
        norm, rate = original(*args)
        rates.append(made.optimizer.param_groups[0]["lr"])
        assert rate == rates[-1]
        return norm, rate

    made._update = update  # type: ignore[method-assign]
    with learning(made):
        for step in range(2):
            Learners(made).learn(step, to_data(groups()), lambda items: None)
    assert rates == pytest.approx([0.8, 0.7, 0.6, 0.5])
    assert seeds == [f"0/rounding/{number}" for number in range(4)]


def test_gradients_are_clipped_to_the_norm(model: Model) -> None:
    free, clipped = learner(model, max_grad_norm=1e9), learner(model, max_grad_norm=0.01)
    norms = []
    for made in (free, clipped):
        seen = watch(made)
        made.optimizer.param_groups[0]["lr"] = 0.0
        before = [p.detach().clone() for p in made.parameters]
        with learning(made):
            metrics = Learners(made).learn(0, to_data(groups()), lambda items: None)
        for parameter, old in zip(made.parameters, before, strict=True):
            parameter.data.copy_(old)
        norms.append((float(seen[0][1].norm()), metrics["train/grad_norm"]))
    assert norms[0][0] == pytest.approx(norms[0][1], rel=1e-4)
    assert norms[0][0] > 0.02
    assert norms[1][0] == pytest.approx(0.01, rel=1e-3)
    assert norms[1][1] == pytest.approx(norms[0][1], rel=1e-4)


def test_weight_decay_shrinks_the_adapter(model: Model) -> None:
    flat = [
        replace(g, completions=tuple(replace(c, advantage=0.0) for c in g.completions))
        for g in groups()
    ]
    made = learner(model, weight_decay=0.5, learning_rate=0.1)
    before = [p.detach().clone() for p in made.parameters]
    with learning(made):
        Learners(made).learn(0, to_data(flat), lambda items: None)
    for parameter, old in zip(made.parameters, before, strict=True):
        assert torch.allclose(parameter.detach(), old * (1 - 0.1 * 0.5), atol=1e-7)


def test_each_optimizer_batch_divides_by_its_own_count(model: Model) -> None:
    """The first of two optimizer steps sees the mean over its half, not over all rollouts."""
    data = groups()
    rows = split(12, 2, "5/3/0")[0]
    flat = [c for g in data for c in g.completions]
    halves = [Group(data[i // 4].prompt, (flat[i],)) for i in rows if flat[i].advantage]
    parts, whole = [], learner(model, optimizer_steps=2, learning_rate=0.0, max_grad_norm=1e9)
    whole.settings = replace(whole.settings, seed=5)
    seen = watch(whole)
    with learning(whole):
        Learners(whole).learn(3, to_data(data), lambda items: None)
    alone = learner(model, learning_rate=0.0, max_grad_norm=1e9)
    parts = watch(alone)
    with learning(alone):
        Learners(alone).learn(0, to_data(halves), lambda items: None)
    scale = len(halves) / len(rows)
    assert torch.allclose(seen[0][1], parts[0][1] * scale, rtol=1e-3, atol=1e-6)


def test_old_logprobs_stay_those_from_before_the_step(model: Model) -> None:
    """The second epoch's ratios are against the first's start: some are clipped."""
    once, twice = learner(model, learning_rate=0.02), learner(model, learning_rate=0.02, epochs=2)
    with learning(once):
        assert (
            Learners(once).learn(0, to_data(groups()), lambda items: None)["train/clip_fraction"]
            == 0
        )
    with learning(twice):
        assert (
            Learners(twice).learn(0, to_data(groups()), lambda items: None)["train/clip_fraction"]
            > 0.1
        )


def test_the_policy_is_the_one_at_the_sampler_s_temperature(model: Model) -> None:
    made = learner(model, temperature=0.5, epochs=2, learning_rate=0.0)
    data = groups()
    fixed, _ = made.measure(to_data(data), "policy")
    ids = torch.tensor([data[0].prompt.token_ids + data[0].completions[0].token_ids])
    with torch.no_grad():
        logits = model.logits(model.hidden_states(ids))[0, 5:-1].double() / 0.5
    targets = torch.tensor(data[0].completions[0].token_ids)[:, None]
    expected = logits.log_softmax(-1).gather(-1, targets)[:, 0]
    assert torch.allclose(fixed[0].double(), expected, atol=1e-4)
    with learning(
        made
    ):  # at rate 0 nothing moves: with one temperature throughout, no ratio is off
        metrics = Learners(made).learn(0, to_data(data), lambda items: None)
    assert metrics["train/clip_fraction"] == 0
    assert metrics["train/loss"] == pytest.approx(0, abs=1e-6)


def test_a_gradient_that_is_not_finite_stops_before_the_weights(model: Model) -> None:
    made = learner(model)
    before = [p.detach().clone() for p in made.parameters]
    made.parameters[0].register_hook(lambda gradient: gradient * math.inf)
    expected = r"step 2: the gradient's norm is (nan|inf) over p0#0.* \(largest log ratio 0\)"
    with pytest.raises(TrainingError, match=expected), learning(made):
        Learners(made).learn(2, to_data(groups()), lambda items: None)
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters, strict=True))
    made.parameters[0]._backward_hooks.clear()  # type: ignore[union-attr]


@pytest.mark.parametrize("row", SHAPED.values(), ids=SHAPED)
def test_options_hold_where_the_kl_is_in_the_reward(model: Model, row: Algorithm) -> None:
    plain, without = learned(model, row)
    _, few = learned(model, replace(row, top_entropy_fraction=0.2))
    assert (few - without).norm() > 0.1 * without.norm()
    far, near = learned(model, replace(row, off_policy_threshold=0.1))
    assert (near - without).norm() > 0.1 * without.norm()
    assert far["train/loss"] != plain["train/loss"]


def test_positive_ones_are_those_whose_reward_is_good_after_the_kl(model: Model) -> None:
    """With much weight on the KL, it and not the reward says which completions are trained."""
    row = replace(SHAPED["rloo"], kl_coefficient=100.0, keep="positive")
    made = learner(model)
    use(made, row)
    rollouts = to_data(with_advantages(groups(), row))
    with learning(made):
        prepared = made.prepared(rollouts)
    expected = [i for i, datum in enumerate(prepared) if mean_advantage(datum) > 0]
    assert made.settings.objective.counted(prepared) == expected
    assert expected != [i for i, datum in enumerate(rollouts) if mean_advantage(datum) > 0]


def test_the_spread_of_the_advantages_is_of_those_that_were_used(model: Model) -> None:
    """After the KL where it belongs to the reward, and of the counted completions."""
    row = replace(SHAPED["rloo"], kl_coefficient=100.0)
    made = learner(model)
    use(made, row)
    rollouts = to_data(with_advantages(groups(), row))
    with learning(made):
        shaped = [mean_advantage(datum) for datum in made.prepared(rollouts)]
    metrics, _ = learned(model, row)
    assert metrics["train/advantage_std"] == pytest.approx(statistics.stdev(shaped), rel=1e-4)
    before = statistics.stdev(mean_advantage(datum) for datum in rollouts)
    assert metrics["train/advantage_std"] > 2 * before
    positive, _ = learned(model, replace(row, keep="positive"))
    expected = statistics.stdev(value for value in shaped if value > 0)
    assert positive["train/advantage_std"] == pytest.approx(expected, rel=1e-4)


def test_only_far_completions_count_as_masked(model: Model) -> None:
    """A completion without a token of high entropy was not left out for its ratio."""
    metrics, _ = learned(model, replace(ROW, top_entropy_fraction=0.01))
    assert metrics["train/masked_out"] == 0


def test_deterministic_operators_are_asked_for_while_learning_alone(model: Model) -> None:
    made = learner(model)
    for asked in (False, True):
        model.deterministic = asked
        with learning(made):
            assert torch.are_deterministic_algorithms_enabled() == asked
        assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
