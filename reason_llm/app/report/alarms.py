"""Checks for faults of a run, each with its evidence: pure functions of records and rollouts.

Each check is ``clear``, an ``alarm``, or ``unknown`` where what it needs is not there, and says why
in a sentence with numbers. The bounds were chosen by measuring: three honest quick starts raise
none, runs that are paid for length, form or one constant answer raise theirs within 10 steps
(``tests/report/test_hacked_runs.py``).
"""

from collections.abc import Sequence
from statistics import fmean

from reason_llm.app.report import dead_runs
from reason_llm.app.report.dead_runs import DEAD_STEPS
from reason_llm.app.report.evidence import (
    MOST_GROUPS,
    RECENT_STEPS,
    Check,
    Evidence,
    Finding,
)
from reason_llm.app.report.rollouts import GroupFacts
from reason_llm.app.report.stage_alarms import (
    CHECKS as STAGE_CHECKS,
    checks_of,
    difference_error,
)
from reason_llm.app.report.trends import Change, change, series
from reason_llm.config import RIGHTNESS, STAGES
from reason_llm.run import Record

FORM = ("format", "tag_count", "regex", "reasoning_steps", "soft_overlong", "cosine", "length",
        "repetition_penalty")  # fmt: skip
LENGTH_FACTOR, TRUNCATED_RISE, DRIFT_STEPS = 1.3, 0.1, 20
REPEATED, REPEATING_FRACTION = 0.3, 0.05
ALIKE, ALIKE_FRACTION = 0.9, 0.3
SILENT_FRACTION = 0.8
JUMP_FACTOR = 5.0
JUMP_FLOORS = {"train/kl": 0.05, "train/sampler_kl": 1e-3, "train/sampler_mismatch_max": 0.1}
"""Below these, in nats, a jump is none: a few tokens of a small difference."""


def reward_without_accuracy(seen: Evidence) -> Finding:
    """Held-out accuracy does not follow the reward: the reward rises and accuracy does not, or
    accuracy falls and the reward does not."""
    steps, accuracies = series(seen.records, "eval/accuracy")
    if len(steps) < 2:
        return Finding("unknown", "Not judged: there are fewer than two evaluations (data.eval).")
    judged = [value for group in seen.groups for value in seen.judged(group)]
    if min(*accuracies, *judged) < 0 or max(*accuracies, *judged) > 1:
        text = f"Not judged: {seen.first} is not within 0 and 1, so its noise is not known."
        return Finding("unknown", text)
    best = max(range(len(steps)), key=lambda i: accuracies[i])
    last, charts = len(steps) - 1, ("score/reward", "eval/accuracy")
    for start in dict.fromkeys((0, best)):
        within = [r for r in seen.trained if steps[start] < r["step"] <= steps[last]]
        total = change(series(within, "score/reward")[1])
        first = change(series(within, f"score/{seen.first}")[1])
        if total is None or first is None or total.is_down:
            continue
        gain = accuracies[last] - accuracies[start]
        error = difference_error(accuracies[start], accuracies[last], seen.num_held_out)
        falls = gain < -3 * error
        # A judge that training itself raises by no more is only slow to show on held-out problems.
        is_slow = first.is_up and first.rise - gain <= 3 * (error**2 + first.error**2) ** 0.5
        if falls or (start == 0 and total.is_up and gain <= error and not is_slow):
            text = (
                f"From step {steps[start]} to {steps[last]} the reward went {_from_to(total)}, "
                f"while held-out {seen.judged_by} went {seen.mean_score(accuracies[start])} → "
                f"{seen.mean_score(accuracies[last])} (± {seen.mean_score(error)})."
            )
            advice = (
                "Read the rollouts that earn most: they show what is being paid for. Then fix the "
                f"rewards, or take {seen.adapter_of(steps[best])}, which has the best "
                f"held-out {seen.judged_by}."
            )
            shown = _earning_most(seen, from_step=steps[last] - RECENT_STEPS)
            return Finding("alarm", text, advice, charts, (steps[start], steps[last]), shown)
    ends = f"{seen.mean_score(accuracies[0])} → {seen.mean_score(accuracies[last])}"
    return Finding("clear", f"Held-out {seen.judged_by} went {ends} with the reward.")


def length_drift(seen: Evidence) -> Finding:
    """Length drift: within some steps completions became much longer or shorter, or more of them
    are cut off."""
    trained, found = seen.trained, None
    for start in range(0, max(1, len(trained) - DRIFT_STEPS + 1), RECENT_STEPS):
        window = trained[start : start + DRIFT_STEPS]
        if len(trained) - start - DRIFT_STEPS < RECENT_STEPS:
            window = trained[start:]  # the last window takes the rest
        length = change(series(window, "sample/completion_tokens")[1])
        truncated = change(series(window, "sample/truncated_fraction")[1])
        if length is None or truncated is None:
            continue
        factor = length.after / max(length.before, 1e-9)
        is_length = (length.is_up and factor >= LENGTH_FACTOR) or (
            length.is_down and factor <= 1 / LENGTH_FACTOR
        )
        # A reward model's pairs may prefer another length: as long as nothing is cut off, that is
        # what is to be learned. ``goes_by_length`` judges the model itself.
        aimed = seen.paid_by_model and max(series(window, "sample/truncated_fraction")[1]) == 0
        earned = is_length and (aimed or _accuracy_rises(seen, window))
        cut = truncated.is_up and truncated.rise >= TRUNCATED_RISE
        if (is_length and not earned) or cut:
            found = found or (window, length, truncated)
    if found is None:
        if len(trained) < 6:
            return Finding("unknown", "Not judged: fewer than 6 steps.")
        lengths = series(trained, "sample/completion_tokens")[1]
        return Finding("clear", f"Mean length {lengths[0]:.0f} → {lengths[-1]:.0f} tokens.")
    window, length, truncated = found
    first, last = int(window[0]["step"]), int(window[-1]["step"])
    text = (
        f"From step {first} to {last} the mean length went {length.before:.0f} → "
        f"{length.after:.0f} tokens, completions cut off by the limit {truncated.before:.0%} → "
        f"{truncated.after:.0%}."
    )
    advice = (
        "If the reward model pays for length, see its report (The reward model goes by length) and "
        "add pairs whose chosen side is the shorter one. "
        if seen.paid_by_model
        else "If the reward pays for length, weigh it less. "
    ) + (
        "If answers are cut off, raise sample.max_new_tokens, or add soft_overlong or "
        "algorithm.truncated: leave_out."
    )
    inside = [group for group in seen.groups if first <= group.step + 1 <= last]
    shown = sorted(seen.recent(inside), key=lambda g: -fmean(g.lengths))[:MOST_GROUPS]
    if length.rise < 0:
        shown = sorted(seen.recent(inside), key=lambda g: fmean(g.lengths))[:MOST_GROUPS]
    charts = ("sample/completion_tokens", "sample/truncated_fraction")
    return Finding("alarm", text, advice, charts, (first, last), tuple(shown))


def form_alone(seen: Evidence) -> Finding:
    """Rise of the reward by parts that do not judge correctness, while the first reward is flat."""
    changes = {
        name: change(series(seen.trained, f"score/{name}")[1]) for name in (*seen.weights, "reward")
    }
    total, first = changes.pop("reward"), changes[seen.first]
    if total is None or first is None:
        return Finding("unknown", "Not judged: fewer than 6 steps.")
    gains = {
        name: seen.weights[name] * each.rise
        for name, each in changes.items()
        if each is not None and name not in RIGHTNESS and (name != seen.first or name in FORM)
    }
    gained = sum(gains.values())
    is_flat = seen.first in FORM or not first.is_up
    if not gains:
        return Finding("clear", "No reward is paid for form.")
    if not (total.is_up and is_flat and gained >= 0.8 * total.rise):
        return Finding(
            "clear",
            f"The first reward, {seen.first}, went {_from_to(first)}; all {_from_to(total)}.",
        )
    names = " and ".join(sorted(gains, key=lambda name: -gains[name])[:2])
    judge = (
        "and no reward says what is right"
        if seen.first in FORM
        else f"while {seen.first}, which says what is right, went {_from_to(first)}"
    )
    text = f"The reward rose {_from_to(total)}, all of it by {names}, {judge}."
    advice = (
        "Weigh these parts less, or pay them only beside a right answer; a form that is learned "
        "first is harmless if the first reward follows soon."
    )
    charts = ("score/reward", *(f"score/{name}" for name in dict.fromkeys((seen.first, *gains))))
    steps = (int(seen.trained[0]["step"]), int(seen.trained[-1]["step"]))
    return Finding(
        "alarm", text, advice, charts, steps, _earning_most(seen, steps[1] - RECENT_STEPS)
    )


def repeating(seen: Evidence) -> Finding:
    """Fraction of the last steps' completions that repeat themselves."""
    recent = seen.recent(seen.groups)
    if not recent:
        return Finding("unknown", "Not judged: no rollouts are archived (run.keep_buffers).")
    shares = [share for group in recent for share in group.repeated]
    fraction = fmean(share > REPEATED for share in shares)
    text = (
        f"{fraction:.1%} of the completions of the last {RECENT_STEPS} steps repeat themselves: "
        f"more than {REPEATED:.0%} of their sequences of 4 tokens stood there before."
    )
    if fraction < REPEATING_FRACTION:
        return Finding("clear", text)
    worst = sorted(recent, key=lambda group: -max(group.repeated))[:MOST_GROUPS]
    advice = "See whether the reward pays for it; add repetition_penalty, or lower max_new_tokens."
    charts = ("sample/completion_tokens", "train/entropy")
    return Finding("alarm", text, advice, charts, _steps_of(recent), tuple(worst))


def alike(seen: Evidence) -> Finding:
    """Groups of the last steps whose completions are nearly the same although not all are right."""
    recent = seen.recent(seen.groups)
    if not recent:
        return Finding("unknown", "Not judged: no rollouts are archived (run.keep_buffers).")
    # A short answer that is always right is always the same: nothing to be warned of.
    unsolved = [g for g in recent if not all(map(seen.is_right, seen.judged(g) or [0.0]))]
    same = [group for group in unsolved if group.similarity >= ALIKE]
    fraction = len(same) / max(1, len(unsolved))
    text = (
        f"In {fraction:.0%} of the groups of the last {RECENT_STEPS} steps that are not all right, "
        f"the completions are near-identical (similarity of {ALIKE:g} and more)."
    )
    if fraction < ALIKE_FRACTION or len(same) < 3:
        return Finding("clear", text)
    advice = (
        "The policy has lost its variety and explores no more: raise sample.temperature, lower the "
        "learning rate, or set algorithm.entropy_coefficient or a KL."
    )
    shown = tuple(sorted(same, key=lambda group: -group.similarity)[:MOST_GROUPS])
    charts = ("train/entropy", "score/groups_without_signal_fraction")
    return Finding("alarm", text, advice, charts, _steps_of(recent), shown)


def no_variance(seen: Evidence) -> Finding:
    """Fraction of the last steps' groups whose completions all earn the same, so that they teach
    nothing."""
    if not seen.compares_groups:
        return Finding("clear", "The algorithm does not compare the completions of a prompt.")
    key = "score/groups_without_signal_fraction"
    last = seen.trained[-RECENT_STEPS:]
    if len(last) < 3:
        return Finding("unknown", "Not judged: fewer than 3 steps.")
    values = []
    for record in last:
        # By the record: the report may hold a part of the groups, or none.
        completions = record["sample/tokens"] / record["sample/completion_tokens"]
        groups = completions / seen.group_size
        drawn = groups + record.get("sample/groups_dropped", 0.0)
        # Dynamic sampling leaves the flat ones out.
        values.append(1 - (1 - record[key]) * groups / drawn)
    fraction = fmean(values)
    if min(values[-DEAD_STEPS:]) >= 1:  # told at once, whatever was before
        last, fraction = last[-DEAD_STEPS:], 1.0
    text = f"In {fraction:.0%} of the groups of the last {len(last)} steps all rewards are equal."
    if fraction < SILENT_FRACTION:
        return Finding("clear", text)
    flat = [group for group in seen.recent(seen.groups) if len(set(group.rewards)) == 1]
    judged = [each[0] for group in flat if (each := seen.judged(group))]
    if judged:
        right = fmean(map(seen.is_right, judged))
        text += f" Of those, {right:.0%} are all right and {1 - right:.0%} all wrong."
    advice = (
        "All wrong: take easier problems (data.pass_rate) or more completions of each. All right: "
        "harder ones, or stop here. algorithm.dynamic_sampling samples others in their place."
    )
    steps = (int(last[0]["step"]), int(last[-1]["step"]))
    return Finding("alarm", text, advice, (key, "score/reward"), steps, tuple(flat[-MOST_GROUPS:]))


def jump(seen: Evidence) -> Finding:
    """Jump of the KL or the mismatch of sampler and learner, as a multiple of the steps before."""
    looked_at = []
    for key, floor in JUMP_FLOORS.items():
        steps, values = series(seen.trained, key)
        if len(values) > RECENT_STEPS:
            looked_at.append(key)
        for i in range(RECENT_STEPS, len(values)):
            before = max(values[i - RECENT_STEPS : i])
            if values[i] > max(floor, JUMP_FACTOR * before):
                text = (
                    f"{key} is {values[i]:.3g} nats at step {steps[i]}, "
                    f"{values[i] / max(before, 1e-12):,.0f} times the most of the "
                    f"{RECENT_STEPS} steps before."
                )
                advice = _about_jump(key, seen.replayed, seen.stale)
                shown = [group for group in seen.groups if group.step + 1 == steps[i]]
                at = (steps[i], steps[i])
                return Finding("alarm", text, advice, (key,), at, tuple(shown[:MOST_GROUPS]))
    if not looked_at:
        return Finding("unknown", f"Not judged: no more than {RECENT_STEPS} steps.")
    return Finding("clear", f"None in {', '.join(looked_at)}.")


def _about_jump(key: str, replayed: str | None, stale: str | None) -> str:
    """Meaning of a jump of this metric, and what can be done."""
    if key == "train/kl":
        return "Look at this step's rollouts, and lower the learning rate or train.max_grad_norm."
    correction = replayed or stale
    if correction is None:
        return (
            "Look at this step's rollouts. Sampler and learner disagree; compare with "
            "sample.engine=transformers and report it."
        )
    between = (
        "The rollouts are saved ones (run.from_buffer): this is how far the policy has moved from "
        "the one that sampled them, and no fault of the sampler. "
    )
    if stale is not None:
        between = (
            "The rollouts are of an earlier policy (run.max_staleness): this is how far it has "
            "moved since, and no fault of the sampler. "
        )
    if correction == "none":
        return between + (
            "Nothing corrects for it (algorithm.correction=none): set that to token_truncate."
        )
    return between + (
        f"algorithm.correction={correction} weighs each rollout by it; the larger it is, the less "
        "they teach. Lower the learning rate, or "
        f"{'run.max_staleness' if stale else 'sample anew'}."
    )


def scoring_errors(seen: Evidence) -> Finding:
    """Number of rewards that raised and of comparisons that took too long; each counts 0 and
    teaches something wrong."""
    found: dict[str, list[int]] = {}
    counts = {}
    for key in ("score/errors", "score/timeouts"):
        steps, values = series(seen.trained, key)
        found[key] = [step for step, value in zip(steps, values, strict=True) if value > 0]
        counts[key] = round(sum(values))
    text = f"{counts['score/errors']} errors and {counts['score/timeouts']} timeouts in scoring."
    at = sorted(found["score/errors"] + found["score/timeouts"])
    if not at:
        return Finding("clear", text)
    advice = (
        "The console's warnings name the rollouts. Fix the reward, or raise "
        "score.timeout_seconds; each of them counted 0."
    )
    charts = tuple(key for key, steps in found.items() if steps)
    zero = [g for g in seen.groups if g.step + 1 in at and 0.0 in g.rewards]
    text += f" First at step {at[0]}."
    return Finding("alarm", text, advice, charts, (at[0], at[-1]), tuple(zero[:MOST_GROUPS]))


OF_ROLLOUTS: dict[str, Check] = dead_runs.OF_ROLLOUTS | {
    "Held-out accuracy does not follow the reward": reward_without_accuracy,
    "Reward by form, not by right answers": form_alone,
    "Length or truncation drifts": length_drift,
    "Completions repeat themselves": repeating,
    "Near-identical completions": alike,
    "Groups without signal": no_variance,
    "KL or mismatch jumps": jump,
    "Scoring errors": scoring_errors,
}
CHECKS: dict[str, Check] = OF_ROLLOUTS | STAGE_CHECKS | dead_runs.OF_LEARNING
"""All of them, by the title that a reader sees."""


def judge(seen: Evidence) -> dict[str, Finding]:
    """Finding of every check that means something for the run, by its title."""
    stage = STAGES[seen.stage]
    checks = (OF_ROLLOUTS if stage.samples else {}) | checks_of(seen)
    if stage.learns:
        checks |= dead_runs.OF_LEARNING
    return {title: check(seen) for title, check in checks.items()}


def _accuracy_rises(seen: Evidence, window: Sequence[Record]) -> bool:
    """Whether held-out accuracy rose from just before the window to its end."""
    steps, values = series(seen.records, "eval/accuracy")
    first, last = window[0]["step"], window[-1]["step"]
    before = [value for step, value in zip(steps, values, strict=True) if step < first]
    after = [value for step, value in zip(steps, values, strict=True) if first <= step <= last]
    if not before or not after:
        return False
    error = difference_error(before[-1], after[-1], seen.num_held_out)
    return after[-1] - before[-1] > 2 * error


def _earning_most(seen: Evidence, from_step: int) -> tuple[GroupFacts, ...]:
    """The groups with the highest rewards since a step."""
    late = [group for group in seen.groups if group.step + 1 > from_step]
    return tuple(sorted(late, key=lambda group: -fmean(group.rewards))[:MOST_GROUPS])


def _steps_of(groups: Sequence[GroupFacts]) -> tuple[int, int]:
    return groups[0].step + 1, groups[-1].step + 1


def _from_to(change: Change) -> str:
    return f"{change.before:.3g} → {change.after:.3g}"
