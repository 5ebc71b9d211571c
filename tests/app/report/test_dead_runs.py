"""A run that cannot learn is told within three steps, in the console and in the report."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from reason_llm.app import training
from reason_llm.app.console import Console
from reason_llm.app.lines import of_summary
from reason_llm.app.report import alarms
from reason_llm.app.report.evidence import Evidence
from reason_llm.config import Config
from report_runs import record


def seen(records: Sequence[dict[str, float]], first: str = "boxed") -> Evidence:
    return Evidence(records, [], {first: 1.0}, 256, 4)


def steps(count: int, **values: float) -> list[dict[str, float]]:
    return [record(step, **values) for step in range(1, count + 1)]


def test_no_right_answer_in_three_steps() -> None:
    found = alarms.no_right_answer(seen(steps(3, score__boxed=0.0)))
    assert found.state == "alarm"
    assert "None of the 15 answers of the last 3 steps is right." in found.text
    assert alarms.no_right_answer(seen(steps(2, score__boxed=0.0))).state == "unknown"
    once = [*steps(2, score__boxed=0.0), record(3, score__boxed=0.01)]
    assert alarms.no_right_answer(seen(once)).state == "clear"
    later = [*steps(20), *(record(s, score__boxed=0.0) for s in (21, 22, 23))]
    assert alarms.no_right_answer(seen(later)).steps == (21, 23)
    own = steps(3, score__mine=0.0)
    assert alarms.no_right_answer(seen(own, "mine")).state == "unknown"


def test_a_first_reward_that_tells_no_answer_from_another() -> None:
    same = {"score__mine": 0.5, "score__first_reward_std": 0.0}
    found = alarms.constant_reward(seen(steps(3, **same), "mine"))
    assert found.state == "alarm"
    assert "mine is 0.5 for every completion of the last 3 steps" in found.text
    varies = [*steps(2, **same), record(3, **same | {"score__first_reward_std": 0.1})]
    assert alarms.constant_reward(seen(varies, "mine")).state == "clear"
    solved = {"score__boxed": 1.0, "score__first_reward_std": 0.0}
    assert alarms.constant_reward(seen(steps(3, **solved))).state == "clear"
    assert alarms.constant_reward(seen(steps(3))).state == "unknown"  # of an earlier version


def test_a_gradient_of_zero() -> None:
    assert alarms.nothing_learned(seen(steps(3, train__grad_norm=0.0))).state == "alarm"
    assert alarms.nothing_learned(seen(steps(2, train__grad_norm=0.0))).state == "unknown"
    assert alarms.nothing_learned(seen(steps(3, train__grad_norm=1e-6))).state == "clear"


def test_what_dies_late_is_told_within_three_steps() -> None:
    key = "score__groups_without_signal_fraction"
    records = [*steps(20, **{key: 0.1}), *(record(s, **{key: 1.0}) for s in (21, 22, 23))]
    for each in records:
        each |= {"sample/tokens": 8 * 20.0}
    assert alarms.no_variance(seen(records[:-1])).state == "clear"
    assert alarms.no_variance(seen(records)).state == "alarm"
    cut = [*steps(20), *(record(s, sample__truncated_fraction=0.9) for s in (21, 22, 23))]
    found = {t for t, f in alarms.judge(seen(cut)).items() if f.state == "alarm"}
    assert "Most completions have no end" in found


def told(caplog: pytest.LogCaptureFixture) -> dict[str, int]:
    """Titles of the alarms in the console by the step that raised them."""
    found: dict[str, int] = {}
    for each in caplog.messages:
        if each.startswith("alarm at step "):
            where, _, text = each.removeprefix("alarm at step ").partition(": ")
            found.setdefault(text.partition(".")[0], int(where))
    return found


@pytest.fixture
def run(
    small_run: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> Callable[..., tuple[dict[str, int], list[str]]]:
    """Alarms of a run, by their step, and the lines at its end."""

    def run(**options: Any) -> tuple[dict[str, int], list[str]]:
        console = Console("quiet")
        caplog.set_level(logging.WARNING, "reason_llm")
        held_out = {"data__eval": str(ROOT / "data" / "arithmetic_test.jsonl"), "eval__limit": 8}
        summary = training.run_training(small_run(**held_out | options), console)
        return told(caplog), of_summary(summary)

    return run


def test_a_run_whose_answers_are_cut_off_and_wrong(
    run: Callable[..., tuple[dict[str, int], list[str]]], tmp_path: Path
) -> None:
    found, _ = run(sample__max_new_tokens=4)
    assert found == {
        "Most completions have no end": 1,
        "No right answer": 3,
        "Groups without signal": 3,
        "Nothing is learned": 3,
    }


def test_a_reward_of_one_half_is_an_alarm_and_no_accuracy(
    run: Callable[..., tuple[dict[str, int], list[str]]], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def half(completion):\n    return 0.5\n")
    found, lines = run(score__rewards=[{"custom": f"{tmp_path / 'mine.py'}:half"}])
    assert found["The first reward is constant"] == 3
    assert found["Nothing is learned"] == 3
    assert lines[0] == "held-out half 0.500 -> 0.500"
    assert not any("accuracy" in line for line in lines)
