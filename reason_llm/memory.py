"""How much memory there is, and the batch sizes that fit into it.

Sizes depend on the machine's total memory (or ``memory.budget_gib``) and never on what is free at
the moment, so that a resumed run batches exactly as the first one did. Estimates are rough and on
the safe side.
"""

import os
import resource
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from reason_llm.config import Config
from reason_llm.model.shared_weights import EngineSizes

GIB = 2**30
KV_CACHE_FRACTION = 0.25
"""Of the budget, for the sampler's KV cache. Weights, activations and the rest share what
remains."""
ACTIVATIONS_FRACTION = 0.25
MOST_SEQUENCES = 256
"""Sequences that vLLM decodes at once."""
MOST_MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Larger micro-batches gain no speed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes that follow from the machine, the model and the config."""

    cache_tokens: int
    """KV cache of the Transformers sampler, all rows together."""
    micro_batch_tokens: int
    engine: EngineSizes | None
    """None: without vLLM."""

    @classmethod
    def of(
        cls,
        config: Config,
        text_config: PretrainedConfig,
        device: torch.device,
        element_bytes: int,
        longest_prompt: int,
    ) -> "Plan":
        """Sizes for this device.

        Args:
            element_bytes: of a base weight.
            longest_prompt: tokens of the longest prompt of all.
        """
        train, sample = config.train, config.sample
        budget = budget_bytes(config.memory.budget_gib, device)
        cache = kv_cache_tokens(budget, text_config, element_bytes)
        micro_batch = train.micro_batch_tokens
        if micro_batch == "auto":
            checkpointing = train.gradient_checkpointing
            micro_batch = micro_batch_tokens(
                budget, text_config, element_bytes, checkpointing, device.type
            )
        engine = None
        if sample.engine == "vllm":
            context = longest_prompt + max(sample.max_new_tokens, config.eval_max_new_tokens)
            sequences = min(sample.rollouts_per_step, MOST_SEQUENCES)
            # vLLM hands out blocks of up to 128 tokens, and one more for each sequence.
            tokens = min(cache, sequences * (context + 2 * 128))
            engine = EngineSizes(
                context_tokens=context,
                kv_cache_bytes=tokens * kv_bytes_per_token(text_config, element_bytes),
                max_sequences=sequences,
                lora_rank=config.model.adapter.rank,
                quantize=config.model.quantize,
            )
        return cls(cache, micro_batch, engine)


def budget_bytes(budget_gib: float | str, device: torch.device) -> int:
    """What ``memory.budget_gib`` allows on this device; ``auto``: all that the machine has."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total if budget_gib == "auto" else min(total, int(float(budget_gib) * GIB))


def kv_cache_tokens(budget: int, config: PretrainedConfig, element_bytes: int) -> int:
    """Tokens of KV cache that fit."""
    return int(KV_CACHE_FRACTION * budget / kv_bytes_per_token(config, element_bytes))


def kv_bytes_per_token(config: PretrainedConfig, element_bytes: int) -> int:
    """Keys and values of one token in every layer and KV head."""
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_size * element_bytes)


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
