"""Choice of completions and pairs.

1. Best of n and thresholds: ties, missing rewards, duplicates.       2. Pairs: no equals, margins.
"""

import math

import pytest

from reason_llm.errors import ConfigError
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.score import selection

NAN = math.nan


def group(*rewards: float | None, tokens: str = "") -> Group:
    """Completions with these rewards, their tokens all different or spelled by letters."""
    spelled = tokens or "".join(chr(97 + i) for i in range(len(rewards)))
    completions = tuple(
        Completion(
            token_ids=(ord(letter),),
            text=letter,
            logprobs=(-1.0,),
            finish_reason="stop",
            rewards={} if reward is None else {"exact": -reward},
            reward=reward,
        )
        for letter, reward in zip(spelled, rewards, strict=True)
    )
    return Group(Prompt("data:1", "text", (1,), "4"), completions)


def test_best_of_n_takes_the_highest_and_the_earlier_of_equals() -> None:
    some = group(-1.0, 2.0, 0.0, 2.0, 1.0)
    assert selection.best_of_n(some) == [1]
    assert selection.best_of_n(some, 3) == [1, 3, 4]
    assert selection.best_of_n(some, 99) == [1, 3, 4, 2, 0]
    assert selection.best_of_n(some, reward="exact") == [0]


def test_a_weighted_sum_that_rounding_left_below_reaches_the_threshold() -> None:
    some = group(0.6 + 0.3 + 0.1, 1 - 2e-9, 1.0)
    assert some.completions[0].reward != 1.0
    assert selection.at_least(some, 1.0) == [2, 0]
    assert selection.right_wrong_pairs(some, 1.0) == [(0, 1), (2, 1)]


def test_no_reward_is_never_chosen() -> None:
    some = group(None, 0.1, NAN, -0.2)
    assert selection.best_of_n(some, 9) == [1, 3]
    assert selection.at_least(some, -math.inf) == [1, 3]
    assert selection.best_worst_pair(some) == (1, 3)
    assert selection.right_wrong_pairs(some, 0.0) == [(1, 3)]
    nothing = group(None, NAN)
    assert selection.best_of_n(nothing) == []
    assert selection.best_worst_pair(nothing) is None


def test_an_unknown_reward_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data:1' has no reward 'exakt'; it has exact"):
        selection.best_of_n(group(1.0, 2.0), reward="exakt")
    with pytest.raises(ConfigError, match="it has none"):
        selection.best_of_n(group(None), reward="exact")
    assert selection.best_of_n(group(None, 2.0), reward="exact") == [1]  # some have it


def test_the_threshold_belongs_to_the_chosen() -> None:
    assert selection.at_least(group(1.0, 0.99, 2.0, 1.0), 1.0) == [2, 0, 3]
    assert selection.at_least(group(0.0, 0.5), 1.0) == []
    assert selection.at_least(group(1.0, -1.0), 1.0, reward="exact") == [1]


def test_of_the_same_tokens_only_the_first_is_chosen() -> None:
    assert selection.at_least(group(1.0, 1.0, 1.0, 1.0, tokens="abab"), 1.0) == [0, 1]
    assert selection.at_least(group(1.0, 1.0, 1.0, tokens="aab"), 1.0) == [0, 2]
    assert selection.at_least(group(0.0, 1.0, tokens="aa"), 1.0) == [1]  # the first right one


def test_the_best_and_the_worst_of_a_group() -> None:
    assert selection.best_worst_pair(group(0.1, 0.9, 0.9, 0.1)) == (1, 0)
    assert selection.best_worst_pair(group(1.0, 0.0), reward="exact") == (1, 0)


def test_equals_make_no_pair() -> None:
    assert selection.best_worst_pair(group(0.5, 0.5, 0.5)) is None
    assert selection.best_worst_pair(group(0.5)) is None
    assert selection.best_worst_pair(group(0.0, 1.0, tokens="aa")) is None
    assert selection.right_wrong_pairs(group(0.0, 1.0, 1.0, tokens="aab"), 1.0) == [(2, 0)]


def test_all_right_with_all_wrong() -> None:
    pairs = selection.right_wrong_pairs(group(1.0, 0.0, 1.0, 0.0), 1.0)
    assert pairs == [(0, 1), (0, 3), (2, 1), (2, 3)]
    assert selection.right_wrong_pairs(group(1.0, -1.0), 1.0, reward="exact") == [(1, 0)]
    assert selection.right_wrong_pairs(group(1.0, 1.0), 1.0) == []
    assert selection.right_wrong_pairs(group(0.0, 0.0), 1.0) == []
