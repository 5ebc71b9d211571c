"""Reward models in the config and the scorer: labels, what they contradict, totals."""

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from reason_llm.config import Config, ScoreSection
from reason_llm.errors import RewardError
from reason_llm.files import parsed_object
from reason_llm.readers.reward_models import SCALE, description, normalized
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.score import Scorer
from reason_llm.train import with_advantages

FIRST = {"name": "format", "weight": 0}


def model(label: str | None = None, weight: float = 1.0, **options: Any) -> dict[str, Any]:
    named = {} if label is None else {"label": label}
    return {
        "name": "reward_model", "weight": weight, "options": {"path": "some/folder"} | options,
    } | named  # fmt: skip


def config(rewards: list[dict[str, Any]], **sections: Any) -> Config:
    tree = {"data": {"train": "x.jsonl"}, "score": {"rewards": rewards}} | sections
    return Config.model_validate(tree)


@pytest.mark.parametrize(
    ("rewards", "sections", "told"),
    [
        ([model()], {}, "with weight 0 if it only evaluates"),
        ([FIRST, model(), model()], {}, "give each a label"),
        ([FIRST, model("a"), model("a")], {}, "give each a label"),
        ([FIRST, model("a.b")], {}, r"label\n.* match pattern"),
        ([FIRST, model("a" * 65)], {}, r"label\n.* match pattern"),
        ([FIRST, model("reward")], {}, "score/reward is already a metric"),
        ([FIRST, model(normalise="none")], {}, "option 'normalise' of reward_model"),
        ([FIRST, model(normalize="running")], {}, "option 'normalize' of reward_model"),
        ([FIRST, {"name": "reward_model"}], {}, "option 'path' of reward_model"),
        ([FIRST, model("a")], {"algorithm": {"name": "dapo"}}, "contradicts the reward model in"),
    ],
)
def test_what_contradicts_itself_is_told(
    rewards: list[dict[str, Any]], sections: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValidationError, match=told):
        config(rewards, **sections)


def test_each_is_a_role_of_the_base_where_it_is_asked() -> None:
    rewards = [FIRST, model("a"), model("b")]
    made = config(rewards)
    assert made.roles == dict.fromkeys(["reward:a", "reward:b"], Path("some/folder"))
    assert made.classifiers["reward_model"] == {}
    assert config(rewards, run={"from_buffer": "buffers"}).roles == {}
    assert config(rewards, stage="sft").roles == {}


def test_a_reward_without_a_label_is_written_as_before() -> None:
    made = config([FIRST, model("a")])
    first, second = made.model_dump(mode="json")["score"]["rewards"]
    assert "label" not in first
    assert second["label"] == "a"
    assert Config.model_validate(made.model_dump(mode="json")) == made


def group(*texts: str) -> Group:
    made = tuple(Completion((1,), text, (0.0,), "stop") for text in texts)
    return Group(Prompt("p:1", "", (1,), ""), made)


RIGHT = "<think>a</think><answer>3</answer>"


def test_totals_come_with_the_last_model() -> None:
    rewards = [FIRST | {"weight": 0.25}, model("a", 2.0), {"name": "tag_count"}, model("b", -1.0)]
    with Scorer(ScoreSection.model_validate({"rewards": rewards}), 10) as scorer:
        scored = scorer.score([group(RIGHT, "x"), group("y", RIGHT)])
        assert [dict(c.rewards) for c in scored[0].completions] == [
            {"format": 1.0, "tag_count": 1.0}, {"format": 0.0, "tag_count": 0.0},
        ]  # fmt: skip
        assert all(c.reward is None for g in scored for c in g.completions)
        (judged,) = scorer.score([group(RIGHT)], only_first=True)
        assert (judged.completions[0].reward, len(judged.completions[0].rewards)) == (0.25, 1)
        half = scorer.with_model_reward(scored, "b", [1.0, 2.0, 3.0, 4.0])
        assert all(c.reward is None for g in half for c in g.completions)
        whole = scorer.with_model_reward(half, "a", [0.5, 0.25, 0.125, 0.0])
    totals = [c.reward for g in whole for c in g.completions]
    assert totals == [0.25 + 1 + 1 - 1, 0.5 - 2, 0.25 - 3, 0.25 + 0 + 1 - 4]
    assert list(whole[0].completions[0].rewards) == ["format", "a", "tag_count", "b"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stops_or_counts_0(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    section = ScoreSection.model_validate({"rewards": [FIRST, model("a")]})
    with Scorer(section, 10) as scorer:
        scored = scorer.score([group("x", "y")])
        with pytest.raises(RewardError, match=rf"the reward model a gave {value} for p:1#1"):
            scorer.with_model_reward(scored, "a", [0.0, value])
    with Scorer(section.model_copy(update={"on_error": "zero"}), 10) as scorer:
        (found,) = scorer.with_model_reward(scored, "a", [1.0, value])
        assert [c.reward for c in found.completions] == [1.0, 0.0]
        assert scorer.take_counts()["score/errors"] == 1
    assert "counts 0" in caplog.text


@pytest.mark.parametrize("algorithm", ["grpo", "gdpo", "rloo"])
def test_a_first_reward_of_weight_0_changes_no_advantage(algorithm: str) -> None:
    section = ScoreSection.model_validate({"rewards": [FIRST, model("a")]})
    row = config([FIRST], algorithm={"name": algorithm}).algorithm.row()
    with Scorer(section, 10) as scorer:
        found = []
        for texts in ((RIGHT, "x", "y"), ("x", RIGHT, RIGHT)):
            scored = scorer.with_model_reward(scorer.score([group(*texts)]), "a", [1.0, 2.0, 4.0])
            (done,) = with_advantages(scored, row, scorer.weights)
            found.append([c.advantage for c in done.completions])
    assert found[0] == found[1]
    assert found[0][0] < found[0][1] < found[0][2]


def test_rewards_are_normalized_and_clipped() -> None:
    scores, scale = [1.0, 5.0, 200.0, -200.0], (1.0, 2.0)
    assert normalized(scores, scale) == [0.0, 2.0, 10.0, -10.0]
    assert normalized(scores, None) == scores
    assert math.isnan(normalized([math.nan], scale)[0])
    assert normalized([math.inf], scale) == [math.inf]  # an error of scoring, not a large reward


def test_the_folder_says_what_was_measured_last_and_nothing_that_was_not() -> None:
    first = {"step": 0, "eval/reward_mean": 0.0, "eval/reward_std": 0.0, "eval/pairs": 9.0}
    last = first | {"step": 5, "eval/reward_mean": -0.5, "eval/reward_std": 2.0,
                    "eval/pair_accuracy": 0.75, "eval/length_correlation": 0.125}  # fmt: skip

    def described(records: list[dict[str, float]]) -> dict[str, Any]:
        tree = {"stage": "reward", "data": {"train": "x.jsonl"}}
        return parsed_object(description(Config.model_validate(tree), records, "b", "t")[SCALE])

    found = described([first, last, {"step": 6}])
    assert {name: value for name, value in found.items() if name != "sha256"} == {
        "mean": -0.5, "std": 2.0, "pairs": 9.0, "read_at": "end_token", "base": "b",
        "template": "t", "pair_accuracy": 0.75, "length_correlation": 0.125,
    }  # fmt: skip
    unmeasured = described([{"step": 1}]).keys() - {"sha256"}
    assert unmeasured == {"read_at", "base", "template"}
    assert description(config([FIRST]), [first], "b", "t") == {}
