"""Sizes that the memory plan shares with what it plans, without PyTorch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

MAX_KEYS_PER_TOKEN = 4
"""Gathered keys, of the tokens that a micro-batch may have: every layer copies them."""
MAX_KEYS = 2**16
"""Limit of the same for a micro-batch with fewer tokens than that."""
TILE_TOKENS = {"cpu": 2048, "cuda": 4096}
"""Most tokens of a tile of a feed-forward (``recompute``), with which products still run at full
speed. A weight in NF4 is unpacked for each tile."""
BLOCK_ELEMENTS = 64
"""Number of weights that share one scale."""
MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as max_lora_rank."""


def max_keys(tokens: int) -> int:
    """Maximum number of gathered keys in a micro-batch of this many tokens."""
    return max(tokens, min(MAX_KEYS_PER_TOKEN * tokens, MAX_KEYS))


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the plan's ledger, in bytes."""

    name: str
    sampling: int = 0
    learning: int = 0
    scoring: int = 0
    """Bytes while a separate reward model or teacher reads the rollouts; 0 without one."""


class AttachmentSizes(Protocol):
    """Interface of the sizes of a run's attachments, and of the part of the model that embeds
    them."""

    def resident(self, element_bytes: int) -> Mapping[str, int]:
        """Bytes that stay in all phases, by the names of their lines."""

    def lines(
        self, element_bytes: int, context: int, vllm_tokens: int | None, is_gpu: bool
    ) -> Sequence[Line]:
        """Lines of the ledger that are not resident.

        Args:
            context: tokens of the longest prompt and completion.
            vllm_tokens: of one forward pass of vLLM; None without it.
            is_gpu: features that are kept in host memory are not in the ledger.
        """

    def kept_bytes(self, element_bytes: int) -> int:
        """Bytes of the features that the learner keeps in host memory."""

    def engine_options(self, is_packed: bool) -> dict[str, Any]:
        """vLLM's options; ``is_packed``: the base's weights are quantised."""


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Sizes with which vLLM starts."""

    context_tokens: int
    kv_cache_bytes: int
    max_sequences: int
    """Sequences decoded at once."""
    lora_rank: int
    """0: without adapters."""
    lora_targets: tuple[str, ...] = ()
    """Last names of the adapted layers, such as q_proj; (): all that vLLM can adapt."""
    quantize: Literal["none", "nf4"] = "none"
    prefill_tokens: int | None = None
    """Tokens of one forward pass at most; None: vLLM's own choice."""
    other_bytes: int = 0
    """Weights and workspace, for an engine that takes the total (Unsloth's)."""
    attachments: AttachmentSizes | None = None
    """None: vLLM loads no part that embeds attachments."""


def chunk_bytes(vocabulary: int, element_bytes: int, softcap: bool, adapted: bool = False) -> int:
    """Peak memory of a chunk in bytes per token: the logits and their temporaries.

    Args:
        element_bytes: of a head's weight; below 4 there is a copy of the weights in it.
        adapted: the head is trained, or there is an adapter on it.
    """
    if adapted:  # autograd's, the entropy's gradient included
        return vocabulary * 4 * (6 if softcap else 5)
    return vocabulary * (4 * (3 if softcap else 2) + (element_bytes if element_bytes < 4 else 0))


def packed_bytes(elements: int, nested: bool) -> int:
    """Memory of one packed layer in bytes: half a byte per weight, and its scales.

    Args:
        nested: the scales are quantised themselves, in 8 bits with a float32 for each 256.
    """
    blocks = -(-elements // BLOCK_ELEMENTS)
    tables = 16 * 4 + (256 * 4 if nested else 0)
    return elements // 2 + tables + (blocks + -(-blocks // 256) * 4 if nested else blocks * 4)
