"""Alarms of a run: pure functions of its records and rollouts, and the table of all of them.

Each check is ``clear``, an ``alarm``, or ``unknown`` where what it needs is not there, and says why
in a sentence with numbers. The bounds were chosen by measuring:
``tests/app/report/test_hacked_runs.py``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean

from reason_llm.app.report.evidence import (
    MAX_GROUPS,
    RECENT_STEPS,
    Change,
    Evidence,
    Finding,
    State,
    alarm,
    change,
    clear,
    series,
    unknown,
)
from reason_llm.app.report.rollouts import GroupFacts
from reason_llm.config import RIGHTNESS, STAGES
from reason_llm.data import RolloutSide, rollout_sides, unasked_form
from reason_llm.run import Record
from reason_llm.score.statistics import exact_sign_flip

FORM = ("format", "tag_count", "regex", "reasoning_steps", "soft_overlong", "cosine", "length",
        "repetition_penalty")  # fmt: skip
NO_ROLLOUTS = "no rollouts are archived (run.keep_buffers_gib)"
LENGTH_FACTOR, TRUNCATED_RISE, DRIFT_STEPS = 1.3, 0.1, 20
REPEATED, REPEATING_FRACTION = 0.3, 0.05
ALIKE, ALIKE_FRACTION = 0.9, 0.3
SILENT_FRACTION = 0.8
MODEL_STEPS = 10
"""In which right answers may follow what a reward model prefers within their noise."""
JUMP_FACTOR = 5.0
JUMP_FLOORS = {"train/kl": 0.05, "train/sampler_kl": 1e-3, "train/sampler_mismatch_max": 0.1}
"""Below these, in nats, a jump is none: a few tokens of a small difference."""
MAY_BE_ZERO = ("soft_overlong", "cosine", "length", "repetition_penalty")
"""Rewards that are 0 where nothing is wrong, or that go by another one."""
SILENT_STEPS = 10
"""Steps after which a reward is called silent if others are not 0."""
DEAD_STEPS = 3
"""Steps in a row after which a run is called dead."""
NO_GRADIENT = 1e-12
"""Norm of a gradient that moves nothing."""
FALL_CHANCE = 0.01
"""Highest p-value, without a true change, of a fall of held-out accuracy below its first value."""
LOST_NATS = -1.0
"""Log-ratio of the chosen side from which on the policy unlearns what it is to prefer."""
RISES = 3
RISEN = 1.02
"""Held-out loss, as a multiple of its lowest, from which on a rise is no rounding."""
ENDLESS_FRACTION, ENDLESS_STEPS = 0.5, 3
OVER_PLAN = 1.05
"""Multiple of the planned bytes above which a peak is an alarm: a plan leaves 5 % of a GPU free."""
LENGTH_CORRELATION = 0.5
"""Of reward and length, Pearson's, beyond which the accuracy against the length is looked at."""


def no_right_answer(seen: Evidence) -> Finding:
    """Not one right answer in the last steps, by a first reward that tells what is right."""
    if seen.first not in RIGHTNESS:
        return unknown(f"{seen.first} does not tell which answers are right")
    last, chart = seen.trained[-DEAD_STEPS:], f"score/{seen.first}"
    steps, values = series(last, chart)
    if len(values) < DEAD_STEPS:
        return unknown(f"fewer than {DEAD_STEPS} steps")
    if max(values) > 0:
        return clear(f"{values[-1]:.1%} of the last step's answers are right.")
    count = round(sum(each["sample/tokens"] / each["sample/completion_tokens"] for each in last))
    text = f"None of the {count:,} answers of the last {len(last)} steps is right."
    if earlier := max(series(seen.trained, chart)[1]):
        text += f" In an earlier step {earlier:.1%} were."
    text = f"{text} {_forms_of_answers(seen) if earlier else likely_causes(seen)}".rstrip()
    return alarm(text, steps, seen.newest, charts=(chart, "sample/truncated_fraction"))


def pays_nothing(seen: Evidence) -> Finding:
    """Rewards that were 0 for every completion since the first step."""
    paid = {n: series(seen.trained, f"score/{n}")[1] for n in seen.weights if n not in MAY_BE_ZERO}
    paid = {n: values for n, values in paid.items() if n == seen.first or seen.weights[n]}
    silent = [name for name, values in paid.items() if values and not any(values)]
    if any(series(seen.trained, "score/first_reward_std")[1]):
        silent = [name for name in silent if name != seen.first]  # its values add up to 0
    steps, are_all = series(seen.trained, "step")[0], len(silent) == len(paid)
    if silent == [seen.first] and seen.first in RIGHTNESS:
        return clear("Only right answers are rewarded: see No right answer.")
    needed = DEAD_STEPS if are_all or not silent else SILENT_STEPS
    if len(steps) < needed:
        return unknown(f"fewer than {needed} steps")
    if not silent:
        return clear("Each reward has paid something.")
    what = "Every reward" if are_all and len(silent) > 1 else "The reward"
    names = " and ".join(filter(None, [", ".join(silent[:-1]), silent[-1]]))
    text = f"{what} ({names}) was 0 for every completion of {len(steps)} steps."
    if seen.first in silent:
        text = f"{text} {likely_causes(seen)}".rstrip()
    charts = (*(f"score/{name}" for name in silent), "sample/truncated_fraction")
    return alarm(text, steps, seen.newest, charts=charts)


def _forms_of_answers(seen: Evidence) -> str:
    """How many completions of the last steps hold an answer, were cut off or never close their
    thought, as text; empty if nothing was counted."""
    last = seen.trained[-DEAD_STEPS:]
    limits = "sample.turn_tokens or " * bool(seen.config.sample.turn_tokens)
    words = {
        "answers_found": f"hold an answer in the form that {seen.first} looks for",
        "truncated": f"were cut off by {limits}sample.max_new_tokens",
        "open_thoughts": "never close their thought",
    }
    told = []
    for name, said in words.items():
        values = series(last, f"sample/{name}_fraction")[1]
        if values and (any(values) or name == "answers_found"):
            told.append(f"{fmean(values):.0%} {said}")
    return f"Of the completions of the last {len(last)} steps {', '.join(told)}." if told else ""


def likely_causes(seen: Evidence) -> str:
    """Return likely causes, from the last steps, of a first reward of 0."""
    config, text = seen.config, _forms_of_answers(seen)
    kind = config.score.rewards[0].kind
    last = seen.trained[-DEAD_STEPS:]
    if any(series(last, "sample/opening_prompts_fraction")[1]):
        text += " The prompt opens a thought, which each completion has to close."
    if (unasked := unasked_form(config.data.system_prompt, kind)) is not None:
        text += f" data.system_prompt does not ask for {unasked}."
    if kind == "exact":
        text += (
            " exact reads all of a completion outside of <think> as the label, or what is in "
            "<answer>: list the labels in the prompt, and ask for one of them alone."
        )
    return text.strip()


def constant_reward(seen: Evidence) -> Finding:
    """The first reward is the same for every completion of the last steps."""
    key = "score/first_reward_std"
    steps, deviations = series(seen.trained[-DEAD_STEPS:], key)
    if len(deviations) < DEAD_STEPS:
        return unknown(f"fewer than {DEAD_STEPS} steps tell how much the first reward varies")
    if max(deviations) > 0:
        return clear(f"{seen.first} has a deviation of {deviations[-1]:.3g} in the last step.")
    value = [0.0, *series(seen.trained, f"score/{seen.first}")[1]][-1]
    if seen.first in RIGHTNESS and (value <= 0 or value >= 1):
        return clear("All answers of the last steps are right, or all are wrong.")
    text = f"{seen.first} is {value:.4g} for every completion of the last {DEAD_STEPS} steps."
    return alarm(text, steps, seen.newest, charts=(f"score/{seen.first}",))


def nothing_learned(seen: Evidence) -> Finding:
    """The gradient of the last steps is zero."""
    steps, norms = series(seen.records[-DEAD_STEPS:], "train/grad_norm")
    if len(norms) < DEAD_STEPS:
        return unknown(f"fewer than {DEAD_STEPS} steps learned")
    if max(norms) > NO_GRADIENT:
        return clear(f"The last gradient has a norm of {norms[-1]:.3g}.")
    text = f"The gradient was 0 in the last {DEAD_STEPS} steps: the adapter does not change."
    return alarm(text, steps)


def reward_without_accuracy(seen: Evidence) -> Finding:
    """The reward rises and held-out accuracy does not."""
    steps, accuracies = series(seen.records, "eval/accuracy")
    judged_by = seen.config.score.judged_by
    if len(steps) < 2:
        return unknown("there are fewer than two evaluations (data.eval)")
    judged = [value for group in seen.groups for value in seen.judged(group)]
    if min(*accuracies, *judged) < 0 or max(*accuracies, *judged) > 1:
        return unknown(f"{seen.first} is not within 0 and 1, so its noise is not known")
    ends = f"{seen.mean_score(accuracies[0])} → {seen.mean_score(accuracies[-1])}"
    within = [r for r in seen.trained if steps[0] < r["step"] <= steps[-1]]
    total = change(series(within, "score/reward")[1])
    first = change(series(within, f"score/{seen.first}")[1])
    gain = accuracies[-1] - accuracies[0]
    error = seen.difference_error(accuracies[0], accuracies[-1])
    if total is None or first is None or not total.is_up or gain > error:
        return clear(f"Held-out {judged_by} went {ends} with the reward.")
    # A judge that training itself raises by no more is only slow to show on held-out problems.
    if first.is_up and first.rise - gain <= 3 * (error**2 + first.error**2) ** 0.5:
        return clear(f"Held-out {judged_by} went {ends}, within the noise of {seen.first}.")
    text = (
        f"From step {steps[0]} to {steps[-1]} the reward went {_from_to(total)} {total.means}, "
        f"while held-out {judged_by} went {ends} (standard error of the difference "
        f"{seen.points(error)})."
    )
    best = steps[max(range(len(steps)), key=lambda i: accuracies[i])]
    advice = (
        "Read the rollouts that earn most: they show what is rewarded. Then fix the rewards, or "
        f"take {seen.adapter_of(best)}, which has the best held-out {judged_by}."
    )
    return alarm(text, steps, _earning_most(seen, steps[-1] - RECENT_STEPS), advice)


def accuracy_falls(seen: Evidence) -> Finding:
    """Held-out accuracy is below its first value by a paired test on the same problems, or below
    its best by more than noise."""
    steps, values = series(seen.records, "eval/accuracy")
    if len(steps) < 2:
        return unknown("there are fewer than two evaluations (data.eval)")
    judged_by, best = seen.config.score.judged_by, max(range(len(steps)), key=lambda i: values[i])
    ends = f"{seen.mean_score(values[0])} → {seen.mean_score(values[-1])}"
    last = next(each for each in reversed(seen.records) if "eval/accuracy" in each)
    better, worse = (round(last.get(f"eval/problems_{side}", 0)) for side in ("better", "worse"))
    chance = exact_sign_flip([1] * better + [-1] * worse)
    within = min(values) >= 0 and max(values) <= 1
    error = seen.difference_error(values[best], values[-1])
    if values[-1] < values[0] and chance <= FALL_CHANCE:
        start, of = 0, f" of {round(last['eval/problems']):,}" if "eval/problems" in last else ""
        why = (
            f"on {worse:,}{of} problems the score is lower than at step {steps[0]}, and on "
            f"{better:,} higher (exact paired test, p = {chance:.1g})"
        )
    elif within and values[-1] - values[best] < -3 * error:
        start, ends = best, f"{seen.mean_score(values[best])} → {seen.mean_score(values[-1])}"
        why = f"the standard error of the difference is {seen.points(error)}"
    else:
        return clear(f"Held-out {judged_by} went {ends}.")
    text = f"From step {steps[start]} to {steps[-1]} held-out {judged_by} went {ends}: {why}."
    advice = (
        "If the reward rose meanwhile, read the rollouts that earn most and fix the rewards; else "
        "lower train.learning_rate 3 to 10 times and start again, or add algorithm.kl. Take "
        f"{seen.adapter_of(steps[best])}, which has the best held-out {judged_by}."
    )
    return alarm(text, steps[start:], seen.newest, advice)


def length_drift(seen: Evidence) -> Finding:
    """Within some steps completions became much longer or shorter, or more of them are cut off."""
    trained = seen.trained
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
            break
    else:
        if len(trained) < 6:
            return unknown("fewer than 6 steps")
        lengths = series(trained, "sample/completion_tokens")[1]
        return clear(f"Mean length {lengths[0]:.0f} → {lengths[-1]:.0f} tokens.")
    first, last = int(window[0]["step"]), int(window[-1]["step"])
    text = (
        f"From step {first} to {last} the mean length went {length.before:.0f} → "
        f"{length.after:.0f} tokens, completions cut off by the limit {truncated.before:.0%} → "
        f"{truncated.after:.0%} {length.means}."
    )
    inside = [group for group in seen.groups if first <= group.step + 1 <= last]
    sign = 1 if length.rise < 0 else -1
    shown = sorted(seen.recent(inside), key=lambda group: sign * fmean(group.lengths))
    return alarm(text, (first, last), shown)


def form_alone(seen: Evidence) -> Finding:
    """Rise of the reward by parts that do not judge correctness, while the first reward is flat."""
    changes = {
        name: change(series(seen.trained, f"score/{name}")[1]) for name in (*seen.weights, "reward")
    }
    total, first = changes.pop("reward"), changes[seen.first]
    if total is None or first is None:
        return unknown("fewer than 6 steps")
    if seen.paid_by_model and len(seen.trained) < MODEL_STEPS:
        return unknown(f"fewer than {MODEL_STEPS} steps, and a reward model pays")
    gains = {
        name: seen.weights[name] * each.rise
        for name, each in changes.items()
        if each is not None and name not in RIGHTNESS and (name != seen.first or name in FORM)
    }
    gained = sum(gains.values())
    # Right answers may follow what a reward model prefers slowly.
    rises = first.rise > first.error if seen.paid_by_model else first.is_up
    is_flat = seen.first in FORM or not rises
    if not gains:
        return clear("No reward is given for form.")
    if not (total.is_up and is_flat and gained >= 0.8 * total.rise):
        ends = f"all {_from_to(total)} {total.means}"
        return clear(f"The first reward, {seen.first}, went {_from_to(first)}; {ends}.")
    names = " and ".join(sorted(gains, key=lambda name: -gains[name])[:2])
    text = (
        f"The reward rose {_from_to(total)}, all of it by {names}, while {seen.first}, the first "
        f"reward, went {_from_to(first)} {total.means}."
    )
    charts = ("score/reward", *(f"score/{name}" for name in dict.fromkeys((seen.first, *gains))))
    steps = series(seen.trained, "step")[0]
    return alarm(text, steps, _earning_most(seen, steps[-1] - RECENT_STEPS), charts=charts)


def repeating(seen: Evidence) -> Finding:
    """Fraction of the last steps' completions that repeat themselves."""
    if not (recent := seen.recent(seen.groups)):
        return unknown(NO_ROLLOUTS)
    shares = [share for group in recent for share in group.repeated]
    fraction = fmean(share > REPEATED for share in shares)
    text = (
        f"{fraction:.1%} of the completions of the last {RECENT_STEPS} steps repeat themselves: "
        f"more than {REPEATED:.0%} of their sequences of 4 tokens stood there before."
    )
    if fraction < REPEATING_FRACTION:
        return clear(text)
    worst = sorted(recent, key=lambda group: -max(group.repeated))
    return alarm(text, [group.step + 1 for group in recent], worst)


def alike(seen: Evidence) -> Finding:
    """Groups of the last steps whose completions are nearly the same although not all are right."""
    if not (recent := seen.recent(seen.groups)):
        return unknown(NO_ROLLOUTS)
    # A short answer that is always right is always the same: nothing to be warned of.
    unsolved = [g for g in recent if not all(map(seen.is_right, seen.judged(g) or [0.0]))]
    same = [group for group in unsolved if group.similarity >= ALIKE]
    fraction = len(same) / max(1, len(unsolved))
    text = (
        f"In {fraction:.0%} of the groups of the last {RECENT_STEPS} steps that are not all right, "
        f"the completions are near-identical (similarity of {ALIKE:g} and more)."
    )
    if fraction < ALIKE_FRACTION or len(same) < 3:
        return clear(text)
    shown = sorted(same, key=lambda group: -group.similarity)
    return alarm(text, [group.step + 1 for group in recent], shown)


def no_variance(seen: Evidence) -> Finding:
    """Fraction of the last steps' groups whose completions all earn the same."""
    if not seen.config.algorithm.row().needs_group:
        return clear("The algorithm does not compare the completions of a prompt.")
    key = "score/groups_without_signal_fraction"
    last = seen.trained[-RECENT_STEPS:]
    if len(last) < 3:
        return unknown("fewer than 3 steps")
    values = []
    for record in last:
        # By the record: the report may hold a part of the groups, or none.
        completions = record["sample/tokens"] / record["sample/completion_tokens"]
        groups = completions / seen.config.sample.completions_per_prompt
        drawn = groups + record.get("sample/groups_dropped", 0.0)
        # Dynamic sampling leaves the flat ones out.
        values.append(1 - (1 - record[key]) * groups / drawn)
    fraction = fmean(values)
    if min(values[-DEAD_STEPS:]) >= 1:  # told at once, whatever was before
        last, fraction = last[-DEAD_STEPS:], 1.0
    text = f"In {fraction:.0%} of the groups of the last {len(last)} steps all rewards are equal."
    if fraction < SILENT_FRACTION:
        return clear(text)
    flat = [group for group in seen.recent(seen.groups) if len(set(group.rewards)) == 1]
    judged = [each[0] for group in flat if (each := seen.judged(group))]
    if judged:
        right = fmean(map(seen.is_right, judged))
        text += f" Of those, {right:.0%} are all right and {1 - right:.0%} all wrong."
    return alarm(text, series(last, "step")[0], flat[-MAX_GROUPS:])


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
                shown = [group for group in seen.groups if group.step + 1 == steps[i]]
                return alarm(text, steps[i : i + 1], shown, charts=(key,))
    if not looked_at:
        return unknown(f"no more than {RECENT_STEPS} steps")
    return clear(f"None in {', '.join(looked_at)}.")


def scoring_errors(seen: Evidence) -> Finding:
    """Number of rewards that raised and of comparisons that took too long; each counts 0."""
    keys = ("score/errors", "score/timeouts")
    found = {key: [r for r in seen.trained if (r.get(key) or 0) > 0] for key in keys}
    errors, timeouts = (round(sum(each[key] for each in found[key])) for key in keys)
    text = f"{errors} errors and {timeouts} timeouts in scoring."
    at = sorted(int(record["step"]) for records in found.values() for record in records)
    if not at:
        return clear(text)
    zero = [group for group in seen.groups if group.step + 1 in at and 0.0 in group.rewards]
    charts = tuple(key for key in keys if found[key])
    return alarm(f"{text} First at step {at[0]}.", at, zero, charts=charts)


def over_limits(side: RolloutSide, seen: Evidence) -> Finding:
    """Means of metrics over the limits of played rollouts, or a step in which all failed."""
    last = seen.trained[-RECENT_STEPS:]
    failed = [int(record["step"]) for record in last if record.get(side.FAILED) == 1]
    if failed:
        text = f"{side.FAILED_TEXT} of {len(failed)} of the last {len(last)} steps."
        return alarm(text, failed, seen.newest, charts=(side.FAILED,))
    if len(last) < DEAD_STEPS:
        return unknown(f"fewer than {DEAD_STEPS} steps")
    found = {key: series(last, key)[1] for key in side.LIMITS}
    means = {key: fmean(values) for key, values in found.items() if values}
    told = [f"{mean:.0%} {side.LIMITS[key][1]}" for key, mean in means.items()]
    text = f"In the last {len(last)} steps {', '.join(told)}."
    over = tuple(key for key, mean in means.items() if mean > side.LIMITS[key][0])
    if not over:
        return clear(text)
    return alarm(text, series(last, "step")[0], seen.newest, charts=over)


def chosen_falls(seen: Evidence) -> Finding:
    """The chosen side of the pairs falls below the reference."""
    key = "train/chosen_log_ratio"
    steps, ratios = series(seen.records, key)
    found = change(ratios)
    if found is None:
        return unknown("fewer than 6 steps")
    ends = f"log-ratio {found.before:.2f} → {found.after:.2f}, {found.means[1:-1]}"
    if found.after >= LOST_NATS or not found.is_down:
        return clear(f"The chosen side stays likely ({ends}).")
    text = (
        f"The chosen completions have lost {-found.after:.2f} nats against the reference, and lose "
        f"more ({ends}): the pairs are ordered by making both sides unlikely."
    )
    return alarm(text, steps)


def overfits(seen: Evidence) -> Finding:
    """The held-out loss rises evaluation after evaluation."""
    steps, losses = series(seen.records, "eval/loss")
    if len(losses) <= RISES:
        return unknown(f"{len(losses)} evaluations of held-out rows (eval.rows, eval.every)")
    best = min(range(len(losses)), key=lambda i: losses[i])
    text = (
        f"The held-out loss went {losses[0]:.4g} → {losses[-1]:.4g}, lowest at step {steps[best]}."
    )
    rises = [later > earlier for earlier, later in pairwise(losses[best:])]
    in_a_row = any(all(rises[i : i + RISES]) for i in range(len(rises) - RISES + 1))
    if not in_a_row or losses[-1] < RISEN * losses[best]:
        return clear(text)
    advice = (
        f"Take {seen.adapter_of(steps[best])}, or stop there (eval.patience), or take fewer "
        "epochs, a lower train.learning_rate or more rows."
    )
    return alarm(text, steps[best:], advice=advice)


def no_end_token(seen: Evidence) -> Finding:
    """Most completions of the last steps are cut off by the limit."""
    sampled = [r for r in seen.records if r.get("sample/truncated_fraction") is not None]
    key = "sample/truncated_fraction" if sampled else "eval/truncated_fraction"
    if not sampled and seen.config.samples:  # greedy answers loop where samples end
        return unknown("no step was sampled")
    steps, values = series(seen.records, key)
    count = ENDLESS_STEPS if sampled else 1
    steps, values = steps[-count:], values[-count:]
    if not values:
        return unknown("nothing was sampled (data.eval)")
    fraction = fmean(values)
    text = f"{fraction:.0%} of the completions have no end token."
    if fraction <= ENDLESS_FRACTION:
        return clear(text)
    cut = [group for group in seen.recent(seen.groups) if any(group.are_truncated)]
    cut.sort(key=lambda group: -sum(group.are_truncated))
    return alarm(text, steps, cut, charts=(key, "sample/completion_tokens"))


def goes_by_length(seen: Evidence) -> Finding:
    """Scores of a reward model follow the length, and where the chosen side has not the length that
    it likes, it is wrong more often than right, or was never tried."""
    measured = [record for record in seen.records if "eval/pairs_chosen_not_longer" in record]
    if not measured or "eval/length_correlation" not in measured[-1]:
        return unknown("no reward model was measured on held-out pairs (stage, eval.rows)")
    last = measured[-1]
    correlation, pairs = last["eval/length_correlation"], last["eval/pairs"]
    side, against = "not longer", last["eval/pairs_chosen_not_longer"]
    if correlation <= 0:
        side, against = "longer", pairs - against
    key = f"eval/accuracy_chosen_{side.replace(' ', '_')}"
    accuracy = last.get(key) if against else None
    text = (
        f"Reward and length have a correlation of {correlation:.2f} on {pairs:.0f} held-out pairs; "
    )
    text += (
        f"in none of them the chosen side is {side}, so nothing tells whether it goes by more."
        if accuracy is None
        else f"where the chosen side is {side}, in {against:.0f} of them, {accuracy:.1%} are right."
    )
    if abs(correlation) <= LENGTH_CORRELATION or (accuracy is not None and accuracy >= 0.5):
        return clear(text)
    advice = (
        f"It may pay for length alone: add pairs whose chosen side is {side}, to data.train and to "
        "eval.rows; as a reward, combine it with soft_overlong and watch the length."
    )
    charts = ("eval/length_correlation", *([] if accuracy is None else [key]))
    return alarm(text, [int(last["step"])], (), advice, charts)


def over_plan(seen: Evidence) -> Finding:
    """A phase took more memory than was planned for it."""
    found = []
    for phase in ("sampling", "learning"):
        peaks = (f"memory/{phase}_peak_gib", f"memory/{phase}_planned_gib")
        both = [(r["step"], r[peaks[0]], r[peaks[1]]) for r in seen.records if set(peaks) <= set(r)]
        if both:
            found.append((phase, *max(both, key=lambda each: each[1] / max(each[2], 1e-9))))
    if not found:
        return unknown("no peak was measured")
    text = ", ".join(f"{phase} {peak:.2f} of {plan:.2f} GiB" for phase, _, peak, plan in found)
    over = [each for each in found if each[2] > OVER_PLAN * each[3]]
    if not over:
        return clear(f"The peaks are within the plan: {text}.")
    charts = tuple(f"memory/{phase}" for phase, *_ in over)
    steps = sorted(int(each[1]) for each in over)
    return alarm(f"More memory was taken than planned: {text}.", steps, charts=charts)


def _has_metric(name: str, seen: Evidence) -> bool:
    return any(name in record for record in seen.records)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A row of the table."""

    check: Callable[[Evidence], Finding]
    advice: str = ""
    """What can be done; empty where the check says it, as it depends on the run."""
    charts: tuple[str, ...] = ()
    applies: Callable[[Evidence], bool] = lambda seen: seen.config.of_stage.samples


ALARMS: dict[str, Alarm] = {
    "No right answer": Alarm(
        no_right_answer,
        "Read some rollouts: if the answers are right and not found, fix the prompt "
        "(data.system_prompt) or the reward; if they are cut off, raise sample.max_new_tokens; if "
        "they were right before, the policy has broken: resume from an earlier checkpoint with a "
        "lower train.learning_rate; else take easier problems or a stronger model.",
    ),
    "A reward pays nothing": Alarm(
        pays_nothing,
        "Read some rollouts: if the model does what is asked for, call the reward on one by hand; "
        "else ask for it (data.system_prompt), or raise the limit that cuts them off.",
    ),
    "The first reward is constant": Alarm(
        constant_reward,
        "Every answer gets the same value, so the model learns nothing from it. Either no answer "
        "is right yet: take easier problems, or start from an SFT adapter (model.start). Or the "
        "reward cannot tell answers apart: call it on a right and on a wrong answer by hand.",
    ),
    "Held-out accuracy does not follow the reward": Alarm(
        reward_without_accuracy, charts=("score/reward", "eval/accuracy")
    ),
    "Held-out accuracy falls": Alarm(
        accuracy_falls,
        charts=("eval/accuracy", "train/grad_norm", "train/kl"),
        applies=partial(_has_metric, "eval/accuracy"),
    ),
    "Reward by form, not by right answers": Alarm(
        form_alone,
        "Weigh these parts less, or pay them only with a right answer; a form that is learned "
        "first is harmless if the first reward follows soon.",
    ),
    "Length or truncation drifts": Alarm(
        length_drift,
        "If a reward pays for length, weigh it less; for a reward model, add pairs whose chosen "
        "side is the shorter one. If answers are cut off, raise sample.max_new_tokens, or add "
        "soft_overlong or algorithm.truncated: leave_out.",
        ("sample/completion_tokens", "sample/truncated_fraction"),
    ),
    "Completions repeat themselves": Alarm(
        repeating,
        "See whether the reward pays for it; add repetition_penalty, or lower max_new_tokens.",
        ("sample/completion_tokens", "train/entropy"),
    ),
    "Near-identical completions": Alarm(
        alike,
        "The policy has lost its variety and explores no more: raise sample.temperature, lower the "
        "learning rate, or set algorithm.entropy_coefficient or a KL.",
        ("train/entropy", "score/groups_without_signal_fraction"),
    ),
    "Groups without signal": Alarm(
        no_variance,
        "All wrong: take easier problems or more completions of each. All right: "
        "harder ones, or stop here. algorithm.dynamic_sampling samples others in their place.",
        ("score/groups_without_signal_fraction", "score/reward"),
    ),
    "KL or mismatch jumps": Alarm(
        jump,
        "Look at this step's rollouts, and lower the learning rate or train.max_grad_norm. A "
        "mismatch of rollouts by an earlier policy (run.from_buffer, run.max_staleness) says how "
        "far it has moved since: see that algorithm.correction is not none. Of others it says that "
        "sampler and learner disagree: compare with sample.engine=transformers and report it.",
    ),
    "Scoring errors": Alarm(
        scoring_errors,
        "The console's warnings name the rollouts. Fix the reward, or raise "
        "score.timeout_seconds; each of them counted 0.",
    ),
    **{
        side.ALARM: Alarm(
            partial(over_limits, side),
            side.ADVICE,
            applies=partial(_has_metric, side.PLAYED),
        )
        for side in rollout_sides()
    },
    "Pairs in order, policy broken": Alarm(
        chosen_falls,
        "Take preference.name irpo or orpo, or a lower train.learning_rate.",
        ("train/chosen_log_ratio", "train/rejected_log_ratio", "eval/accuracy"),
        applies=lambda seen: True,
    ),
    "Overfitting": Alarm(
        overfits,
        charts=("eval/loss", "eval/perplexity", "train/loss"),
        applies=lambda seen: not seen.config.of_stage.samples,
    ),
    "Most completions have no end": Alarm(
        no_end_token,
        "Their answers are cut off and count as wrong: raise sample.max_new_tokens (and "
        "sample.turn_tokens, of an environment), or begin from an adapter that has learned to end "
        "(model.start); for demonstrations, see in --data-check that the last learned token is an "
        "end token.",
        applies=lambda seen: not seen.config.of_stage.scores,
    ),
    "The reward model goes by length": Alarm(goes_by_length, applies=lambda seen: True),
    "Memory over its plan": Alarm(
        over_plan,
        "The plan is wrong for this model or machine, and another run of it may not fit: lower "
        "train.micro_batch_tokens or memory.budget_gib, and report it.",
        applies=lambda seen: True,
    ),
    "Nothing is learned": Alarm(
        nothing_learned,
        "Rewards that are equal in every group, or filters that mask every completion, leave "
        "nothing to learn: see the other alarms and the trained fraction, and change the problems, "
        "the rewards or algorithm's filters.",
        ("train/grad_norm", "train/loss", "train/trained_fraction"),
        applies=lambda seen: seen.config.of_stage.learns,
    ),
}
"""All of them, by the title that a reader sees."""


def judge(seen: Evidence, state: State | None = None) -> dict[str, Finding]:
    """Findings of all checks that apply to the run, or of those with this state, by title."""
    own = seen.config.of_stage.alarms
    others = {title for stage in STAGES.values() for title in stage.alarms if title not in own}
    found = {}
    for title, row in ALARMS.items():
        if title not in others and row.applies(seen):
            finding = row.check(seen)
            if finding.state == "alarm":
                advice, charts = finding.advice or row.advice, finding.charts or row.charts
                finding = replace(finding, advice=advice, charts=charts)
            if state in (None, finding.state):
                found[title] = finding
    return found


def _accuracy_rises(seen: Evidence, window: Sequence[Record]) -> bool:
    """Whether held-out accuracy rose from just before the window to its end."""
    steps, values = series(seen.records, "eval/accuracy")
    first, last = window[0]["step"], window[-1]["step"]
    before = [value for step, value in zip(steps, values, strict=True) if step < first]
    after = [value for step, value in zip(steps, values, strict=True) if first <= step <= last]
    if not before or not after:
        return False
    return after[-1] - before[-1] > 2 * seen.difference_error(before[-1], after[-1])


def _earning_most(seen: Evidence, from_step: int) -> list[GroupFacts]:
    """The groups since a step, those with the highest rewards first."""
    late = [group for group in seen.groups if group.step + 1 > from_step]
    return sorted(late, key=lambda group: -fmean(group.rewards))


def _from_to(change: Change) -> str:
    return f"{change.before:.3g} → {change.after:.3g}"
