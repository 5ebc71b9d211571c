"""The replicas of a run: this process, the head, which is number 0, and those beside it.

Each holds a model of its own. They sample the shards of a wave, and a power of two of them learns a
step together. The head alone scores, evaluates and writes. When a replica dies, what it had of a
wave is sampled by the others, and a step under way is learned again, from the state before it and
the same rollouts; meanwhile a new process is started in its place, which takes part from the next
phase on. What is sampled and learned is the same throughout, as it depends on the shards alone.
Samplers are such processes, too, which only sample.

``run.max_staleness`` says which version samples a step: a version is the policy of a number of
learned steps. The head keeps the adapters of the versions that steps to come ask for, and gives
them in memory to whoever samples.

One process alone is this, too, where it works in shards or samples by an earlier version: then
there is no cluster, and Ray is not imported.
"""

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reason_llm.errors import PeersLost, ReplicaError
from reason_llm.model import Datum
from reason_llm.rollout import Group
from reason_llm.run.collect import Step
from reason_llm.run.start.prepare import Job
from reason_llm.run.store.metrics import Record
from reason_llm.run.team import ahead, cluster
from reason_llm.run.team.cluster import SILENT_SECONDS, Call, Cluster, Member
from reason_llm.run.team.peers import GroupPeers, in_file, listen
from reason_llm.run.team.protocol import SamplingBy
from reason_llm.run.team.replica import Seat, Work, completions, costs
from reason_llm.run.watch import Watch
from reason_llm.sample import Draw, Part, Progress, Sampler, SamplingParams, ShardedSampler
from reason_llm.train import Learners, Shards, deal

MOST_STARTS = 8
"""Processes that a run starts in the places of lost replicas."""
MOST_ATTEMPTS = 3
"""At a step in which peers lose each other and none of them is dead."""
LEARN_PROGRESS = Callable[[int], None]


@contextmanager
def start(job: Job, watch: Watch, count: int) -> Iterator["Many"]:
    """The team of so many replicas, whose processes start while this one goes on.

    Args:
        count: 0 where the cluster to join says.

    Raises:
        ReplicaError: Ray cannot be started or joined, or has no place for them.
    """
    _set_threads(job.config.run.shards)
    team = Many(job, watch)
    if count == 1 and not job.config.run.samplers:
        yield team
        return
    with Cluster(job.config, count, team.lose) as connected:
        team.join(connected)
        yield team


def _set_threads(shards: int) -> None:
    """Have each replica use the same number of a CPU's threads, however many there are: the bits
    of a product depend on it."""
    if shards > 1 and not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // shards))


class Many:
    """The head's view of the replicas: the ``Team`` that they are, and the ``sample.Dealer`` of its
    sampler."""

    def __init__(self, job: Job, watch: Watch) -> None:
        self._job = job
        self._watch = watch
        self._shards = job.config.run.shards
        self._cluster: Cluster | None = None
        self._learners: Learners | None = None
        self._kl_coefficient: float | None = None
        self._staleness = job.config.run.max_staleness
        self._version = 0
        """Learned steps of the head's adapter."""
        self._adapters: dict[int, dict[str, Tensor]] = {}
        """Of the versions that steps to come are sampled by, the head's own among them; none
        without staleness."""
        self._sampled_by: int | None = None
        """Version that the head samples by in ``at``; None: its own."""
        self._adapter_lock = threading.Lock()
        """Held while the head's state is copied, and while ``_sampled_by`` changes."""
        self._sent: tuple[int, Any] | None = None
        """The version that was given last, as the cluster holds it."""
        self._record: Record = {}
        self._peers: GroupPeers | None = None
        self._group: list[Member] = []
        """Those beside the head that the peers are."""
        self._names = itertools.count()
        self._secret = secrets.token_hex(32)
        """By which the peers know each other."""
        self._starts_left = MOST_STARTS
        self._told: list[Member] = []
        """Lost ones of which the user knows."""
        self._sampled_ahead: dict[int, Record] = {}
        """For the records of the steps that were sampled ahead."""

    @property
    def count(self) -> int:
        """Replicas that the run is to have, the head among them."""
        return 1 if self._cluster is None else self._cluster.count

    def join(self, connected: Cluster) -> None:
        """Take the replicas of this cluster."""
        self._cluster = connected
        if connected.folder is None:  # of several machines
            self._store, self._port = listen(connected.address)
        for member in connected.members:
            connected.call(member, "warm")

    def begin(self, learners: Learners, earlier: Mapping[int, dict[str, Tensor]]) -> None:
        """Have the replicas load their models.

        Args:
            earlier: adapters of versions before the head's.
        """
        self._learners = learners
        self._version = self._job.state.step
        self._adapters = dict(earlier)
        self._keep_adapter()
        if self._cluster is None:
            return
        for member in self._cluster.members:
            self._open(self._cluster, member)
        started = time.perf_counter()
        for member in self._cluster.members:
            self._wait_until_open(member)
        self._tell_of_losses("while it loaded the model")
        count = 1 + len(self._ready())
        told = f"{count} replica{'s' if count > 1 else ''}"
        if self._cluster.samplers:
            told += f" and {len(self._alive(samplers=True))} that sample only"
        self._watch.line(
            f"{told} on {len(self._machines())} machine"
            f"{'s' if len(self._machines()) > 1 else ''}, {self._shards} shards; the others were "
            f"waited for {time.perf_counter() - started:.0f} s; the plan above is for each"
        )
        if self._job.config.run.sum == "fast" and self.count > 1:
            self._watch.line(
                "gradients are added by a plain all-reduce (run.sum=fast): the adapter's last bits "
                f"are those of {self.count} replicas"
            )

    def lose(self) -> None:
        """Have the head wait no longer for a peer that is gone; from any thread."""
        if (peers := self._peers) is not None and any(member.lost for member in self._group):
            peers.lose()

    @property
    def has_samplers(self) -> bool:
        """Whether there are processes that only sample."""
        return self._cluster is not None and self._cluster.samplers > 0

    @property
    def earlier_adapters(self) -> dict[int, dict[str, Tensor]]:
        """Adapters of the versions before the head's that steps to come are sampled by."""
        return {key: each for key, each in self._adapters.items() if key < self._version}

    def version_of(self, step: int) -> int:
        """Learned steps of the policy that samples this step. A run that began from a checkpoint
        has no adapters from before it."""
        if not self._staleness:
            return step if self._job.config.learns else 0
        return max(min(self._adapters), step - self._staleness)

    @contextmanager
    def at(self, version: int) -> Iterator[None]:
        """Context in which the policy is that of so many learned steps, for sampling."""
        if version == self._version or not self._staleness:
            yield
            return
        model = self._own.policy.model
        with self._adapter_lock:
            self._sampled_by = version
        try:
            model.load_adapter("policy", self._adapters[version])
            yield
        finally:
            model.load_adapter("policy", self._adapters[self._version])
            self._sampled_by = None

    def take_record(self, step: int) -> Record:
        """See ``Team``. The seconds of sampling ahead are beside learning, and have other names."""
        record, self._record = self._record, {}
        for name, value in self._sampled_ahead.pop(step, {}).items():
            phase = name.removeprefix("time/")
            record[name if phase == name else f"time/ahead_{phase}"] = value
        return record

    def dealing(self, sampler: Sampler) -> Sampler:
        """See ``Team``."""
        return ShardedSampler(sampler, self._shards, self)

    def sampling_ahead(self, step: Step, sampling: SamplingBy) -> AbstractContextManager[None]:
        """See ``Team``: the samplers are idle while the others learn."""
        if not self.has_samplers or not self._staleness:
            return nullcontext()
        return ahead.sampling_ahead(self, step, sampling, self._own.policy.model)

    def note_ahead(self, step: int, record: Record) -> None:
        """Keep what is known of a step that was sampled ahead."""
        self._sampled_ahead[step] = record

    def set_kl_coefficient(self, coefficient: float) -> None:
        """As ``Learners.set_kl_coefficient``, for all."""
        self._kl_coefficient = coefficient
        self._own.set_kl_coefficient(coefficient)

    def sample(
        self, parts: Sequence[Part], params: SamplingParams, own: Draw, progress: Progress
    ) -> list[list[Group]]:
        """See ``sample.Dealer``. The head samples its parts while the others do theirs."""
        found: dict[int, list[Group]] = {}
        version = self._version if self._sampled_by is None else self._sampled_by
        while left := [part for part in parts if part.shard not in found]:
            calls: list[tuple[Part, Call]] = []
            mine = list(left)
            if self._cluster is not None and (ready := self.who_samples(version)):
                mine = left[:: len(ready) + 1]
                for number, member in enumerate(ready):
                    for part in left[number + 1 :: len(ready) + 1]:
                        calls.append((part, self.begin_part(member, part, params, version)))
            for part in mine:
                with self.timed(0, "sampling"):
                    found[part.shard] = own(part)
            for part, call in calls:
                try:
                    groups = self.end_part(part, call)
                except PeersLost:
                    continue
                found[part.shard] = groups
                sampled = [c for group in groups for c in group.completions]
                progress(sum(len(c.token_ids) for c in sampled), len(sampled))
            self.tell_of_losses()
        return [found[part.shard] for part in parts]

    def who_samples(self, version: int, *, learners: bool = True) -> list[Member]:
        """Processes beside the head that live; they are given the adapter of this version where
        they lack it.

        Args:
            learners: False: the samplers alone, while the others learn.
        """
        found = self._alive(samplers=True)
        if learners:
            found = self._ready() + found
        for member in found:
            if version not in (member.version, member.held):
                assert self._cluster is not None
                self._cluster.call(member, "hold", version, self._as_sent(version))
                member.held = version
        return found

    def begin_part(self, member: Member, part: Part, params: SamplingParams, version: int) -> Call:
        """Have one of ``who_samples`` sample a shard's part."""
        assert self._cluster is not None
        return self._cluster.call(
            member, "sample", part, params, None if version == member.version else version
        )

    def end_part(self, part: Part, call: Call) -> list[Group]:
        """The groups of a part.

        Raises:
            PeersLost: who sampled it is gone.
        """
        content, seconds = call.result()
        self._note(call.member.number, "sampling_seconds", seconds)
        return completions(part.prompts, content)

    def tell_of_losses(self) -> None:
        """Tell the user of processes that were lost while they sampled."""
        self._tell_of_losses("while sampling: what it had of the wave is sampled again")

    @contextmanager
    def timed(self, number: int, phase: str) -> Iterator[None]:
        """Add the seconds of the block to those of a process in a phase."""
        started = time.perf_counter()
        yield
        self._note(number, f"{phase}_seconds", time.perf_counter() - started)

    def _note_all(self, number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._note(number, name, value)

    def _note(self, number: int, name: str, value: float) -> None:
        if self._cluster is None:
            return
        key = f"replicas/{number}/{name}"
        self._record[key] = self._record.get(key, 0.0) + value

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
                self._take_version()
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
            self._take_version()
            for member in members:
                member.version = self._version
            self._tell_of_losses(f"when step {step + 1} was learned")
            return found | {"replicas/count": float(1 + len(members))}
        raise ReplicaError(
            f"step {step + 1}: the replicas lose each other again and again; look at the network "
            "between them, and call the same command again to go on"
        )

    def _take_version(self) -> None:
        self._version += 1
        self._keep_adapter()

    def _keep_adapter(self) -> None:
        """Keep the head's adapter, and drop those that no step to come is sampled by."""
        if not self._staleness:
            return
        self._adapters[self._version] = self._own.policy.model.adapter_of("policy")
        for version in list(self._adapters):
            if version < self._version - self._staleness:
                del self._adapters[version]

    def _as_sent(self, version: int) -> Any:
        """The adapter of a version as the cluster holds it, sent once."""
        assert self._cluster is not None
        if self._sent is None or self._sent[0] != version:
            adapter = self._adapters.get(version)
            if adapter is None:
                adapter = self._own.policy.model.adapter_of("policy")
            self._sent = version, self._cluster.shared(adapter)
        return self._sent[1]

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
            self._name = f"{next(self._names)}-{secrets.token_hex(8)}"
        rows, size = self._cluster.shared(list(data)), 1 + len(members)
        calls = [
            self._cluster.call(
                member, "learn", step, rows, self._kl_coefficient,
                Seat(self._name, rank, size, self._head, self._secret, member.address),
            )
            for rank, member in enumerate(members, start=1)
        ]  # fmt: skip
        try:
            if self._peers is None:
                device = self._own.policy.model.device
                is_exact = self._job.config.run.sum == "exact"
                head = self._head
                store = in_file(head, self._name) if isinstance(head, Path) else self._store
                self._peers = GroupPeers(
                    store, self._name, 0, size, self._cluster.address, device, is_exact,
                    self._secret,
                )  # fmt: skip
                self._group = members
                deal(self._own, Shards(self._shards, self._peers))
            with self.timed(0, "learning"), costs(self._peers) as own_costs:
                found = self._own.learn(step, data, progress)
        except PeersLost:
            self._leave()
            self._find_out(calls)
            raise
        except BaseException:
            self._leave()
            raise
        self._note_all(0, own_costs)
        for call in calls:
            try:
                self._note_all(call.member.number, call.result())
            except PeersLost:  # what it learned is here, too
                self._leave()
        return found

    @property
    def _head(self) -> tuple[str, int] | Path:
        """Where the replicas find each other."""
        assert self._cluster is not None
        return self._cluster.folder or (self._cluster.address, self._port)

    def _leave(self) -> None:
        """Leave the group of peers, if there is one."""
        deal(self._own, Shards(self._shards))
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
            job.data.teacher_prompts, torch.get_num_threads(), member.only_samples,
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
        """Replicas beside the head that live and have its adapter. Those that have not are given it
        here, unless the head samples by an earlier one at this moment."""
        if self._cluster is None:
            return []
        ready = self._alive(samplers=False)
        behind = [member for member in ready if member.version != self._version]
        with self._adapter_lock:
            own = self._own.state() if behind and self._sampled_by is None else None
        if own is not None:
            state = self._cluster.shared(own)
            tokens = self._own.policy.micro_batches.tokens
            calls = [self._cluster.call(member, "load", state, tokens) for member in behind]
            for call in calls:
                try:
                    call.result()
                    call.member.version = self._version
                except PeersLost:
                    pass
        return [m for m in ready if not m.lost and m.version == self._version]

    def _alive(self, *, samplers: bool) -> list[Member]:
        """Processes beside the head that live: samplers, or replicas that learn."""
        if self._cluster is None:
            return []
        alive = cluster.alive(self._cluster.members)
        return [member for member in alive if member.only_samples == samplers]

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
            left, total = 1 + sum(not m.lost for m in self._cluster.members), self._cluster.total
            ahead = "no further one is started"
            if self._starts_left:
                self._starts_left -= 1
                self._open(self._cluster, self._cluster.start_again(member))
                ahead = "another one is started"
            self._watch.line(
                f"{member.name} {member.lost} {when}; {left} of {total} "
                f"{'processes' if self.has_samplers else 'replicas'} are left and {ahead}"
            )
