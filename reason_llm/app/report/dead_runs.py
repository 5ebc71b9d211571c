"""Checks for a run that cannot learn: pure functions of a run's records, told within three steps.

Cut off completions are in ``stage_alarms``, groups without signal in ``alarms``.
"""

from reason_llm.app.report.evidence import MOST_GROUPS, Check, Evidence, Finding
from reason_llm.app.report.trends import series
from reason_llm.config import RIGHTNESS

DEAD_STEPS = 3
"""Steps in a row after which a run is called dead."""
NO_GRADIENT = 1e-12
"""Norm of a gradient that moves nothing."""


def no_right_answer(seen: Evidence) -> Finding:
    """Not one right answer in the last steps, by a first reward that tells what is right."""
    if seen.first not in RIGHTNESS:
        text = f"Not judged: {seen.first} does not tell which answers are right."
        return Finding("unknown", text)
    last = seen.trained[-DEAD_STEPS:]
    steps, values = series(last, f"score/{seen.first}")
    if len(values) < DEAD_STEPS:
        return Finding("unknown", f"Not judged: fewer than {DEAD_STEPS} steps.")
    if max(values) > 0:
        return Finding("clear", f"{values[-1]:.1%} of the last step's answers are right.")
    count = round(sum(each["sample/tokens"] / each["sample/completion_tokens"] for each in last))
    text = f"None of the {count:,} answers of the last {len(last)} steps is right."
    advice = (
        "Read some rollouts: if the answers are right and not found, fix the prompt "
        "(data.system_prompt) or the reward; if they are cut off, raise sample.max_new_tokens; "
        "else take easier problems or a stronger model."
    )
    wrong = seen.recent(seen.groups)[-MOST_GROUPS:]
    charts = (f"score/{seen.first}", "sample/truncated_fraction")
    return Finding("alarm", text, advice, charts, (steps[0], steps[-1]), tuple(wrong))


def constant_reward(seen: Evidence) -> Finding:
    """The first reward is the same for every completion of the last steps."""
    key = "score/first_reward_std"
    steps, deviations = series(seen.trained[-DEAD_STEPS:], key)
    if len(deviations) < DEAD_STEPS:
        text = f"Not judged: fewer than {DEAD_STEPS} steps tell how much the first reward varies."
        return Finding("unknown", text)
    if max(deviations) > 0:
        text = f"{seen.first} has a standard deviation of {deviations[-1]:.3g} in the last step."
        return Finding("clear", text)
    _, values = series(seen.trained, f"score/{seen.first}")
    value = values[-1] if values else 0.0
    if seen.first in RIGHTNESS and (value <= 0 or value >= 1):
        return Finding("clear", "All answers of the last steps are right, or all are wrong.")
    text = f"{seen.first} is {value:.4g} for every completion of the last {DEAD_STEPS} steps."
    advice = (
        "It tells no answer from another, so nothing is learned from it and evaluation says "
        "nothing: call it on a right and on a wrong answer by hand."
    )
    shown = tuple(seen.recent(seen.groups)[-MOST_GROUPS:])
    return Finding("alarm", text, advice, (f"score/{seen.first}",), (steps[0], steps[-1]), shown)


def nothing_learned(seen: Evidence) -> Finding:
    """The gradient of the last steps is zero."""
    steps, norms = series(seen.records[-DEAD_STEPS:], "train/grad_norm")
    if len(norms) < DEAD_STEPS:
        return Finding("unknown", f"Not judged: fewer than {DEAD_STEPS} steps learned.")
    if max(norms) > NO_GRADIENT:
        return Finding("clear", f"The last gradient has a norm of {norms[-1]:.3g}.")
    text = f"The gradient was 0 in the last {DEAD_STEPS} steps: the adapter does not change."
    advice = (
        "Rewards that are equal in every group, or filters that mask every completion, leave "
        "nothing to learn: see the other alarms and the trained fraction, and change the problems, "
        "the rewards or algorithm's filters."
    )
    charts = ("train/grad_norm", "train/loss", "train/trained_fraction")
    return Finding("alarm", text, advice, charts, (steps[0], steps[-1]))


OF_ROLLOUTS: dict[str, Check] = {
    "No right answer": no_right_answer,
    "The first reward is constant": constant_reward,
}
OF_LEARNING: dict[str, Check] = {"Nothing is learned": nothing_learned}
