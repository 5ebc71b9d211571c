"""Each check by itself: raised by what it is for, with its evidence, and by nothing near it."""

from dataclasses import replace

import pytest

from reason_llm.app.report import alarms
from reason_llm.app.report.evidence import Finding
from reason_llm.config import STAGES
from report_runs import evidence as seen, facts, record

ALWAYS = {title for title, each in alarms.ALARMS.items() if each.applies(seen())} - {
    title for stage in STAGES.values() for title in stage.alarms
}
"""Checks of every run of reinforcement learning."""


@pytest.mark.parametrize(
    ("problems", "before", "after", "error"),
    [(256, 0.25, 0.75, (2 * 0.25 / 256) ** 0.5), (None, 0.25, 0.75, (2 * 0.25 / 128) ** 0.5),
     (100, 0.0, 0.0, (2 * 0.0196 / 100) ** 0.5), (100, 1.0, 1.0, (2 * 0.0196 / 100) ** 0.5)],
)  # fmt: skip
def test_the_error_of_a_difference_is_that_of_two_accuracies(
    problems: int | None, before: float, after: float, error: float
) -> None:
    evidence = replace(seen(), num_held_out=problems)
    assert evidence.difference_error(before, after) == pytest.approx(error)


def rising(count: int, **options: float) -> list[dict[str, float]]:
    """Steps 0 to count whose reward goes from 0.2 to 0.8, with a little noise."""
    found = []
    for step in range(count + 1):
        reward = 0.2 + 0.6 * step / count + 0.005 * (-1) ** step
        found.append(record(step, **{"score/reward": reward, "score/boxed": reward} | options))
    return found


def with_accuracy(records: list[dict[str, float]], *points: tuple[int, float]) -> None:
    for step, accuracy in points:
        records[step]["eval/accuracy"] = accuracy


def raised(finding: Finding) -> bool:
    assert finding.text
    assert finding.state != "alarm" or finding.steps
    return finding.state == "alarm"


def test_a_reward_that_rises_with_accuracy_is_clear_and_without_it_is_not() -> None:
    groups = [facts(step, rewards=[step, step]) for step in range(12)]
    honest, flat, fallen = rising(12), rising(12), rising(12)
    with_accuracy(honest, (0, 0.2), (6, 0.5), (12, 0.8))
    with_accuracy(flat, (0, 0.2), (6, 0.21), (12, 0.22))
    with_accuracy(fallen, (0, 0.2), (6, 0.7), (12, 0.5))
    assert not raised(alarms.reward_without_accuracy(seen(honest, groups)))
    found = alarms.reward_without_accuracy(seen(flat, groups))
    assert raised(found)
    assert found.steps == (0, 12)
    assert found.groups[0].rewards == [11, 11]  # what earned most
    assert "take the adapter of step 12 (its checkpoint), which has the best" in found.advice
    assert not raised(alarms.reward_without_accuracy(seen(fallen, groups)))
    assert alarms.accuracy_falls(seen(fallen, groups)).steps == (6, 12)


def test_a_fall_from_the_best_accuracy_is_told_from_there() -> None:
    records = rising(24)
    with_accuracy(records, (0, 0.2), (8, 0.75), (16, 0.5), (24, 0.45))
    found = alarms.accuracy_falls(seen(records))
    assert raised(found)
    assert found.steps == (8, 24)


def test_an_accuracy_that_falls_with_the_reward_is_no_matter_of_the_rewards() -> None:
    """28 -> 5 % of 39 problems: 9 that were right are wrong, by McNemar's exact test 2 / 2^9."""
    records = [record(s, **{"score/reward": 0.354 - 0.004 * s}) for s in range(13)]
    with_accuracy(records, (0, 11 / 39), (6, 4 / 39), (12, 2 / 39))
    records[6] |= {"eval/problems": 39.0, "eval/problems_better": 1.0, "eval/problems_worse": 8.0}
    records[12] |= {"eval/problems": 39.0, "eval/problems_better": 0.0, "eval/problems_worse": 9.0}
    evidence = replace(seen(records), num_held_out=39)
    found = alarms.accuracy_falls(evidence)
    assert found.text == (
        "From step 0 to 12 held-out accuracy went 28.2% → 5.1%: on 9 of 39 problems the score is "
        "lower than at step 0, and on 0 higher (exact paired test, p = 0.004)."
    )
    assert "lower train.learning_rate" in found.advice
    assert not raised(alarms.reward_without_accuracy(evidence))
    earlier = replace(evidence, records=records[:7])  # 2 (1 + 9) / 2^9 = 0.04
    assert not raised(alarms.accuracy_falls(earlier))
    assert alarms.accuracy_falls(seen(rising(12))).state == "unknown"


def test_accuracy_that_is_only_slow_to_show_is_clear() -> None:
    """Training's own judge has risen by no more than held-out noise could hide."""
    records = [
        record(step, **{"score/reward": 0.3 + 0.004 * step, "score/boxed": 0.3 + 0.004 * step})
        for step in range(13)
    ]
    with_accuracy(records, (0, 0.35), (12, 0.36))
    assert not raised(alarms.reward_without_accuracy(seen(records)))
    shaped = [{**r, "score/boxed": 0.3} for r in records]  # the judge itself did not rise
    with_accuracy(shaped, (0, 0.35), (12, 0.36))
    assert raised(alarms.reward_without_accuracy(seen(shaped)))


@pytest.mark.parametrize("parts", [[-1.0, 1.0], [0.0, 10.0]])
def test_a_judge_of_another_range_has_noise_that_nobody_knows(parts: list[float]) -> None:
    """128 problems of -1 or 1 have a standard error of 0.09 in the mean, not of 0.04."""
    records = rising(12)
    with_accuracy(records, (0, 0.5), (12, 0.3))
    assert raised(alarms.reward_without_accuracy(seen(records)))
    groups = [facts(step, parts={"boxed": parts}) for step in range(12)]
    assert alarms.reward_without_accuracy(seen(records, groups)).state == "unknown"
    with_accuracy(records, (0, 5.0), (12, 4.5))
    assert alarms.reward_without_accuracy(seen(records)).state == "unknown"


def test_without_a_held_out_set_nothing_is_judged() -> None:
    assert alarms.reward_without_accuracy(seen(rising(12))).state == "unknown"


@pytest.mark.parametrize("direction", [1.0, -0.5])
def test_length_that_drifts(direction: float) -> None:
    records = [
        record(step, **{"sample/completion_tokens": 20 + direction * step + 0.1 * (step % 2)})
        for step in range(1, 16)
    ]
    groups = [facts(step, lengths=[step, step]) for step in range(15)]
    found = alarms.length_drift(seen(records, groups))
    assert raised(found)
    assert found.groups[0].step == (14 if direction > 0 else 10)  # of the last steps
    assert "(means of the first and the last 5 steps)" in found.text
    # The same length with a gain in accuracy is earned.
    earned = [record(0, **{"eval/accuracy": 0.2}), *records]
    earned[-1] = {**earned[-1], "eval/accuracy": 0.6}
    assert not raised(alarms.length_drift(seen(earned)))


def test_truncation_that_drifts_is_not_earned_by_accuracy() -> None:
    records = [record(0, **{"eval/accuracy": 0.2})] + [
        record(step, **{"sample/truncated_fraction": 0.02 * step}) for step in range(1, 16)
    ]
    records[-1]["eval/accuracy"] = 0.9
    assert raised(alarms.length_drift(seen(records)))
    steady = [record(s, **{"sample/truncated_fraction": 0.3 + 0.01 * (s % 2)}) for s in range(16)]
    assert not raised(alarms.length_drift(seen(steady)))


def test_a_drift_in_the_middle_of_a_long_run_is_found() -> None:
    lengths = [20.0] * 30 + [20.0 + 2 * i for i in range(10)] + [40.0] * 60
    records = [
        record(s + 1, **{"sample/completion_tokens": v + 0.1 * (s % 2)})
        for s, v in enumerate(lengths)
    ]
    found = alarms.length_drift(seen(records))
    assert raised(found)
    assert found.steps is not None
    assert 15 <= found.steps[0] <= 40 <= found.steps[1] <= 60


def test_reward_by_form() -> None:
    weights = {"boxed": 1.0, "format": 2.0}

    def records(boxed: float) -> list[dict[str, float]]:
        found = []
        for step in range(1, 13):
            noise = 0.004 * (-1) ** step
            right, form = 0.2 + boxed * step / 12 + noise, 0.1 + 0.8 * step / 12 + noise
            values = {"score/boxed": right, "score/format": form, "score/reward": right + 2 * form}
            found.append(record(step, **values))
        return found

    found = alarms.form_alone(seen(records(0.0), weights=weights))
    assert raised(found)
    assert "format" in found.text
    assert set(found.charts) == {"score/reward", "score/boxed", "score/format"}
    assert not raised(alarms.form_alone(seen(records(0.3), weights=weights)))
    # A second reward of rightness is no form.
    tests = {"code_tests": 1.0, "code_tests_fraction": 1.0}
    renamed = [
        {
            key.replace("boxed", "code_tests").replace("format", "code_tests_fraction"): value
            for key, value in r.items()
        }
        for r in records(0.0)
    ]
    assert not raised(alarms.form_alone(seen(renamed, weights=tests)))
    assert not raised(alarms.form_alone(seen(rising(12))))


def test_a_run_that_is_paid_for_form_and_nothing_else() -> None:
    records = [{**r, "score/format": r["score/reward"]} for r in rising(12)]
    assert raised(alarms.form_alone(seen(records, weights={"format": 1.0})))


def test_completions_that_repeat_themselves() -> None:
    groups = [facts(step) for step in range(10)] + [facts(10, repeated=[0.9, 0.1])]
    found = alarms.repeating(seen([record(11)], groups))
    assert raised(found)  # one in ten of the last five steps
    assert found.groups[0].step == 10
    assert not raised(alarms.repeating(seen([record(10)], groups[:-1])))
    assert not raised(alarms.repeating(seen([record(20)], [*groups, *map(facts, range(12, 20))])))
    assert alarms.repeating(seen([record(1)])).state == "unknown"


def test_groups_of_one_text_are_told_unless_they_are_all_right() -> None:
    same = [facts(step, similarity=0.95) for step in range(5)]
    assert raised(alarms.alike(seen([record(5)], same)))
    right = [replace(each, parts={"boxed": [1.0, 1.0]}) for each in same]
    assert not raised(alarms.alike(seen([record(5)], right)))
    assert not raised(alarms.alike(seen([record(5)], [facts(step) for step in range(5)])))
    # Programs that pass some tests are not right yet.
    weights = {"code_tests_fraction": 1.0}
    partly = [replace(each, parts={"code_tests_fraction": [0.5, 0.5]}) for each in same]
    assert raised(alarms.alike(seen([record(5)], partly, weights=weights)))
    weights = {"mine": 1.0}
    own = [replace(each, parts={"mine": [0.5, 0.5]}) for each in same]
    assert not raised(alarms.alike(seen([record(5)], own, weights=weights)))


def test_groups_without_variance() -> None:
    key = "score/groups_without_signal_fraction"
    groups = [facts(step, rewards=[0.0, 0.0], parts={"boxed": [0.0, 0.0]}) for step in range(8)]
    found = alarms.no_variance(seen([record(s, **{key: 0.9}) for s in range(9)], groups))
    assert raised(found)
    assert "100% all wrong" in found.text
    assert {group.step for group in found.groups} == {3, 4, 5, 6, 7}
    assert not raised(alarms.no_variance(seen([record(s, **{key: 0.7}) for s in range(9)])))


def test_groups_that_dynamic_sampling_dropped_count_as_flat() -> None:
    key = "score/groups_without_signal_fraction"
    usual = {key: 0.0, "sample/completion_tokens": 20.0, "sample/tokens": 20.0 * 2 * 64}
    for groups in ([], [facts(step) for step in range(5)]):  # of the 64, the report holds one
        few = [record(s, **usual, **{"sample/groups_dropped": 64.0}) for s in range(6)]
        found = alarms.no_variance(seen(few, groups))
        assert not raised(found)
        assert "In 50% of the groups" in found.text
        many = [record(s, **usual, **{"sample/groups_dropped": 64.0 * 9}) for s in range(6)]
        assert raised(alarms.no_variance(seen(many, groups)))


@pytest.mark.parametrize(
    ("key", "usual", "jumped"),
    [
        ("train/kl", 0.02, 0.3),
        ("train/sampler_kl", 1e-5, 0.01),
        ("train/sampler_mismatch_max", 0.05, 1.0),
    ],
)
def test_a_jump(key: str, usual: float, jumped: float) -> None:
    records = [record(step, **{key: usual * (1 + step / 20)}) for step in range(1, 21)]
    groups = [facts(11), facts(12)]
    assert not raised(alarms.jump(seen(records, groups)))
    records[11][key] = jumped
    found = alarms.jump(seen(records, groups))
    assert raised(found)
    assert (found.steps, found.charts) == ((12, 12), (key,))
    assert [group.step for group in found.groups] == [11]  # the rollouts that led to step 12


def test_a_kl_that_grows_from_nothing_is_no_jump() -> None:
    records = [record(step, **{"train/kl": 1e-6 * 3.0**step}) for step in range(1, 12)]
    assert not raised(alarms.jump(seen(records)))


@pytest.mark.parametrize("key", ["score/errors", "score/timeouts"])
def test_scoring_errors(key: str) -> None:
    records = [record(step) for step in range(1, 6)]
    assert not raised(alarms.scoring_errors(seen(records)))
    records[2][key] = 2.0
    found = alarms.scoring_errors(seen(records, [facts(1), facts(2)]))
    assert raised(found)
    assert (found.steps, found.charts) == ((3, 3), (key,))
    assert [group.step for group in found.groups] == [2]


def test_a_run_of_one_step_raises_nothing() -> None:
    found = alarms.judge(seen([record(0), record(1)], [facts(0)]))
    assert set(found) == ALWAYS
    assert not any(raised(each) for each in found.values())


@pytest.mark.parametrize("key", [key for key in record(1) if key != "step"])
def test_records_that_somebody_left_incomplete_are_no_traceback(key: str) -> None:
    records = [record(step) for step in range(12)]
    for value in (0.0, -1.0, 1e99):
        changed = [each | {key: value} for each in records]
        assert set(alarms.judge(seen(changed, [facts(0)]))) == ALWAYS
    without = [{name: each[name] for name in each if name != key} for each in records]
    for some in (without, [*records[:6], *without[6:]]):
        assert set(alarms.judge(seen(some, [facts(0)]))) == ALWAYS


def measured(correlation: float, against: float | None, pairs: float = 40) -> Finding:
    """Of a reward model: accuracy where the chosen side is not the one that it likes."""
    values = {"eval/length_correlation": correlation, "eval/pairs": 100.0}
    values["eval/pairs_chosen_not_longer"] = pairs if correlation > 0 else 100 - pairs
    side = "not_longer" if correlation > 0 else "longer"
    if against is not None:
        values[f"eval/accuracy_chosen_{side}"] = against
    return alarms.goes_by_length(seen([record(0), {"step": 5} | values, {"step": 6}]))


def test_a_reward_model_that_goes_by_length_is_told() -> None:
    assert raised(measured(0.51, 0.49))
    assert raised(measured(-0.51, 0.49))
    assert raised(measured(0.9, None, pairs=0))
    assert not raised(measured(0.51, 0.5))
    assert not raised(measured(-0.51, 0.5))
    assert not raised(measured(0.49, 0.1))
    assert not raised(measured(0.49, None, pairs=0))
    assert "in 40 of them, 49.0% are right" in measured(0.51, 0.49).text
    assert "is longer, in 40 of them, 49.0% are right" in measured(-0.51, 0.49).text
    assert raised(measured(-0.9, None, pairs=0))
    assert measured(0.51, 0.49).steps == (5, 5)
    assert alarms.goes_by_length(seen([record(0)])).state == "unknown"


def test_a_first_reward_of_weight_0_judges_still() -> None:
    """As beside a reward model: what is paid rises, and what is right is flat, or rises too."""
    flat, both = rising(12), rising(12)
    for step, each in enumerate(flat):
        each |= {"score/paid": each["score/reward"], "score/boxed": 0.3 + 0.001 * (-1) ** step}
    for each in both:
        each |= {"score/paid": each["score/reward"]}
    weights = {"boxed": 0.0, "paid": 1.0}
    assert raised(alarms.form_alone(seen(flat, weights=weights)))
    assert not raised(alarms.form_alone(seen(both, weights=weights)))
    with_accuracy(flat, (0, 0.2), (6, 0.21), (12, 0.2))
    assert raised(alarms.reward_without_accuracy(seen(flat, weights=weights)))


@pytest.mark.parametrize(("rise", "is_raised"), [(0.08, False), (0.0, True), (-0.08, True)])
def test_a_judge_may_follow_a_reward_model_slowly(rise: float, is_raised: bool) -> None:
    records = rising(12)
    for step, each in enumerate(records):
        judged = 0.3 + rise * step / 12 + 0.03 * (-1) ** step
        each |= {"score/paid": each["score/reward"], "score/boxed": judged}
    weights = {"boxed": 0.0, "paid": 1.0}
    assert raised(alarms.form_alone(seen(records, weights=weights)))  # one may be paid for form
    paid = seen(records, weights=weights, by_model="paid")
    assert raised(alarms.form_alone(paid)) == is_raised
    assert alarms.form_alone(replace(paid, records=records[:10])).state == "unknown"
    assert alarms.form_alone(replace(paid, records=records[:11])).state != "unknown"


def test_rollouts_with_other_rewards_than_the_run_are_looked_at() -> None:
    groups = [facts(step, parts={"another": [0.0] * 4}, rewards=[0.0] * 4) for step in range(9)]
    key = "score/groups_without_signal_fraction"
    found = alarms.judge(seen([record(step, **{key: 0.9}) for step in range(9)], groups))
    silent = found["Groups without signal"]
    assert raised(silent)
    assert "all right" not in silent.text


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("environment_error_fraction", 0.2, "20% of the rollouts ended by a fault"),
        ("failed_calls_fraction", 0.7, "70% of the calls of tools failed"),
        ("no_calls_fraction", 0.99, "99% of the rollouts made no call of a tool that can be read"),
        ("out_of_turns_fraction", 0.9, "90% of the rollouts used up all their turns"),
    ],
)
def test_an_environment_that_fails(key: str, value: float, words: str) -> None:
    fine = {"sample/turns": 2.0, f"sample/{key}": 0.05}
    records = [record(step, **fine) for step in range(1, 6)]
    assert alarms.ALARMS["The environment fails"].check(seen(records)).state == "clear"
    assert alarms.ALARMS["The environment fails"].check(seen(records[:2])).state == "unknown"
    records += [record(step, **{**fine, f"sample/{key}": value}) for step in range(6, 12)]
    found = alarms.ALARMS["The environment fails"].check(seen(records))
    assert raised(found) and words in found.text and found.charts == (f"sample/{key}",)
    assert "The environment fails" in alarms.judge(seen(records))
    assert "The environment fails" not in alarms.judge(seen([record(1)]))


def up(ends: dict[str, tuple[float, float]]) -> list[dict[str, float]]:
    """Twelve steps: each key at its first value in six, then at its second."""
    return [
        record(step, **{key: values[step > 6] for key, values in ends.items()})
        for step in range(1, 13)
    ]


@pytest.mark.parametrize(
    ("first", "value", "is_right"),
    [("boxed", 1.0, True), ("boxed", 0.99, False), ("mine", 0.01, True), ("mine", 0.0, False)],
)
def test_an_answer_is_right_by_what_the_first_reward_tells(
    first: str, value: float, is_right: bool
) -> None:
    assert seen([], weights={first: 1.0}).is_right(value) is is_right


@pytest.mark.parametrize(
    ("first", "value", "state"),
    [("boxed", 0.0, "clear"), ("boxed", 1.0, "clear"), ("boxed", 0.5, "alarm"),
     ("mine", 0.0, "alarm"), ("mine", 1.0, "alarm")],
)  # fmt: skip
def test_a_constant_reward_is_told_unless_all_are_right_or_all_wrong(
    first: str, value: float, state: str
) -> None:
    before = [record(1, **{f"score/{first}": 0.3, "score/first_reward_std": 0.1})]
    same = {f"score/{first}": value, "score/first_reward_std": 0.0}
    records = before + [record(step, **same) for step in (2, 3, 4)]
    found = alarms.constant_reward(seen(records, weights={first: 1.0}))
    assert (found.state, found.steps) == (state, (2, 4) if state == "alarm" else None)


def test_a_flat_accuracy_is_told_with_its_numbers_and_its_adapter() -> None:
    records, groups = rising(12), [facts(step, rewards=[step, 0]) for step in range(12)]
    with_accuracy(records, (0, 0.2), (6, 0.21), (12, 0.2))
    found = alarms.reward_without_accuracy(seen(records, groups))
    assert found.text == (
        "From step 0 to 12 the reward went 0.325 → 0.725 (means of the first and the last 4 "
        "steps), while held-out accuracy went 20.0% → 20.0% (standard error of "
        "the difference 3.5 points)."
    )
    assert "take the adapter of step 6 (its checkpoint), which has the best" in found.advice
    assert [group.step for group in found.groups] == [11, 10, 9, 8, 7]


def test_an_alarm_has_its_own_advice_or_the_table_s() -> None:
    records = up({"sample/truncated_fraction": (0.0, 0.9), "score/errors": (0.0, 1.0)})
    found = alarms.judge(seen(records), "alarm")
    assert {each.state for each in found.values()} == {"alarm"}
    drift, errors = (found[name] for name in ("Length or truncation drifts", "Scoring errors"))
    assert drift.charts == ("sample/completion_tokens", "sample/truncated_fraction")
    assert drift.advice.startswith("If a reward pays for length, weigh it less; for a reward model")
    assert errors.charts == ("score/errors",)
    assert errors.advice.startswith("The console's warnings name the rollouts.")
