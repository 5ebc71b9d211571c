"""Sampling of completions with vLLM or Transformers, from the base copy and its adapter."""

from reason_llm.sample.episodes import episodes_of
from reason_llm.sample.phase import CANARY_PROMPTS, prove_sampler_is_policy, sampler_of, sampling
from reason_llm.sample.protocol import (
    Ended,
    Episodes,
    Progress,
    Sampler,
    SamplingParams,
    ignore_ended,
)
from reason_llm.sample.transformers_sampler import TransformersSampler, stop_strings, stream
from reason_llm.sample.vllm_sampler import VllmBatch, VllmSampler
