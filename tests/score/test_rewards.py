"""Rewards on texts worked by hand."""

import pytest

from reason_llm.config import RewardSpec
from reason_llm.errors import ConfigError
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.score import REWARDS, find_rewards, score
from reason_llm.score.boxed_math import last_boxed


def reward(name: str, text: str, answer: str = "3") -> float:
    return REWARDS[name](Prompt("p", "", (), answer), Completion((), text, (), "stop"))


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("so \\boxed{3}", "3", 1),
        ("\\boxed{4} no, \\boxed{3}", "3", 1),
        ("\\boxed{3} no, \\boxed{4}", "3", 0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1),
        ("\\boxed{\\dfrac{2}{4}}", "\\frac{1}{2}", 1),
        ("\\boxed{1/2}", "\\frac{1}{3}", 0),
        ("\\boxed{003}", "3", 1),
        ("\\boxed{-3}", "3", 0),
        ("the answer is 3", "3", 0),
        ("\\boxed{3", "3", 0),
        ("\\boxed{}", "3", 0),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1),
        ("\\boxed{37+45}", "82", 0),
        ("\\boxed{37+45=82}", "82", 0),
        ("\\boxed{17 = 18}", "18", 0),
        ("\\boxed{x = 18}", "18", 1),
        ("\\boxed{20 - 2}", "18", 0),
        ("\\boxed{1.2 \\times 10^3}", "1200", 1),
        ("\\boxed{9 \\times 2}", "18", 0),
        ("\\boxed{1,018}", "1018", 1),
        ("\\boxed{3 \\cdot 4}", "12", 0),
        ("\\boxed{1 1/2}", "1.5", 1),
        ("\\boxed{1.5e-3}", "0.0015", 1),
        ("\\boxed{+3}", "3", 1),
        ("\\boxed{x = 1 + 2}", "3", 0),
        ("#### 3", "3", 0),
        ("\\boxed{4} #### 3", "3", 0),
        ("<answer>3</answer>", "3", 0),
        ("\\boxed{Pairs}", "Paris", 0),
        ("\\boxed{paris}", "Paris", 1),
        ("\\boxed{" + "1" * 6000 + "}", "3", 0),
    ],
)
def test_boxed(text: str, answer: str, value: float) -> None:
    assert reward("boxed", text, answer) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>1+2</think><answer>3</answer>", 1),
        ("<answer> 3\n</answer>", 1),
        ("<answer>4</answer><answer>3</answer>", 1),
        ("<answer>3</answer><answer>4</answer>", 0),
        ("<answer>4<answer>3</answer>", 1),
        ("<answer>3", 0),
        ("3", 0),
        ("\\boxed{3}", 0),
        ("<answer>1+2</answer>", 0),
        ("<answer></answer>", 0),
    ],
)
def test_think_answer_tags(text: str, value: float) -> None:
    assert reward("think_answer_tags", text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a\nb</think>\n<answer>3</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("so <think>a</think><answer>3</answer>", 0),
        ("<think>a</think><answer>3</answer> so", 0),
        ("<answer>3</answer><think>a</think>", 0),
        ("<think>a</think><think>b</think><answer>3</answer>", 0),
        ("<think>a</think><answer>3</answer><answer>3</answer>", 0),
        ("<think>a<answer>3</answer>", 0),
    ],
)
def test_format(text: str, value: float) -> None:
    assert reward("format", text) == value


def test_tag_count_is_a_quarter_for_each_tag_once() -> None:
    assert reward("tag_count", "<think>a</think><answer>3</answer>") == 1
    assert reward("tag_count", "<think>a</think><answer>3") == 0.75
    assert reward("tag_count", "<think><think>a</think>") == 0.25
    assert reward("tag_count", "3") == 0


def test_last_boxed_keeps_nested_and_escaped_braces() -> None:
    assert last_boxed("\\boxed{\\{1, \\sqrt{2}\\}}") == "\\{1, \\sqrt{2}\\}"
    assert last_boxed("none") is None


def test_the_total_is_the_weighted_sum_and_the_parts_are_kept() -> None:
    rewards = find_rewards(
        [RewardSpec(name="think_answer_tags"), RewardSpec(name="format", weight=0.25)]
    )
    right, wrong = "<think>a</think><answer>3</answer>", "<answer>3</answer>"
    group = Group(
        Prompt("p", "", (), "3"), tuple(Completion((1,), t, (0.0,), "stop") for t in (right, wrong))
    )
    (scored,) = score([group], rewards)
    first, second = scored.completions
    assert (first.reward, dict(first.rewards)) == (1.25, {"think_answer_tags": 1, "format": 1})
    assert (second.reward, dict(second.rewards)) == (1.0, {"think_answer_tags": 1, "format": 0})
    assert first.token_ids == (1,)


def test_an_unknown_reward_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'boxd'.*boxed, think_answer_tags, format, tag_count"):
        find_rewards([RewardSpec(name="boxd")])
