"""Micro-batches within a token budget. Out of memory, the work begins again in smaller ones."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from reason_llm.errors import OutOfMemory
from reason_llm.model import Datum, max_keys
from reason_llm.model.vllm import is_out_of_memory

log = logging.getLogger(__name__)
T = TypeVar("T")


class MicroBatches:
    """Micro-batches of at most ``tokens`` tokens, halved for the rest of the run if memory runs
    out; if packed, rows lie end to end."""

    def __init__(self, tokens: int, is_packed: bool = False) -> None:
        self.tokens = tokens
        self.is_packed = is_packed
        self._replays = 0

    def take_replays(self) -> int:
        """Number of restarts since the last call."""
        replays, self._replays = self._replays, 0
        return replays

    def run(self, data: Sequence[Datum], work: Callable[[list[list[int]]], T], size: int = 1) -> T:
        """Call ``work`` with the indices of every micro-batch; if memory runs out, call it again
        with smaller ones. Every ``size`` consecutive rows stay together.

        Raises:
            OutOfMemory: these alone in a micro-batch are too much.
        """
        lengths = [datum.num_tokens for datum in data]
        largest = max(map(sum, units(lengths, size)), default=0)
        while True:
            try:
                return work(
                    packed_batches(data, self.tokens, size)
                    if self.is_packed
                    else padded_batches(lengths, self.tokens, size)
                )
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failed = " ".join(str(error).split())[:200]
            # Here the traceback that held the tensors is gone.
            if self.tokens <= largest:
                what = "row" if size == 1 else "pair"
                raise OutOfMemory(
                    f"out of memory with one {what} of {largest} tokens in a micro-batch "
                    f"({failed}); lower sample.max_new_tokens or model.context_tokens, or set "
                    "train.gradient_checkpointing to true or, of a dense model, model.quantize to "
                    "nf4; what was learned and sampled so far is saved"
                )
            self.tokens = max(largest, self.tokens // 2)
            self._replays += 1
            message = "out of memory while learning (%s): again with micro-batches of %d tokens"
            log.warning(message, failed, self.tokens)
            torch.cuda.empty_cache()


@contextmanager
def ending_out_of_memory(doing: str) -> Iterator[None]:
    """Turn an error of the allocator that smaller micro-batches cannot fix into OutOfMemory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"out of memory while {doing} ({' '.join(str(error).split())[:200]}); set "
            "train.optimizer to adamw_8bit, or lower model.adapter.rank or memory.budget_gib; what "
            "was learned and sampled so far is saved"
        ) from None


MAX_PADDING = 0.05
"""Largest part of padding among all tokens that go through the model."""


def units(values: Sequence[T], size: int) -> list[Sequence[T]]:
    """Cut into parts of ``size`` that stay together."""
    return [values[start : start + size] for start in range(0, len(values), size)]


def padded_batches(lengths: Sequence[int], budget_tokens: int, size: int = 1) -> list[list[int]]:
    """Indices grouped so that rows * longest row <= budget and at most ``MAX_PADDING`` of all is
    padding, longest first; ``size`` rows are never split, and may be more than the budget alone."""
    longest_of = [max(unit) for unit in units(lengths, size)]
    batches: list[list[int]] = []
    real = padded = 0  # tokens of all batches so far, without padding and with it
    for unit in sorted(range(len(longest_of)), key=lambda u: (-longest_of[u], u)):
        rows = list(range(unit * size, unit * size + size))
        # The first unit of a batch holds its longest row.
        longest = longest_of[batches[-1][0] // size] if batches else 0
        fits = batches and (len(batches[-1]) + size) * longest <= budget_tokens
        real += sum(lengths[row] for row in rows)
        if fits and padded + size * longest - real <= MAX_PADDING * (padded + size * longest):
            batches[-1] += rows
            padded += size * longest
        else:
            batches.append(rows)
            padded += size * longest_of[unit]
    return batches


def packed_batches(data: Sequence[Datum], budget_tokens: int, size: int = 1) -> list[list[int]]:
    """Indices grouped so that all tokens together are within the budget, a prompt's counted once;
    units of a prompt are side by side, the group with the longest row first. Else as above."""
    groups: dict[tuple[bytes | str, ...], list[list[int]]] = {}
    for unit in units(range(len(data)), size):
        groups.setdefault(data[unit[0]].prompt_key, []).append(list(unit))

    def by_length(unit: list[int]) -> tuple[int, int]:
        return -max(data[i].num_tokens for i in unit), unit[0]

    for group in groups.values():
        group.sort(key=by_length)
    batches: list[list[int]] = []
    tokens = keys = 0  # of the last batch
    for group in sorted(groups.values(), key=lambda group: by_length(group[0])):
        for place, unit in enumerate(group):
            own_keys = sum(data[i].num_tokens for i in unit)
            own = own_keys - sum(data[i].num_prompt for i in unit)
            own += sum({data[i].prompt_key: data[i].num_prompt for i in unit}.values())
            shared = data[unit[0]].num_prompt if place else 0  # which the unit before has
            more = own - shared
            fits = tokens + more <= budget_tokens
            if batches and fits and keys + own_keys <= max_keys(budget_tokens):
                batches[-1] += unit
                tokens, keys = tokens + more, keys + own_keys
            else:
                batches.append(unit)
                tokens, keys = own, own_keys
    return batches
