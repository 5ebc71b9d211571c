"""The best evaluation of a run, and when ``eval.patience`` ends the run.

Best is the highest held-out accuracy; without held-out problems the highest accuracy of held-out
pairs; without pairs the lowest held-out loss. Of equal accuracies the lower held-out loss, if it is
measured, decides; else the first counts.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from reason_llm.rollout import KNOWN_FIELDS_ONLY, Count, Number, Text
from reason_llm.run.store.metrics import Record

METRICS: dict[Literal["eval/accuracy", "eval/pair_accuracy", "eval/loss"], str] = {
    "eval/accuracy": "held-out accuracy",
    "eval/pair_accuracy": "accuracy of held-out pairs",
    "eval/loss": "held-out loss",
}
"""Measures by which a run may be judged, in words; the first that it has counts."""
LOWER_IS_BETTER = ("eval/loss",)


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY
    step: Count
    metric: Literal["eval/accuracy", "eval/pair_accuracy", "eval/loss"]
    value: Number
    held_out: Text
    """Digest of what was evaluated."""
    judged_by: Text
    """What evaluation measures: ``accuracy``, or the first reward's name."""
    evaluations_since: Count = 0
    """Number of later evaluations, none of them better."""
    loss: Number | None = None
    """Held-out loss, which decides between equal accuracies; None without both."""

    def __str__(self) -> str:
        """``held-out accuracy 91.4% at step 40``."""
        name, is_fraction = METRICS[self.metric], self.metric not in LOWER_IS_BETTER
        if self.metric == "eval/accuracy" and self.judged_by != "accuracy":
            name, is_fraction = f"held-out {self.judged_by}", False
        value = f"{self.value:.1%}" if is_fraction else f"{self.value:.4g}"
        return f"{name} {value} at step {self.step}"


def after(
    best: Best | None, step: int, record: Record, held_out: str, judged_by: str
) -> Best | None:
    """The best evaluation once ``step`` is evaluated: that of ``step`` itself if it is better than
    the best before, of which one of other problems or rows does not count. Further arguments as the
    fields of ``Best``."""
    metric = next((key for key in METRICS if key in record), None)
    if metric is None:
        return best
    value = float(record[metric])
    if best is not None and (best.metric, best.held_out) != (metric, held_out):
        best = None
    sign = -1 if metric in LOWER_IS_BETTER else 1
    loss = math.nan if metric == "eval/loss" else float(record.get("eval/loss", math.nan))
    now = Best(step, metric, value, held_out, judged_by, 0, loss if math.isfinite(loss) else None)
    if math.isfinite(value) and (best is None or _rank(now, sign) > _rank(best, sign)):
        return now
    return best and replace(best, evaluations_since=best.evaluations_since + 1)


def _rank(best: Best, sign: int) -> tuple[float, float]:
    """Higher is better: first the value, then the loss."""
    return sign * best.value, -math.inf if best.loss is None else -best.loss


def ends_early(best: Best | None, patience: int) -> bool:
    """Whether ``eval.patience`` evaluations in a row were no better; False with patience 0."""
    return best is not None and 0 < patience <= best.evaluations_since
