"""A rollout of several conversations: a row for each, with one advantage."""

from dataclasses import replace
from typing import Any

import orjson
import pytest
import torch

from json_groups import group_from_json
from reason_llm.config.algorithms import resolve
from reason_llm.model import to_data
from reason_llm.model.datum import Datum
from reason_llm.rollout import Completion, Conversation, Group, Prompt, Span
from reason_llm.train.objectives import PolicyGradient

SPLIT = Conversation((7, 8, 9), (4, 5, 6, 4), "four", (-1.0, 0.0, -2.0, -3.0), (Span(1, 2),))
SHORT = Conversation((7,), (3,), "one", (-4.0,))


def completion(reward: float, *others: Conversation, **more: Any) -> Completion:
    told = {"finish_reason": "environment", "rewards": {"environment": reward}, "reward": reward}
    made = {**told, "advantage": reward - 1.5, **more}
    return Completion((5, 6), "two", (-0.5, -0.25), others=others, **made)


GROUPS = [
    Group(Prompt("a", "", (1, 2), ""), (completion(3, SPLIT, SHORT), completion(1))),
    Group(Prompt("b", "", (1,), ""), (completion(0), completion(2, SHORT))),
]


def test_each_is_a_row() -> None:
    data = to_data(GROUPS)
    names = ["a#0", "a#1", "b#0", "b#1", "a#0.1", "a#0.2", "b#1.1"]
    assert [each.name for each in data] == names
    assert [each.group for each in data] == [0, 0, 1, 1, 0, 0, 1]
    assert [each.rollout for each in data] == [0, 1, 2, 3, 0, 0, 3]
    assert [each.reward for each in data] == [3, 1, 0, 2, 3, 3, 2]
    split, short = data[4], data[6]
    assert split.ids.tolist() == [7, 8, 9, 4, 5, 6, 4]
    assert split.trained.tolist() == [False, False, False, True, False, True, True]
    assert split.columns["sampler_logprobs"].tolist() == [0, 0, 0, -1, 0, -2, -3]
    assert split.columns["advantages"].tolist() == [0, 0, 0, 1.5, 0, 1.5, 1.5]
    assert (short.ids.tolist(), short.columns["advantages"].tolist()) == ([7, 3], [0, 0.5])


def test_a_row_with_another_prompt_keeps_what_the_model_wrote() -> None:
    row = to_data(GROUPS)[4]
    other = row.with_prompt((1,))
    assert other.ids.tolist() == [1, 4, 5, 6, 4]
    assert other.trained.tolist() == [False, True, False, True, True]
    assert (other.name, other.rollout, other.columns) == (row.name, row.rollout, {})
    assert replace(row, trained=(False,) * 7).prompt_ids == tuple(row.ids)


def test_what_holds_for_the_rollout_holds_for_its_rows() -> None:
    """Cut off or without a reward, all of its rows are."""
    cut = completion(1, SHORT, finish_reason="length", rewards={"environment": float("nan")})
    data = to_data([replace(GROUPS[0], completions=(completion(0, SHORT), cut))])
    assert [(each.is_truncated, each.has_reward) for each in data] == [
        (False, True), (True, False), (False, True), (True, False),
    ]  # fmt: skip
    row = resolve("grpo", {"truncated": "leave_out"})
    assert PolicyGradient(row, 32).counted(data) == [0, 2]


def test_the_best_are_rollouts() -> None:
    row = resolve("grpo", {"keep": 1})
    assert PolicyGradient(row, 32).counted(to_data(GROUPS)) == [0, 3, 4, 5, 6]


def test_the_kl_of_a_rollout_is_that_of_its_rows() -> None:
    """Off the reward, before the baseline; told for a whole rollout."""
    row = resolve("rloo", {"kl": "k1", "kl_coefficient": 0.5, "scale": "none"})

    def measured(datum: Datum, number: int) -> Datum:
        old = torch.arange(1.0, datum.num_trained + 1)
        return datum.with_trained("old_logprobs", old).with_trained("ref_logprobs", old - number)

    objective = PolicyGradient(row, 32)
    data = [measured(datum, number) for number, datum in enumerate(to_data(GROUPS))]
    kl = [2 * 0 + 3 * 4 + 1 * 5, 2 * 1, 2 * 2, 2 * 3 + 1 * 6]
    less = [reward - 0.5 * each for reward, each in zip((3, 1, 0, 2), kl, strict=True)]
    first, second = less[0] - less[1], less[2] - less[3]
    by_hand = {"a#0": first, "a#1": -first, "b#0": second, "b#1": -second}
    for datum in objective.prepared(data):
        expected = by_hand[datum.name.partition(".")[0]]
        assert datum.on_trained("advantages").tolist() == [expected] * datum.num_trained
    told = objective.describe(data, range(len(data)))
    assert told["train/kl_per_completion"] == pytest.approx(sum(kl) / 4)


def test_the_buffer_keeps_them() -> None:
    assert [group_from_json(orjson.loads(orjson.dumps(group))) for group in GROUPS] == GROUPS
    for wrong, says in (
        (replace(SPLIT, logprobs=(-1.0,)), "'a', completion 0: 4 token_ids but 1 log-probs"),
        (replace(SPLIT, spans=(Span(3, 5),)), "'a', completion 0: its spans do not follow"),
    ):
        group = replace(GROUPS[0], completions=(completion(1, SHORT, wrong),))
        with pytest.raises(ValueError, match=says):
            group_from_json(orjson.loads(orjson.dumps(group)))
