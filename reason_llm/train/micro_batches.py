"""Micro-batches within a token budget. Out of memory, the work begins again in smaller ones."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from reason_llm.errors import OutOfMemory
from reason_llm.model import MOST_KEYS_PER_TOKEN, Datum
from reason_llm.model.vllm import is_out_of_memory

log = logging.getLogger(__name__)


class MicroBatches:
    """Micro-batches whose size is halved for the rest of the run when memory does not suffice.

    Args:
        tokens: of a micro-batch to begin with.
        is_packed: its rows lie end to end.
    """

    def __init__(self, tokens: int, device: torch.device, is_packed: bool = False) -> None:
        self.tokens = tokens
        self.is_packed = is_packed
        self.replays = 0
        """How often work began again."""
        self._device = device

    def run(
        self,
        data: Sequence[Datum],
        work: Callable[[list[int]], None],
        restart: Callable[[], None],
    ) -> None:
        """Call ``work`` on the indices of every micro-batch; out of memory, call ``restart`` and
        begin again.

        Raises:
            OutOfMemory: a rollout alone in its micro-batch is too much.
        """
        lengths = [datum.num_tokens for datum in data]
        while True:
            try:
                for batch in (
                    packed_batches(data, self.tokens)
                    if self.is_packed
                    else padded_batches(lengths, self.tokens)
                ):
                    work(batch)
                return
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failed = " ".join(str(error).split())[:200]
            # Outside the handler, whose traceback holds the tensors that take the memory.
            if self.tokens <= max(lengths):
                raise OutOfMemory(
                    f"out of memory with one rollout of {max(lengths)} tokens in a micro-batch "
                    f"({failed}); lower sample.max_new_tokens or model.context_tokens, or set "
                    "train.gradient_checkpointing to true or model.quantize to nf4; what was "
                    "learned and sampled so far is saved"
                )
            self.tokens = max(max(lengths), self.tokens // 2)
            self.replays += 1
            log.warning(
                "out of memory while learning (%s): again with micro-batches of %d tokens",
                failed,
                self.tokens,
            )
            restart()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()


@contextmanager
def ending_out_of_memory(doing: str) -> Iterator[None]:
    """Turn an out-of-memory error that smaller micro-batches cannot fix into one line.

    Raises:
        OutOfMemory: in the allocator's place.
    """
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


def rng_states() -> list[Tensor]:
    """Generator states of the CPU and of each GPU."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *on_gpus]


def set_rng_states(states: list[Tensor]) -> None:
    """Restore the generator states from ``rng_states``."""
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(states[1:])


MOST_PADDING = 0.05
"""Of all tokens that go through the model."""


def padded_batches(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Indices grouped so that rows * longest row <= budget and at most ``MOST_PADDING`` of all is
    padding, longest rows first.

    A row longer than the budget is a micro-batch of its own. Longest first: if memory does not
    suffice, it shows at once.
    """
    batches: list[list[int]] = []
    real = padded = 0  # tokens of all batches so far, without padding and with it
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        # The first row of a batch is its longest.
        longest = lengths[batches[-1][0]] if batches else 0
        fits = batches and (len(batches[-1]) + 1) * longest <= budget_tokens
        real += lengths[index]
        if fits and padded + longest - real <= MOST_PADDING * (padded + longest):
            batches[-1].append(index)
            padded += longest
        else:
            batches.append([index])
            padded += lengths[index]
    return batches


def packed_batches(data: Sequence[Datum], budget_tokens: int) -> list[list[int]]:
    """Indices grouped so that all tokens together are within the budget, a prompt's counted once;
    completions of a prompt are side by side, the group with the longest row first.

    A row longer than the budget is a micro-batch of its own.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, datum in enumerate(data):
        groups.setdefault(datum.prompt_ids, []).append(index)
    for group in groups.values():
        group.sort(key=lambda i: (-data[i].num_tokens, i))
    batches: list[list[int]] = []
    tokens = keys = 0  # of the last batch
    prompts: set[tuple[int, ...]] = set()
    for group in sorted(groups.values(), key=lambda g: (-data[g[0]].num_tokens, g[0])):
        for index in group:
            row = data[index]
            prompt = row.prompt_ids
            more = row.num_tokens - (len(prompt) if prompt in prompts else 0)
            fits = tokens + more <= budget_tokens
            if batches and fits and keys + row.num_tokens <= MOST_KEYS_PER_TOKEN * budget_tokens:
                batches[-1].append(index)
                tokens, keys = tokens + more, keys + row.num_tokens
            else:
                batches.append([index])
                tokens = keys = row.num_tokens
                prompts = set()
            prompts.add(prompt)
    return batches
