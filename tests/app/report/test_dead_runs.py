"""A run that cannot learn is told within three steps, in the console and in the report."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import report_runs
from conftest import ROOT
from reason_llm.app import training
from reason_llm.app.console import Console
from reason_llm.app.lines import of_summary
from reason_llm.app.report import alarms
from reason_llm.app.report.alarms import judge
from reason_llm.app.report.evidence import Evidence
from reason_llm.app.report.payload import evidence
from reason_llm.app.report.runs import read_run
from reason_llm.config import Config
from report_runs import record, write_run


def seen(records: Sequence[dict[str, float]], first: str = "boxed") -> Evidence:
    return report_runs.evidence(records, weights={first: 1.0})


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


def test_rewards_of_0_from_the_first_step_on_name_the_likely_causes(tmp_path: Path) -> None:
    """As a run's folder shows it; the alarm ends when one of them pays."""
    nothing = {"score/format": 0.0, "score/soft_overlong": 0.0, "score/reward": 0.0,
               "sample/truncated_fraction": 0.72, "sample/open_thoughts_fraction": 0.9,
               "sample/opening_prompts_fraction": 1.0}  # fmt: skip
    rewards = [{"name": "format"}, {"name": "soft_overlong"}]
    silent = [record(step, **nothing) for step in range(4)]
    run = read_run(write_run(tmp_path / "run", silent, rewards=rewards), "run")
    found = judge(evidence(run, []))["A reward pays nothing"]
    assert found.state == "alarm" and found.steps == (1, 3)
    assert found.text == (
        "The reward (format) was 0 for every completion of 3 steps. Of the completions of the last "
        "3 steps 72% were cut off by sample.max_new_tokens, 90% never close their thought. The "
        "prompt opens a thought, which each completion has to close."
    )
    assert "data.system_prompt" in found.advice
    of_turns = run.config.with_options({"sample.turn_tokens": 64})
    found = judge(evidence(replace(run, config=of_turns), []))["A reward pays nothing"]
    assert "72% were cut off by sample.turn_tokens or sample.max_new_tokens, 90%" in found.text
    paid = record(4, **nothing | {"score/format": 0.01})
    assert alarms.pays_nothing(replace(evidence(run, []), records=[*silent, paid])).state == "clear"


def test_a_silent_reward_beside_others_is_named_after_ten_steps() -> None:
    weights = {"boxed": 1.0, "format": 0.2, "tries": 0.0, "soft_overlong": 1.0}
    silent = {"score/format": 0.0, "score/tries": 0.0, "score/soft_overlong": 0.0}
    rows = [record(step, **silent) for step in range(11)]
    found = alarms.pays_nothing(report_runs.evidence(rows, weights=weights))
    assert found.text == "The reward (format) was 0 for every completion of 10 steps."
    assert alarms.pays_nothing(report_runs.evidence(rows[:-1], weights=weights)).state == "unknown"
    both = [row | {"score/boxed": 0.0, "sample/answers_found_fraction": 0.25} for row in rows[:4]]
    unasked = report_runs.evidence(both, weights=weights, data__system_prompt="none")
    told = alarms.pays_nothing(unasked).text
    assert told.startswith("Every reward (boxed and format) was 0 for every completion of 3 steps.")
    assert "25% hold an answer in the form that boxed looks for" in told
    assert told.endswith("data.system_prompt does not ask for \\boxed.")
    wrong = alarms.no_right_answer(report_runs.evidence(both, weights=weights))
    assert "25% hold an answer" in wrong.text
    even = [row | {"score/boxed": 0.0, "score/first_reward_std": 1.0} for row in rows[:4]]
    assert alarms.pays_nothing(seen(even)).state == "clear"


@pytest.mark.parametrize(
    ("reward", "prompt", "unasked"),
    [
        ("boxed", "auto", None), ("boxed", "none", "\\boxed"), ("gym", "boxed", "<answer>"),
        ("exact", "Answer with one of bug, refund.", None),
        ("code_tests", "Write a program.", "```python"), ("boxed", "Put it in \\boxed{}.", None),
    ],
)  # fmt: skip
def test_the_form_that_the_system_prompt_does_not_ask_for(
    tmp_path: Path, reward: str, prompt: str, unasked: str | None
) -> None:
    run = read_run(write_run(tmp_path / "run", [record(0)], rewards=[{"name": reward}]), "run")
    config = run.config.with_options({"data.system_prompt": prompt})
    told = alarms.likely_causes(evidence(replace(run, config=config), []))
    assert told.startswith(f"data.system_prompt does not ask for {unasked}.") == bool(unasked)


def test_a_label_that_is_never_right_is_to_be_asked_for_alone() -> None:
    rows = [record(step, **{"score/exact": 0.0}) for step in range(4)]
    wrong = alarms.no_right_answer(seen(rows, "exact"))
    assert wrong.text.endswith("list the labels in the prompt, and ask for one of them alone.")
    assert "does not ask" not in wrong.text


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


def test_answers_that_were_right_before_are_said_to_have_been() -> None:
    cut = {"score__boxed": 0.0, "sample__truncated_fraction": 0.9}
    records = [*steps(20, score__boxed=0.3), *(record(s, **cut) for s in (21, 22, 23))]
    found = judge(report_runs.evidence(records, data__system_prompt="none"))["No right answer"]
    assert found.steps == (21, 23)
    assert "of the last 3 steps is right. In an earlier step 30.0% were. Of the" in found.text
    assert "90% were cut off by sample.max_new_tokens" in found.text
    assert "resume from an earlier checkpoint with a lower train.learning_rate" in found.advice
    assert "does not ask" not in found.text  # it was asked for well enough before
    mine = {"score__mine": 0.0, "score__first_reward_std": 0.0}
    own = [*steps(20, score__mine=0.3), *(record(s, **mine) for s in (21, 22, 23))]
    assert "mine is 0 for every completion" in alarms.constant_reward(seen(own, "mine")).text


def test_held_out_accuracy_that_falls_to_0_falls() -> None:
    accuracies = enumerate((0.0, 0.2, 0.62, 0.0))
    records = [record(10 * i, eval__accuracy=value, eval__problems=256) for i, value in accuracies]
    found = judge(seen(records))["Held-out accuracy falls"]
    assert found.state == "alarm" and found.steps == (20, 30)
    assert "Take the adapter of step 20" in found.advice


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
    assert lines[0] == "held-out half 0.500 -> 0.500 on 8 problems"
    assert not any("accuracy" in line for line in lines)
