"""Inputs and findings of the checks of a run; changes of noisy series."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Literal

from reason_llm.app.lines import mean_score
from reason_llm.app.report.rollouts import GroupFacts
from reason_llm.config import Config, is_right
from reason_llm.run import Record

State = Literal["clear", "alarm", "unknown"]
RECENT_STEPS = 5
MAX_GROUPS = 12
"""Max groups shown as evidence."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Data that the checks look at."""

    config: Config
    records: Sequence[Record]
    groups: Sequence[GroupFacts]
    """Those that the report holds."""
    num_held_out: int | None = None
    best_step: int | None = None
    """Of the adapter in adapter_best/; None without one."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward by name, the first one first."""
        return {reward.key: reward.weight for reward in self.config.score.rewards}

    @property
    def first(self) -> str:
        """Name of the reward that judges."""
        return self.config.score.rewards[0].key

    @property
    def paid_by_model(self) -> bool:
        """Whether a reward model pays: what its pairs prefer, often longer answers, is the aim."""
        return any(reward.reader and reward.weight for reward in self.config.score.rewards)

    @property
    def trained(self) -> list[Record]:
        """Complete records of steps, without that of the untrained policy."""
        counts = ("sample/tokens", "sample/completion_tokens")
        return [
            record
            for record in self.records
            if record["step"] > 0
            and "score/groups_without_signal_fraction" in record
            and all(record.get(name, 0) > 0 for name in counts)
        ]

    def mean_score(self, value: float) -> str:
        """See ``lines.mean_score``."""
        return mean_score(value, self.config.score.judged_by)

    def points(self, difference: float) -> str:
        """``8.2 points`` of an accuracy, ``0.082`` of another first reward."""
        is_accuracy = self.config.score.judged_by == "accuracy"
        return f"{100 * difference:.1f} points" if is_accuracy else f"{difference:.3f}"

    def adapter_of(self, step: int) -> str:
        """Return where to find the adapter of an evaluated step, as text."""
        place = "in adapter_best/, --which best" if step == self.best_step else "its checkpoint"
        return f"the adapter of step {step} ({place})"

    def is_right(self, value: float) -> bool:
        """See ``config.is_right``."""
        return is_right(self.config.score.rewards[0].kind, value)

    def judged(self, group: GroupFacts) -> Sequence[float]:
        """Values of the first reward; none in rollouts of another run that have other rewards."""
        return group.parts.get(self.first, ())

    def difference_error(self, before: float, after: float) -> float:
        """Upper bound on the standard error of the difference of two accuracies: that of different
        problems, 128 if their number is unknown."""
        mean = min(max((before + after) / 2, 0.02), 0.98)
        return float((2 * mean * (1 - mean) / (self.num_held_out or 128)) ** 0.5)

    def recent(self, groups: Sequence[GroupFacts]) -> list[GroupFacts]:
        """Groups of the last steps."""
        last = max((group.step for group in groups), default=0)
        return [group for group in groups if group.step > last - RECENT_STEPS]

    @property
    def newest(self) -> list[GroupFacts]:
        """The last groups, as many as are shown."""
        return self.recent(self.groups)[-MAX_GROUPS:]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check."""

    state: State
    text: str
    advice: str = ""
    """Of an alarm, as ``charts``; empty where the table of alarms has it."""
    charts: tuple[str, ...] = ()
    steps: tuple[int, int] | None = None
    """From the first record to the last one that shows it."""
    groups: tuple[GroupFacts, ...] = ()


def clear(text: str) -> Finding:
    """Nothing is wrong."""
    return Finding("clear", text)


def unknown(why: str) -> Finding:
    """Return the finding of a check without its data."""
    return Finding("unknown", f"Not judged: {why}.")


def alarm(
    text: str,
    steps: Sequence[int],
    groups: Sequence[GroupFacts] = (),
    advice: str = "",
    charts: tuple[str, ...] = (),
) -> Finding:
    """Something is wrong in these steps; the groups are cut to those that are shown."""
    ends = steps[0], steps[-1]
    return Finding("alarm", text, advice, charts, ends, tuple(groups[:MAX_GROUPS]))


ENDS = 5
"""Values averaged at either end, at most; a third of a short series."""
SIGNIFICANT = 3.0
"""Standard errors. Tests of reports call this many times over, so 2 would often be wrong."""


@dataclass(frozen=True, slots=True)
class Change:
    """Means of the first and the last values of a series, with their noise."""

    before: float
    after: float
    error: float
    """Standard error of the difference, from how much neighbouring values differ."""
    num_ends: int

    @property
    def means(self) -> str:
        """Note on the number of steps whose means ``before`` and ``after`` are."""
        return f"(means of the first and the last {self.num_ends} steps)"

    @property
    def rise(self) -> float:
        """``after - before``."""
        return self.after - self.before

    @property
    def is_up(self) -> bool:
        """Whether the series rose beyond noise."""
        return self.rise > SIGNIFICANT * self.error

    @property
    def is_down(self) -> bool:
        """Whether the series fell beyond noise."""
        return -self.rise > SIGNIFICANT * self.error


def change(values: Sequence[float]) -> Change | None:
    """The change over the series; None for fewer than 6 values.

    The noise of a value is the root of half the mean squared difference of neighbours, which a slow
    trend hardly raises (von Neumann, 1941, doi:10.1214/aoms/1177731677)."""
    if len(values) < 6:
        return None
    ends = min(ENDS, len(values) // 3)
    steps = [later - earlier for earlier, later in pairwise(values)]
    variance = fmean(step * step for step in steps) / 2
    before, after = fmean(values[:ends]), fmean(values[-ends:])
    return Change(before, after, (2 * variance / ends) ** 0.5, ends)


def series(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the records that have a number there."""
    points = [(int(r["step"]), float(r[key])) for r in records if r.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]
