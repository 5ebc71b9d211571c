"""The replicas of a run: this process, the head, which is number 0, and those beside it.

Each holds a model of its own. They sample the shards of a wave, and a power of two of them learns a
step together. The head alone scores, evaluates and writes. When a replica dies, what it had of a
wave is sampled by the others, and a step under way is learned again, from the state before it and
the same rollouts; meanwhile a new process is started in its place, which takes part from the next
phase on. What is sampled and learned is the same throughout, as it depends on the shards alone.

With ``run.replicas: 1`` there is no cluster, and Ray is not imported.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from reason_llm.errors import PeersLost, ReplicaError
from reason_llm.model import Datum
from reason_llm.rollout import Group
from reason_llm.run import cluster, replica_count
from reason_llm.run.cluster import SILENT_SECONDS, Call, Cluster, Member
from reason_llm.run.metrics import Record
from reason_llm.run.peers import GroupPeers, listen
from reason_llm.run.prepare import Job
from reason_llm.run.replica import Seat, Work, completions
from reason_llm.run.watch import Watch
from reason_llm.sample import Draw, Part, Progress, SamplingParams
from reason_llm.train import Learners, Shards

MOST_STARTS = 8
"""Processes that a run starts in the places of lost replicas."""
MOST_ATTEMPTS = 3
"""At a step in which peers lose each other and none of them is dead."""
LEARN_PROGRESS = Callable[[int], None]


@contextmanager
def start(job: Job, watch: Watch) -> Iterator["Replicas"]:
    """The run's replicas, whose processes start while this one goes on.

    Raises:
        ReplicaError: Ray cannot be started or joined, or has no place for them.
    """
    _set_threads(job.config.run.shards)
    count = replica_count.count_of(job.config)
    replicas = Replicas(job, watch)
    if count == 1:
        yield replicas
        return
    with ExitStack() as until_end:
        replicas.join(until_end.enter_context(Cluster(job.config, count, replicas.lose)))
        yield replicas


def _set_threads(shards: int) -> None:
    """Have each replica use the same number of a CPU's threads, however many there are: the bits
    of a product depend on it."""
    if shards > 1 and not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // shards))


class Replicas:
    """The head's view of the replicas: the ``sample.Dealer`` of its sampler, and the learners of
    all of them as if they were one."""

    def __init__(self, job: Job, watch: Watch) -> None:
        self._job = job
        self._watch = watch
        self._shards = job.config.run.shards
        self._cluster: Cluster | None = None
        self._learners: Learners | None = None
        self._kl_coefficient: float | None = None
        self._version = 0
        """Learned steps of the head's adapter."""
        self._peers: GroupPeers | None = None
        self._group: list[Member] = []
        """Those beside the head that the peers are."""
        self._names = itertools.count()
        self._starts_left = MOST_STARTS
        self._told: list[Member] = []
        """Lost ones of which the user knows."""

    @property
    def count(self) -> int:
        """Replicas that the run is to have, the head among them."""
        return 1 if self._cluster is None else self._cluster.count

    def join(self, connected: Cluster) -> None:
        """Take the replicas of this cluster."""
        self._cluster = connected
        self._store, self._port = listen(connected.address)
        for member in connected.members:
            connected.call(member, "warm")

    def begin(self, learners: Learners) -> None:
        """Have the replicas load their models, and deal what the head's learners learn."""
        self._learners = learners
        self._version = self._job.state.step
        learners.deal(Shards(self._shards))
        if self._cluster is None:
            return
        for member in self._cluster.members:
            self._open(self._cluster, member)
        started = time.perf_counter()
        for member in self._cluster.members:
            self._wait_until_open(member)
        self._tell_of_losses("while it loaded the model")
        self._watch.line(
            f"{1 + len(self._ready())} replicas on {len(self._machines())} machine"
            f"{'s' if len(self._machines()) > 1 else ''}, {self._shards} shards; the others were "
            f"waited for {time.perf_counter() - started:.0f} s"
        )

    def lose(self) -> None:
        """Have the head wait no longer for a peer that is gone; from any thread."""
        if (peers := self._peers) is not None:
            peers.lose()

    def set_kl_coefficient(self, coefficient: float) -> None:
        """As ``Learners.set_kl_coefficient``, for all."""
        self._kl_coefficient = coefficient
        self._own.set_kl_coefficient(coefficient)

    def sample(
        self, parts: Sequence[Part], params: SamplingParams, own: Draw, progress: Progress
    ) -> list[list[Group]]:
        """See ``sample.Dealer``. The head samples its parts while the others do theirs."""
        found: dict[int, list[Group]] = {}
        while left := [part for part in parts if part.shard not in found]:
            calls: list[tuple[Part, Call]] = []
            mine = list(left)
            if self._cluster is not None and (ready := self._ready()):
                mine = left[:: len(ready) + 1]
                for number, member in enumerate(ready):
                    for part in left[number + 1 :: len(ready) + 1]:
                        call = self._cluster.call(member, "sample", part, params)
                        calls.append((part, call))
            for part in mine:
                found[part.shard] = own(part)
            for part, call in calls:
                try:
                    groups = completions(part.prompts, call.result())
                except PeersLost:
                    continue
                found[part.shard] = groups
                sampled = [c for group in groups for c in group.completions]
                progress(sum(len(c.token_ids) for c in sampled), len(sampled))
            self._tell_of_losses("while sampling: what it had of the wave is sampled again")
        return [found[part.shard] for part in parts]

    def learn(self, step: int, data: Sequence[Datum], progress: LEARN_PROGRESS) -> Record:
        """As ``Learners.learn``, shared between as many replicas as live, in a power of two.

        Raises:
            TrainingError, OutOfMemory: as there, on any of them.
            ReplicaError: they lose each other again and again.
        """
        passed = 0

        def tell(rows: int) -> None:
            nonlocal passed
            passed += rows
            progress(rows)

        for _ in range(MOST_STARTS + MOST_ATTEMPTS):
            ready = self._ready()
            members = ready[: (1 << (len(ready) + 1).bit_length() - 1) - 1]
            if not members:
                self._leave()
                found = self._own.learn(step, data, tell)
                self._version += 1
                return found
            before = self._own.state()
            try:
                found = self._learn_with(members, step, data, tell)
            except PeersLost:
                self._own.load(before)
                tell(-passed)
                self._tell_of_losses(
                    f"while step {step + 1} was learned: it is learned again from its rollouts"
                )
                continue
            self._version += 1
            for member in members:
                member.version = self._version
            self._tell_of_losses(f"when step {step + 1} was learned")
            return found | {"replicas/count": float(1 + len(members))}
        raise ReplicaError(
            f"step {step + 1}: the replicas lose each other again and again; look at the network "
            "between them, and call the same command again to go on"
        )

    @property
    def _own(self) -> Learners:
        assert self._learners is not None
        return self._learners

    def _learn_with(
        self, members: list[Member], step: int, data: Sequence[Datum], progress: LEARN_PROGRESS
    ) -> Record:
        assert self._cluster is not None
        if self._peers is None or members != self._group:
            self._leave()
            self._name = f"{next(self._names)}"
        rows, size = self._cluster.shared(list(data)), 1 + len(members)
        calls = [
            self._cluster.call(
                member, "learn", step, rows, self._kl_coefficient,
                Seat(self._name, rank, size, (self._cluster.address, self._port), member.address),
            )
            for rank, member in enumerate(members, start=1)
        ]  # fmt: skip
        try:
            if self._peers is None:
                device = self._own.policy.model.device
                self._peers = GroupPeers(
                    self._store, self._name, 0, size, self._cluster.address, device
                )
                self._group = members
                self._own.deal(Shards(self._shards, self._peers))
            found = self._own.learn(step, data, progress)
        except PeersLost:
            self._leave()
            self._find_out(calls)
            raise
        except BaseException:
            self._leave()
            raise
        for call in calls:
            try:
                call.result()
            except PeersLost:  # what it learned is here, too
                self._leave()
        return found

    def _leave(self) -> None:
        """Leave the group of peers, if there is one."""
        self._own.deal(Shards(self._shards))
        if self._peers is not None:
            self._peers.close()
        self._peers, self._group = None, []

    def _find_out(self, calls: list[Call]) -> None:
        """Wait until it is known of each replica whether it lives.

        Raises:
            ReasonError: one of them failed with it.
        """
        assert self._cluster is not None
        until = time.monotonic() + SILENT_SECONDS + 30
        errors: list[Exception] = []
        for call in calls:
            call.member.version = None  # it may have moved
            while not call.is_done(1.0):
                if time.monotonic() > until:
                    call.member.lost = "did not come back"
                    self._cluster.end(call.member)
            try:
                call.result()
            except PeersLost:
                continue
            except Exception as error:  # noqa: BLE001  (raised below, when all have ended)
                errors.append(error)
        if errors:
            raise errors[0]

    def _open(self, connected: Cluster, member: Member) -> None:
        job = self._job
        # Rewards and rows in Python are the head's alone, and may be nothing that can be sent.
        work = Work(
            job.config.as_written, job.folder, Path.cwd(), job.state, job.plan,
            job.data.teacher_prompts, torch.get_num_threads(),
        )  # fmt: skip
        member.opened = connected.call(member, "open", work)

    def _wait_until_open(self, member: Member) -> None:
        """Raises ReasonError: something that the config names cannot be used there."""
        assert member.opened is not None
        try:
            member.opened.result()
        except PeersLost:
            return

    def _ready(self) -> list[Member]:
        """Replicas beside the head that live and have its adapter; they are given it here."""
        if self._cluster is None:
            return []
        ready = cluster.alive(self._cluster.members)
        behind = [member for member in ready if member.version != self._version]
        if behind:
            state = self._cluster.shared(self._own.state())
            tokens = self._own.policy.micro_batches.tokens
            calls = [self._cluster.call(member, "load", state, tokens) for member in behind]
            for call in calls:
                try:
                    call.result()
                    call.member.version = self._version
                except PeersLost:
                    pass
        return [m for m in ready if not m.lost and m.version == self._version]

    def _machines(self) -> set[str]:
        assert self._cluster is not None
        return {self._cluster.address, *(m.address or "" for m in self._cluster.members)} - {""}

    def _tell_of_losses(self, when: str) -> None:
        """A line for each replica that was lost, and a new process in its place."""
        if self._cluster is None:
            return
        for member in list(self._cluster.members):
            if not member.lost or member in self._told:
                continue
            self._told.append(member)
            left = 1 + sum(not each.lost for each in self._cluster.members)
            ahead = "no further one is started"
            if self._starts_left:
                self._starts_left -= 1
                self._open(self._cluster, self._cluster.start_again(member))
                ahead = "another one is started"
            self._watch.line(
                f"{member.name} {member.lost} {when}; {left} of {self.count} replicas are left and "
                f"{ahead}"
            )
