"""The checks of the stages: each raised by a run that earns it, and by no healthy one."""

from collections.abc import Sequence

import pytest

from reason_llm.app.report import alarms
from reason_llm.app.report.evidence import Evidence, Finding
from reason_llm.config import StageName
from reason_llm.run import Record
from report_runs import evidence


def seen(records: Sequence[Record], stage: StageName = "preference") -> Evidence:
    return evidence(records, stage=stage)


def raised(finding: Finding) -> bool:
    return finding.state == "alarm"


def steps(key: str, values: Sequence[float], first: int = 1) -> list[Record]:
    return [{"step": first + i, key: value} for i, value in enumerate(values)]


def judged(*pairs: tuple[float, float]) -> list[Record]:
    """Evaluations every ten steps: held-out accuracy, and the pairs in order."""
    return [
        {"step": 10 * i, "eval/accuracy": accuracy, "eval/pair_accuracy": right}
        for i, (accuracy, right) in enumerate(pairs)
    ]


def test_an_alarm_says_where_the_adapter_of_the_best_step_is() -> None:
    kept = evidence(best_step=40)
    assert kept.adapter_of(40) == "the adapter of step 40 (in adapter_best/, --which best)"
    assert kept.adapter_of(30) == "the adapter of step 30 (its checkpoint)"


def test_the_chosen_side_falls() -> None:
    key = "train/chosen_log_ratio"
    falling = steps(key, [-0.15 * i + 0.01 * (-1) ** i for i in range(30)])
    found = alarms.judge(seen(falling))["Pairs in order, policy broken"]
    assert raised(found)
    assert "irpo or orpo" in found.advice
    assert found.charts[0] == key
    assert found.steps == (1, 30)
    # As low and no longer falling, falling and still likely, rising: none.
    for values in (
        [-1.5 + 0.01 * (-1) ** i for i in range(30)],
        [-0.02 * i + 0.01 * (-1) ** i for i in range(30)],
        [0.15 * i for i in range(30)],
    ):
        assert not raised(alarms.chosen_falls(seen(steps(key, values))))


def test_accuracy_falls_while_the_pairs_come_into_order() -> None:
    broken = judged((0.35, 0.5), (0.65, 0.8), (0.42, 0.8), (0.34, 0.82))
    found = alarms.accuracy_falls(seen(broken))
    assert raised(found)
    assert found.steps == (10, 30)
    assert "65.0% → 34.0%" in found.text
    for healthy in (
        judged((0.35, 0.5), (0.71, 0.88), (0.645, 0.95)),  # within 3 standard errors
        judged((0.35, 0.5), (0.6, 0.8), (0.65, 0.9)),
        judged((0.35, 0.5)),
    ):
        assert not raised(alarms.accuracy_falls(seen(healthy)))


def test_overfitting() -> None:
    def found(*losses: float) -> Finding:
        return alarms.overfits(seen(steps("eval/loss", losses), "sft"))

    late = found(3.0, 2.0, 1.5, 1.6, 1.7, 1.8)
    assert raised(late)
    assert late.steps == (3, 6)
    assert raised(found(3.0, 1.5, 1.6, 1.7, 1.8, 1.79))
    assert found(3.0, 2.0, 1.5, 1.6, 1.7, 1.65).state == "clear"  # two rises
    assert found(3.0, 1.5, 1.501, 1.502, 1.503).state == "clear"  # of rounding
    assert found(3.0, 1.5, 1.6, 1.7, 1.8, 1.4).state == "clear"  # lower than ever since
    assert found(1.5, 1.6, 1.7, 1.8, 1.0, 1.1).state == "clear"  # and one rise since
    assert found(3.0, 2.0, 1.5).state == "unknown"


@pytest.mark.parametrize(
    ("key", "stage"), [("sample/truncated_fraction", "rl"), ("eval/truncated_fraction", "sft")]
)
def test_completions_without_an_end(key: str, stage: StageName) -> None:
    def found(*fractions: float) -> Finding:
        return alarms.no_end_token(seen(steps(key, fractions), stage))

    assert raised(found(0.1, 0.2, *[0.6] * 5))
    assert not raised(found(*[0.9] * 5, *[0.1] * 5))
    assert not raised(found(0.5))
    assert found().state == "unknown"


FALLS = "Held-out accuracy falls"
OF_ROLLOUTS = [title for title in list(alarms.ALARMS)[:12] if title != FALLS]


def test_a_stage_has_the_checks_that_mean_something_for_it() -> None:
    pairs, overfitting, endless, nothing, memory = (
        "Pairs in order, policy broken",
        "Overfitting",
        "Most completions have no end",
        "Nothing is learned",
        "Memory over its plan",
    )
    expected: dict[StageName, list[str]] = {
        "sft": [overfitting, endless, nothing, memory],
        "pretrain": [overfitting, endless, nothing, memory],
        "reward": [overfitting, "The reward model goes by length", nothing, memory],
        "preference": [pairs, overfitting, endless, nothing, memory],
        "sample": [*OF_ROLLOUTS, endless, memory],
    }
    for stage, titles in expected.items():
        found = alarms.judge(seen([{"step": 1}], stage))
        assert {*found} == {*titles}, stage
        assert not any(map(raised, found.values()))
    of_rollouts = alarms.judge(seen([{"step": 1}], "rl"))
    assert {*of_rollouts} == {*OF_ROLLOUTS, endless, nothing, memory}
    answering = [
        {"step": 0, "eval/accuracy": 0.5, "eval/problems": 64},
        {"step": 9, "eval/accuracy": 0.0},
    ]
    assert raised(alarms.judge(seen(answering, "sft"))[FALLS])


def test_groups_of_equal_rewards_teach_where_nothing_compares_them() -> None:
    usual = {"score/groups_without_signal_fraction": 1.0, "sample/tokens": 80.0}
    records = [{"step": i, "sample/completion_tokens": 20.0, **usual} for i in range(1, 9)]
    compared = seen(records, "rl")
    assert raised(alarms.no_variance(compared))
    distilled = evidence(records, algorithm__name="opd")
    assert alarms.no_variance(distilled).state == "clear"


def test_a_peak_over_its_plan_is_told() -> None:
    key, planned = "memory/learning_peak_gib", "memory/learning_planned_gib"
    usual = [{"step": step, key: 10.4, planned: 10.0} for step in range(1, 5)]
    assert alarms.over_plan(seen(usual, "rl")).state == "clear"
    found = alarms.over_plan(seen([*usual, {"step": 5, key: 10.6, planned: 10.0}], "rl"))
    assert raised(found)
    assert "learning 10.60 of 10.00 GiB" in found.text
    assert found.steps == (5, 5)
    assert alarms.over_plan(seen([{"step": 1}], "rl")).state == "unknown"
    sampling = {"memory/sampling_planned_gib": 1.0}
    both = [
        {"step": s, key: 10 + s, planned: 10.0,
         "memory/sampling_peak_gib": 1.08 - s / 100, **sampling}
        for s in range(1, 5)
    ]  # fmt: skip
    found = alarms.over_plan(seen(both, "rl"))
    assert (found.steps, found.charts) == ((1, 4), ("memory/sampling", "memory/learning"))
    assert found.text.endswith("sampling 1.07 of 1.00 GiB, learning 14.00 of 10.00 GiB.")
    found = alarms.over_plan(seen(both[3:], "rl"))  # 4 % are within what a plan leaves
    assert found.charts == ("memory/learning",)
