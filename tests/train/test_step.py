"""A step of the learner, by its metrics and its last gradient.

1. What is measured once, before the policy moves.   2. Old log-probs and the sampler's correction.
3. What is left out, and what is trained for its entropy.   4. Dropout: its seed, and replays.
5. The same step again, after a kill inside it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import set_peft_model_state_dict

from conftest import TINY
from learners import ROW, SHAPED, flat, groups, learn, learned, learner, watch
from marks import most_are_long
from reason_llm.config import AdapterSection, ModelSection
from reason_llm.config.algorithms import Algorithm
from reason_llm.model import adapters
from reason_llm.model.base import Model
from reason_llm.model.datum import to_data
from reason_llm.train import losses, optim
from reason_llm.train.learner import Learner, learning
from reason_llm.train.objectives import mean_advantage
from reason_llm.train.scored import with_advantages
from small_memory import SmallMemory


def test_the_sampler_is_compared_before_the_policy_moves(model: Model) -> None:
    """k3 of KL(sampler || learner), and no other way round."""
    row = replace(ROW, kl="k3", kl_coefficient=1e-9)  # so that all take part
    once, _ = learned(model, row, learning_rate=0.02)
    twice, _ = learned(model, row, learning_rate=0.02, epochs=2)
    assert twice["train/sampler_kl"] == pytest.approx(once["train/sampler_kl"], rel=1e-5)
    made = learner(model)
    mismatch = torch.cat(made.measure(to_data(groups()), "policy")[0]) - -1.0
    by_hand = (torch.expm1(mismatch) - mismatch).mean()
    assert once["train/sampler_kl"] == pytest.approx(float(by_hand), rel=1e-4)
    assert once["train/sampler_mismatch_max"] == pytest.approx(float(mismatch.abs().max()))
    learn(made)
    assert all(parameter.grad is None for parameter in made.parameters)  # given back for sampling


def test_kl_of_the_reward_is_measured_against_the_base(model: Model) -> None:
    """And is not in the loss, too."""
    row = SHAPED["rloo"]
    metrics, _ = learned(model, row)
    made, rollouts = learner(model, row), to_data(with_advantages(groups(), row))
    now = torch.cat(made.measure(rollouts, "policy")[0])
    with adapters.reference(model.policy):
        base = torch.cat(made.measure(rollouts, "policy")[0])
    assert metrics["train/kl"] == pytest.approx(float((now - base).mean()), rel=1e-4)
    with learning(made):
        rows = made.prepared(rollouts)
    by_hand = -sum(mean_advantage(d) * float(d.columns["old_logprobs"].sum()) for d in rows) / 12
    assert metrics["train/loss"] == pytest.approx(by_hand, rel=1e-3)


def test_the_correction_is_of_the_old_policy_and_stays_so(model: Model) -> None:
    """The second optimizer step is off policy."""
    row = replace(ROW, correction="token_truncate")
    once, _ = learned(model, row, learning_rate=0.02)
    twice, _ = learned(model, row, learning_rate=0.02, epochs=2)
    assert 0 < once["train/importance_weight"] < 1
    assert twice["train/importance_weight"] == pytest.approx(
        once["train/importance_weight"], rel=1e-4
    )
    later, _ = learned(model, ROW, learning_rate=0.02, optimizer_steps=2)
    assert later["train/ratio_p01"] < 0.99 < 1.01 < later["train/ratio_p99"]


def test_off_policy_completions_are_those_that_the_policy_left(model: Model) -> None:
    """Nothing is far at first; after a large step something is."""
    row = replace(ROW, off_policy_threshold=0.01)
    now = iter(learner(model).measure(to_data(groups()), "policy")[0])
    near = [
        replace(g, completions=tuple(
            replace(c, logprobs=tuple(next(now).tolist())) for c in g.completions
        )) for g in groups()
    ]  # fmt: skip
    masked = [
        learned(model, row, near, learning_rate=0.02, epochs=epochs)[0]["train/masked_out"]
        for epochs in (1, 2)
    ]
    assert masked[0] == 0 < masked[1]


def test_groups_without_signal_are_trained_for_their_entropy(model: Model) -> None:
    found = torch.cat(learner(model).measure(to_data(flat()), "policy")[1])
    for fraction in (1.0, 0.1):
        row = replace(ROW, entropy_coefficient=0.1, top_entropy_fraction=fraction)
        metrics, _ = learned(model, row, flat())
        assert metrics["train/trained_fraction"] == 1
        assert metrics["train/grad_norm"] > 0
        # The mean of the tokens that are trained, and of no others.
        trained = found[found >= found.quantile(1 - fraction)]
        assert metrics["train/loss"] == pytest.approx(-0.1 * float(trained.mean()), rel=1e-4)


def test_the_part_of_the_tokens_that_is_trained_stays_as_the_policy_moves(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def watched(loss_BT: torch.Tensor, mask_BT: torch.Tensor, how: Any) -> torch.Tensor:
        seen.append(loss_BT[mask_BT] != 0)
        return original(loss_BT, mask_BT, how)

    original = losses.masked_sum
    monkeypatch.setattr(losses, "masked_sum", watched)
    # No clip, so that no loss is 0 but for the entropy.
    row = replace(ROW, surrogate="reinforce", top_entropy_fraction=0.2)
    learned(model, row, learning_rate=0.1, epochs=2)
    first, second = torch.cat(seen).chunk(2)
    assert int(first.sum()) == pytest.approx(0.2 * len(first), abs=1)
    assert torch.equal(first, second)


def test_completions_without_signal_have_their_part_of_the_highest_entropies(model: Model) -> None:
    """As if they had been passed: a KL too small to matter has them passed."""
    data = groups()
    data[1] = replace(
        data[1], completions=tuple(replace(c, reward=1.0) for c in data[1].completions)
    )
    row = replace(ROW, top_entropy_fraction=0.3)
    seen = [
        learned(model, each, with_advantages(data, each), max_grad_norm=1e9)[1]
        for each in (row, replace(row, kl="k3", kl_coefficient=1e-12))
    ]
    assert seen[1].norm() > 0
    assert (seen[0] - seen[1]).norm() < 1e-5 * seen[1].norm()


@pytest.fixture
def dropping(tokenizer: Any) -> Iterator[Model]:
    """The tiny model whose adapter drops a third of its inputs while learning."""
    adapter = AdapterSection(rank=4, dropout=0.3)
    with Model(
        ModelSection(path=str(TINY), dtype="float32", adapter=adapter), tokenizer, 0
    ) as made:
        for parameter in made.policy.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.05)
        yield made


def gradients(model: Model, step: int = 0, seed: int = 0, **train: Any) -> list[torch.Tensor]:
    made = learner(model, learning_rate=0.0, max_grad_norm=1e9, **train)
    made.settings = replace(made.settings, seed=seed)
    seen = watch(made)
    learn(made, step=step)
    return [gradient for _, gradient in seen]


def test_dropout_is_drawn_anew_from_the_seed_and_the_step(dropping: Model) -> None:
    made = learner(dropping)
    with learning(made):  # what is measured is without it
        measured = [torch.cat(made.measure(to_data(groups()), "policy")[0]) for _ in range(2)]
        judged = [made.judge(to_data(groups())) for _ in range(2)]
    assert torch.equal(*measured) and judged[0] == judged[1]
    torch.manual_seed(1)
    first, second = gradients(dropping, epochs=2)
    assert not torch.equal(first, second)  # the passes for old log-probs end with dropout on again
    torch.manual_seed(2)
    assert torch.equal(gradients(dropping, epochs=2)[0], first)
    for other in ({"step": 1}, {"seed": 1}):
        assert not torch.equal(gradients(dropping, epochs=2, **other)[0], first)


def test_a_replay_draws_the_same_dropout_and_tells_its_progress_back(dropping: Model) -> None:
    told: list[int] = []
    made = learner(dropping, learning_rate=0.0)
    seen = watch(made)
    made.micro_batches.tokens = 40
    limit = 25 * 384 * 4
    with SmallMemory(limit, torch.OutOfMemoryError) as memory:
        learn(made, told=told.append)
    assert memory.refused
    assert sum(told) == 12
    small = learner(dropping, learning_rate=0.0)
    small.micro_batches.tokens = made.micro_batches.tokens
    again = watch(small)
    learn(small)
    assert torch.equal(seen[0][1], again[0][1])


@pytest.mark.parametrize(
    "row",
    [replace(ROW, kl="k3", kl_coefficient=0.1, top_entropy_fraction=0.5), *SHAPED.values()],
    ids=["loss", *SHAPED],
)
@pytest.mark.parametrize("updates", most_are_long([1, 2, 3], [2]))
def test_a_step_that_broke_off_is_learned_again_to_the_same_bits(
    dropping: Model, row: Algorithm, updates: int
) -> None:
    """From the adapter and the optimizer of before the step, whatever was drawn meanwhile."""
    model, start = dropping, adapters.snapshot(dropping.policy).tensors
    options = {"learning_rate": 0.01, "optimizer_steps": 2, "epochs": 2}

    def fresh() -> Learner:
        set_peft_model_state_dict(model.policy, start)
        return learner(model, row, **options)

    def after(of: Learner) -> tuple[Any, ...]:
        optimizer = {k: v.clone() for k, v in optim.state_tensors(of.optimizer).items()}
        return adapters.snapshot(model.policy).tensors, optimizer

    whole = fresh()
    expected = learn(whole, step=3)
    wanted = after(whole)
    broken = fresh()

    class KilledError(Exception):
        pass

    def die(*_: Any) -> None:
        if broken.updates_in_step > updates:
            raise KilledError

    broken.optimizer.register_step_pre_hook(die)
    with pytest.raises(KilledError):
        learn(broken, step=3)
    torch.manual_seed(0)
    again = fresh()
    found = learn(again, step=3)
    assert found == expected
    for mine, theirs in zip(after(again), wanted, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
