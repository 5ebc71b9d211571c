"""Changes of noisy series: pure functions of lists of numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from reason_llm.run import Record

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
    trend hardly raises (von Neumann, 1941, doi:10.1214/aoms/1177731677).
    """
    if len(values) < 6:
        return None
    ends = min(ENDS, len(values) // 3)
    steps = [later - earlier for earlier, later in pairwise(values)]
    variance = fmean(step * step for step in steps) / 2
    before, after = fmean(values[:ends]), fmean(values[-ends:])
    return Change(before, after, (2 * variance / ends) ** 0.5)


def series(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the records that have a number there."""
    found = [(int(r["step"]), float(r[key])) for r in records if r.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]
