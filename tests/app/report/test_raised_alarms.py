"""Alarms that ended are told at the end and in the report, each with its steps and curves."""

from pathlib import Path
from typing import Any

import pytest

from reason_llm.app import training
from reason_llm.app.report import raised
from reason_llm.app.report.alarms import length_drift
from reason_llm.app.report.page import write_report
from reason_llm.app.report.payload import examine, to_value
from reason_llm.app.report.raised import Raised, summary
from reason_llm.app.report.runs import read_run
from report_runs import evidence, record, write_run


def of(step: int, is_right: bool) -> dict[str, float]:
    value = float(is_right)
    return record(step, score__boxed=value / 2, score__reward=value / 2)


def followed(folder: Path, before: int, steps: list[dict[str, float]]) -> list[tuple[int, str]]:
    """What a run raises that goes on after ``before`` records."""
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:before]))
    live = training.LiveAlarms(read_run(folder, "run"))
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    return [(new.step, new.title) for each in steps for new in live.take(each)]


def test_an_alarm_that_ended_is_told_with_its_steps_and_curves(tmp_path: Path) -> None:
    records = [of(step, is_right=step not in (1, 2, 3, 4)) for step in range(9)]
    folder = write_run(tmp_path / "run", records)
    assert followed(folder, 1, records[1:]) == [(3, "No right answer")]
    (line,) = write_report([folder], tmp_path / "report.html")
    assert line == "alarms: none now, 1 raised before, at step 3"
    (run,) = to_value([examine(read_run(folder, "run"))])["runs"]
    (ended,) = run["ended"]
    assert (ended["step"], ended["title"]) == (3, "No right answer")
    assert ended["charts"] and ended["steps"] == [1, 3]
    assert "No right answer" in (tmp_path / "report.html").read_text()


def test_an_alarm_is_told_again_when_it_comes_back_and_not_while_it_lasts(tmp_path: Path) -> None:
    """A resume changes neither."""
    records = [of(step, is_right=step in (0, 6, 7, 8)) for step in range(12)]
    folder = write_run(tmp_path / "run", records)
    assert followed(folder, 1, records[1:5]) == [(3, "No right answer")]
    assert followed(folder, 5, records[5:]) == [(11, "No right answer")]
    assert [each.step for each in raised.read(folder)] == [3, 11]


def test_evaluations_of_rows_are_kept_however_long_a_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "MOST_RECORDS", 3)
    rows = [record(step, eval__loss=1.0) if step == 1 else of(step, True) for step in range(9)]
    run = read_run(write_run(tmp_path / "run", rows[:1]), "run")
    live = training.LiveAlarms(run)
    for row in rows[1:]:
        live.take(row)
    assert [row["step"] for row in run.records] == [1, 4, 5, 6, 7, 8]


def test_a_run_that_goes_on_from_an_earlier_step_forgets_what_came_after_it(tmp_path: Path) -> None:
    records = [of(step, is_right=False) for step in range(6)]
    folder = write_run(tmp_path / "run", records)
    assert followed(folder, 1, records[1:]) == [(3, "No right answer")]
    assert followed(folder, 3, [of(3, is_right=True)]) == []
    assert raised.read(folder) == []


def test_what_is_told() -> None:
    before = [Raised(step, "A", "", "", (), None) for step in (6, 9, 9, 12)]
    assert summary([], []) == "no alarms"
    assert summary(["A", "B"], []) == "alarms: A; B"
    assert summary([], before[:1]) == "alarms: none now, 1 raised before, at step 6"
    assert summary(["B"], before) == "alarms: B, 4 raised before, at steps 6, 9 and 12"


def test_a_line_that_a_kill_cut_short_is_passed_over(tmp_path: Path) -> None:
    kept = Raised(6, "A", "text", "advice", ("train/kl",), (5, 6))
    raised.write(tmp_path, [kept, kept])
    path = tmp_path / raised.FILE
    path.write_bytes(path.read_bytes()[:-9])
    assert raised.read(tmp_path) == [kept]


@pytest.mark.parametrize(
    ("paid_by_model", "truncated", "state"),
    [(True, 0.0, "clear"), (False, 0.0, "alarm"), (True, 0.02, "alarm")],
)
def test_longer_answers_are_the_aim_of_a_reward_model_while_none_is_cut_off(
    paid_by_model: bool, truncated: float, state: str
) -> None:
    """As the PPO of configs/rlhf_ppo_tiny.yaml, which learns to write the working."""
    lengths = [12.0, 12.1, 12.2, 13.0, 14.5, 16.0, 18.0, 20.0, 21.0, 21.5, 22.0, 22.1]
    values: dict[str, Any] = {"sample__truncated_fraction": truncated}
    records = [
        record(step, sample__completion_tokens=length, **values)
        for step, length in enumerate(lengths, 1)
    ]
    weights, by_model = {"boxed": 0.0, "paid": 1.0}, "paid" if paid_by_model else ""
    found = length_drift(evidence(records, weights=weights, by_model=by_model))
    assert found.state == state
