"""A second model in a run: it reads the step's rollouts and gives a column or a reward."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reason_llm.config import Config
from reason_llm.data import Data
from reason_llm.model import Datum, Model
from reason_llm.model.plan import Subject
from reason_llm.rollout import Group
from reason_llm.train import Learner, LearningSettings, RoleReader

Progress = Callable[[int], None]
"""Called with the number of rows or completions that were read."""


@dataclass(frozen=True, slots=True)
class Base:
    """Digests that an adapter of another run must match."""

    config: str
    """Digest of the base's config."""
    template: str
    """Digest of how prompts are written."""


class Reader:
    """A model that reads the step's rollouts, over the resident base or with separate weights.

    A reader is made and checked before a weight is read, and sent to other replicas as it is then.
    """

    title: str = ""
    """Name of its memory phase on the console."""
    is_outside: bool = False
    """Whether it has separate weights, so that the head alone reads by it."""
    context_tokens: int | None = None
    """Longest row that it reads; None for a role of the base."""

    def digests(self) -> Mapping[str, Any]:
        """Digests of its files by ``section.name`` in the run's identity."""
        return {}

    def lines(self) -> list[str]:
        """Lines about it for the start of a run."""
        return []

    def take(self, data: Data) -> None:
        """Take the required parts of the run's data."""

    def add_roles(self, model: Model, run: Path) -> None:
        """Add its adapters to the model; ``run`` is the run's folder."""

    def column(self) -> RoleReader | None:
        """The reader of its column within the learning of a step, where it is a role of the base
        and all replicas read together; None for the others."""
        return None

    def learning(self, config: Config, policy: LearningSettings) -> LearningSettings | None:
        """Settings of the reader's learner, derived from the policy's; None if it does not
        learn."""
        return None


class OutsideReader(Reader, ABC):
    """A model with separate weights that adds a column in its own memory phase."""

    is_outside = True

    @abstractmethod
    def read(self, data: Sequence[Datum], learner: Learner, progress: Progress) -> list[Datum]:
        """The rows with its column.

        Raises:
            ModelError: it cannot be loaded.
            OutOfMemory: it does not fit.
            TrainingError: it does not answer.
        """


class RewardReader(Reader, ABC):
    """A model that gives rewards, before advantages are computed."""

    key: str
    """Key of its reward."""

    @abstractmethod
    def rewards(self, groups: Sequence[Group], learner: Learner, progress: Progress) -> list[float]:
        """Reward of each completion, in order; one that is not finite is an error of scoring.

        Raises:
            ModelError: it cannot be loaded.
            OutOfMemory: it does not fit, or a completion alone is too much.
            RewardError: a completion is longer than it reads.
        """


Opened = Callable[[Config, Subject, Base], Sequence[Reader]]
"""The readers of a kind that a config asks for, checked; raises ReasonError."""
