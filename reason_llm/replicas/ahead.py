"""Sampling ahead: while a step is learned, the processes that only sample do the steps after it.

A thread of the head collects them, as ``collect`` does, and deals their shards. When the step is
learned, the head and the other replicas take what is left of the next step. Nothing is sampled
while a step is evaluated and saved. Whatever fails here is tried again in its turn.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from reason_llm.errors import ReasonError, Stopped, one_line
from reason_llm.replicas.crew import Crew, Deal
from reason_llm.replicas.sharded_sampler import Draw, Lot, Part, ShardedSampler, sample_lot
from reason_llm.rollout import Group
from reason_llm.run.collect import Step, collect
from reason_llm.run.store.metrics import Record, timed
from reason_llm.run.team import SamplingBy
from reason_llm.run.watch import SILENT
from reason_llm.sample import Progress, SamplingParams, sampler_of

POLL_SECONDS = 0.02

logger = logging.getLogger(__name__)


class _Abandoned(Exception):
    """Nobody waits for these samples any more."""


class Ahead:
    """Context in which the samplers do the steps after this one that may be sampled by now; at its
    end the next one is sampled, if the run has one. It is the ``Dealer`` of its thread's
    sampler, and the ``collect.Stop`` of its steps.

    Args:
        records: by step; those of the steps that are sampled here are added.
    """

    def __init__(
        self, crew: Crew, step: Step, sampling: SamplingBy, records: dict[int, Record]
    ) -> None:
        self._crew = crew
        self._step = step
        self._sampling = sampling
        self._records = records
        self._number = step.number
        self._version = 0
        """Learned steps of the policy that samples."""
        self._deal: Deal | None = None
        """The current wave."""
        self._is_enough = False
        self._learners_are_free = False
        self._is_abandoned = False
        self._next_is_sampled = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="sampling ahead", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._end()

    def _finish(self) -> None:
        """Finish sampling the next step, and the current wave of later steps."""
        self._learners_are_free = True
        with timed(self._step.record, "waiting"):
            while self._thread.is_alive():
                self._is_enough = self._next_is_sampled
                deal = self._deal
                if deal is not None and (lot := deal.take()) is not None:
                    try:
                        self._sample(deal, lot)
                    except ReasonError as error:  # first the learned step is saved
                        self._end()
                        self._error = error
                        break
                self._thread.join(POLL_SECONDS)
        if isinstance(self._error, ReasonError):
            logger.warning(
                "sampling step %d ahead failed (%s); it is tried again in its turn",
                self._number + 1,
                one_line(self._error),
            )
        elif self._error is not None:
            raise self._error
        self._crew.report_losses()

    def _end(self) -> None:
        self._is_abandoned = True
        self._thread.join()

    @property
    def requested(self) -> bool:
        """See ``collect.Stop``."""
        return self._is_enough or self._step.stop.requested

    def check(self) -> None:
        """See ``collect.Stop``."""
        if self.requested:
            raise Stopped(0)

    def sample(
        self, parts: Sequence[Part], params: SamplingParams, own: Draw, progress: Progress
    ) -> list[list[Group]]:
        """See ``Dealer``. Called in the thread; the samplers are given a lot at a time."""
        crew, version = self._crew, self._version
        takers = len(crew.who_samples(version, learners=self._learners_are_free))
        deal = self._deal = Deal(crew, parts, params, version, max(1, takers))
        while not deal.is_done:
            if self._is_abandoned:
                raise _Abandoned
            deal.hand_out(crew.who_samples(version, learners=self._learners_are_free), 1)
            if not deal.gather():
                time.sleep(POLL_SECONDS)
        return deal.groups()

    def _sample(self, deal: Deal, lot: Lot | None) -> None:
        """Sample this lot and the wave's remaining lots in this process."""
        with self._sampling(deal.version) as sampler:
            while lot is not None:
                with self._crew.timed("sampling"):
                    groups = sample_lot(sampler, lot, deal.params, lambda tokens, items: None)
                deal.keep(lot, groups)
                lot = deal.take()

    def _work(self) -> None:
        step, run, buffer = self._step, self._step.config.run, self._step.buffer
        own = sampler_of(self._crew.learners.policy.model, step.job.plan.cache_tokens)
        sampler = ShardedSampler(own, run.shards, self)
        try:
            document = buffer.find(step.number)
            assert document is not None
            drawn = step.drawn + document.drawn
            last = min(step.number + run.max_staleness, run.steps - 1)
            for number in range(step.number + 1, last + 1):
                self._number = number
                document = buffer.find(number)
                if document is None or not document.complete:
                    self.check()
                    self._version = self._crew.version_of(number)
                    later = replace(
                        step,
                        number=number,
                        drawn=drawn,
                        version=self._version,
                        stop=self,
                        watch=SILENT,
                        record={},
                    )
                    collect(later, sampler)
                    self._records[number] = later.record
                    document = buffer.find(number)
                assert document is not None
                drawn += document.drawn
                self._next_is_sampled = True
        except (Stopped, _Abandoned):
            return
        except BaseException as error:  # noqa: BLE001  (raised in the run's thread)
            self._error = error
