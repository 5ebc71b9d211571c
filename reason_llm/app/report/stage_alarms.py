"""Checks of the stages, of the readers and of the end token: pure functions of a run's records.
Their titles and advice are in the table of ``alarms``."""

from itertools import pairwise
from statistics import fmean

from reason_llm.app.report.evidence import (
    RECENT_STEPS,
    Evidence,
    Finding,
    alarm,
    change,
    clear,
    series,
    unknown,
)
from reason_llm.config import LowMean

LOST_NATS = -1.0
"""Log-ratio of the chosen side from which on the policy unlearns what it is to prefer."""
RISES = 3
RISEN = 1.02
"""Held-out loss, as a multiple of its lowest, from which on a rise is no rounding."""
ENDLESS_FRACTION, ENDLESS_STEPS = 0.5, 3
OVER_PLAN = 1.02
"""Of the planned bytes, from which on a peak is more than rounding above them."""
LENGTH_CORRELATION = 0.5
"""Of reward and length, Pearson's, beyond which the accuracy against the length is looked at."""


def ordered_and_broken(seen: Evidence) -> Finding:
    """The pairs come into order while the chosen side falls below the reference, or held-out
    accuracy below its best."""
    return (
        _chosen_falls(seen)
        or _accuracy_falls(seen)
        or clear("The chosen side stays likely, and held-out accuracy stays.")
    )


def _chosen_falls(seen: Evidence) -> Finding | None:
    key = "train/chosen_log_ratio"
    steps, ratios = series(seen.records, key)
    found = change(ratios)
    if found is None or not (found.after < LOST_NATS and found.is_down):
        return None
    text = (
        f"The chosen completions have lost {-found.after:.2f} nats against the reference, and lose "
        f"more (log-ratio {found.before:.2f} → {found.after:.2f}, {found.means[1:-1]}): the pairs "
        "are ordered by making both sides unlikely."
    )
    charts = (key, "train/rejected_log_ratio", "eval/accuracy")
    return alarm(text, steps, (), _PREFERENCE_ADVICE, charts)


def _accuracy_falls(seen: Evidence) -> Finding | None:
    steps, accuracies = series(seen.records, "eval/accuracy")
    pairs = _order_of_pairs(seen)
    if len(steps) < 2 or pairs is None or pairs[1] <= pairs[0]:
        return None
    best = max(range(len(steps)), key=lambda i: accuracies[i])
    error = seen.difference_error(accuracies[best], accuracies[-1])
    if accuracies[best] - accuracies[-1] <= 3 * error:
        return None
    text = (
        f"From step {steps[best]} to {steps[-1]} held-out accuracy went {accuracies[best]:.1%} → "
        f"{accuracies[-1]:.1%} (± {error:.1%}), while the order of the pairs went "
        f"{pairs[0]:.3g} → {pairs[1]:.3g}."
    )
    charts = ("eval/accuracy", "eval/pair_accuracy", "train/pair_accuracy", "train/margin")
    advice = f"{_PREFERENCE_ADVICE} Or take {seen.adapter_of(steps[best])}."
    return alarm(text, steps[best:], (), advice, charts)


_PREFERENCE_ADVICE = "Take preference.name irpo or orpo, or a lower train.learning_rate."


def _order_of_pairs(seen: Evidence) -> tuple[float, float] | None:
    """Order of the pairs at the first and the last record: their accuracy, or, of labels, the
    difference of the sides' log-ratios."""
    for key in ("eval/pair_accuracy", "train/pair_accuracy"):
        _, values = series(seen.records, key)
        if len(values) > 1:
            return values[0], values[-1]
    both = ("train/chosen_log_ratio", "train/rejected_log_ratio")
    apart = [r[both[0]] - r[both[1]] for r in seen.records if set(both) <= r.keys()]
    return (apart[0], apart[-1]) if len(apart) > 1 else None


def low_mean(row: LowMean, seen: Evidence) -> Finding:
    """The mean of a reader's metric over the last steps is negative."""
    steps, values = series(seen.records, row.key)
    if not values or steps[-1] < row.first_steps + RECENT_STEPS:
        return unknown(f"fewer than {row.first_steps + RECENT_STEPS} steps")
    mean = fmean(values[-RECENT_STEPS:])
    text = row.text.format(mean=mean)
    if mean >= 0:
        return clear(text)
    return alarm(text, (row.first_steps, steps[-1]))


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
    if not sampled and seen.stage in ("rl", "sample"):  # greedy answers loop where samples end
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
    advice = (
        "Their answers are cut off and count as wrong: raise sample.max_new_tokens (and "
        "sample.turn_tokens, of an environment), or "
    ) + (
        "begin from an adapter that has learned to end (model.start)."
        if seen.stage in ("rl", "sample")
        else "see in --data-check that the last learned token is an end token."
    )
    cut = [group for group in seen.recent(seen.groups) if any(group.are_truncated)]
    cut.sort(key=lambda group: -sum(group.are_truncated))
    charts = (key, "sample/completion_tokens")
    return alarm(text, steps, cut, advice, charts)


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
