"""Shards: a step's rows are dealt in a number of parts that the config fixes, and the gradients of
these are added in a fixed order. What is learned depends on the number of shards, and not on how
many processes share them.

Processes (``Peers``) hold equal runs of shards. A shard's gradient is a sum over its micro-batches;
the shards' sums are the leaves of a binary tree. Its lower levels are added within a process, its
upper ones between two processes, and as a + b and b + a have the same bits, all of them end with
the same total.

Not here: how peers reach each other.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from reason_llm.model import Datum


class Peers(Protocol):
    """The processes that learn a step together. Every call is made by all of them, in one order."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of processes, a power of two."""
        ...

    def add(self, total: Tensor) -> None:
        """Add the other processes' tensors to this one, in place, by pairs of ranks that differ in
        one bit, the lowest first."""
        ...

    def gather(self, content: bytes) -> list[bytes]:
        """What each process gave, in the order of the ranks."""
        ...


class Alone:
    """The peers of a process that learns by itself."""

    rank = 0
    size = 1

    def add(self, total: Tensor) -> None:
        """Nothing."""

    def gather(self, content: bytes) -> list[bytes]:
        """Its own."""
        return [content]


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of a step and who learns from which."""

    count: int = 1
    """A power of two, and a multiple of the number of peers."""
    peers: Peers = Alone()  # noqa: RUF009

    @property
    def own(self) -> range:
        """Shards of this process."""
        each = self.count // self.peers.size
        return range(self.peers.rank * each, (self.peers.rank + 1) * each)

    def deal(self, data: Sequence[Datum]) -> list[list[int]]:
        """Indices of the rows of each shard, in ascending order.

        The rows of a group stay together. The groups with the most tokens are dealt first, each to
        the shard that has the fewest tokens by then.
        """
        if self.count == 1:
            return [list(range(len(data)))]
        groups: dict[int, list[int]] = {}
        for i, datum in enumerate(data):
            groups.setdefault(datum.group, []).append(i)
        tokens = {key: sum(data[i].num_tokens for i in rows) for key, rows in groups.items()}
        dealt: list[list[int]] = [[] for _ in range(self.count)]
        held = [0] * self.count
        for key in sorted(groups, key=lambda key: (-tokens[key], key)):
            shard = held.index(min(held))
            dealt[shard] += groups[key]
            held[shard] += tokens[key]
        return [sorted(rows) for rows in dealt]


def shard_seed(seed: str, shard: int) -> int:
    """Seed of one shard's randomness."""
    return random.Random(f"{seed}/shard/{shard}").getrandbits(63)


class GradientSum:
    """Sum of the gradients of an optimizer batch over its shards, in the parameters' ``grad``.

    Args:
        parameters: float32, on one device.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], shards: Shards) -> None:
        self._parameters = parameters
        self._shards = shards
        self._spare: list[Tensor] = []
        self._sums: list[tuple[int, Tensor]] = []
        """Sums that wait for their sibling in the tree, with their level; the highest first."""
        self._current: Tensor | None = None
        if shards.count == 1:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)

    def begin(self) -> None:
        """Set the gradients to zero for the next shard of this process."""
        if self._shards.count > 1:
            self._current = self._spare.pop() if self._spare else self._empty()
            self._show(self._current)
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()

    def end(self) -> None:
        """Take the gradients as the shard's, and add the sums whose sibling is there."""
        if self._current is None:
            return
        level, total = 0, self._current
        while self._sums and self._sums[-1][0] == level:
            _, before = self._sums.pop()
            before.add_(total)
            self._spare.append(total)
            level, total = level + 1, before
        self._sums.append((level, total))
        self._current = None

    def finish(self) -> None:
        """Add the peers' sums; the gradients are the total afterwards, with the same bits
        everywhere."""
        if self._shards.count == 1:
            return
        ((_, total),) = self._sums
        self._sums.clear()
        self._shards.peers.add(total)
        self._show(total)
        self._spare.append(total)  # until the next shard begins

    def _empty(self) -> Tensor:
        first = self._parameters[0]
        return first.new_empty(sum(each.numel() for each in self._parameters))

    def _show(self, flat: Tensor) -> None:
        """Have the gradients be views of ``flat``."""
        sizes = [each.numel() for each in self._parameters]
        for parameter, part in zip(self._parameters, flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
