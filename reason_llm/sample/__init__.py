"""Sampling of completions with vLLM or Transformers, from the base copy and its adapter."""

from reason_llm.sample.batches import batch_of, common_prefix, turn_seed
from reason_llm.sample.episodes import closing, environments_of, in_environment
from reason_llm.sample.phase import prove_sampler_is_policy, sampler_of, sampling
from reason_llm.sample.protocol import (
    Ended,
    Episodes,
    Progress,
    Sampler,
    SamplingParams,
    Wave,
    unheard,
)
from reason_llm.sample.transformers_sampler import TransformersSampler, stop_strings, stream
from reason_llm.sample.vllm_sampler import VllmSampler

__all__ = [
    "Ended",
    "Episodes",
    "Progress",
    "Sampler",
    "SamplingParams",
    "TransformersSampler",
    "VllmSampler",
    "Wave",
    "batch_of",
    "closing",
    "common_prefix",
    "environments_of",
    "in_environment",
    "prove_sampler_is_policy",
    "sampler_of",
    "sampling",
    "stop_strings",
    "stream",
    "turn_seed",
    "unheard",
]
