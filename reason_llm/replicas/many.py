"""The replicas of a run: this process, the head, which is number 0, and the others (``crew``).

They sample the shards of a wave, and a power of two of them learns a step together. The head alone
scores, evaluates and writes. When a replica dies, what it had of a wave is sampled by the others,
and a step under way is learned again, from the state before it and the same rollouts; a new process
takes part from the next phase on. What is sampled and learned depends on the shards alone.
"""

import itertools
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch

from reason_llm.model import Datum
from reason_llm.replicas.ahead import Ahead
from reason_llm.replicas.cluster import SILENT_SECONDS, Call, Cluster, Member
from reason_llm.replicas.crew import MAX_STARTS, Crew, Deal
from reason_llm.replicas.entry_points import Several
from reason_llm.replicas.errors import PeersLost, ReplicaError
from reason_llm.replicas.peers import GroupPeers, Seat, listen
from reason_llm.replicas.replica import costs
from reason_llm.replicas.sharded_learner import Shards, deal
from reason_llm.replicas.sharded_sampler import Draw, Part, ShardedSampler
from reason_llm.rollout import Group
from reason_llm.run.collect import Step
from reason_llm.run.start.prepare import Job
from reason_llm.run.store.metrics import Record
from reason_llm.run.team import RowProgress, SamplingBy
from reason_llm.run.watch import Watch
from reason_llm.sample import Progress, Sampler, SamplingParams

MAX_ATTEMPTS = 3
"""Attempts at a step in which peers lose each other although none is dead."""


@contextmanager
def start(job: Job, watch: Watch) -> Iterator["Many"]:
    """The team of a run, whose other processes start while this one continues; raises
    ReplicaError."""
    processes = job.run.processes
    assert isinstance(processes, Several)
    count = processes.count
    shards = job.config.run.shards
    is_dealt = shards > 1 and not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ
    threads = torch.get_num_threads()
    try:
        if is_dealt:  # The bits of a product depend on it, however many replicas there are.
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // shards))
        if count == 1 and not job.config.run.samplers:
            yield Many(job, watch, None)
            return
        with Cluster(job.config, count) as connected:
            team = Many(job, watch, connected)
            connected.on_loss = team.lose
            yield team
    finally:
        if is_dealt:
            torch.set_num_threads(threads)


class Many(Crew):
    """The ``Team`` of the head and its crew, and the ``Dealer`` of the head's sampler."""

    def __init__(self, job: Job, watch: Watch, connected: Cluster | None) -> None:
        super().__init__(job, watch, connected)
        self._sampled_ahead: dict[int, Record] = {}
        """Records of the steps that were sampled ahead."""
        self._peers: GroupPeers | None = None
        self._group: list[Member] = []
        """The members of the current group of peers, without the head."""
        self._names = itertools.count()
        self._name = ""
        """Name of the group of peers."""
        self._secret = secrets.token_hex(32)
        """Secret by which the peers recognise each other."""
        if connected is not None and connected.folder is None:  # of several machines
            self._store, self._port = listen(connected.address)

    def dealing(self, sampler: Sampler) -> Sampler:
        """See ``Team``."""
        return ShardedSampler(sampler, self._run.shards, self)

    def take_record(self, step: int, sampled_by: int | None) -> Record:
        """See ``Team``. Sampling ahead overlaps with learning; its seconds have other names."""
        record, self._record = self._record, {}
        if self._run.max_staleness and sampled_by is not None:
            record["sample/staleness_steps"] = step - sampled_by
        for name, value in self._sampled_ahead.pop(step, {}).items():
            phase = name.removeprefix("time/")
            record[name if phase == name else f"time/ahead_{phase}"] = value
        return record

    def sample(
        self, parts: Sequence[Part], params: SamplingParams, own: Draw, progress: Progress
    ) -> list[list[Group]]:
        """See ``Dealer``. The head samples lots while the others do theirs."""
        version = self.version if self.sampled_by is None else self.sampled_by
        deal = Deal(self, parts, params, version, 1 + len(self.who_samples(version)))
        while not deal.is_done:
            members = self.who_samples(version)
            lot = deal.take()
            deal.hand_out(members, 2)  # one waits, as the head cannot be asked while it samples
            if lot is not None:
                with self.timed("sampling"):
                    deal.keep(lot, own(lot))
            sampled = [c for group in deal.gather(wait=lot is None) for c in group.completions]
            progress(sum(len(c.token_ids) for c in sampled), len(sampled))
            self.report_losses()
        return deal.groups()

    def learning(self, step: Step, sampling: SamplingBy) -> AbstractContextManager[None]:
        """See ``Team``: the samplers are idle while the others learn."""
        if not self._run.samplers or not self._run.max_staleness:
            return nullcontext()
        return Ahead(self, step, sampling, self._sampled_ahead)

    def learn(self, step: int, data: Sequence[Datum], progress: RowProgress) -> Record:
        """``Learners.learn``, shared between as many replicas as live, in a power of two.

        Raises:
            TrainingError, OutOfMemory: as there, on any of them.
            ReplicaError: they lose each other again and again.
        """
        own, passed = self.learners, 0

        def report(rows: int) -> None:
            nonlocal passed
            passed += rows
            progress(rows)

        for _ in range(MAX_STARTS + MAX_ATTEMPTS):
            ready = self.ready()
            # With this process a power of two, by which the tree of shards divides evenly.
            members = ready[: (1 << (len(ready) + 1).bit_length() - 1) - 1]
            if not members:
                self._leave()
                record = own.learn(step, data, report)
            else:
                before = own.state()
                try:
                    record = self._learn_with(members, step, data, report)
                except PeersLost as error:
                    own.load(before)
                    report(-passed)
                    again = f"step {step + 1} was learned: it is learned again from its rollouts"
                    if not self.report_losses(f"while {again}"):
                        self._watch.line(f"the replicas lost each other while {again} ({error})")
                    continue
                record |= {"replicas/count": float(1 + len(members))}
            self.version += 1
            self.keep_adapter()
            for member in members:
                member.version = self.version
            if members:
                self.report_losses(f"when step {step + 1} was learned")
            return record
        raise ReplicaError(
            f"step {step + 1}: the replicas keep losing each other; check the network "
            "between them, and call the same command again to resume"
        )

    def lose(self) -> None:
        """Stop the head's waiting for a lost peer; from any thread."""
        if (peers := self._peers) is not None and any(member.lost for member in self._group):
            peers.lose()

    def _learn_with(
        self,
        members: list[Member],
        step: int,
        data: Sequence[Datum],
        progress: RowProgress,
    ) -> Record:
        own, cluster = self.learners, self.cluster
        assert cluster is not None
        if self._peers is None or members != self._group:
            self._leave()
            self._name = f"{next(self._names)}-{secrets.token_hex(8)}"
        rows, size = cluster.shared(list(data)), 1 + len(members)
        head = cluster.folder or (cluster.address, self._port)
        own_seat = Seat(self._name, 0, size, head, self._secret, cluster.address)
        calls = []
        for rank, member in enumerate(members, start=1):
            seat = replace(own_seat, rank=rank, address=member.address)
            calls.append(self.call(member, "learn", step, rows, seat))
        try:
            if self._peers is None:
                self._peers = GroupPeers(
                    own_seat,
                    own.policy.model.device,
                    lambda: any(call.is_done() for call in calls),
                )
                self._group = members
                deal(own, Shards(self._run.shards, self._peers))
            with self.timed("learning"), costs(self._peers) as own_costs:
                record = own.learn(step, data, progress)
        except BaseException as error:
            self._leave()
            if isinstance(error, PeersLost) and (cause := self._wait_for_all(calls)):
                raise PeersLost(cause) from error
            raise
        self.note(0, own_costs)
        for call in calls:
            try:
                self.note(call.member.number, call.result())
            except PeersLost:  # its result is here, too
                self._leave()
        return record

    def _leave(self) -> None:
        """Leave the group of peers, if any."""
        deal(self.learners, Shards(self._run.shards))
        if self._peers is not None:
            self._peers.close()
        self._peers, self._group = None, []

    def _wait_for_all(self, calls: list[Call]) -> str:
        """Wait until every replica has either answered or been lost; return the first loss. Raises
        the first error of a replica."""
        assert self.cluster is not None
        until = time.monotonic() + SILENT_SECONDS + 30
        errors: list[Exception] = []
        lost = ""
        for call in calls:
            call.member.version = None  # it may have moved
            while not call.is_done(1.0):
                if time.monotonic() > until:
                    call.member.lost = "did not come back"
                    self.cluster.end(call.member)
            try:
                call.result()
            except PeersLost as error:
                lost = lost or f"{call.member.name}: {error}"
            except Exception as error:  # noqa: BLE001  (raised below, when all have ended)
                errors.append(error)
        if errors:
            raise errors[0]
        return lost
