"""What an optimizer step does with its rollouts, watched from outside.

1. Rates by position, clipping, weight decay.    2. A batch's own denominator, old log-probs.
3. The temperature of the policy.                4. Non-finite gradients.
"""

import math
import statistics
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch

from learners import ROW, SHAPED, flat, groups, learn, learned, learner, watch
from reason_llm.errors import TrainingError
from reason_llm.model import logprobs
from reason_llm.model.base import Model
from reason_llm.model.datum import to_data
from reason_llm.rollout import Group
from reason_llm.train import optim
from reason_llm.train.learner import learning, split
from reason_llm.train.objectives import mean_advantage
from reason_llm.train.scored import with_advantages


@pytest.mark.parametrize("passes", [{"optimizer_steps": 2}, {"epochs": 2}], ids=str)
def test_the_rate_follows_the_schedule_over_all_steps(
    model: Model, passes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = learner(model, schedule="linear", learning_rate=0.8, **passes)
    made.settings = replace(made.settings, first_step=3)
    rates, seeds = [], []

    def step(optimizer: torch.optim.Optimizer, carried: Any, seed: str) -> None:
        rates.append(optimizer.param_groups[0]["lr"])  # and nothing moves
        seeds.append(seed)

    monkeypatch.setattr(optim, "step", step)
    told = [learn(made, step=step)["train/learning_rate"] for step in (3, 4)]
    assert rates == pytest.approx([0.8, 0.7, 0.6, 0.5])
    assert told == rates[1::2]
    assert seeds == [f"0/rounding/{number}" for number in range(4)]


def test_gradients_are_clipped_to_the_norm(model: Model) -> None:
    (free, whole), (clipped, cut) = (learned(model, ROW, max_grad_norm=n) for n in (1e9, 0.01))
    assert float(whole.norm()) == pytest.approx(free["train/grad_norm"], rel=1e-4)
    assert free["train/grad_norm"] > 0.02
    assert float(cut.norm()) == pytest.approx(0.01, rel=1e-3)
    assert clipped["train/grad_norm"] == pytest.approx(free["train/grad_norm"], rel=1e-4)


def test_weight_decay_shrinks_the_adapter(model: Model) -> None:
    made = learner(model, weight_decay=0.5, learning_rate=0.1)
    before = [p.detach().clone() for p in made.parameters]
    learn(made, flat())
    for parameter, old in zip(made.parameters, before, strict=True):
        assert torch.allclose(parameter.detach(), old * (1 - 0.1 * 0.5), atol=1e-7)


def test_each_optimizer_batch_divides_by_its_own_count(model: Model) -> None:
    """The first of two optimizer steps sees the mean over its half, not over all rollouts."""
    data, still = groups(), {"learning_rate": 0.0, "max_grad_norm": 1e9}
    rows = split(12, 2, "5/3/0")[0]
    all_of = [c for g in data for c in g.completions]
    halves = [Group(data[i // 4].prompt, (all_of[i],)) for i in rows if all_of[i].advantage]
    whole = learner(model, optimizer_steps=2, **still)
    whole.settings = replace(whole.settings, seed=5)
    seen = watch(whole)
    learn(whole, data, 3)
    _, alone = learned(model, ROW, halves, **still)
    assert torch.allclose(seen[0][1], alone * len(halves) / len(rows), rtol=1e-3, atol=1e-6)


def test_old_logprobs_stay_those_from_before_the_step(model: Model) -> None:
    """The second epoch's ratios are against the first's start: some are clipped."""
    once, _ = learned(model, ROW, learning_rate=0.02)
    twice, _ = learned(model, ROW, learning_rate=0.02, epochs=2)
    assert once["train/clip_fraction"] == 0 and twice["train/clip_fraction"] > 0.1


def test_the_policy_is_the_one_at_the_sampler_s_temperature(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = learner(model, temperature=0.5, epochs=2, learning_rate=0.0)
    made.settings = replace(made.settings, chunk_tokens=3)
    chunks: list[int] = []
    original = logprobs.target_logprobs

    def watched(*args: Any, **options: Any) -> Any:
        chunks.append(args[5])
        return original(*args, **options)

    monkeypatch.setattr(logprobs, "target_logprobs", watched)
    data = groups()
    fixed, _ = made.measure(to_data(data), "policy")
    ids = torch.tensor([data[0].prompt.token_ids + data[0].completions[0].token_ids])
    with torch.no_grad():
        logits = model.logits(model.hidden_states(ids))[0, 5:-1].double() / 0.5
    targets = torch.tensor(data[0].completions[0].token_ids)[:, None]
    expected = logits.log_softmax(-1).gather(-1, targets)[:, 0]
    assert torch.allclose(fixed[0].double(), expected, atol=1e-4)
    metrics = learn(made)  # at rate 0 with one temperature throughout, no ratio is off
    assert metrics["train/clip_fraction"] == 0 and set(chunks) == {3}
    assert metrics["train/loss"] == pytest.approx(0, abs=1e-6)


def test_a_gradient_that_is_not_finite_stops_before_the_weights(model: Model) -> None:
    made = learner(model)
    before = [p.detach().clone() for p in made.parameters]
    made.parameters[0].register_hook(lambda gradient: gradient * math.inf)
    expected = r"step 2: the gradient's norm is (nan|inf) over p0#0.* \(largest log ratio 0\)"
    with pytest.raises(TrainingError, match=expected):
        learn(made, step=2)
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters, strict=True))
    made.parameters[0]._backward_hooks.clear()  # type: ignore[union-attr]


def test_rows_are_shuffled_by_the_seed_and_cut_into_nearly_equal_parts() -> None:
    assert split(5, 1, "a") == [[0, 1, 2, 3, 4]]
    parts = split(7, 3, "a")
    assert [len(part) for part in parts] == [2, 2, 3]
    assert sorted(chain(*parts)) == [*range(7)]
    assert parts == split(7, 3, "a") != split(7, 3, "b")


def test_the_kl_says_which_completions_are_good_and_how_far_they_are_apart(model: Model) -> None:
    """With much weight on it where it belongs to the reward."""
    row = replace(SHAPED["rloo"], kl_coefficient=100.0)
    made = learner(model, replace(row, keep="positive"))
    rollouts = to_data(with_advantages(groups(), row))
    with learning(made):
        prepared = made.prepared(rollouts)
    before = [mean_advantage(datum) for datum in rollouts]
    shaped = [mean_advantage(datum) for datum in prepared]
    good = [i for i, value in enumerate(shaped) if value > 0]
    assert made.settings.objective.counted(prepared) == good
    assert good != [i for i, value in enumerate(before) if value > 0]
    spread = learned(model, row)[0]["train/advantage_std"]
    assert spread == pytest.approx(statistics.stdev(shaped), rel=1e-4)
    assert spread > 2 * statistics.stdev(before)
    positive = learned(model, replace(row, keep="positive"))[0]["train/advantage_std"]
    assert positive == pytest.approx(statistics.stdev(shaped[i] for i in good), rel=1e-4)


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
