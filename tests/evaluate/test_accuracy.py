"""Outcomes become scores, by hand; the lines of a file are kept by whole waves."""

import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from reason_llm.errors import DataError, WriteError
from reason_llm.evaluate.accuracy import estimates, scores, summarize, table
from reason_llm.evaluate.outcomes import EvaluationWave, OutcomeLog
from reason_llm.rollout import Prompt
from reason_llm.score.math import majority
from reason_llm.score.statistics import estimate


def answer(reward: float, final: str | None = None, tokens: int = 5) -> dict[str, Any]:
    return {"text": "…", "tokens": tokens, "finish_reason": "stop", "reward": reward,
            "answer": final}  # fmt: skip


def outcome(model: str, number: int, greedy: float, samples: list[tuple[float, str | None]]) -> Any:
    return {"model": model, "set": "s", "id": f"p{number}", "prompt": "", "gold": "",
            "greedy": answer(greedy), "samples": [answer(*each) for each in samples]}  # fmt: skip


OUTCOMES = [
    outcome(
        "a", 0, 1.0,
        [(1.0, r"\frac{1}{2}"), (1.0, "0.5"), (0.0, "3"), (0.0, "3"), (1.0, "0.50")],
    ),
    outcome("a", 1, 0.0, [(0.0, "7"), (0.0, "7"), (1.0, "8"), (0.0, None), (0.0, None)]),
    outcome("a", 2, 1.0, [(0.0, None)] * 5),
]  # fmt: skip


def test_scores_by_hand() -> None:
    values = scores(OUTCOMES, 5, vote=majority)
    assert values["greedy"] == [1, 0, 1]
    assert values["mean@5"] == pytest.approx([0.6, 0.2, 0])
    assert values["pass@2"] == pytest.approx([0.9, 0.4, 0])  # 1 - C(2, 2)/C(5, 2), 1 - C(4, 2)/10
    assert values["pass@4"] == pytest.approx([1, 0.8, 0])
    assert values["pass@5"] == [1, 1, 0]
    # Votes are counted by value: a half has three spellings, and more votes than 3.
    assert values["maj@5"] == [1, 0, 0]
    assert list(values) == ["greedy", "mean@5", "pass@2", "pass@4", "pass@5", "maj@5"]


def test_scores_that_cannot_be_had_are_left_out() -> None:
    assert list(scores(OUTCOMES, 0, vote=majority)) == ["greedy"]
    assert "maj@5" not in scores(OUTCOMES, 5, vote=None)
    assert list(scores(OUTCOMES, 1, vote=majority)) == ["greedy", "mean@1"]
    parts = [outcome("a", 0, 0.5, [(0.5, None), (1.0, None)])]
    assert list(scores(parts, 2, vote=None)) == ["greedy", "mean@2"]


def test_two_models_are_compared_problem_by_problem() -> None:
    other = [
        outcome("b", 0, 0.0, [(0.0, None)] * 5),
        outcome("b", 1, 0.0, [(0.0, None)] * 5),
        outcome("b", 2, 1.0, [(1.0, "2")] * 5),
    ]
    summary = summarize(OUTCOMES + other, 5, vote=majority, compared=True)
    greedy = summary["comparisons"]["s"]["greedy"]
    assert (greedy["better"], greedy["worse"], greedy["p_value"]) == (1, 0, 1.0)
    assert greedy["difference"]["value"] == pytest.approx(1 / 3)
    means = summary["comparisons"]["s"]["mean@5"]
    # Differences 3, 1, -5 of 5: of the 8 sums of signs, all but the four of +-9 and +-7 ... are
    # 9, 7, 3, 1 in size, and 1 is the least, so each of them is as large.
    assert means["p_value"] == pytest.approx(1.0)
    assert summary["results"]["a"]["s"]["completion_tokens"] == 5
    lines = table(summary)
    assert any("s greedy: a - b = +33.3" in line for line in lines)
    assert lines[:3] == [
        "set  problems  score   model  value   95 % interval",
        "s    3         greedy  a       66.7   [20.8, 93.9]",
        "s    3         greedy  b       33.3   [6.1, 79.2]",
    ]
    (line,) = (line for line in lines if line.startswith("s mean@5"))
    assert line.startswith("s mean@5: a - b = -6.7 [")
    assert line.endswith("p = 1 (better on 2, worse on 1)")


def test_a_tiny_difference_is_shown_without_a_minus() -> None:
    ours = [outcome("a", number, 0.5, []) for number in range(4)]
    theirs = [outcome("b", number, 0.5 + 1e-5, []) for number in range(4)]
    summary = summarize(ours + theirs, 0, vote=None, compared=True)
    summary["comparisons"]["s"]["greedy"]["difference"] |= {"low": -1e-5, "high": -0.0}
    (line,) = (line for line in table(summary) if " - " in line)
    assert line.startswith("s greedy: a - b = +0.0 [0.0, 0.0], p = ")


def test_completions_that_were_cut_off_are_told() -> None:
    lines = [outcome("a", number, 0.0, []) for number in range(4)]
    said = "s a: 25% of the completions were cut off and count as wrong; raise eval.max_new_tokens"
    assert said not in table(summarize(lines, 0, vote=None, compared=False))
    lines[0]["greedy"]["finish_reason"] = "length"
    assert said in table(summarize(lines, 0, vote=None, compared=False))


def test_rewards_of_any_range_have_normal_intervals() -> None:
    parts = [outcome("a", number, reward, []) for number, reward in enumerate((-1.0, 2.0, 5.0))]
    greedy = summarize(parts, 0, vote=None, compared=False)["results"]["a"]["s"]["greedy"]
    assert (greedy["value"], greedy["high"]) == pytest.approx((2.0, 2 + 1.959964 * 3**0.5))


def test_intervals_are_of_the_trials_that_each_problem_stands_for() -> None:
    values = [0.5, 0.5, 0.5, 0.6]
    trials = {"greedy": 1, "mean@8": 8, "pass@2": 4, "pass@4": 2, "pass@8": 1, "maj@8": 1}
    expected = {name: estimate(values, count) for name, count in trials.items()}
    assert estimates(dict.fromkeys(trials, values), 8) == expected
    assert len({expected[name].low for name in ("greedy", "pass@4", "pass@2", "mean@8")}) == 4


def waves(count: int, size: int = 2) -> list[EvaluationWave]:
    prompts = [Prompt(f"p{number}", "", (1,), "") for number in range(count)]
    return [
        EvaluationWave("a", "s", start, prompts[start : start + size])
        for start in range(0, count, size)
    ]


def lines(count: int) -> list[Any]:
    return [outcome("a", number, 1.0, []) for number in range(count)]


@pytest.mark.parametrize(
    ("kept", "cut", "done"),
    [(0, 0, 0), (1, 0, 0), (2, 0, 1), (3, 7, 1), (4, 0, 2), (5, 0, 3), (5, 3, 2)],
)
def test_whole_waves_are_kept(tmp_path: Path, kept: int, cut: int, done: int) -> None:
    path = tmp_path / "problems.jsonl"
    whole = b"".join(orjson.dumps(each) + b"\n" for each in lines(kept))
    path.write_bytes(whole[: len(whole) - cut])
    log = OutcomeLog(path)
    assert log.resume(waves(5)) == done
    problems = min(2 * done, 5)
    assert [each["id"] for each in log.outcomes] == [f"p{i}" for i in range(problems)]
    for wave in waves(5)[done:]:
        log.append([lines(5)[int(prompt.id[1:])] for prompt in wave.prompts])
    assert path.read_bytes() == b"".join(orjson.dumps(each) + b"\n" for each in lines(5))


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_bytes(orjson.dumps(outcome("b", 0, 1.0, [])) + b"\n" + b"x" * 3)
    with pytest.raises(DataError, match=r"problems\.jsonl:1 is not of this evaluation"):
        OutcomeLog(path).resume(waves(1, size=1))
    path.write_bytes(b"{}\n")
    with pytest.raises(DataError, match="no outcome of a problem"):
        OutcomeLog(path).resume(waves(1, size=1))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("greedy", "reward"), "x"), (("greedy", "reward"), None), (("greedy", "reward"), 1e300),
        (("greedy", "tokens"), "x"), (("greedy",), None), (("greedy",), 5), (("samples",), "x"),
        (("samples",), []), (("samples", 0), 5), (("samples", 0, "reward"), [1]),
        (("samples", 0, "answer"), 5), (("samples", 0, "finish_reason"), None),
    ],
)  # fmt: skip
def test_an_outcome_that_is_none_is_refused(tmp_path: Path, place: tuple, value: Any) -> None:
    path, line = tmp_path / "problems.jsonl", outcome("a", 0, 1.0, [(1.0, "1")])
    inner: Any = line
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_bytes(orjson.dumps(line) + b"\n")
    with pytest.raises(DataError, match=r"problems\.jsonl:1: no outcome of a problem"):
        OutcomeLog(path, num_samples=1).resume(waves(1, size=1))


def test_a_disk_that_does_not_take_a_wave_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="No such file or directory"):
        OutcomeLog(tmp_path / "gone" / "problems.jsonl").append(lines(2))


def test_a_file_beyond_its_bound_is_not_read(tmp_path: Path) -> None:
    (path := tmp_path / "problems.jsonl").touch()
    os.truncate(path, 1 << 42)  # a hole, which would be read for an hour
    with pytest.raises(DataError, match="larger than 4,096 MiB"):
        OutcomeLog(path).resume(waves(2))


def test_a_fifo_is_no_file_of_outcomes(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    os.mkfifo(path)
    with pytest.raises(DataError, match="it is a FIFO"):
        OutcomeLog(path).resume(waves(1))
