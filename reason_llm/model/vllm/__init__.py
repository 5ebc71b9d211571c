"""The base copy, owned by vLLM and shared by the learner."""

from reason_llm.model.vllm.engine import MAX_LORA_RANKS, is_out_of_memory, on_default_stream
