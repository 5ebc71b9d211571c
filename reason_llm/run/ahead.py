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
from contextlib import contextmanager
from dataclasses import dataclass, field

from reason_llm.config import Config
from reason_llm.errors import PeersLost, ReasonError, Stopped, one_line
from reason_llm.rollout import Group
from reason_llm.run.buffer import RolloutBuffer
from reason_llm.run.cluster import Call, Member
from reason_llm.run.collect import collect
from reason_llm.run.metrics import Record, timed
from reason_llm.run.prepare import Job
from reason_llm.run.replicas import Replicas
from reason_llm.run.run import Run
from reason_llm.run.watch import SILENT, Watch
from reason_llm.sample import Draw, Part, Progress, SamplingParams, sampler_of

POLL_SECONDS = 0.02

logger = logging.getLogger(__name__)


@contextmanager
def sampling_ahead(run: Run, step: int) -> Iterator[None]:
    """Context in which the samplers do the steps after this one that may be sampled by now; at its
    end the next one is sampled, if the run has one."""
    if not run.replicas.has_samplers or not run.config.run.max_staleness:
        yield
        return
    ahead = _Ahead(run, step)
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

    def __init__(self, run: Run) -> None:
        self._run = run
        self.is_enough = False

    @property
    def requested(self) -> bool:
        return self.is_enough or self._run.stop.requested

    def check(self) -> None:
        if self.requested:
            raise Stopped(0)


@dataclass(frozen=True, slots=True)
class _View:
    """The run as ``collect`` sees it for a step ahead."""

    job: Job
    config: Config
    buffer: RolloutBuffer
    stop: _Enough
    drawn: int
    record: Record = field(default_factory=dict)
    watch: Watch = SILENT


class _Queue:
    """The ``sample.Dealer`` whose parts are taken by whoever has nothing else to do."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
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
            for member in self._replicas.who_samples(self.version, learners=self.learners_are_free):
                if member.number not in under_way and (part := self.take()) is not None:
                    call = self._replicas.begin_part(member, part, params, self.version)
                    under_way[member.number] = member, part, call
            ended = [each for each in under_way.values() if each[2].is_done()]
            for member, part, call in ended:
                del under_way[member.number]
                try:
                    self.give(part, self._replicas.end_part(part, call))
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

    def __init__(self, run: Run, step: int) -> None:
        self._run = run
        self._step = self._number = step
        self._stop = _Enough(run)
        self._queue = _Queue(run.replicas)
        self._sampler = run.dealing(sampler_of(run.model, run.job.plan.cache_tokens), self._queue)
        self._next_is_sampled = False
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._work, name="sampling ahead", daemon=True)

    def finish(self) -> None:
        """Have the next step sampled to its end, and later ones to the end of a wave."""
        run, queue = self._run, self._queue
        queue.learners_are_free = True
        with timed(run.record, "waiting"):
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
        run.replicas.tell_of_losses()

    def end(self) -> None:
        """End the thread."""
        self._queue.is_abandoned = True
        self.thread.join()

    def _sample(self, part: Part | None) -> None:
        """Sample this part and those that are left in this process."""
        queue, run = self._queue, self._run
        version, params = queue.version, queue.params
        assert params is not None
        with run.sampling_by(version) as sampler:
            while part is not None:
                with run.replicas.timed(0, "sampling"):
                    groups = sampler.sample(
                        part.prompts, params, part.seed, lambda tokens, items: None
                    )
                queue.give(part, groups)
                part = queue.take() if version == queue.version else None

    def _work(self) -> None:
        run, step = self._run, self._step
        last = min(step + run.config.run.max_staleness, run.config.run.steps - 1)
        drawn = run.state.drawn + run.buffer.drawn(step)
        try:
            for number in range(step + 1, last + 1):
                self._number = number
                found = run.buffer.find(number)
                if found is None or not found.complete:
                    self._stop.check()
                    self._queue.version = run.replicas.version_of(number)
                    view = _View(run.job, run.config, run.buffer, self._stop, drawn)
                    collect(view, self._sampler, number)
                    run.sampled_ahead[number] = view.record
                    found = run.buffer.find(number)
                assert found is not None
                drawn += found.drawn
                self._next_is_sampled = True
        except (Stopped, _Abandoned):
            return
        except BaseException as error:  # noqa: BLE001  (raised in the run's thread)
            self._error = error
