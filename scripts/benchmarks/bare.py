"""Sampling by vLLM alone: ``LLM.generate`` with CUDA graphs and the same memory, with or without an
adapter."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import save_file

from benchmarks import device, ours
from benchmarks.sides import Turns
from benchmarks.work import Work, prompts
from reason_llm.model import load_tokenizer, meta_model
from reason_llm.model.vllm import MAX_LORA_RANKS


def measure(work: Work, turns: Turns, lora: bool = False) -> None:
    """Tokens per second with the same prompts, lengths and log-probs. Completions are decoded when
    they end, as ours are, not token by token."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    plan = ours.plan_of(work)
    assert plan.engine is not None
    more: dict[str, Any] = {}
    if lora:
        rank = next(rank for rank in MAX_LORA_RANKS if rank >= work.rank)
        more |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    if not device.has_gpu():
        more["enforce_eager"] = True
    llm = LLM(
        model=work.model,
        dtype="bfloat16",
        max_model_len=plan.engine.context_tokens,
        max_num_seqs=plan.engine.max_sequences,
        kv_cache_memory_bytes=plan.engine.kv_cache_bytes,
        gpu_memory_utilization=0.01,  # only checks, where the KV cache's size is given
        disable_log_stats=True,
        **more,
    )
    params = SamplingParams(
        n=work.completions,
        max_tokens=work.completion_tokens,
        temperature=1.0,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )
    tokenizer = load_tokenizer(work.model)
    with TemporaryDirectory() as folder:
        adapter = _write_adapter(work, Path(folder)) if lora else None
        request = LoRARequest("random", 1, adapter) if adapter else None
        for step in range(work.steps):
            turns.wait()
            started = time.perf_counter()
            outputs = llm.generate(
                [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts(work, step)],
                params,
                lora_request=request,
                use_tqdm=False,
            )
            for output in outputs:
                for choice in output.outputs:
                    tokenizer.decode(choice.token_ids, skip_special_tokens=True)
            seconds = time.perf_counter() - started
            tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
            speed = {"sampling_tokens_per_second": tokens / seconds}
            turns.answer({"sampling_seconds": seconds, "tokens": tokens, **speed})


def _write_adapter(work: Work, folder: Path) -> str:
    """Random values in PEFT's own form."""
    policy = meta_model(ours.config_of(work).model)
    tensors = {
        name: 0.01 * torch.randn(tensor.shape, dtype=torch.bfloat16)
        for name, tensor in get_peft_model_state_dict(policy).items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    policy.peft_config["default"].save_pretrained(str(folder))
    return str(folder)
