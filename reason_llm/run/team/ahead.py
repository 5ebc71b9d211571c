"""Sampling ahead: while a step is learned, the processes that only sample do the steps after it.

A thread of the head collects them, as ``collect`` does, and deals their shards from one queue. When
the step is learned, the head and the other replicas take from the queue what is left of the next
step, by the version that it asks for. At the end of the block the thread has ended: nothing is
sampled while a step is evaluated and saved.

Whatever fails here is tried again when it is the step's turn. What is sampled does not depend on
who samples it, or on when.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol

from reason_llm.errors import PeersLost, ReasonError, Stopped, one_line
from reason_llm.model import Model
from reason_llm.rollout import Group
from reason_llm.run.collect import Step, Stop, collect
from reason_llm.run.store.metrics import Record, timed
from reason_llm.run.team.cluster import Call, Member
from reason_llm.run.team.protocol import SamplingBy
from reason_llm.run.watch import SILENT
from reason_llm.sample import (
    Draw,
    Part,
    Progress,
    SamplingParams,
    ShardedSampler,
    sampler_of,
)

POLL_SECONDS = 0.02

logger = logging.getLogger(__name__)


class Workers(Protocol):
    """The processes beside the head, of which some are idle while it learns."""

    def version_of(self, step: int) -> int: ...  # noqa: D102

    def who_samples(self, version: int, *, learners: bool = True) -> list[Member]: ...  # noqa: D102

    def begin_part(  # noqa: D102
        self, member: Member, part: Part, params: SamplingParams, version: int
    ) -> Call: ...

    def end_part(self, part: Part, call: Call) -> list[Group]: ...  # noqa: D102

    def tell_of_losses(self) -> None: ...  # noqa: D102

    def timed(self, number: int, phase: str) -> AbstractContextManager[None]: ...  # noqa: D102

    def note_ahead(self, step: int, record: Record) -> None: ...  # noqa: D102


@contextmanager
def sampling_ahead(
    workers: Workers, step: Step, sampling: SamplingBy, model: Model
) -> Iterator[None]:
    """Context in which the samplers do the steps after this one that may be sampled by now; at its
    end the next one is sampled, if the run has one."""
    ahead = _Ahead(workers, step, sampling, model)
    ahead.thread.start()
    try:
        yield
        ahead.finish()
    finally:
        ahead.end()


class _Abandoned(Exception):
    """Nobody waits for what is sampled."""


class _Enough:
    """The ``collect.Stop`` of what is sampled ahead."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self.is_enough = False

    @property
    def requested(self) -> bool:
        return self.is_enough or self._stop.requested

    def check(self) -> None:
        if self.requested:
            raise Stopped(0)


class _Queue:
    """The ``sample.Dealer`` whose parts are taken by whoever has nothing else to do."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._lock = threading.Lock()
        self._waiting: deque[Part] = deque()
        self._found: dict[int, list[Group]] = {}
        self.version = 0
        """Learned steps of the policy that samples."""
        self.params: SamplingParams | None = None
        self.learners_are_free = False
        self.is_abandoned = False

    def sample(
        self, parts: Sequence[Part], params: SamplingParams, own: Draw, progress: Progress
    ) -> list[list[Group]]:
        """See ``sample.Dealer``. Called in the thread; the samplers are given a part at a time."""
        with self._lock:
            self._waiting, self._found, self.params = deque(parts), {}, params
        under_way: dict[int, tuple[Member, Part, Call]] = {}
        while len(self._found) < len(parts):
            if self.is_abandoned:
                raise _Abandoned
            for member in self._workers.who_samples(self.version, learners=self.learners_are_free):
                if member.number not in under_way and (part := self.take()) is not None:
                    call = self._workers.begin_part(member, part, params, self.version)
                    under_way[member.number] = member, part, call
            ended = [each for each in under_way.values() if each[2].is_done()]
            for member, part, call in ended:
                del under_way[member.number]
                try:
                    self.give(part, self._workers.end_part(part, call))
                except PeersLost:
                    self._put_back(part)
            if not ended:
                time.sleep(POLL_SECONDS)
        return [self._found[part.shard] for part in parts]

    def take(self) -> Part | None:
        """A part that nobody has taken yet."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def give(self, part: Part, groups: list[Group]) -> None:
        """The groups of a part that was taken."""
        with self._lock:
            self._found[part.shard] = groups

    def _put_back(self, part: Part) -> None:
        with self._lock:
            self._waiting.appendleft(part)


class _Ahead:
    """The thread, and what this process does for it."""

    def __init__(self, workers: Workers, step: Step, sampling: SamplingBy, model: Model) -> None:
        self._workers = workers
        self._step = step
        self._sampling = sampling
        self._number = step.number
        self._stop = _Enough(step.stop)
        self._queue = _Queue(workers)
        own = sampler_of(model, step.job.plan.cache_tokens)
        self._sampler = ShardedSampler(own, step.config.run.shards, self._queue)
        self._next_is_sampled = False
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._work, name="sampling ahead", daemon=True)

    def finish(self) -> None:
        """Have the next step sampled to its end, and later ones to the end of a wave."""
        queue = self._queue
        queue.learners_are_free = True
        with timed(self._step.record, "waiting"):
            while self.thread.is_alive():
                self._stop.is_enough = self._next_is_sampled
                if (part := queue.take()) is not None:
                    try:
                        self._sample(part)
                    except ReasonError as error:  # the step that was learned is saved first
                        self.end()
                        self._error = error
                        break
                self.thread.join(POLL_SECONDS)
        if isinstance(self._error, ReasonError):
            logger.warning(
                "sampling ahead of step %d ended (%s); it goes on when it is its turn",
                self._number + 1, one_line(self._error),
            )  # fmt: skip
        elif self._error is not None:
            raise self._error
        self._workers.tell_of_losses()

    def end(self) -> None:
        """End the thread."""
        self._queue.is_abandoned = True
        self.thread.join()

    def _sample(self, part: Part | None) -> None:
        """Sample this part and those that are left in this process."""
        queue = self._queue
        version, params = queue.version, queue.params
        assert params is not None
        with self._sampling(version) as sampler:
            while part is not None:
                with self._workers.timed(0, "sampling"):
                    groups = sampler.sample(
                        part.prompts, params, part.seed, lambda tokens, items: None
                    )
                queue.give(part, groups)
                part = queue.take() if version == queue.version else None

    def _work(self) -> None:
        step, run = self._step, self._step.config.run
        buffer, last = step.buffer, min(step.number + run.max_staleness, run.steps - 1)
        learned = buffer.find(step.number)
        assert learned is not None
        drawn = step.drawn + learned.drawn
        try:
            for number in range(step.number + 1, last + 1):
                self._number = number
                found = buffer.find(number)
                if found is None or not found.complete:
                    self._stop.check()
                    version = self._queue.version = self._workers.version_of(number)
                    later = replace(
                        step,
                        number=number,
                        drawn=drawn,
                        version=version,
                        stop=self._stop,
                        watch=SILENT,
                        record={},
                    )
                    collect(later, self._sampler)
                    self._workers.note_ahead(number, later.record)
                    found = buffer.find(number)
                assert found is not None
                drawn += found.drawn
                self._next_is_sampled = True
        except (Stopped, _Abandoned):
            return
        except BaseException as error:  # noqa: BLE001  (raised in the run's thread)
            self._error = error
