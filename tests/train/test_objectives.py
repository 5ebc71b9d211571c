"""Which rows count, and the KL taken off the reward."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from reason_llm.config import CriticSection
from reason_llm.config.algorithms import ALGORITHMS, Algorithm, resolve
from reason_llm.model.datum import Datum
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.train import objectives
from reason_llm.train.objectives import PolicyGradient, Values, shaped_advantages, with_critic
from reason_llm.train.scored import with_advantages

NUMBERS = count()


def rollout(
    reward: float, advantage: float = 0.0, truncated: bool = False, group: int = 0, length: int = 2
) -> Datum:
    return Datum.of(
        (1,),
        (2,) * length,
        rollout=next(NUMBERS),
        reward=reward,
        is_truncated=truncated,
        group=group,
        columns={"advantages": [advantage] * length},
    )


def counted(data: list[Datum], row: Algorithm) -> list[int]:
    return PolicyGradient(row, 32).counted(data)


def shaped(rewards: list[float], row: Algorithm, old: list[Tensor], ref: list[Tensor]) -> Any:
    """Advantages of one group's completions."""
    data = [
        rollout(reward, length=len(o))
        .with_trained("old_logprobs", o)
        .with_trained("ref_logprobs", r)
        for reward, o, r in zip(rewards, old, ref, strict=True)
    ]
    return shaped_advantages(data, row)


def test_all_count_unless_the_row_says_otherwise() -> None:
    data = [
        rollout(1, 0.5),
        rollout(0, -0.5, truncated=True),
        rollout(2, 0.0, group=1),
        rollout(3, 0.1, group=1),
    ]
    assert counted(data, ALGORITHMS["grpo"]) == [0, 1, 2, 3]
    assert counted(data, resolve("grpo", {"keep": "positive"})) == [0, 3]
    assert counted(data, resolve("grpo", {"keep": 1})) == [0, 3]
    assert counted(data, resolve("grpo", {"truncated": "leave_out"})) == [0, 2, 3]


def test_ties_of_the_best_go_to_the_first() -> None:
    data = [rollout(1), rollout(2), rollout(2), rollout(2)]
    assert counted(data, resolve("grpo", {"keep": 2})) == [1, 2]


def test_groups_may_have_different_sizes() -> None:
    data = [rollout(1), rollout(2, group=1), rollout(3, group=1), rollout(0, group=1)]
    assert counted(data, resolve("grpo", {"keep": 2})) == [0, 1, 2]


OLD, ALL = ("old_logprobs", "entropies"), [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "options", "updates", "measured"),
    [
        ("dapo", {}, 1, ([0, 2], ())), ("dapo", {}, 2, ([0, 2], OLD)),
        ("dapo", {"truncated": "leave_out"}, 1, ([0], ())),
        ("dapo", {"entropy_coefficient": 0.1}, 1, (ALL, ())),
        ("dapo", {"top_entropy_fraction": 0.5}, 1, (ALL, OLD)),
        ("grpo", {"keep": "positive"}, 1, ([0], ("ref_logprobs",))),
        ("grpo", {}, 3, (ALL, (*OLD, "ref_logprobs"))),
        ("rloo", {"truncated": "leave_out"}, 1, (ALL, (*OLD, "ref_logprobs"))),
        ("ppo", {"kl": "none"}, 1, (ALL, (*OLD, "old_values"))),
        ("opd", {}, 1, (ALL, (*OLD, "teacher_logprobs"))),
    ],
)  # fmt: skip
def test_what_is_measured_first(name: str, options: dict, updates: int, measured: Any) -> None:
    data = [rollout(1, 0.5), rollout(0, 0.0), rollout(2, -0.5, truncated=True)]
    assert PolicyGradient(resolve(name, options), 32).measured(data, updates) == measured


def test_the_counts_of_an_optimizer_batch() -> None:
    rows = [
        rollout(1, length=n).with_trained("entropies", torch.arange(1.0, n + 1)) for n in (2, 3)
    ]
    row = resolve("grpo", {"aggregation": "constant"})
    assert PolicyGradient(row, 32).count(rows) == objectives.Counts(64.0, 5)
    half = PolicyGradient(replace(row, top_entropy_fraction=0.5), 32)
    assert half.count(rows) == objectives.Counts(64.0, 3, 2.0)
    assert half.count([]) == objectives.Counts(1.0, 1)


@pytest.mark.parametrize("correction", ["auto", "none"])
def test_without_a_correction_a_token_has_no_weight(correction: str) -> None:
    mask, zeros = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2)
    columns = {"advantages": zeros + 3, "sampler_logprobs": zeros - 1}
    batch = objectives.Batch(mask, zeros, zeros, columns, torch.zeros(1))
    row = resolve("dapo", {"correction": correction})
    found = PolicyGradient(row, 32).loss(batch, objectives.Counts(2.0, 2))
    assert (float(found.total), "importance_weight" in found.values) == (-6.0, False)


@pytest.mark.parametrize(
    ("place", "aggregation"), [("loss", "sequence_mean"), ("reward", "sequence_sum")]
)
def test_the_loss_of_a_micro_batch_by_hand(place: Any, aggregation: Any) -> None:
    """Tokens by a loop. Masked ones (too little entropy) keep their KL and
    their place in the row's length; a weight within rounding is 1."""
    logprobs = [[-1.0, -2.0], [-0.5, -1.5, -3.0], [-1.0]]
    old = [[-1.1, -2.0], [-0.5, -1.4, -2.9], [-2.0]]
    sampler = [[-1.3, -2.05], [-0.505, -1.2, -2.9], [-2.0]]
    ref = [[-0.7, -2.5], [-0.6, -1.9, -2.0], [-1.4]]
    entropies = [[0.3, 0.8], [0.5, 0.2, 0.9], [0.7]]
    advantages = [[0.5, 1.5], [-1.0, 2.0, -0.5], [1.0]]

    def padded(values: list[list[float]]) -> Tensor:
        """Between numbers that count nowhere."""
        return torch.tensor([[7.0, *row, 5.0, 5.0][:4] for row in values], dtype=torch.float64)

    mask = torch.tensor([[False] + [n < len(row) for n in range(3)] for row in logprobs])
    named = {"old_logprobs": old, "sampler_logprobs": sampler, "ref_logprobs": ref,
             "advantages": advantages, "entropies": entropies}  # fmt: skip
    columns = {name: padded(values) for name, values in named.items()}
    counts = objectives.Counts(3.0, 11, min_entropy=0.5)
    now = columns["entropies"] + 0.25  # those of now, which the bonus is of
    row = replace(
        ALGORITHMS["grpo"], surrogate="reinforce", aggregation=aggregation, kl_coefficient=0.4,
        kl_place=place, entropy_coefficient=0.1, top_entropy_fraction=0.5,
        correction="token_truncate", correction_cap=1.2,
    )  # fmt: skip
    batch = objectives.Batch(mask, padded(logprobs), now, columns, torch.zeros(3))
    found = PolicyGradient(row, 32, rounding_nats=0.01).loss(batch, counts)
    total, bonus, kls, weights = 0.0, 0.0, [], []
    for i, tokens in enumerate(logprobs):
        length = len(tokens) if aggregation == "sequence_mean" else 1
        for t, logprob in enumerate(tokens):
            log_weight, log_ratio = old[i][t] - sampler[i][t], ref[i][t] - logprob
            weights.append(min(1.2, math.exp(log_weight * (abs(log_weight) > 0.01))))
            kls.append(math.exp(log_ratio) - 1 - log_ratio)
            if entropies[i][t] >= 0.5:
                total -= advantages[i][t] * logprob * weights[-1] / length
                bonus += entropies[i][t] + 0.25
            total += 0.4 * kls[-1] / length * (place == "loss")
    assert float(found.total) == pytest.approx(total - 0.1 * bonus / 11 * 3)
    assert found.values["kl"][mask].tolist() == pytest.approx(kls)
    assert found.values["importance_weight"][mask].tolist() == pytest.approx(weights)
    assert torch.equal(found.values["entropy"], now) and found.masked_out == 0


@pytest.mark.parametrize(
    ("estimator", "of_token"),
    [
        ("k1", lambda log: -log),
        ("k2", lambda log: log**2 / 2),
        ("k3", lambda log: math.exp(log) - 1 - log),
    ],
)
def test_kl_off_the_reward_of_the_completion(
    estimator: str, of_token: Callable[[float], float]
) -> None:
    row = resolve("rloo", {"kl": estimator, "kl_coefficient": 0.1})
    old = [torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0])]
    ref = [torch.tensor([-1.2, -1.3]), torch.tensor([-0.75, -1.0])]
    found = shaped([1, 0], row, old, ref)
    first, second = of_token(-0.2) + of_token(-0.3), of_token(0.25) + of_token(0.0)
    by_hand = (1 - 0.1 * first) - (0 - 0.1 * second)
    for each, sign in zip(found, (1, -1), strict=True):
        assert each.tolist() == pytest.approx([sign * by_hand] * 2)


def test_kl_off_each_token_s_reward_is_whitened_over_all_tokens() -> None:
    """REINFORCE++: returns to go of -beta kl_t with the reward at the end."""
    row = replace(ALGORITHMS["reinforce_pp"], kl_coefficient=1.0)
    old = [torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0])]
    ref = [torch.tensor([-1.5, -1.0]), torch.tensor([-1.0, -0.5])]
    found = torch.stack(shaped([1, 0], row, old, ref))
    returns = torch.tensor([[-0.5 + 1, 1.0], [0.5, 0.5]])
    assert torch.allclose(found, (returns - returns.mean()) / returns.std(), atol=1e-6)


def unscored(datum: Datum) -> Datum:
    """The row of a completion to which every reward gave None."""
    return replace(datum, has_reward=False)


def test_a_completion_without_a_reward_is_none_of_the_best() -> None:
    data = [rollout(-2), unscored(rollout(0)), rollout(-1), unscored(rollout(0, group=1))]
    assert counted(data, resolve("grpo", {"keep": 1})) == [2]


@pytest.mark.parametrize("name", ["rloo", "reinforce_pp"])
def test_a_completion_without_a_reward_teaches_nothing_where_the_kl_is_in_it(name: str) -> None:
    row, logs = ALGORITHMS[name], torch.tensor([-1.0, -1.5])
    data = [
        rollout(reward).with_trained("old_logprobs", logs).with_trained("ref_logprobs", logs + kl)
        for reward, kl in ((1, 0.1), (0, 0.2), (5, 0.3))
    ]
    found = shaped_advantages([*data[:2], unscored(data[2])], row)
    without = shaped_advantages(data[:2], row)
    assert [each.tolist() for each in found[:2]] == [each.tolist() for each in without]
    assert found[2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["reinforce_pp", "ppo"])
def test_what_is_left_out_counts_in_no_whitening(name: str) -> None:
    row, logs = resolve(name, {"truncated": "leave_out"}), torch.tensor([-1.0, -1.5])
    data = [
        rollout(reward)
        .with_trained("old_logprobs", logs)
        .with_trained("ref_logprobs", logs + 0.1 * reward)
        .with_trained("old_values", torch.tensor([0.25, 0.5]))
        for reward in (1, 0, 5)
    ]
    made = PolicyGradient(row, 32).prepared([*data[:2], replace(data[2], is_truncated=True)])
    without = PolicyGradient(row, 32).prepared(data[:2])
    for column in ("advantages", "returns") if row.critic else ("advantages",):
        found = [each.on_trained(column).tolist() for each in made]
        assert found[:2] == [each.on_trained(column).tolist() for each in without]
        assert found[2] == ([0.25, 0.5] if column == "returns" else [0.0, 0.0])


def test_the_whitening_of_what_the_buffer_holds_passes_over_truncated_completions() -> None:
    rewards, ends = (3.0, 1.0, 0.0, 8.0), ("stop", "stop", "stop", "length")
    completions = tuple(
        Completion((1,), "", (-1.0,), end, {"a": reward}, reward)
        for reward, end in zip(rewards, ends, strict=True)
    )
    groups = [Group(Prompt("p", "", (1,), ""), completions)]
    for name in ("reinforce_pp_baseline", "gdpo"):
        assert with_advantages(groups, resolve(name, {}))[0].completions[3].advantage > 1
        row = resolve(name, {"truncated": "leave_out"})
        found = [c.advantage for c in with_advantages(groups, row)[0].completions]
        assert found[3] == 0
        kept = torch.tensor(found[:3], dtype=torch.float64)
        assert (kept.mean().item(), kept.std().item()) == pytest.approx((0, 1), abs=1e-3)


def test_the_critic_learns_nothing_of_what_is_left_out() -> None:
    data = [rollout(1), replace(rollout(0), is_truncated=True)]
    leaving = Values(leaves_out_truncated=True)
    assert (leaving.counted(data), leaving.trained(data)) == ([0], [0])
    assert (Values().counted(data), Values().trained(data)) == ([0, 1], [0, 1])


def test_a_missing_end_costs_the_reward_of_the_last_token() -> None:
    row = resolve("ppo", {"kl": "none", "scale": "none", "missing_eos_penalty": 2.0})
    data = [
        rollout(1).with_trained(name, torch.zeros(2)) for name in ("old_values",) for _ in range(2)
    ]
    data = [each.with_trained("old_logprobs", torch.zeros(2)) for each in data]
    data[1] = replace(data[1], is_truncated=True)
    found = with_critic(data, row, CriticSection(gamma=0.5))
    assert [each.on_trained("advantages").tolist() for each in found] == [[0.5, 1.0], [-0.5, -1.0]]


def test_a_completion_without_a_reward_teaches_neither_ppo_s_policy_nor_its_critic() -> None:
    row, logs = ALGORITHMS["ppo"], torch.tensor([-1.0, -1.5])
    data = [
        rollout(reward)
        .with_trained("old_logprobs", logs)
        .with_trained("ref_logprobs", logs + 0.1)
        .with_trained("old_values", torch.tensor([0.25, 0.5]))
        for reward in (1, 0, 5)
    ]
    found = with_critic([*data[:2], unscored(data[2])], row, CriticSection())
    without = with_critic(data[:2], row, CriticSection())
    for name in ("advantages", "returns"):
        for one, other in zip(found, without, strict=False):
            assert one.on_trained(name).tolist() == other.on_trained(name).tolist()
    assert found[2].on_trained("advantages").tolist() == [0.0, 0.0]
    assert found[2].on_trained("returns").tolist() == [0.25, 0.5]


def test_weights_of_the_rewards_reach_gdpo() -> None:
    completions = tuple(
        Completion((1,), "", (-1.0,), "stop", {"a": a, "b": b}, a + b)
        for a, b in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0))
    )
    groups = [Group(Prompt("p", "", (1,), ""), completions)]
    only_a = with_advantages(groups, ALGORITHMS["gdpo"], {"a": 1.0, "b": 0.0})[0].completions
    assert only_a[0].advantage == pytest.approx(only_a[2].advantage)
    assert only_a[0].advantage > 0 > only_a[1].advantage


def test_the_reward_stands_at_the_last_token_of_a_short_completion_too() -> None:
    row = replace(ALGORITHMS["reinforce_pp"], kl_coefficient=1.0)
    none = [torch.zeros(1), torch.zeros(3)]
    found = shaped([2, 0], row, none, none)
    returns = torch.tensor([2.0, 0.0, 0.0, 0.0])
    by_hand = (returns - returns.mean()) / returns.std()
    assert torch.allclose(torch.cat(found), by_hand, atol=1e-6)


def test_the_reward_reaches_the_first_of_300_tokens() -> None:
    """A right and a wrong answer and a critic that knows nothing yet, by the default lambdas."""
    row = resolve("ppo", {"kl": "none"})
    data = [
        rollout(reward, length=300)
        .with_trained("old_logprobs", torch.zeros(300))
        .with_trained("old_values", torch.zeros(300))
        for reward in (1, 0)
    ]
    right, wrong = (
        each.on_trained("advantages") for each in with_critic(data, row, CriticSection())
    )
    assert (right[0].item(), wrong[0].item()) == pytest.approx((1, -1), abs=0.01)
    assert right[0] == right[-1]
    short = with_critic(data, row, CriticSection(lam=0.95))
    ahead = (short[0].on_trained("advantages") - short[1].on_trained("advantages")).tolist()
    assert 0 < ahead[0] < 1e-5 < 1 < ahead[-1]
