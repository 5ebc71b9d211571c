"""The processes other than the head, and the versions of the policy that are sampled by.

Each holds a whole model; samplers only sample. A single process that works in shards, or
samples with an earlier version, has a crew without members, and Ray is not imported. The head keeps
the adapters of the versions that steps to come ask for, and gives them in memory to whoever
samples.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reason_llm.model import Model
from reason_llm.replicas import cluster
from reason_llm.replicas.cluster import Call, Cluster, Member
from reason_llm.replicas.errors import PeersLost
from reason_llm.replicas.replica import Work, as_written, completions, learner
from reason_llm.replicas.sharded_sampler import Lot, Part, lots
from reason_llm.rollout import Group
from reason_llm.run.start.prepare import Job
from reason_llm.run.store import checkpoint
from reason_llm.run.store.metrics import Record
from reason_llm.run.team import Team
from reason_llm.run.watch import Watch
from reason_llm.sample import SamplingParams
from reason_llm.train import Learner, Learners, LearningSettings

MAX_STARTS = 8
"""Processes that a run starts in the places of lost replicas."""
WHILE_SAMPLING = "while sampling: what it had of the wave is sampled again"


class Crew(Team):
    """The head and the other processes, if there are any, as samplers."""

    def __init__(self, job: Job, watch: Watch, connected: Cluster | None) -> None:
        super().__init__(job.config.learns)
        self._job = job
        self._run = job.config.run
        self._watch = watch
        self.cluster = connected
        self.version = job.state.step
        """Learned steps of the head's adapter."""
        self.adapters: dict[int, dict[str, Tensor]] = {}
        self.sampled_by: int | None = None
        """Version that the head samples by in ``at``; None: its own."""
        self._lock = threading.Lock()
        """Held while the head's state is copied, and while ``sampled_by`` changes."""
        self._sent: tuple[int, Any] | None = None
        """The version that was sent last, with its reference in the cluster."""
        self._starts_left = MAX_STARTS
        self._reported: list[Member] = []
        """Lost members that the user was told of."""
        self._record: Record = {}
        """The work of each process since the last record."""
        self.samples_in_batches = job.config.sample.engine == "vllm"
        """Whether a process samples its whole part of a wave in one batch."""
        for member in self.members:
            self.call(member, "warm")

    @property
    def members(self) -> list[Member]:
        """All members, dead ones included."""
        return [] if self.cluster is None else list(self.cluster.members)

    def call(self, member: Member, method: str, *arguments: Any) -> Call:
        """See ``Cluster.call``."""
        assert self.cluster is not None
        return self.cluster.call(member, method, *arguments)

    def learner(self, model: Model, settings: LearningSettings) -> Learner:
        """See ``Team``."""
        return learner(model, settings, self._run.shards)

    def begin(self, learners: Learners) -> None:
        """Have all load their models; see ``Team.begin``."""
        super().begin(learners)
        self.adapters = checkpoint.earlier_adapters(self._job.state, self._run.max_staleness)
        self.keep_adapter()
        if self.cluster is None:
            return
        opened = [self._open(member) for member in self.members]
        started = time.perf_counter()
        for call in opened:
            with suppress(PeersLost):  # reported below, where another one is started
                call.result()
            while not (call.member.address or call.member.lost):
                time.sleep(cluster.POLL_SECONDS)
        self.report_losses("while it loaded the model")
        count = 1 + len(self.ready())
        machines = len({self.cluster.address, *(m.address or "" for m in self.members)} - {""})
        self._watch.line(
            f"replicas: {count}, samplers: {len(self._alive(samplers=True))}, machines: "
            f"{machines}, shards: {self._run.shards}; the others were waited for "
            f"{time.perf_counter() - started:.0f} s; the plan above is for each"
        )

    def version_of(self, step: int) -> int:
        """See ``Team``. A run that began from a checkpoint has no adapters from before it."""
        if not self.adapters:
            return super().version_of(step)
        return max(min(self.adapters), step - self._run.max_staleness)

    def keep_adapter(self) -> None:
        """Keep the head's adapter, and drop those that no step to come is sampled by."""
        if staleness := self._run.max_staleness:
            self.adapters[self.version] = self.learners.policy.model.adapter_of("policy")
            for version in list(self.adapters):
                if version < self.version - staleness:
                    del self.adapters[version]

    def at(self, version: int) -> AbstractContextManager[None]:
        """See ``Team``."""
        if version == self.version or not self.adapters:
            return nullcontext()
        return self._with_version(version)

    @contextmanager
    def _with_version(self, version: int) -> Iterator[None]:
        model = self.learners.policy.model
        with self._lock:
            self.sampled_by = version
        try:
            model.load_adapter("policy", self.adapters[version])
            yield
        finally:
            model.load_adapter("policy", self.adapters[self.version])
            self.sampled_by = None

    def ready(self) -> list[Member]:
        """Live replicas that have the head's adapter. Replicas without it get it now, unless the
        head is sampling with an earlier one."""
        replicas = self._alive(samplers=False)
        outdated = [member for member in replicas if member.version != self.version]
        with self._lock:
            own = self.learners.state() if outdated and self.sampled_by is None else None
        if own is not None:
            assert self.cluster is not None
            state, tokens = self.cluster.shared(own), self.learners.policy.micro_batches.tokens
            for call in [self.call(member, "load", state, tokens) for member in outdated]:
                with suppress(PeersLost):
                    call.result()
                    call.member.version = self.version
        return [m for m in replicas if not m.lost and m.version == self.version]

    def who_samples(self, version: int, *, learners: bool = True) -> list[Member]:
        """Live members except the ``learners``; members without the adapter of this version get it
        now."""
        members = self._alive(samplers=True)
        if learners:
            members = self.ready() + members
        for member in members:
            if version not in (member.version, member.held):
                self.call(member, "hold", version, self._shared_adapter(version))
                member.held = version
        return members

    def report_losses(self, when: str = WHILE_SAMPLING) -> int:
        """Print a line for each lost member, and start a new process for it; their number."""
        before = len(self._reported)
        for member in self.members:
            if not member.lost or member in self._reported:
                continue
            assert self.cluster is not None
            self._reported.append(member)
            left = 1 + sum(not other.lost for other in self.members)
            then = "no further one is started"
            if self._starts_left:
                self._starts_left -= 1
                self._open(self.cluster.start_again(member))
                then = "another one is started"
            kind = "processes" if self.cluster.samplers else "replicas"
            self._watch.line(
                f"{member.name} {member.lost} {when}; {left} of {self.cluster.total} {kind} are "
                f"left and {then}"
            )
        return len(self._reported) - before

    def note(self, number: int, values: Mapping[str, float]) -> None:
        """Add numbers to the record of a process."""
        for name, value in values.items() if self.cluster is not None else ():
            key = f"replicas/{number}/{name}"
            self._record[key] = self._record.get(key, 0.0) + value

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to the head's in a phase."""
        started = time.perf_counter()
        yield
        self.note(0, {f"{phase}_seconds": time.perf_counter() - started})

    def _shared_adapter(self, version: int) -> Any:
        """The adapter of a version as the cluster holds it, sent once."""
        if self._sent is None or self._sent[0] != version:
            assert self.cluster is not None
            adapter = self.adapters.get(version)
            if adapter is None:
                adapter = self.learners.policy.model.adapter_of("policy")
            self._sent = version, self.cluster.shared(adapter)
        return self._sent[1]

    def _open(self, member: Member) -> Call:
        job = self._job
        work = Work(
            as_written(job.config),
            job.folder,
            Path.cwd(),
            job.state,
            job.plan,
            [reader for reader in job.run.readers if not reader.is_outside],
            torch.get_num_threads(),
            member.only_samples,
        )
        member.opened = self.call(member, "open", work)
        return member.opened

    def _alive(self, *, samplers: bool) -> list[Member]:
        return [member for member in cluster.alive(self.members) if member.only_samples == samplers]


@dataclass(eq=False)
class Deal:
    """The parts of a wave, which idle processes take in lots; ``takers`` are free to sample."""

    crew: Crew
    parts: Sequence[Part]
    params: SamplingParams
    version: int
    """Learned steps of the policy that samples."""
    takers: int

    def __post_init__(self) -> None:
        self._waiting = deque(lots(self.parts, self.takers, self.crew.samples_in_batches))
        self._results: dict[int, list[Group]] = {}
        """Sampled groups by shard."""
        self._under_way: dict[int, list[tuple[Lot, Call]]] = {}
        self._lock = threading.Lock()

    @property
    def is_done(self) -> bool:
        """Whether every part is sampled."""
        return len(self._results) == len(self.parts)

    def groups(self) -> list[list[Group]]:
        """The groups of each part, in order."""
        return [self._results[part.shard] for part in self.parts]

    def take(self) -> Lot | None:
        """A free lot for this process; None if all are taken."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def hand_out(self, members: Sequence[Member], max_lots: int) -> None:
        """Give waiting lots to these members, so that each has up to ``max_lots``."""
        for _ in range(max_lots):
            for member in members:
                calls = self._under_way.setdefault(member.number, [])
                if len(calls) < max_lots and (lot := self.take()) is not None:
                    of = None if self.version == member.version else self.version
                    call = self.crew.call(member, "sample", lot, self.params, of)
                    calls.append((lot, call))

    def gather(self, *, wait: bool = False) -> list[Group]:
        """Groups that members sampled since the last call, or, if it is to wait, whatever is under
        way. What a lost one had waits again."""
        gathered: list[Group] = []
        for calls in self._under_way.values():
            while calls and (wait or calls[0][1].is_done()):
                lot, call = calls.pop(0)
                try:
                    content, seconds = call.result()
                except PeersLost:
                    with self._lock:
                        self._waiting.appendleft(lot)
                    continue
                self.crew.note(call.member.number, {"sampling_seconds": seconds})
                groups = completions([p for part in lot for p in part.prompts], content)
                gathered += groups
                rest = iter(groups)
                self.keep(lot, [list(islice(rest, len(part.prompts))) for part in lot])
        return gathered

    def keep(self, lot: Lot, groups: Sequence[list[Group]]) -> None:
        """Store the sampled groups of each part of a lot."""
        for part, groups_of_part in zip(lot, groups, strict=True):
            self._results[part.shard] = groups_of_part
