"""Shards: a step's rows are dealt in a number of parts that the config fixes, and the gradients of
these are added in a fixed order. What is learned depends on the number of shards, and not on how
many processes (``Peers``), each with an equal run of them, share them.

The shards' gradients are the leaves of a binary tree: its lower levels are added within a process,
its upper ones between two. As a + b and b + a have the same bits, all end with the same total.

Not here: how peers reach each other.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from reason_llm.errors import TrainingError
from reason_llm.model import Datum, Model, Role
from reason_llm.train import Learner, Learners, LearningSettings, Output, Part, Tally


class Peers(Protocol):
    """The processes that learn a step together. All of them make the same calls in the same
    order."""

    rank: int
    size: int
    """Number of processes, a power of two."""

    def add(self, total: Tensor) -> None:
        """Add the other processes' tensors to this one, in place, by pairs of ranks that differ in
        one bit, the lowest first."""

    def gather(self, content: bytes) -> list[bytes]:
        """The parts of all processes, in the order of the ranks."""


class Alone:
    """The peers of a process that learns alone."""

    rank = 0
    size = 1

    def add(self, total: Tensor) -> None:
        """Nothing to add."""

    def gather(self, content: bytes) -> list[bytes]:
        """The content of this one process."""
        return [content]


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of a step, and the process that learns from each."""

    count: int = 1
    """A power of two, and a multiple of the number of peers."""
    peers: Peers = Alone()  # noqa: RUF009

    @property
    def own(self) -> range:
        """Shards of this process."""
        per_peer = self.count // self.peers.size
        return range(self.peers.rank * per_peer, (self.peers.rank + 1) * per_peer)

    def deal(self, data: Sequence[Datum]) -> list[list[int]]:
        """Indices of the rows of each shard, ascending. Rows of a group stay together; larger
        groups come first, each to the shard with the fewest tokens so far."""
        if self.count == 1:
            return [list(range(len(data)))]
        groups: dict[int, list[int]] = {}
        for i, datum in enumerate(data):
            groups.setdefault(datum.group, []).append(i)
        tokens = {key: sum(data[i].num_tokens for i in rows) for key, rows in groups.items()}
        rows_of_shards: list[list[int]] = [[] for _ in range(self.count)]
        held = [0] * self.count
        for key in sorted(groups, key=lambda key: (-tokens[key], key)):
            shard = held.index(min(held))
            rows_of_shards[shard] += groups[key]
            held[shard] += tokens[key]
        return [sorted(rows) for rows in rows_of_shards]


class GradientSum:
    """Sum of the gradients of an optimizer batch over its shards, in the ``grad`` of parameters
    that are float32 and on one device."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], shards: Shards) -> None:
        self._parameters = parameters
        self._shards = shards
        self._spare: list[Tensor] = []
        self._sums: list[tuple[int, Tensor]] = []
        """Sums that wait for their sibling in the tree, with their level; the highest first."""
        self.begin()
        self._spare.append(self._current)

    def begin(self) -> None:
        """Set the gradients to zero for the next shard of this process."""
        size = sum(parameter.numel() for parameter in self._parameters)
        spare = self._spare
        self._current = spare.pop() if spare else self._parameters[0].new_empty(size)
        self._show(self._current.zero_())

    def end(self) -> None:
        """Take the gradients as the shard's, and add the sums whose sibling is there."""
        level, total = 0, self._current
        while self._sums and self._sums[-1][0] == level:
            _, before = self._sums.pop()
            before.add_(total)
            self._spare.append(total)
            level, total = level + 1, before
        self._sums.append((level, total))

    def finish(self) -> None:
        """Add the peers' sums, so that all peers have the same total, bit by bit."""
        ((_, total),) = self._sums
        self._sums.clear()
        self._shards.peers.add(total)
        self._show(total)
        self._spare.append(total)  # until the next shard begins

    def _show(self, flat: Tensor) -> None:
        """Have the gradients be views of ``flat``."""
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, part in zip(self._parameters, flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)


class ShardedLearner(Learner):
    """A learner that takes each step in shards, alone or together with its peers."""

    def __init__(self, model: Model, settings: LearningSettings, shards: Shards) -> None:
        super().__init__(model, settings)
        self.shards = shards

    def measure_step(
        self, data: Sequence[Datum], role: Role, output: Output | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """See ``Learner``: the peers measure the rows of their shards."""
        rows_of_shards = self.shards.deal(data)
        outputs: list[Tensor] = [torch.empty(0)] * len(data)
        entropies = list(outputs)
        for shard in self.shards.own:
            measured = self.measure([data[i] for i in rows_of_shards[shard]], role, output)
            for i, value, entropy in zip(rows_of_shards[shard], *measured, strict=True):
                outputs[i], entropies[i] = value, entropy
        if self.shards.peers.size > 1:
            self._exchange(data, rows_of_shards, outputs)
            self._exchange(data, rows_of_shards, entropies)
        return outputs, entropies

    def judge(self, data: Sequence[Datum]) -> dict[str, float]:
        """See ``Learner``: by this process alone."""
        held, self.shards = self.shards, Shards()
        try:
            return super().judge(data)
        finally:
            self.shards = held

    def _exchange(
        self, data: Sequence[Datum], rows_of_shards: list[list[int]], values: list[Tensor]
    ) -> None:
        """Fill in the peers' measurements for the rows of their shards, bit by bit."""
        shards = self.shards
        own = [values[i].float() for shard in shards.own for i in rows_of_shards[shard]]
        content = torch.cat([torch.empty(0), *own]).numpy().tobytes()
        per_peer = shards.count // shards.peers.size
        for rank, measured in enumerate(shards.peers.gather(content)):
            if rank == shards.peers.rank or not measured:
                continue
            rows = [
                i
                for shard in rows_of_shards[rank * per_peer : (rank + 1) * per_peer]
                for i in shard
            ]
            numbers = torch.frombuffer(bytearray(measured), dtype=torch.float32)
            parts = numbers.split([data[i].num_trained for i in rows])
            for i, part in zip(rows, parts, strict=True):
                values[i] = part

    def _make_gradients(self) -> None:
        self._gradient = GradientSum(self.parameters, self.shards)

    def _accumulate(self, part: Part) -> list[Tally]:
        """The gradient shard by shard, summed over the peers; the tallies of this process's."""
        tallies = []
        rows_of_shards = self.shards.deal([part.data[i] for i in part.passed])
        seed = f"{self.settings.seed}/dropout/{part.step}/{self.updates_in_step}"
        for shard in self.shards.own:
            rows = [part.passed[i] for i in rows_of_shards[shard]]
            torch.manual_seed(random.Random(f"{seed}/shard/{shard}").getrandbits(63))
            self._gradient.begin()
            tallies.append(self._accumulate_rows(part._replace(passed=rows)))
            self._gradient.end()
        self._gradient.finish()
        part.progress(
            len(part.passed) - sum(len(rows_of_shards[shard]) for shard in self.shards.own)
        )
        return tallies

    def _of_all(self, step: int, tallies: list[list[Tally]]) -> tuple[list[list[Tally]], int]:
        """The tallies of all shards in order. The peers compare their adapters here.

        Raises:
            TrainingError: a peer has another adapter.
        """
        has_peers, digest = self.shards.peers.size > 1, hashlib.sha256()
        for parameter in self.parameters if has_peers else ():
            digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
        content = {
            "updates": [[_to_json(tally) for tally in of_update] for of_update in tallies],
            "micro_batch_tokens": self.micro_batches.tokens,
            "replays": self.micro_batches.take_replays(),
            "digest": digest.hexdigest(),
        }
        results: list[dict[str, Any]] = [
            json.loads(result) for result in self.shards.peers.gather(json.dumps(content).encode())
        ]
        digests = [result["digest"] for result in results]
        if len(set(digests)) > 1:
            shown = ", ".join(f"{rank}: {digest[:12]}" for rank, digest in enumerate(digests))
            raise TrainingError(
                f"step {step}: the replicas learned different adapters ({shown}); use the same "
                "kind of machine and the same packages for all of them, and call the same command "
                "again to resume from the last checkpoint"
            )
        # The smallest micro-batch of any peer holds for all, and in the checkpoint.
        self.micro_batches.tokens = min(result["micro_batch_tokens"] for result in results)
        of_all = [
            [_from_json(tally) for result in results for tally in result["updates"][update]]
            for update in range(len(tallies))
        ]
        return of_all, sum(result["replays"] for result in results)


def deal(learners: Learners, shards: Shards) -> None:
    """Have the learners, which are sharded ones, take their steps in these shards from here on."""
    for learner in learners.by_role.values():
        if isinstance(learner, ShardedLearner):
            learner.shards = shards


def _to_json(tally: Tally) -> dict[str, Any]:
    """A tally as JSON values, which ``_from_json`` reads; Infinity and NaN may be in it."""
    sums, unit_sums = (
        {name: float(value) for name, value in values.items()}
        for values in (tally.sums, tally.unit_sums)
    )
    ratios = torch.cat([torch.empty(0), *tally.log_ratios]).tolist()
    plain = asdict(replace(tally, sums={}, unit_sums={}, log_ratios=[]))
    return plain | {"sums": sums, "unit_sums": unit_sums, "log_ratios": ratios}


def _from_json(value: dict[str, Any]) -> Tally:
    ratios = value.pop("log_ratios")
    return Tally(**value, log_ratios=[torch.tensor(ratios)] if ratios else [])
