"""The processes that sample and learn a run: this one alone (``Team``), or those of the package
``replicas``, which does with several what the methods of ``Team`` say."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from reason_llm.model import Datum, Model
from reason_llm.run.collect import Step
from reason_llm.run.store.metrics import Record
from reason_llm.sample import Sampler
from reason_llm.train import Learner, Learners, LearningSettings

RowProgress = Callable[[int], None]
"""Called with the number of rows that were learned."""
SamplingBy = Callable[[int], AbstractContextManager[Sampler]]
"""The sampling phase of this process, with the policy of the given number of learned steps."""


class Team:
    """This process alone, which does one thing after the other. Several share what these methods
    do, and the loop does not know which it asks.

    A version of the policy is the number of steps that it has learned.
    """

    adapters: Mapping[int, dict[str, Tensor]] = {}
    """Earlier adapters by version, which steps to come are sampled by; empty without any."""

    def __init__(self, learns: bool) -> None:
        self._learns = learns
        self._learners: Learners | None = None

    @property
    def learners(self) -> Learners:
        """The learners of this process."""
        assert self._learners is not None
        return self._learners

    def learner(self, model: Model, settings: LearningSettings) -> Learner:
        """A learner of this process."""
        return Learner(model, settings)

    def begin(self, learners: Learners) -> None:
        """Take this process's learners, before the first step."""
        self._learners = learners

    def version_of(self, step: int) -> int:
        """The version of the policy that samples this step; 0 in a stage that learns nothing."""
        return step if self._learns else 0

    def at(self, version: int) -> AbstractContextManager[None]:
        """Context in which this process's policy is that version, for sampling."""
        return nullcontext()

    def dealing(self, sampler: Sampler) -> Sampler:
        """A sampler that shares its requests between all processes, from this process's own."""
        return sampler

    def learning(self, step: Step, sampling: SamplingBy) -> AbstractContextManager[None]:
        """Context of the learning of a step, in which idle processes may sample later steps."""
        return nullcontext()

    def learn(self, step: int, data: Sequence[Datum], progress: RowProgress) -> Record:
        """Learn a step by all, as ``Learners.learn``."""
        return self.learners.learn(step, data, progress)

    def take_record(self, step: int, sampled_by: int | None) -> Record:
        """Numbers for a step's record, such as each process's work since the last one;
        ``sampled_by`` is the version of the policy that sampled the step, if it is known."""
        return {}
