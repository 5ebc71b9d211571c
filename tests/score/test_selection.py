"""Choice of completions and pairs, and the texts of conditional SFT.

1. Best of n and thresholds: ties, missing rewards, duplicates.       2. Pairs: no equals, margins.
3. Prompts that hold a score.       4. Bins.
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
    some = group(0.6 + 0.3 + 0.1, 0.999, 1.0)
    assert some.completions[0].reward != 1.0
    assert selection.at_least(some, 1.0) == [0, 2]
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


def test_the_threshold_belongs_to_the_chosen() -> None:
    assert selection.at_least(group(1.0, 0.99, 2.0, 1.0), 1.0) == [0, 2, 3]
    assert selection.at_least(group(0.0, 0.5), 1.0) == []


def test_at_most_so_many_of_a_prompt_the_best_of_them() -> None:
    some = group(1.0, 3.0, 1.0, 2.0, 1.0)
    assert selection.at_least(some, 1.0, limit=2) == [1, 3]
    assert selection.at_least(some, 1.0, limit=3) == [0, 1, 3]
    assert selection.at_least(some, 1.0, limit=0) == []


def test_of_the_same_tokens_only_the_first_is_chosen() -> None:
    assert selection.at_least(group(1.0, 1.0, 1.0, 1.0, tokens="abab"), 1.0) == [0, 1]
    assert selection.at_least(group(1.0, 1.0, 1.0, tokens="aab"), 1.0, limit=2) == [0, 2]
    assert selection.at_least(group(0.0, 1.0, tokens="aa"), 1.0) == [
        1
    ]  # the first one that is right


def test_the_best_and_the_worst_of_a_group() -> None:
    assert selection.best_worst_pair(group(0.1, 0.9, 0.9, 0.1)) == (1, 0)
    assert selection.best_worst_pair(group(1.0, 0.0), reward="exact") == (1, 0)


def test_equals_make_no_pair() -> None:
    assert selection.best_worst_pair(group(0.5, 0.5, 0.5)) is None
    assert selection.best_worst_pair(group(0.5)) is None
    assert selection.best_worst_pair(group(0.0, 1.0, tokens="aa")) is None
    assert selection.right_wrong_pairs(group(0.0, 1.0, 1.0, tokens="aab"), 1.0) == [(2, 0)]


def test_a_pair_may_have_to_be_a_margin_apart() -> None:
    some = group(0.0, 0.5, 1.0)
    assert selection.best_worst_pair(some, min_margin=1.0) == (2, 0)
    assert selection.best_worst_pair(some, min_margin=1.01) is None
    assert selection.right_wrong_pairs(some, 0.5) == [(1, 0), (2, 0)]
    assert selection.right_wrong_pairs(some, 0.5, min_margin=0.75) == [(2, 0)]


def test_all_right_with_all_wrong() -> None:
    pairs = selection.right_wrong_pairs(group(1.0, 0.0, 1.0, 0.0), 1.0)
    assert pairs == [(0, 1), (0, 3), (2, 1), (2, 3)]
    assert selection.right_wrong_pairs(group(1.0, 1.0), 1.0) == []
    assert selection.right_wrong_pairs(group(0.0, 0.0), 1.0) == []


def test_the_kl_of_best_of_n() -> None:
    assert selection.best_of_n_kl(1) == 0.0
    assert selection.best_of_n_kl(2) == pytest.approx(math.log(2) - 0.5)
    with pytest.raises(ValueError, match="best of 0"):
        selection.best_of_n_kl(0)


def test_z_scores_have_the_unbiased_deviation() -> None:
    assert selection.z_scores([2.0, 4.0, 6.0]) == [-1.0, 0.0, 1.0]
    assert selection.z_scores([1.0, 3.0]) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    assert selection.z_scores([0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]
    assert (selection.z_scores([7.0]), selection.z_scores([])) == ([0.0], [])


def test_the_score_follows_the_prompt() -> None:
    assert selection.conditional_prompt("Add 1.", 5.0) == "Add 1. <rm_score>: 5.00 "
    assert selection.conditional_prompt("Q", -0.001) == "Q <rm_score>: -0.00 "
    assert selection.conditional_prompt("Q", 1.126, "[{reward}] {input}") == "[1.13] Q"


def test_names_of_fields_in_the_prompt_stay_as_they_are() -> None:
    text = selection.conditional_prompt("{reward} {input} {x}", 0.5)
    assert text == "{reward} {input} {x} <rm_score>: 0.50 "


@pytest.mark.parametrize(
    ("template", "missing"),
    [("{input} ", "{reward}"), ("{reward}", "{input}"), ("", "{input} and {reward}")],
)
def test_a_template_without_its_fields_is_refused(template: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"lacks {missing}; add it"):
        selection.conditional_prompt("Q", 1.0, template)


def test_edges_are_interpolated_quantiles() -> None:
    assert selection.quantile_edges([4.0, 1.0, 2.0], 2) == [2.0]
    assert selection.quantile_edges([0.0, 1.0, 3.0, 7.0], 2) == [2.0]
    assert selection.quantile_edges([0.0, 10.0], 4) == [2.5, 5.0, 7.5]
    assert selection.quantile_edges([0.3], 3) == [0.3, 0.3]


def test_an_edge_at_a_reward_is_that_very_number() -> None:
    numbers = [0.1 * i for i in range(31)]
    assert selection.quantile_edges(numbers, 3) == [numbers[10], numbers[20]]


def test_a_reward_on_an_edge_is_in_the_bin_above() -> None:
    edges = [1.0, 2.0]
    assert [selection.quantile_bin(r, edges) for r in (0.9, 1.0, 1.9, 2.0, 9.0)] == [0, 1, 1, 2, 2]
    equal = selection.quantile_edges([0.5] * 4, 3)
    assert selection.quantile_bin(0.5, equal) == 2
    assert selection.bin_text(2) == "<|reward_2|>"


@pytest.mark.parametrize(("rewards", "bins"), [([], 5), ([1.0], 1)])
def test_bins_need_rewards_and_two_of_them(rewards: list[float], bins: int) -> None:
    with pytest.raises(ValueError, match=f"{bins} bins of {len(rewards)} rewards"):
        selection.quantile_edges(rewards, bins)
