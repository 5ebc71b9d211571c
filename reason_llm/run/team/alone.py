"""The processes that sample and learn a run (``Team``): this one alone, or several (``many``).

The loop asks a ``Team`` and does not know which it is.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from reason_llm.model import Datum
from reason_llm.run.collect import Step
from reason_llm.run.store.metrics import Record
from reason_llm.sample import Sampler
from reason_llm.train import Learners

Told = Callable[[int], None]
"""Called with the number of rows that were learned."""
Learn = Callable[[int, Sequence[Datum], Told, float | None], Record]
"""Of a step's number, its rows, whom to tell of them, and the weight of the KL from there on."""
SamplingBy = Callable[[int], AbstractContextManager[Sampler]]
"""The sampling phase of this process, with the policy of the given number of learned steps."""


class Team(Protocol):
    """Whoever samples and learns a run, this process among them.

    A version of the policy is the number of steps that it has learned.
    """

    def begin(self, learners: Learners, earlier: Mapping[int, dict[str, Tensor]]) -> None:
        """Take this process's learners, before the first step.

        Args:
            earlier: adapters of versions before theirs, from a checkpoint.
        """
        ...

    def version_of(self, step: int) -> int:
        """The version of the policy that samples this step."""
        ...

    def at(self, version: int) -> AbstractContextManager[None]:
        """Context in which this process's policy is that version, for sampling."""
        ...

    def dealing(self, sampler: Sampler) -> Sampler:
        """The sampler that shares what it is asked between all, from this process's."""
        ...

    def sampling_ahead(self, step: Step, sampling: SamplingBy) -> AbstractContextManager[None]:
        """Context of the learning of a step, in which idle processes sample the steps after it."""
        ...

    @property
    def learn(self) -> Learn:
        """Learns a step by all, as ``Learners.learn``."""
        ...

    @property
    def earlier_adapters(self) -> dict[int, dict[str, Tensor]]:
        """Adapters of earlier versions that steps to come are sampled by, for the checkpoint."""
        ...

    def take_record(self, step: int) -> Record:
        """For a step's record: each process's work since the last one, and sampling ahead."""
        ...


class Alone:
    """The team of one process, which does one thing after the other."""

    def __init__(self, learns: bool) -> None:
        self._learns = learns
        self.learn: Learn

    def begin(self, learners: Learners, earlier: Mapping[int, dict[str, Tensor]]) -> None:
        """Only these learners learn."""
        self.learn = learners.learn

    def version_of(self, step: int) -> int:
        """The newest version; the untrained one in a stage that learns nothing."""
        return step if self._learns else 0

    def at(self, version: int) -> AbstractContextManager[None]:
        """The policy has one version at a time."""
        return nullcontext()

    def dealing(self, sampler: Sampler) -> Sampler:
        """The sampler as it is."""
        return sampler

    def sampling_ahead(self, step: Step, sampling: SamplingBy) -> AbstractContextManager[None]:
        """One process has no idle time to use."""
        return nullcontext()

    @property
    def earlier_adapters(self) -> dict[int, dict[str, Tensor]]:
        """None."""
        return {}

    def take_record(self, step: int) -> Record:
        """Nothing."""
        return {}
