"""The base copy that vLLM owns and the learner shares."""

from reason_llm.model.vllm.engine import MAX_LORA_RANKS, on_default_stream

__all__ = [
    "MAX_LORA_RANKS",
    "on_default_stream",
]
