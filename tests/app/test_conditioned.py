"""Scores in the prompts of demonstrations (pairs --as conditioned): z-scores and quantile bins by
hand, rows out of rollouts, and a run that learns them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY
from reason_llm.app.cli import main
from reason_llm.app.conditioned import bin_of, fit, quantile_edges
from reason_llm.app.pairs import write_pairs
from reason_llm.config import Config, PairsSection
from reason_llm.errors import DataError, ReasonError, RolloutBufferError
from reason_llm.loop import train
from reason_llm.model import load_tokenizer
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.run import Document, RunIdentity, to_bytes

tokenizer = load_tokenizer(str(TINY))


def texts(scores: list[float], **options: Any) -> list[str]:
    condition = fit(scores, PairsSection.model_validate(options))
    return [condition.text(score) for score in scores]


def test_z_scores_have_the_unbiased_deviation_and_two_decimals() -> None:
    scores = [2.0, 4.0, 9.0]  # mean 5, deviation sqrt((9 + 1 + 16) / 2) = 3.6056
    assert texts(scores, bins=0) == [f" <rm_score>: {z} " for z in ("-0.83", "-0.28", "1.11")]


def test_bins_are_between_linear_quantiles() -> None:
    # Sorted 0 1 2 10: the thirds stand at 1 and at 2 of the three steps between them.
    assert quantile_edges([10, 0, 2, 1], 3) == pytest.approx((1.0, 2.0))
    assert quantile_edges([0, 1, 2, 10], 2) == (1.5,)
    assert quantile_edges([0, 10], 4) == (2.5, 5.0, 7.5)
    assert texts([10, 0, 2, 1], bins=2) == [f" <rm_score>: {b} " for b in (1, 0, 1, 0)]
    assert [bin_of(s, (1.0, 2.0)) for s in (-5, 1, 1.9, 2, 99)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("right", [1, 200, 396, 700, 1200, 1999])
@pytest.mark.parametrize("num_bins", [2, 5])
def test_many_equal_scores_are_told_from_the_others(right: int, num_bins: int) -> None:
    scores = [1.0] * right + [0.0] * (2000 - right)
    found = texts(scores, bins=num_bins)
    assert found[-1] != found[0] == f" <rm_score>: {num_bins - 1} "


@pytest.mark.parametrize(
    ("scores", "options", "error", "told"),
    [
        ([1.0, 1.0], {"bins": 0}, DataError, "all 2 scores are equal"),
        ([1.0], {}, DataError, "all 1 scores are equal"),
        ([1e308, -1e308], {"bins": 0}, DataError, "no finite deviation"),
    ],
)  # fmt: skip
def test_what_cannot_be_written(
    scores: list[float], options: dict[str, Any], error: type[ReasonError], told: str
) -> None:
    with pytest.raises(error, match=told) as caught:
        texts(scores, **options)
    assert "\n" not in str(caught.value)


def written(source: Path, **options: Any) -> list[dict[str, Any]]:
    target = source.parent / "out.jsonl"
    target.unlink(missing_ok=True)
    counts = write_pairs([source], target, "conditioned", PairsSection.model_validate(options))
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert counts.rows == len(rows)
    return rows


def saved(folder: Path, config: dict[str, Any], *prompts: str) -> Path:
    """Rollouts of a right and a wrong answer to each prompt."""
    (folder / "buffers").mkdir()
    groups = []
    for text in prompts:
        completions = tuple(
            Completion((token, 2), said, (-1.0,) * 2, "stop", {"boxed": reward}, reward, 0.0)
            for said, reward in (("4", 1.0), ("5", 0.0))
            for token in tokenizer.encode(said)
        )
        groups.append(Group(Prompt("x:1", text, tuple(tokenizer.encode(text)), "4"), completions))
    document = Document(RunIdentity("abc", "mine", config), 0, True, True, len(groups), groups)
    path = folder / "buffers" / "step-00000000.json.gz"
    path.write_bytes(to_bytes(document, compressed=True))
    return folder / "buffers"


HEADER = "<|im_end|>\n<|im_start|>assistant\n"
RUN = {
    "model": {"path": str(TINY), "files_sha256": {"config.json": "0a"}, "end_token_ids": [2]},
    "data": {"train": "x", "template_sha256": "0b"},
}
"""A config as buffers have it, with what identifies the run."""


def test_rollouts_end_their_question_with_their_reward(tmp_path: Path) -> None:
    source = saved(tmp_path, RUN, f"<|im_start|>user\n2+2?{HEADER}", "2+2?")
    rows = written(source, bins=0)
    assert [(row["completion"], row["score"]) for row in rows] == [("4", 1.0), ("5", 0.0)]
    for row, z in zip(rows, ("0.87", "-0.87"), strict=True):  # of 1, 0, 1 and 0: sqrt(3) / 2
        assert row["prompt"] == f"<|im_start|>user\n2+2? <rm_score>: {z} {HEADER}"
        assert row["prompt_ids"] == tokenizer.encode(row["prompt"])


def test_rollouts_of_an_unknown_config_are_refused(tmp_path: Path) -> None:
    source = saved(tmp_path, {"model": {"path": str(TINY)}}, f"<|im_start|>user\n2+2?{HEADER}")
    with pytest.raises(RolloutBufferError, match="config is not one of this version"):
        written(source)


def test_a_run_learns_from_the_rows_of_the_command(
    small_run: Callable[..., Config], tmp_path: Path
) -> None:
    prompts = [f"<|im_start|>user\n{n}+2?{HEADER}" for n in range(3)]
    source, target = saved(tmp_path, RUN, *prompts), tmp_path / "conditioned.jsonl"
    command = ["pairs", str(source), "--as", "conditioned", "--out", str(target), "--bins", "2"]
    assert main(command) == 0
    train(small_run(
        stage="sft", run__steps=1, algorithm={}, sample={}, train__rows_per_step=6,
        data={"train": str(target)},
    ))  # fmt: skip
    assert (tmp_path / "runs" / "small" / "adapter" / "adapter_config.json").exists()
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    for row in rows:
        assert row["prompt"].endswith(f"+2? <rm_score>: {row['score']:.0f} {HEADER}")
    assert len(rows) == 6
