"""Out of memory is an event, not an end: the work begins again in smaller micro-batches."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from reason_llm.errors import OutOfMemory
from reason_llm.model import layout as packing
from reason_llm.model.layout import Rollout
from reason_llm.model.vllm.engine import is_out_of_memory

log = logging.getLogger(__name__)


class MicroBatches:
    """Work in micro-batches whose size is halved, for good, when memory does not suffice.

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
        rollouts: Sequence[Rollout],
        work: Callable[[list[int]], None],
        restart: Callable[[], None],
    ) -> None:
        """``work`` on the indices of every micro-batch; out of memory, ``restart`` and all again.

        Raises:
            OutOfMemory: a rollout alone in its micro-batch is too much.
        """
        lengths = [rollout.num_tokens for rollout in rollouts]
        while True:
            try:
                for batch in (
                    packing.packed_batches(rollouts, self.tokens)
                    if self.is_packed
                    else packing.micro_batches(lengths, self.tokens)
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
    """What smaller micro-batches would not help ends with one line.

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
    """Of the CPU's generator and each GPU's."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *on_gpus]


def set_rng_states(states: list[Tensor]) -> None:
    """Take back what ``rng_states`` gave."""
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(states[1:])
