"""Scores in the prompts of demonstrations: z-scores and quantile bins, by hand."""

from pathlib import Path

import pytest

from reason_llm.config import SupervisedSection
from reason_llm.data.conditioning import (
    Conditioning,
    bin_of,
    fit,
    quantile_edges,
    read,
)
from reason_llm.data.forms import Completed
from reason_llm.errors import ConfigError, DataError

TEMPLATE = "{input} <rm_score>: {reward} "


def z_scores(**options: str) -> SupervisedSection:
    return SupervisedSection.model_validate({"condition": "reward", **options})


def bins(count: int, **options: str) -> SupervisedSection:
    return SupervisedSection.model_validate(
        {"condition": "bins", "condition_bins": count, **options}
    )


Z_SCORES = z_scores()


def test_z_scores_have_the_unbiased_deviation_and_two_decimals() -> None:
    scores = [2.0, 4.0, 9.0]  # mean 5, deviation sqrt((9 + 1 + 16) / 2) = 3.6056
    found = fit(scores, Z_SCORES)
    assert found.mean == 5.0
    assert found.deviation == pytest.approx(13**0.5, rel=1e-15)
    assert found.edges is None
    assert [found.reward_text(score) for score in scores] == ["-0.83", "-0.28", "1.11"]
    assert found.prompt("Q", found.reward_text(9.0)) == "Q <rm_score>: 1.11 "
    assert found.prompt("Q", "5.00") == "Q <rm_score>: 5.00 "


def test_bins_are_between_linear_quantiles() -> None:
    # Sorted 0 1 2 10: the thirds stand at 1 and at 2 of the three steps between them.
    assert quantile_edges([10, 0, 2, 1], 3) == pytest.approx((1.0, 2.0))
    assert quantile_edges([0, 1, 2, 10], 2) == (1.5,)
    assert quantile_edges([0, 10], 4) == (2.5, 5.0, 7.5)
    found = fit([10, 0, 2, 1], bins(2))
    assert [found.reward_text(s) for s in (0, 1, 1.5, 2, 10)] == ["0", "0", "1", "1", "1"]
    assert found.prompt("Q", "1") == "Q <rm_score>: 1 "
    assert [bin_of(s, (1.0, 2.0)) for s in (-5, 1, 1.9, 2, 99)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("right", [1, 200, 396, 700, 1200, 1999])
@pytest.mark.parametrize("num_bins", [2, 5])
def test_many_equal_scores_are_told_from_the_others(right: int, num_bins: int) -> None:
    found = fit([1.0] * right + [0.0] * (2000 - right), bins(num_bins))
    assert found.reward_text(0.0) != found.reward_text(1.0) == found.target == str(num_bins - 1)


def test_ties_are_in_one_bin() -> None:
    found = fit([3.0, 3.0, 1.0, 2.0, 3.0, 4.0], bins(3))
    assert [found.reward_text(score) for score in (1.0, 2.0, 3.0, 4.0)] == ["0", "1", "2", "2"]


def test_the_score_stands_in_the_last_message_of_the_user() -> None:
    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "a {reward} {input}"}]
    example = Completed("x", talk, ([{"role": "assistant", "content": "A"}],), True, 3.0)
    found = Conditioning(TEMPLATE, 1.0, 2.0, None).apply(example)
    assert found.messages == [
        talk[0], {"role": "user", "content": "a {reward} {input} <rm_score>: 1.00 "}
    ]  # fmt: skip
    assert (found.completions, found.value, found.is_text) == (example.completions, 3.0, True)
    before = Conditioning("[{reward}] {input}!", 1.0, 2.0, None).apply(example)
    assert before.messages[-1]["content"] == "[1.00] a {reward} {input}!"
    odd = Completed("x:3", talk[:1], example.completions)
    with pytest.raises(DataError, match=r"x:3: the prompt ends with a message of 'system'"):
        found_by = Conditioning(TEMPLATE, 0.0, 1.0, None)
        found_by.apply(odd)


@pytest.mark.parametrize(
    ("scores", "condition", "error", "named"),
    [
        ([1.0, 1.0], Z_SCORES, DataError, "all 2 scores are equal"),
        ([1.0], bins(5), DataError, "all 1 scores are equal"),
        ([], Z_SCORES, DataError, "all 0 scores"),
        ([1e308, -1e308], Z_SCORES, DataError, "no finite deviation"),
        ([1, 2], z_scores(condition_text="{input}"), ConfigError, r"holds \{reward\} 0 times"),
        (
            [1, 2],
            z_scores(condition_text="{reward} {input} {input}"),
            ConfigError,
            r"\{input\} 2 times",
        ),
    ],
)
def test_what_cannot_be_written(
    scores: list[float], condition: SupervisedSection, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named) as caught:
        fit(scores, condition)
    assert "\n" not in str(caught.value)


def test_what_is_asked_for_and_saved(tmp_path: Path) -> None:
    """The best by default: a z-score of 5, the highest bin."""
    assert fit([0, 1], Z_SCORES).target == "5.00"
    assert fit([0, 1], bins(4)).target == "3"
    assert fit([0, 1], z_scores(condition_target="1.50")).target == "1.50"
    found = fit([0, 1, 5], bins(3, condition_text="{reward}: {input}", condition_target="1"))
    talk = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    asked = found.asking("x", [*talk, {"role": "user", "content": "C"}])
    assert [message["content"] for message in asked] == ["A", "B", "1: C"]
    with pytest.raises(DataError, match="x:7: the prompt ends with a message of 'assistant'"):
        found.asking("x:7", talk)
    assert read(tmp_path) is None
    found.write(tmp_path)
    assert read(tmp_path) == found


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"template": "x"}',
        '{"template": "{input}", "mean": 0, "deviation": 1, "edges": null, "target": "5"}',
        '{"template": "{input}{reward}", "mean": "0", "deviation": 1, "edges": null}',
        '{"template": "{input}{reward}", "mean": 0, "deviation": 1, "edges": [true]}',
        '{"template": "{input}{reward}", "mean": 0, "deviation": 1, "edges": 3, "target": "5"}',
        '{"template": "{input}{reward}", "mean": 0, "deviation": 1, "edges": null, "target": 5}',
        '{"template": 3, "mean": 0, "deviation": 1, "edges": null, "target": "5"}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "conditioning.json").write_text(content)
    with pytest.raises(DataError, match=r"conditioning.json is damaged \(") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)
