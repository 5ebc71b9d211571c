"""metrics.jsonl holds each step once, and the summary follows from it alone."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import pstdev
from typing import Any

import pytest

from reason_llm import train
from reason_llm.config import Config
from reason_llm.errors import DataError, WriteError
from reason_llm.rollout import Completion, Group, Prompt, Span
from reason_llm.run.start.prepare import prepare
from reason_llm.run.store import metrics
from reason_llm.run.store.metrics import MetricsLog
from reason_llm.run.watch import SILENT
from reason_llm.score.math import final_boxed


def test_records_after_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, None, 0.0)
    for step in range(4):
        log.write(step, {"score/reward": step / 10})
    resumed = MetricsLog(tmp_path, 2, 0.0)
    resumed.write(3, {"score/reward": 9.0})
    steps = [(r["step"], r["score/reward"]) for r in metrics.read(tmp_path)]
    assert steps == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 9.0)]
    MetricsLog(tmp_path, None, 0.0)  # a run that was killed before its first checkpoint
    assert metrics.read(tmp_path) == []


@pytest.mark.parametrize("kept", [[1, 2], [0, 2], [0, 1], []], ids=str)
def test_a_record_that_is_gone_is_told(
    kept: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(tmp_path, None, 0.0)
    for step in range(3):
        log.write(step, {"score/reward": float("nan")})
    noted = log.sha256
    log.write(3, {})  # after the checkpoint
    resumed = MetricsLog(tmp_path, 2, 0.0, noted)
    assert not caplog.records
    assert resumed.sha256 == noted
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join(lines[i] for i in kept))
    MetricsLog(tmp_path, 2, 0.0, noted)
    (told,) = caplog.messages
    assert "metrics.jsonl up to step 2 is not what was written" in told


def test_a_resumed_run_tells_of_a_record_that_is_gone(
    small_run: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    train(small_run(run__steps=1))
    job = prepare(small_run(run__steps=2), SILENT)
    job.begin(0.0)
    assert not caplog.records
    (job.folder / "metrics.jsonl").write_bytes(b"")
    job.begin(0.0)
    (told,) = caplog.messages
    assert "metrics.jsonl up to step 1 is not what was written" in told


def test_a_line_cut_off_by_a_kill_is_no_record(tmp_path: Path) -> None:
    MetricsLog(tmp_path, None, 0.0).write(0, {})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 1, "scor')
    assert [r["step"] for r in metrics.read(tmp_path)] == [0]
    MetricsLog(tmp_path, 0, 0.0).write(1, {})
    assert [r["step"] for r in metrics.read(tmp_path)] == [0, 1]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\nnonsense\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        metrics.read(tmp_path)


def test_what_was_not_finite_is_left_out(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, None, 0.0)
    log.write(1, {"score/reward": float("inf"), "train/sampler_kl": float("nan"), "sample/x": 2.0})
    (found,) = log.records()
    assert found.keys() == {"step", "sample/x", "time/total_seconds"}
    MetricsLog(tmp_path, 1, 0.0)  # and a run goes on over it
    log.path.write_bytes(b'{"step": 0, "score/reward": "high"}\n')
    with pytest.raises(DataError, match="a value that is not a number"):
        log.records()


def test_a_number_whose_sums_would_not_be_finite_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "score/reward": 1e308, "sample/x": 2.0}\n')
    assert metrics.read(tmp_path) == [{"step": 1, "sample/x": 2.0}]


@pytest.mark.parametrize("step", [-1, 10**400, 0.5])
def test_a_step_that_is_none_is_named(tmp_path: Path, step: float) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": {step}}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:1"):
        metrics.read(tmp_path)


def test_records_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, None, 0.0)
    log.path.unlink()
    log.path.mkdir()
    with pytest.raises(WriteError, match=r"metrics\.jsonl cannot be written \(Is a directory\)"):
        log.write(0, {})
    with pytest.raises(DataError, match=r"metrics\.jsonl cannot be read \(it is a folder"):
        log.records()


def test_named_sets_stand_beside_the_first() -> None:
    values = {"eval/accuracy": 0.5, "eval/completion_tokens": 3.0, "eval/problems": 30.0}
    record = values | metrics.by_name(values, "aime") | metrics.by_name({"eval/accuracy": 0.1}, "b")
    assert record["eval/aime/completion_tokens"] == 3.0
    assert metrics.accuracies(record) == {"aime": 0.5, "b": 0.1}
    first = {"step": 0, "eval/accuracy": 0.25, "eval/aime/accuracy": 0.25}
    summary = metrics.summarize([first, {"step": 1}, {"step": 2, **record}], Path("a"), 0.0)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.25, 0.5)
    assert summary["accuracy_of_sets"] == {"aime": [0.25, 0.5]}
    assert (summary["accuracy_problems"], summary["problems_of_sets"]) == (30, {"aime": 30})


def test_summary_adds_up_the_records() -> None:
    records = [
        {"step": 0, "eval/accuracy": 0.25, "time/total_seconds": 1.0, "memory/peak_rss_mib": 10.0},
        {"step": 1, "time/sampling_seconds": 2.0, "time/total_seconds": 3.5, "sample/tokens": 7},
        {"step": 2, "eval/accuracy": 0.5, "time/sampling_seconds": 1.0, "time/total_seconds": 2.0,
         "memory/peak_rss_mib": 30.0, "sample/tokens": 5},
    ]  # fmt: skip
    summary = metrics.summarize(records, Path("runs/x/adapter"), 0.5)
    assert summary["accuracy_before"] == 0.25
    assert summary["accuracy_after"] == 0.5
    assert summary["steps"] == 2
    assert summary["sampling_seconds"] == 3.0
    assert summary["total_seconds"] == 7.0
    assert summary["peak_rss_mib"] == 30.0
    assert summary["sampled_tokens"] == 12
    assert summary["adapter"] == "runs/x/adapter"


def test_what_is_told_of_a_step_s_rollouts() -> None:
    """Means are over the completions that have a reward, and over written tokens."""

    def made(reward: float, advantage: float, reason: Any, **others: Any) -> Completion:
        one = Completion((1, 2, 3), "", (-1.0,) * 3, reason, {"a": reward, "none": math.nan})
        return replace(one, reward=reward, advantage=advantage, **others)

    failed = made(0.0, 0.0, "error")
    failed = replace(failed, rewards={"a": math.nan, "none": math.nan})
    pairs = [
        (made(1.0, 1.0, "stop"), made(0.0, -1.0, "length", spans=(Span(0, 1),))),
        (made(1.0, 0.0, "stop"), made(1.0, 0.0, "turns")),
        (made(1.0, 0.0, "stop"), made(0.5, 0.0, "stop")),
        (made(1.0, 0.5, "stop"), failed),
    ]
    groups = [Group(Prompt("p", "", (1,), ""), pair) for pair in pairs]
    assert metrics.describe(groups, "a") == {
        "sample/tokens": 23, "sample/completion_tokens": 23 / 8, "sample/truncated_fraction": 1 / 8,
        "score/groups_without_signal_fraction": 3 / 4, "score/a": 5.5 / 7, "score/reward": 5.5 / 7,
        "score/first_reward_std": pstdev([1, 0, 1, 1, 1, 0.5, 1]),
    }  # fmt: skip


def test_a_step_whose_first_reward_is_0_tells_what_its_completions_hold() -> None:
    opened = Prompt("p", "What?<think>\n", (1,), "3")
    texts = ["a</think> \\boxed{4}", "a \\boxed{3}"]
    made = [Completion((1,), text, (0.0,), "stop", {"a": 0.0}, 0.0) for text in texts]
    groups = [Group(opened, tuple(made)), Group(replace(opened, text="What?"), (made[1],) * 2)]
    found = metrics.describe(groups, "a", final_boxed)
    told = ("sample/open_thoughts", "sample/opening_prompts", "sample/answers_found")
    assert [found[f"{name}_fraction"] for name in told] == [0.25, 0.5, 0.75]
    paid = replace(made[0], rewards={"a": 1.0})
    assert "sample/answers_found_fraction" not in metrics.describe(
        [replace(groups[0], completions=(paid, made[1]))], "a", final_boxed
    )
