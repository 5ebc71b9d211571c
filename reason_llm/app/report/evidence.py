"""What the checks of a run look at, and what they find."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from reason_llm.app.report.rollouts import GroupFacts
from reason_llm.config import RIGHTNESS, StageName
from reason_llm.run import Record

State = Literal["clear", "alarm", "unknown"]
RECENT_STEPS = 5
MOST_GROUPS = 12
"""Shown as evidence."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Data that the checks look at."""

    records: Sequence[Record]
    groups: Sequence[GroupFacts]
    """Those that the report holds."""
    weights: dict[str, float]
    """Of each reward by name, the first one first."""
    num_held_out: int | None
    group_size: int
    """Completions of a prompt."""
    replayed: str | None = None
    """Of a run that learns from saved rollouts (run.from_buffer), its resolved
    algorithm.correction; None for a run that samples."""
    stale: str | None = None
    """The same of a run that samples by an earlier policy (run.max_staleness)."""
    stage: StageName = "rl"
    best_step: int | None = None
    """Of the adapter in adapter_best/; None without one."""
    compares_groups: bool = True
    """Whether the algorithm learns from the differences within a group alone."""
    paid_by_model: bool = False
    """Whether a reward model pays: what its pairs prefer, often longer answers, is the aim."""

    @property
    def first(self) -> str:
        """Name of the reward that judges."""
        return next(iter(self.weights))

    @property
    def trained(self) -> list[Record]:
        """Records of steps, without that of the untrained policy and without incomplete ones: those
        that ``metrics.describe`` wrote."""
        counts = ("sample/tokens", "sample/completion_tokens")
        return [
            record
            for record in self.records
            if record["step"] > 0
            and "score/groups_without_signal_fraction" in record
            and all(record.get(name, 0) > 0 for name in counts)
        ]

    @property
    def judged_by(self) -> str:
        """As ``ScoreSection.judged_by``."""
        return "accuracy" if self.first in RIGHTNESS else self.first

    def mean_score(self, value: float) -> str:
        """``91.4%`` of an accuracy, ``0.914`` of another first reward."""
        return f"{value:.1%}" if self.judged_by == "accuracy" else f"{value:.3f}"

    def adapter_of(self, step: int) -> str:
        """Where the adapter of an evaluated step is found, in words."""
        place = "in adapter_best/, --which best" if step == self.best_step else "its checkpoint"
        return f"the adapter of step {step} ({place})"

    def is_right(self, value: float) -> bool:
        """Whether the first reward's value is that of a right answer: 1, or above 0 for a reward of
        unknown range."""
        return value >= 1 if self.first in RIGHTNESS else value > 0

    def judged(self, group: GroupFacts) -> Sequence[float]:
        """Values of the first reward; none in rollouts of another run (run.from_buffer) that have
        other rewards."""
        return group.parts.get(self.first, ())

    def recent(self, groups: Sequence[GroupFacts]) -> list[GroupFacts]:
        """Groups of the last steps."""
        last = max((group.step for group in groups), default=0)
        return [group for group in groups if group.step > last - RECENT_STEPS]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check."""

    state: State
    text: str
    advice: str = ""
    charts: tuple[str, ...] = ()
    """Keys of the records that show it."""
    steps: tuple[int, int] | None = None
    """From the first record to the last one that shows it."""
    groups: tuple[GroupFacts, ...] = ()
    """Rollouts that show it best."""


Check = Callable[[Evidence], Finding]
