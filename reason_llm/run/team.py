"""The processes that sample and learn a run: this one alone (``Team``), or several (``many``)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from reason_llm.model import Datum
from reason_llm.run.collect import Step
from reason_llm.run.store.metrics import Record
from reason_llm.sample import Sampler
from reason_llm.train import Learners

Told = Callable[[int], None]
"""Called with the number of rows that were learned."""
SamplingBy = Callable[[int], AbstractContextManager[Sampler]]
"""The sampling phase of this process, with the policy of the given number of learned steps."""


class Team:
    """This process alone, which does one thing after the other. Several share what these methods
    do, and the loop does not know which it asks.

    A version of the policy is the number of steps that it has learned.
    """

    adapters: Mapping[int, dict[str, Tensor]] = {}
    """Adapters by version, for sampling of later steps; empty without staleness."""

    def __init__(self, learns: bool) -> None:
        self._learns = learns
        self._learners: Learners | None = None

    @property
    def learners(self) -> Learners:
        """The learners of this process."""
        assert self._learners is not None
        return self._learners

    def begin(self, learners: Learners, earlier: Mapping[int, dict[str, Tensor]]) -> None:
        """Take this process's learners, before the first step.

        Args:
            earlier: adapters of versions before theirs, from a checkpoint.
        """
        self._learners = learners

    def version_of(self, step: int) -> int:
        """The version of the policy that samples this step; 0 in a stage that learns nothing."""
        return step if self._learns else 0

    def at(self, version: int) -> AbstractContextManager[None]:
        """Context in which this process's policy is that version, for sampling."""
        return nullcontext()

    def dealing(self, sampler: Sampler) -> Sampler:
        """The sampler that shares what it is asked between all, from this process's."""
        return sampler

    def sampling_ahead(self, step: Step, sampling: SamplingBy) -> AbstractContextManager[None]:
        """Context of the learning of a step, in which idle processes sample the steps after it."""
        return nullcontext()

    def learn(self, step: int, data: Sequence[Datum], progress: Told) -> Record:
        """Learn a step by all, as ``Learners.learn``."""
        return self.learners.learn(step, data, progress)

    def take_record(self, step: int) -> Record:
        """For a step's record: each process's work since the last one, and sampling ahead."""
        return {}
