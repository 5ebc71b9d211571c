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
"""Told of rows that were learned."""
SamplingBy = Callable[[int], AbstractContextManager[Sampler]]
"""The sampling phase of this process, by the policy of so many learned steps."""


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
        """The version that samples this step."""
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

    def learn(
        self, step: int, data: Sequence[Datum], kl_coefficient: float | None, progress: Told
    ) -> Record:
        """As ``Learners.learn``, by all; with this weight of the KL, where it is not None."""
        ...

    @property
    def earlier_adapters(self) -> dict[int, dict[str, Tensor]]:
        """Adapters of earlier versions that steps to come are sampled by, for the checkpoint."""
        ...

    def take_record(self, step: int) -> Record:
        """For the record of a step: what was done by whom since the last one, and its sampling if
        that was ahead."""
        ...


class Alone:
    """The team of one process, which does one thing after the other."""

    def __init__(self, learns: bool) -> None:
        self._learns = learns
        self._learners: Learners | None = None

    def begin(self, learners: Learners, earlier: Mapping[int, dict[str, Tensor]]) -> None:
        """See ``Team``."""
        self._learners = learners

    def version_of(self, step: int) -> int:
        """The newest one; the untrained one where nothing is learned."""
        return step if self._learns else 0

    def at(self, version: int) -> AbstractContextManager[None]:
        """The policy has one version at a time."""
        return nullcontext()

    def dealing(self, sampler: Sampler) -> Sampler:
        """The sampler itself."""
        return sampler

    def sampling_ahead(self, step: Step, sampling: SamplingBy) -> AbstractContextManager[None]:
        """Nobody is idle."""
        return nullcontext()

    def learn(
        self, step: int, data: Sequence[Datum], kl_coefficient: float | None, progress: Told
    ) -> Record:
        """See ``Team``."""
        assert self._learners is not None
        if kl_coefficient is not None:
            self._learners.set_kl_coefficient(kl_coefficient)
        return self._learners.learn(step, data, progress)

    @property
    def earlier_adapters(self) -> dict[int, dict[str, Tensor]]:
        """None."""
        return {}

    def take_record(self, step: int) -> Record:
        """Nothing."""
        return {}
