"""How much memory there is, and the batch sizes that fit into it.

Sizes depend on the machine's total memory (or ``memory.budget_gib``) and never on what is free at
the moment, so that a resumed run batches exactly as the first one did. Estimates are rough and on
the safe side.
"""

import os
import resource

import torch
from transformers import PretrainedConfig

GIB = 2**30
KV_CACHE_FRACTION = 0.25
"""Of the budget, for the sampler's KV cache. Weights, activations and the rest share what
remains."""
ACTIVATIONS_FRACTION = 0.25
MOST_MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Larger micro-batches gain no speed."""


def budget_bytes(budget_gib: float | str, device: torch.device) -> int:
    """What ``memory.budget_gib`` allows on this device; ``auto``: all that the machine has."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total if budget_gib == "auto" else min(total, int(float(budget_gib) * GIB))


def kv_cache_tokens(budget: int, config: PretrainedConfig, element_bytes: int) -> int:
    """Tokens of KV cache that fit: keys and values of every layer and KV head."""
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * head_size * element_bytes
    return int(KV_CACHE_FRACTION * budget / per_token)


def micro_batch_tokens(
    budget: int, config: PretrainedConfig, element_bytes: int, checkpointing: bool, device: str
) -> int:
    """Tokens of one forward and backward pass whose activations fit.

    About 16 hidden and 6 intermediate vectors are kept for each token and layer (counted on Qwen2
    with LoRA on every linear layer); with gradient checkpointing, one hidden vector, and one layer
    in full.
    """
    layer = (16 * config.hidden_size + 6 * config.intermediate_size) * element_bytes
    layers = config.num_hidden_layers
    per_token = (
        layers * config.hidden_size * element_bytes + layer if checkpointing else layers * layer
    )
    return max(
        1, min(MOST_MICRO_BATCH_TOKENS[device], int(ACTIVATIONS_FRACTION * budget / per_token))
    )


def peak_rss_mib() -> float:
    """The largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
