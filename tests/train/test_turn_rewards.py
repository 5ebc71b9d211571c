"""Advantages of turns: the return to go less the baseline of whole rollouts."""

from itertools import product
from typing import Any

import pytest
import torch

from reason_llm.config.algorithms import resolve
from reason_llm.model import to_data
from reason_llm.model.datum import Datum
from reason_llm.rollout import Completion, Group, Prompt, Span
from reason_llm.train.objectives import PolicyGradient
from reason_llm.train.scored import with_advantages

TURNS = ((6.0,), (2.0, 0.0), (4.0, -4.0, 8.0))
"""With weight 0.5 and a reward of 0, 1 and 2 at the end, the returns are 3, 2 and 6."""
TINY = {"credit": "turn", "kl": "k2", "kl_coefficient": 1e-12}


def group(*turns: tuple[float, ...], weight: float = 0.5, at_end: float = 1.0) -> Group:
    """Rollouts with two tokens for each turn, and one for each reply between."""
    made = []
    for number, each in enumerate(turns):
        length, reward = 3 * len(each) - 1, weight * sum(each) + at_end * number
        made.append(Completion(
            (5,) * length, "", (-1.0,) * length, "environment", {"environment": reward}, reward,
            spans=tuple(Span(3 * n + 2, 3 * n + 3) for n in range(len(each) - 1)),
            environment={"turn_rewards": list(each)},
        ))  # fmt: skip
    return Group(Prompt("p", "", (1, 2), ""), tuple(made))


def prepared(row: Any, credited: Group, weight: float = 0.5) -> list[Datum]:
    """As the learner has them, with log-probs, a base and values that differ by token."""
    data = to_data(with_advantages([credited], row, turn_weight=weight))
    for name, slope in (("old_logprobs", -0.125), ("ref_logprobs", -0.0625), ("old_values", 0.25)):
        data = [d.with_trained(name, slope * torch.arange(1.0, d.num_trained + 1)) for d in data]
    return PolicyGradient(row, 32, turn_weight=weight).prepared(data)


@pytest.mark.parametrize(
    ("options", "baseline", "divisor"),
    [
        ({"scale": "none"}, [11 / 3] * 3, 1.0),
        ({"scale": "none", "baseline": "leave_one_out"}, [4.0, 4.5, 2.5], 1.0),
        ({"scale": "group"}, [11 / 3] * 3, (13 / 3) ** 0.5 + 1e-4),
        ({"scale": "whiten"}, [11 / 3] * 3, (13 / 3) ** 0.5 + 1e-4),
        ({**TINY, "kl_place": "reward"}, [11 / 3] * 3, (13 / 3) ** 0.5 + 1e-4),
    ],
)
def test_by_hand(options: dict[str, Any], baseline: list[float], divisor: float) -> None:
    """The returns have the mean 11 / 3 and the sample variance 13 / 3."""
    data = prepared(resolve("bnpo", {"credit": "turn", **options}), group(*TURNS))
    for datum, to_go, base in zip(
        data, ([3.0], [2.0, 1.0], [6.0, 4.0, 6.0]), baseline, strict=True
    ):
        by_hand = [(each - base) / divisor for each in to_go for _ in range(2)]
        assert datum.on_trained("advantages").tolist() == pytest.approx(by_hand, abs=1e-6)
        assert not datum.columns["advantages"][~torch.tensor(datum.trained)].any()


def test_returns_to_go_of_tokens() -> None:
    """REINFORCE++ whitens them over all tokens; PPO has each reward at the end of its turn."""
    to_go = torch.tensor([3.0] * 2 + [2, 2, 1, 1] + [6, 6, 4, 4, 6, 6])
    for name, column, expected in (
        ("reinforce_pp", "advantages", (to_go - to_go.mean()) / to_go.std()),
        ("ppo", "whole_returns", to_go),
    ):
        data = prepared(resolve(name, TINY), group(*TURNS))
        found = torch.cat([datum.on_trained(column) for datum in data])
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "gspo_token", "rloo", "reinforce_pp", "ppo"])
def test_rewards_of_the_last_turn_are_learned_as_before(name: str) -> None:
    last = group((0.3,), (0.0, 0.7), (0.0, 0.0, -0.1))
    by_turn = prepared(resolve(name, {"credit": "turn"}), last)
    for one, other in zip(by_turn, prepared(resolve(name, {}), last, 0.0), strict=True):
        assert torch.equal(one.columns["advantages"], other.columns["advantages"])


PATHS = (("stop",), ("go", "good"), ("go", "bad"))
PAID = {"stop": 0.3, "go": -0.2, "good": 1.0, "bad": -0.5}


def by_number(pair: Group) -> list[list[float]]:
    """What must not be done: each turn's return to go less the mean of those with that turn."""
    to_go = [[sum(c.turn_rewards) - earned for earned in c.earned] for c in pair.completions]
    reached = [[turns[n] for turns in to_go if n < len(turns)] for n in range(2)]
    return [[g - sum(reached[n]) / len(reached[n]) for n, g in enumerate(each)] for each in to_go]


@pytest.mark.parametrize(
    ("baseline", "factor"), [("leave_one_out", 1.0), ("group_mean", 0.5), ("by_number", None)]
)
def test_the_expected_gradient_is_the_policy_s(baseline: str, factor: float | None) -> None:
    """Over all groups of a bandit whose policy may stop."""
    logits = torch.tensor([[0.4, -0.3], [0.1, 0.8]], dtype=torch.float64, requires_grad=True)
    log = dict(zip(PAID, logits.log_softmax(-1).flatten(), strict=True))
    chance = {path: torch.stack([log[each] for each in path]).sum().exp() for path in PATHS}
    value = torch.stack([chance[path] * sum(PAID[each] for each in path) for path in PATHS]).sum()
    surrogate = torch.zeros((), dtype=torch.float64)
    for paths in product(PATHS, repeat=2):
        paid = [tuple(PAID[action] for action in path) for path in paths]
        pair = group(*paid, weight=1.0, at_end=0.0)
        found = by_number(pair)
        if factor is not None:
            row = resolve("bnpo", {"credit": "turn", "scale": "none", "baseline": baseline})
            data = to_data(with_advantages([pair], row, turn_weight=1.0))
            found = [datum.on_trained("advantages")[::2].tolist() for datum in data]
        weight = (chance[paths[0]] * chance[paths[1]]).detach() / 2
        for path, turns in zip(paths, found, strict=True):
            for action, advantage in zip(path, turns, strict=True):
                surrogate = surrogate + weight * advantage * log[action]
    (true,) = torch.autograd.grad(value, logits, retain_graph=True)
    (estimated,) = torch.autograd.grad(surrogate, logits)
    if factor is None:
        assert torch.cosine_similarity(true.flatten(), estimated.flatten(), dim=0) < 0.95
    else:
        assert torch.allclose(estimated, factor * true, atol=1e-6)
