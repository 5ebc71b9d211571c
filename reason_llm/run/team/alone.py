"""The processes that sample and learn a run: this one alone, or several (``many``).

The loop asks a ``Team`` and does not know which it is. With one process and one shard nothing of
Ray, shards or sampling ahead is imported.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from reason_llm.model import Datum
from reason_llm.run.collect import Step
from reason_llm.run.start.prepare import Job
from reason_llm.run.store.metrics import Record
from reason_llm.run.team.protocol import SamplingBy, Team
from reason_llm.run.watch import Watch
from reason_llm.sample import Sampler
from reason_llm.train import Learners


class Alone:
    """The team of one process, which does one thing after the other."""

    def __init__(self, job: Job) -> None:
        self._learns = job.config.learns
        self._learners: Learners | None = None

    def begin(self, learners: Learners, earlier: Mapping[int, dict[str, Tensor]]) -> None:
        """See ``Team``."""
        self._learners = learners

    def version_of(self, step: int) -> int:
        """See ``Team``."""
        return step if self._learns else 0

    def at(self, version: int) -> AbstractContextManager[None]:
        """The policy has one version at a time."""
        return nullcontext()

    def dealing(self, sampler: Sampler) -> Sampler:
        """The sampler itself."""
        return sampler

    def set_kl_coefficient(self, coefficient: float) -> None:
        """See ``Team``."""
        assert self._learners is not None
        self._learners.set_kl_coefficient(coefficient)

    def sampling_ahead(self, step: Step, sampling: SamplingBy) -> AbstractContextManager[None]:
        """Nobody is idle."""
        return nullcontext()

    def learn(self, step: int, data: Sequence[Datum], progress: Callable[[int], None]) -> Record:
        """See ``Team``."""
        assert self._learners is not None
        return self._learners.learn(step, data, progress)

    @property
    def earlier_adapters(self) -> dict[int, dict[str, Tensor]]:
        """None."""
        return {}

    def take_record(self, step: int) -> Record:
        """Nothing."""
        return {}


@contextmanager
def gather(job: Job, watch: Watch) -> Iterator[Team]:
    """The run's team, whose other processes start while this one goes on.

    Raises:
        ReplicaError: Ray cannot be started or joined, or has no place for them.
    """
    run, count = job.config.run, job.run.replicas
    if count == 1 and run.shards == 1 and not run.samplers and not run.max_staleness:
        yield Alone(job)
        return
    from reason_llm.run.team import many

    with many.start(job, watch, count) as team:
        yield team
